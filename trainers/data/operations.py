"""The arithmetic that rows and packs take of a model: additions and multiplications, each one operation.

In: a model's sizes; how many tokens are computed, and what they attend to. Out: operations, and the work of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What decides how many operations a forward pass takes."""

    body: float
    """Weights that a token meets in the layers."""
    head: float
    """Weights of the output matrix."""
    width: float
    """Width of all heads of all layers."""

    @classmethod
    def of(cls, causal_lm: nn.Module) -> Operations:
        """Those of a model, on all ranks together. Each layer counts as if it attended to a whole row."""
        config = causal_lm.config.get_text_config()
        inputs, output = causal_lm.get_input_embeddings().weight, causal_lm.get_output_embeddings().weight
        heads = getattr(config, "num_attention_heads", None) or 0
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
        body = 0.0
        for parameter in causal_lm.parameters():
            if parameter.ndim == 2 and parameter is not inputs and parameter is not output:
                body += parameter.numel()
            elif parameter.ndim == 3:  # experts, of which a token meets a few
                body += parameter.numel() / len(parameter) * getattr(config, "num_experts_per_tok", len(parameter))
        return cls(body=body, head=float(output.numel()), width=float(config.num_hidden_layers * width))

    @property
    def attention_length(self) -> float:
        """The length of a row at which its attention takes as much arithmetic as all else, for full causal attention.

        A row of L tokens takes 2 P L operations, P the weights that a token meets, and 2 q L² for its attention, q the
        width of all heads, as a token sees half of the row on average.
        """
        return (self.body + self.head) / self.width if self.width else math.inf

    def forward(self, *, computed: float, predicted: float, pairs: float) -> float:
        """Operations of a forward pass that computes so many tokens, of `predicted` the logits, and attends from a
        token to another one `pairs` times, in each layer; a backward pass takes twice as many."""
        return 2 * (self.body * computed + self.head * predicted) + 4 * self.width * pairs


def work_of(lengths: np.ndarray, *, attention_length: float) -> np.ndarray:
    """The arithmetic of a row, in that of a token without attention: L + L² / `attention_length`, the length at which
    attention takes as much as all else; infinite: tokens alone.

    >>> work_of(np.array([10, 100]), attention_length=50)
    array([ 12., 300.])
    """
    work: np.ndarray = lengths + np.square(lengths, dtype=np.float64) / attention_length
    return work
