"""Are two batches the same, and how far apart are two updates.

In: a claim and its samples; policy folders. Out: a digest; a distance and a cosine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from storage.log.entries import Claim, to_json
from storage.objects.digests import WEIGHTS_FILE, sha256_of
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from trainers.data.samples import Samples


def batch_sha256(claim: Claim, samples: Samples) -> str:
    """Digest of a claim and of every value in its samples: ranks that compare it know that they train on the same."""

    def digest_of(array: np.ndarray) -> str:
        return f"{array.dtype} {array.shape} {sha256_of(np.ascontiguousarray(array).tobytes())}"

    batch = {"claim": to_json(claim), "samples": vars(samples)}
    return sha256_of(json.dumps(batch, sort_keys=True, default=digest_of).encode())


def compare_updates(new: Path, recorded: Path, *, start: Path) -> tuple[float | None, float | None]:
    """(‖new − recorded‖ / ‖recorded − start‖, cosine of new − start and recorded − start), over all weights.

    All three are policy folders with the same tensors; one tensor of each is in memory at a time. Null where an
    update the number divides by is zero.
    """
    from safetensors import safe_open

    name = ADAPTER_WEIGHTS if has_adapter(new) else WEIGHTS_FILE
    opened = [safe_open(str(folder / name), framework="pt") for folder in (new, recorded, start)]
    apart = new_squares = recorded_squares = product = 0.0
    for name in opened[0].keys():  # noqa: SIM118 - the file is no mapping
        new_V, recorded_V, start_V = (file.get_tensor(name).double().flatten() for file in opened)
        apart += float((new_V - recorded_V).square().sum())
        new_squares += float((new_V - start_V).square().sum())
        recorded_squares += float((recorded_V - start_V).square().sum())
        product += float((new_V - start_V) @ (recorded_V - start_V))
    distance = math.sqrt(apart / recorded_squares) if recorded_squares else None
    both = math.sqrt(new_squares * recorded_squares)
    return distance, product / both if both else None
