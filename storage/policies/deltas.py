"""A policy as its differences from an earlier policy, the anchor: smaller, and exact to the last bit.

In: two safetensors files with the same tensors. Out: a delta file; and from anchor and delta the second file, byte for
byte.

    anchor ─┬─▶ write_delta ─▶ delta ─┬─▶ apply_delta ─▶ whole
    whole ──┘                 anchor ─┘

A delta is a safetensors file too. For each tensor that changed it has two: `<name>/gaps`, uint8, the number of
unchanged values before each changed one (255 means 255 and that the next gap is added); and `<name>/values`, the bits
of the new values as unsigned integers of their width. Values are compared as integers, so NaN equals itself and −0.0
differs from 0.0.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from storage.objects.digests import DigestMismatch

FORMAT = "millrace-delta-1"
CHUNK = 2**22
"""Values compared at once; the comparison needs a few times their memory."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A memory-mapped safetensors file."""

    header: bytes
    tensors: dict[str, np.ndarray]
    """Name → flat tensor, each value an unsigned integer of its width."""


def write_delta(whole: Path, anchor: Path, file: Path, *, most_bytes: int, about: dict[str, str]) -> float | None:
    """Write the difference of `whole` from `anchor`; returns the share of the values whose bits differ.

    Returns None and writes no file if that takes more than `most_bytes`, or if the files hold different tensors.
    `about` goes into the file's metadata. Needs up to `most_bytes` of memory.
    """
    new, old = _open(whole), _open(anchor)
    if new.header != old.header:
        return None
    at_least = 0  # counting is much cheaper than encoding if most values changed
    for name, values in new.tensors.items():
        for start in range(0, values.size, CHUNK):
            differs = values[start : start + CHUNK] != old.tensors[name][start : start + CHUNK]
            at_least += int(np.count_nonzero(differs)) * (1 + values.itemsize)
            if at_least > most_bytes:
                return None
    delta: dict[str, np.ndarray] = {}
    num_bytes = num_changed = 0
    for name, values in new.tensors.items():
        parts = []
        for part in _changes(values, old.tensors[name]):
            num_bytes += sum(array.nbytes for array in part)
            if num_bytes > most_bytes:
                return None
            parts.append(part)
        if parts:
            gaps, changed = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            delta[f"{name}/gaps"], delta[f"{name}/values"] = gaps, changed
            num_changed += changed.size
    save_file(delta, str(file), metadata={"format": FORMAT, **about})
    return num_changed / max(1, sum(values.size for values in new.tensors.values()))


def apply_delta(anchor: Path, delta: Path, file: Path) -> None:
    """Write the file from which `delta` was made.

    Raises `storage.objects.digests.DigestMismatch` if the delta does not belong to this anchor.
    """
    shutil.copyfile(anchor, file)
    tensors = _open(file, mode="r+").tensors
    with safe_open(str(delta), framework="numpy") as stored:
        for key in stored.keys():  # noqa: SIM118 - the file is not a mapping
            name, _, part = key.rpartition("/")
            if part != "gaps":
                continue
            values = stored.get_tensor(f"{name}/values")
            positions = _positions(stored.get_tensor(key))
            target = tensors.get(name, np.empty(0, np.uint8))
            fits = target.dtype == values.dtype and positions.size == values.size
            if not fits or positions[-1:] >= target.size:
                raise DigestMismatch(f"{delta} changes {values.size} values of {name} that {anchor} does not have")
            target[positions] = values


def read_about(delta: Path) -> dict[str, str]:
    """The metadata of a delta. Raises `storage.objects.digests.DigestMismatch` for any other file."""
    with safe_open(str(delta), framework="numpy") as stored:
        about = stored.metadata() or {}
    if about.get("format") != FORMAT:
        raise DigestMismatch(f"{delta} is in format {about.get('format')!r}, and this version reads {FORMAT!r}")
    return dict(about)


def _changes(new: np.ndarray, old: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(gaps, values) of each chunk of a tensor that changed."""
    last = -1
    for start in range(0, new.size, CHUNK):
        values = new[start : start + CHUNK]
        changed = np.flatnonzero(values != old[start : start + CHUNK])
        if changed.size:
            positions = changed + start
            yield _gaps(positions, after=last), values[changed]
            last = int(positions[-1])


def _gaps(positions: np.ndarray, *, after: int) -> np.ndarray:
    """Rising positions as gaps of one byte or more."""
    between = np.diff(positions, prepend=after) - 1
    ends = np.cumsum(between // 255 + 1) - 1
    gaps = np.full(ends[-1] + 1, 255, np.uint8)
    gaps[ends] = between % 255
    return gaps


def _positions(gaps: np.ndarray) -> np.ndarray:
    """The positions that `_gaps` encoded."""
    ends = np.flatnonzero(gaps != 255)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)


def _open(file: Path, *, mode: Any = "r") -> _Weights:
    """Map a safetensors file. The format: 8 bytes with the header's length, the header as JSON, the tensors.

    Raises `storage.objects.digests.DigestMismatch` for any other file.
    """
    try:
        content = np.memmap(file, dtype=np.uint8, mode=mode)
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = content[:start].tobytes()
        tensors = {}
        for name, tensor in json.loads(header[8:]).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                size = math.prod(tensor["shape"])
                width = (end - begin) // size if size else 1
                # Values smaller than a byte, or of no integer's width, are compared byte by byte.
                width = width if width in (1, 2, 4, 8) and width * size == end - begin else 1
                tensors[name] = content[start + begin : start + end].view(f"<u{width}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DigestMismatch(f"{file} is no safetensors file: {error}") from error
    return _Weights(header=header, tensors=tensors)
