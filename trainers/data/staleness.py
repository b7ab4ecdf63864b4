"""How far behind the sampled tokens are, and which of them are trained.

In: arrays of shape [T], `mask_T` true where a policy sampled, and the version that is trained. Out: the same shape, and
the step's metrics.
"""

from __future__ import annotations

import math

import numpy as np

from settings.train import StalePolicy
from storage.log.claims import updates_behind


def lag_of_tokens(
    versions_T: np.ndarray, mask_T: np.ndarray, *, base_version: int, steps_per_update: int
) -> np.ndarray:
    """Weight updates between the policy that sampled a token and the one being trained; 0 for other tokens."""
    return np.where(mask_T, updates_behind(versions_T, live=base_version, steps_per_update=steps_per_update), 0)


def tokens_to_train(
    lag_T: np.ndarray, mask_T: np.ndarray, *, max_staleness: float, stale_policy: StalePolicy
) -> np.ndarray:
    """True for sampled tokens, those over the bound ⌈max_staleness⌉ left out under `mask`: `strict` has dropped their
    groups at claim, `correct` keeps them under capped importance weights."""
    return mask_T & (lag_T <= math.ceil(max_staleness)) if stale_policy == "mask" else mask_T


def staleness_metrics(
    lag_T: np.ndarray, mask_T: np.ndarray, trained_T: np.ndarray, *, max_staleness: float
) -> dict[str, float]:
    """Mean (if there are any), maximum and histogram of the sampled tokens' lag, and the share that was masked."""
    bound, lags = math.ceil(max_staleness), lag_T[mask_T]
    counts = np.bincount(lags.clip(0, bound + 1), minlength=bound + 2) / max(1, len(lags))
    names = [*(f"staleness_share_{lag}" for lag in range(bound + 1)), "staleness_share_over"]
    return {
        **({"staleness_mean": float(lags.mean())} if len(lags) else {}),
        "staleness_max": float(lag_T.max()),
        **dict(zip(names, counts.tolist(), strict=True)),
        "masked_stale_fraction": float(1 - trained_T.sum() / max(1, mask_T.sum())),
    }
