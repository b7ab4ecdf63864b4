"""What kinds of layers a model has, and how each is computed in a pack: the one table of it.

    full, sliding, chunked attention      `packed_attention`, under transformers' own rules about what a token may see
    linear attention, Mamba, convolution  on sequences side by side: no state crosses from one to the next
    experts, dense layers                 token by token, as they are
    output matrix                         logits scaled, capped or with a bias, as the model's own forward has them

In: a causal LM of transformers. Out: the same, packed; a sentence if it has a layer of another kind.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from trainers.model.attention import PACKED_ATTENTION
from trainers.model.layout import run_side_by_side

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATEFUL = {"linear_attention", "conv", "mamba", "mamba2", "hybrid", "recurrent"}
BY_TOKEN = {"moe", "mlp", "dense", "sparse"}
"""What `layer_types` of a configuration may say. Others choose the tokens they attend to, or compress them."""
_WITHOUT_CONVOLUTION = ("LightningAttention",)
"""Ends of names of classes that keep a state; others have a convolution over tokens among their parts."""


class Head(NamedTuple):
    """How logits come from the last states: cap · tanh(scale · (W h + bias) / cap)."""

    scale: float = 1.0
    cap: float | None = None


def decoder_of(causal_lm: Any) -> Any:
    """The model without its head, and of one that sees and hears the part that reads and writes text."""
    decoder = causal_lm.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(causal_lm, "model", None)


def unknown_kind(causal_lm: Any) -> str:
    """A kind of layer that is in no row of the table; empty if there is none."""
    kinds = set(getattr(causal_lm.config.get_text_config(), "layer_types", None) or ())
    return min(kinds - ATTENTION - STATEFUL - BY_TOKEN, default="")


def pack_layers(causal_lm: Any) -> bool:
    """Compute the layers in packs, in place; False for a model that does not let its attention be replaced."""
    causal_lm.set_attn_implementation(PACKED_ATTENTION)
    for module in decoder_of(causal_lm).layers.modules():
        has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
        if has_convolution or type(module).__name__.endswith(_WITHOUT_CONVOLUTION):
            module.forward = functools.partial(run_side_by_side, module.forward)
    is_replaced: bool = decoder_of(causal_lm).config._attn_implementation == PACKED_ATTENTION
    return is_replaced


@torch.no_grad()
def head_of(causal_lm: Any) -> Head:
    """Read off the model's own forward pass what it does to the states before and after its output matrix: some divide
    by `logits_scaling`, others multiply by it. Whether it is that, `trial` sees."""
    seen: dict[str, torch.Tensor] = {}

    def ones(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(output)

    def states_of_one(_: nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = torch.ones_like(output.last_hidden_state)
        return output

    def look(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen["states"] = arguments[0]

    output = causal_lm.get_output_embeddings()
    hooks = [
        decoder_of(causal_lm).register_forward_hook(states_of_one),
        output.register_forward_pre_hook(look),
        output.register_forward_hook(ones),
    ]
    cap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)
    try:
        after = float(causal_lm(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False).logits.flatten()[0])
    finally:
        for hook in hooks:
            hook.remove()
    return Head(float(seen["states"].flatten()[0]) * (1.0 if cap else after), cap)
