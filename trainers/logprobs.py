"""Log-probabilities of given tokens without ever holding a batch's logits.

In: hidden states, the output matrix, target ids. Out: log p(target) and the entropy, per token. Work is done in
chunks of tokens, recomputed in the backward pass, so memory is chunk × vocabulary instead of T × vocabulary.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint


def chunked_logprobs(
    hidden_TD: torch.Tensor,
    output_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy), each float32 of shape [T], of softmax(hidden · outputᵀ / temperature).

    `temperature` must be the one the tokens were sampled at: the engine's logprobs are taken after it.
    """
    logprobs, entropies = [], []
    for start in range(0, len(targets_T), chunk):
        part = slice(start, start + chunk)
        logprob, entropy = checkpoint(
            _chunk, hidden_TD[part], output_VD, targets_T[part], temperature, use_reentrant=False
        )
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden_CD: torch.Tensor, output_VD: torch.Tensor, targets_C: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CV = (hidden_CD @ output_VD.T).float() / temperature
    log_p_CV = logits_CV.log_softmax(-1)
    entropy_C = -(log_p_CV.exp() * log_p_CV).sum(-1)
    return log_p_CV.gather(1, targets_C[:, None])[:, 0], entropy_C.detach()
