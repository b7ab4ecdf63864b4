"""The randomness of a token belongs to its place: a pure function, without a stream and without a state.

    seed of the run, place in the prompt order, attempt, beginning of the sequence ─▶ seed of the sequence
    seed of the sequence, number of the turn ─▶ seed of the request
    seed of the request, position in the reply ─▶ seed of the token, which the sampler draws with

So neither the worker, the batch, the moment nor the policy's version changes a draw, and neither does anything that
ends a reply and continues it. The first line is BLAKE2b of the places as JSON. The other two are SplitMix64 (Steele,
Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195): output `number` of the generator that starts at `seed`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

DRAW = "draw"
"""Key of a request's (seed, position of its first token in the reply) in vLLM's `extra_args`."""
_STEP, _ALL = 0x9E3779B97F4A7C15, 2**64 - 1


def seed_of(*place: Any) -> int:
    """63 bits for a place, given as plain JSON values; other places have other seeds."""
    digest = hashlib.blake2b(json.dumps(place, separators=(",", ":")).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nth_seed(seed: int, number: int) -> int:
    """63 bits for the `number`-th turn of a sequence, or token of a reply, from 0."""
    return int(_mixed(seed + (number + 1) * _STEP & _ALL))


def nth_seeds(seed_R: np.ndarray, number_R: np.ndarray) -> np.ndarray:
    """`nth_seed` of R rows: int64, shape [R]."""
    seeds: np.ndarray = _mixed(seed_R.astype(np.uint64) + (number_R.astype(np.uint64) + 1) * _STEP)
    return seeds.astype(np.int64)


def _mixed(bits: Any) -> Any:
    """The generator's output for a state, an int or an array of uint64, without its lowest bit."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _ALL
    return (bits ^ (bits >> 31)) >> 1
