"""How much each token counts in the loss.

In: trained tokens per sequence, or entropies, of a whole mini-batch. Out: weights, or a mask. Both are made once per
mini-batch from numbers of all its rows on all ranks, so they do not depend on packs or ranks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def aggregation_weights(
    counts_B: np.ndarray, *, aggregation: Aggregation, num_tokens: int, num_sequences: int, max_tokens: int
) -> np.ndarray:
    """The weight of each token of a row, float64 of shape [B]; a token that was not sampled has weight 0.

    token_mean      1 / num_tokens                       DAPO, https://arxiv.org/abs/2503.14476
    sequence_mean   1 / (counts_B · num_sequences)       GRPO, https://arxiv.org/abs/2402.03300 eq. 3
    sequence_sum    1 / num_sequences                    REINFORCE; LUSPO, https://arxiv.org/abs/2602.05261
    constant        1 / (num_sequences · max_tokens)     Dr. GRPO, https://arxiv.org/abs/2503.20783

    `counts_B` are the sampled tokens of each row's sequence, which is its attempt, forks together; `num_tokens` and
    `num_sequences` the totals over the mini-batch of all ranks, all counted before anything is masked: masking must not
    make the others louder. A sequence without tokens has weight 0; whether it counts is the caller's to say.

    >>> aggregation_weights(np.array([4, 1]), aggregation="sequence_mean", num_tokens=5, num_sequences=2, max_tokens=8)
    array([0.125, 0.5  ])
    """
    match aggregation:
        case "token_mean":
            weights_B = np.full(len(counts_B), 1 / max(1, num_tokens))
        case "sequence_mean":
            weights_B = 1 / (np.maximum(1, counts_B) * max(1, num_sequences))
        case "sequence_sum":
            weights_B = np.full(len(counts_B), 1 / max(1, num_sequences))
        case "constant":
            weights_B = np.full(len(counts_B), 1 / (max(1, num_sequences) * max_tokens))
    return np.where(counts_B > 0, weights_B, 0.0)


_ROUNDING = 1e-5
"""Noise in an entropy of 1 nat, in proportion for larger ones: packing changes a tenth of it in float32."""


def top_entropy_mask(entropy_T: np.ndarray, mask_T: np.ndarray, *, fraction: float) -> np.ndarray:
    """True on the `fraction` of trained tokens at which the policy was least certain; bool of shape [T].

    All tokens of the step at once: entropy ≥ its quantile 1 − fraction over trained tokens, which is one of the
    entropies, so that ties stay in and at least one token. Entropies within 1e-5 of the quantile are ties: after equal
    contexts they are equal but for rounding. https://arxiv.org/abs/2506.01939

    >>> top_entropy_mask(np.array([0.1, 2.0, 9.0, 0.5, 0.2]), np.array([1, 1, 0, 1, 1]), fraction=0.5)
    array([False,  True, False,  True, False])
    """
    trained_T = mask_T > 0
    if not trained_T.any():
        return np.zeros_like(trained_T)
    threshold = np.quantile(entropy_T[trained_T], 1 - fraction, method="higher")
    threshold -= _ROUNDING * max(1.0, threshold)
    return trained_T & (np.where(trained_T, entropy_T, 0) >= threshold)
