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
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from storage.objects.digests import DigestMismatch

FORMAT = "millrace-delta-1"
CHUNK = 2**22
"""Values compared at once; the comparison needs a few times their memory."""


def write_delta(whole: Path, anchor: Path, file: Path, *, most_bytes: int, about: dict[str, str]) -> float | None:
    """Write the difference of `whole` from `anchor`; returns the share of the values whose bits differ.

    Returns None and writes no file if that takes more than `most_bytes`, or if the files hold different tensors.
    `about` goes into the file's metadata. Needs about `most_bytes` of memory.
    """
    (header, new), (anchor_header, old) = _open(whole), _open(anchor)
    if header != anchor_header:
        return None
    num_bytes = num_changed = 0  # at least; counting is much cheaper than encoding if most values changed
    for name, values in new.items():
        for start in range(0, values.size, CHUNK):
            changed = np.count_nonzero(values[start : start + CHUNK] != old[name][start : start + CHUNK])
            num_changed += int(changed)
            num_bytes += int(changed) * (1 + values.itemsize)
            if num_bytes > most_bytes:
                return None
    delta: dict[str, np.ndarray] = {}
    for name, values in new.items():
        if parts := list(_changes(values, old[name])):
            gaps, new_values = zip(*parts, strict=True)
            delta[f"{name}/gaps"], delta[f"{name}/values"] = np.concatenate(gaps), np.concatenate(new_values)
    if sum(array.nbytes for array in delta.values()) > most_bytes:
        return None
    save_file(delta, str(file), metadata={"format": FORMAT, **about})
    return num_changed / max(1, sum(values.size for values in new.values()))


def apply_delta(anchor: Path, delta: Path, file: Path) -> None:
    """Write the file from which `delta` was made.

    Raises `storage.objects.digests.DigestMismatch` if the delta does not belong to this anchor.
    """
    shutil.copyfile(anchor, file)
    _, tensors = _open(file, mode="r+")
    _, changes = _open(delta)
    for name in (key.removesuffix("/gaps") for key in changes if key.endswith("/gaps")):
        values, positions = changes[f"{name}/values"], _positions(changes[f"{name}/gaps"])
        target = tensors.get(name, np.empty(0, np.uint8))
        fits = target.dtype == values.dtype and positions.size == values.size
        if not fits or positions[-1:] >= target.size:
            raise DigestMismatch(f"{delta} changes {values.size} values of {name} that {anchor} does not have")
        target[positions] = values


def read_about(delta: Path) -> dict[str, str]:
    """The metadata of a delta. Raises `storage.objects.digests.DigestMismatch` for any other file."""
    header, _ = _open(delta)
    about: dict[str, str] = json.loads(header[8:]).get("__metadata__", {})
    if about.get("format") != FORMAT:
        raise DigestMismatch(f"{delta} is in format {about.get('format')!r}, and this version reads {FORMAT!r}")
    return about


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


def _open(file: Path, *, mode: Any = "r") -> tuple[bytes, dict[str, np.ndarray]]:
    """Map a safetensors file: its head (8 bytes with the length of the JSON behind them, and this JSON), and every
    tensor by name, flat, its values as unsigned integers of their width.

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
    return header, tensors
