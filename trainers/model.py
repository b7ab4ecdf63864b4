"""The policy as the trainer sees it: packed token ids in, log-probabilities of the next tokens out.

In: a model folder (HF layout), or a hub id. Out: `PolicyModel`, whose forward never materialises a batch's logits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from trainers.logprobs import chunked_logprobs


class PolicyModel(nn.Module):
    """A causal LM whose forward returns (logprobs, entropy) of given targets, each of shape [T]."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self,
        input_ids_T: torch.Tensor,
        targets_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        attention_mask: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.causal_lm.model(
            input_ids=input_ids_T[None],
            position_ids=position_ids_T[None],
            attention_mask=attention_mask,
            use_cache=False,
        ).last_hidden_state[0]
        output_VD = self.causal_lm.get_output_embeddings().weight
        return chunked_logprobs(hidden, output_VD, targets_T, temperature=temperature)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks, the units of sharding."""
        layers = self.causal_lm.model.layers
        assert isinstance(layers, nn.ModuleList)
        return layers


def load_model(folder: Path) -> PolicyModel:
    """A policy folder as a float32 module with exact (SDPA) attention, on the CPU.

    Raises `OSError` or `ValueError` when the folder is no HF model, `ValueError` for an architecture without
    decoder layers.
    """
    causal_lm = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="sdpa")
    if not hasattr(getattr(causal_lm, "model", None), "layers"):
        raise ValueError(f"{folder}: {type(causal_lm).__name__} has no decoder layers under .model.layers")
    causal_lm.config.use_cache = False
    return PolicyModel(causal_lm)
