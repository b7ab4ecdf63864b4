"""A policy as the values in which it differs from an earlier one, its anchor: smaller, and exact to the last bit.

In: two safetensors files with the same tensors. Out: a delta file, and from anchor and delta the other file again, byte
for byte.

    anchor ─┬─▶ write_delta ─▶ delta ─┬─▶ apply_delta ─▶ whole
    whole ──┘                 anchor ─┘

A delta is a safetensors file too. Of each tensor that changed it has `<name>/gaps`, uint8: how many values stayed the
same before each one that changed, where 255 stands for 255 of them and more to come; and `<name>/values`: the bits of
the new values, as unsigned integers of their width. Values are compared as integers, so that NaN equals itself and
−0.0 is not 0.0.
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
"""Values compared at once: what the comparison needs of memory is a few times this."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A safetensors file, its tensors as integers that share its memory."""

    header: bytes
    tensors: dict[str, np.ndarray]
    """By name, flat, each value an unsigned integer of its width."""


def write_delta(whole: Path, anchor: Path, file: Path, *, most_bytes: int, about: dict[str, str]) -> float | None:
    """Write what of `whole` differs from `anchor`; returns the share of the values whose bits differ.

    Null, and no file, where that would take more than `most_bytes`, or where the files do not hold the same tensors.
    `about` goes into the file's metadata. Up to `most_bytes` are held in memory.
    """
    new, old = _open(whole), _open(anchor)
    if new.header != old.header:
        return None
    at_least = 0  # counting is much cheaper than encoding, where most values change and there will be no delta
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
    """Write the file that `delta` was made of.

    Raises `storage.objects.digests.DigestMismatch` where the delta does not belong to this anchor.
    """
    shutil.copyfile(anchor, file)
    tensors = _open(file, mode="r+").tensors
    with safe_open(str(delta), framework="numpy") as stored:
        for key in stored.keys():  # noqa: SIM118 - the file is no mapping
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
    """The metadata of a delta. Raises `storage.objects.digests.DigestMismatch` for a file that is none."""
    with safe_open(str(delta), framework="numpy") as stored:
        about = stored.metadata() or {}
    if about.get("format") != FORMAT:
        raise DigestMismatch(f"{delta} is in format {about.get('format')!r}, and this version reads {FORMAT!r}")
    return dict(about)


def _changes(new: np.ndarray, old: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(gaps, values) of each stretch of a tensor in which something changed."""
    last = -1
    for start in range(0, new.size, CHUNK):
        values = new[start : start + CHUNK]
        changed = np.flatnonzero(values != old[start : start + CHUNK])
        if changed.size:
            positions = changed + start
            yield _gaps(positions, after=last), values[changed]
            last = int(positions[-1])


def _gaps(positions: np.ndarray, *, after: int) -> np.ndarray:
    """Rising positions as bytes."""
    between = np.diff(positions, prepend=after) - 1
    ends = np.cumsum(between // 255 + 1) - 1
    gaps = np.full(ends[-1] + 1, 255, np.uint8)
    gaps[ends] = between % 255
    return gaps


def _positions(gaps: np.ndarray) -> np.ndarray:
    """The positions that `_gaps` wrote."""
    ends = np.flatnonzero(gaps != 255)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)


def _open(file: Path, *, mode: Any = "r") -> _Weights:
    """Map a safetensors file. The format: 8 bytes with the header's length, the header as JSON, the tensors.

    Raises `storage.objects.digests.DigestMismatch` for a file that is none.
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
                # What is packed closer than a byte per value, or lies in no integer's width, goes byte by byte.
                width = width if width in (1, 2, 4, 8) and width * size == end - begin else 1
                tensors[name] = content[start + begin : start + end].view(f"<u{width}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DigestMismatch(f"{file} is no safetensors file: {error}") from error
    return _Weights(header=header, tensors=tensors)
