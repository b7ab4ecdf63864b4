"""What retention keeps: the rules, and how people write them.

In: counts, an age and a size. Out: `Rules`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to keep. Without an age or a size, everything goes that no kept policy reaches."""

    keep_last: int = 5
    """The newest policies, the live one among them; an engine may still be loading one that is no longer live."""
    keep_every: int = 0
    """Every so many versions one more; 0: none."""
    older_than_seconds: float = 0.0
    """Only what was written at least so long ago goes."""
    max_bytes: int | None = None
    """Only so much goes, oldest first, that the runs together come down to this size; null: all of it goes."""
    orphan_seconds: float = 3600.0
    """How old a file without a log entry must be: a writer puts the file first and the entry behind it."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "older_than_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} is negative; use 0 or more")

    def __str__(self) -> str:
        parts = [f"keep_last {self.keep_last}"]
        parts += [f"keep_every {self.keep_every}"] if self.keep_every else []
        parts += [f"older than {self.older_than_seconds:.0f} s"] if self.older_than_seconds else []
        parts += [f"at most {self.max_bytes} bytes"] if self.max_bytes is not None else []
        return ", ".join(parts)


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def make_rules(*, keep_last: int, keep_every: int, older_than: str, max_size: str) -> Rules:
    """Rules as people write them: `older_than="30d", max_size="50GB"`, empty for none.

    Raises `ValueError` naming what cannot be read.
    """
    return Rules(
        keep_last=keep_last,
        keep_every=keep_every,
        older_than_seconds=_number(older_than, _SECONDS, example="30d") if older_than else 0.0,
        max_bytes=int(_number(max_size, _BYTES, example="50GB")) if max_size else None,
    )


def _number(text: str, units: dict[str, float], *, example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r}: write a number and a unit, for example {example}; units: {', '.join(units)}")
    return float(match[1]) * units[match[2]]
