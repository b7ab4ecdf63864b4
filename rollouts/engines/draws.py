"""The randomness of a token belongs to its place: a pure function, without a stream and without a state.

    seed of the run, place in the prompt order, attempt, beginning of the sequence ─▶ seed of the sequence
    seed of the sequence, number of the turn ─▶ seed of the request
    seed of the request, position in the reply ─▶ seed of the token, which the sampler draws with

So neither the worker, the batch, the moment nor the policy's version changes a draw, and neither does anything that
ends a reply and continues it. The first line is BLAKE2b of the places as JSON. The other two are SplitMix64: output
`number` of the generator that starts at `seed`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from storage.objects.splitmix import splitmix64

DRAW = "draw"
"""Key of a request's (seed, position of its first token in the reply) in vLLM's `extra_args`."""


def seed_of(*place: Any) -> int:
    """63 bits for a place, given as plain JSON values; other places have other seeds."""
    digest = hashlib.blake2b(json.dumps(place, separators=(",", ":")).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nth_seed(seed: int, number: int) -> int:
    """63 bits for the `number`-th turn of a sequence, or token of a reply, from 0."""
    return int(splitmix64(seed, number) >> 1)


def nth_seeds(seed_R: np.ndarray, number_R: np.ndarray) -> np.ndarray:
    """`nth_seed` of R rows: int64, shape [R]."""
    seeds: np.ndarray = splitmix64(seed_R.astype(np.uint64), number_R.astype(np.uint64)) >> 1
    return seeds.astype(np.int64)
