"""Values as people read them on a terminal.

In: numbers, sizes, policy versions, text that a policy may have written. Out: short strings without markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float | None, *, digits: int = 4, missing: str = "none") -> str:
    """A number with at most so many significant digits."""
    return missing if value is None else f"{value:.{digits}g}"


def size(num_bytes: int) -> str:
    """Bytes for people: `1.2 GB`, in powers of 1000 as disks are sold."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: `1, 3–7`."""
    spans: list[list[int]] = []
    for value in numbers:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def versions_of(row: Mapping[str, Any]) -> str:
    """Policy versions that sampled a row's tokens, from its `head_version` and `tail_version`: `5` or `3–5`."""
    return ranges(range(row["head_version"], row["tail_version"] + 1))


def printable(text: str) -> str:
    """Text without control characters other than newline and tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def one_line(text: str) -> str:
    """Text that cannot break a line, nor steer the terminal: a policy may say anything. It keeps its length."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def shortened(text: str, most: int) -> str:
    """At most so many characters, the last of them `…` where some are missing."""
    return text if len(text) <= most else text[: most - 1] + "…"
