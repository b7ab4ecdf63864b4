"""What counts as a number where a reward is meant: of any library in, a float or None out."""

from __future__ import annotations

from decimal import Decimal
from numbers import Real
from typing import Any

LARGEST = 3.4028234663852886e38
"""Shards keep rewards as float32."""


def as_number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for None, NaN, infinity and what a float32 cannot hold.

    A truth value is 0 or 1. Raises `TypeError` for anything else, text and arrays of one dimension or more included.

    >>> as_number(Decimal("0.5")), as_number(True), as_number(math.inf)
    (0.5, 1.0, None)
    """
    if type(value) is float:  # most are: the general way takes several times as long
        return value if abs(value) <= LARGEST else None
    if value is None or (getattr(value, "ndim", None) == 0 and getattr(value, "mask", False)):  # NumPy's `masked`
        return None
    if getattr(value, "ndim", None) == 0:  # NumPy's and torch's scalars
        value = value.item()
    if not isinstance(value, Real | Decimal) and not getattr(value, "is_number", False):  # SymPy's
        raise TypeError(f"{value!r} is not a number")
    try:
        number = float(value)
    except (OverflowError, ValueError):  # an integer of 400 digits, Decimal("sNaN")
        return None
    return number if abs(number) <= LARGEST else None
