"""SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): the same everywhere.

In: a seed, and which of its numbers. Out: 64 bits.
"""

from __future__ import annotations

from typing import Any

_STEP, _ALL = 0x9E3779B97F4A7C15, 2**64 - 1


def splitmix64(seed: Any, number: Any) -> Any:
    """Output `number`, from 0, of the generator that starts at `seed`: int, or uint64 arrays."""
    bits = seed + (number + 1) * _STEP & _ALL
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _ALL
    return bits ^ (bits >> 31)
