"""The policy as the trainer sees it: packed token ids in, log-probabilities of the next tokens out.

In: a model folder (HF layout), or a hub id. Out: `PolicyModel`, whose forward never materialises a batch's logits nor
a mask over its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from settings.errors import InvalidInput
from trainers.model.distributed import kept_on_host
from trainers.model.experts import Routers
from trainers.model.kinds import Head, decoder_of
from trainers.model.layout import Layout, checkpointed, in_layout
from trainers.model.logprobs import linear_logprobs
from trainers.model.teams import on_all
from trainers.model.trial import replace_attention

if TYPE_CHECKING:
    from settings.train import LoraSettings


class PolicyModel(nn.Module):
    """A causal LM whose forward returns (logprobs, entropy) of given targets, each of shape [T]."""

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        logits_gib: float = 0.5,
        compile: bool = False,
        offload_activations: bool = False,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.head = Head()
        self.routers = Routers(causal_lm)
        self._tile_bytes = int(logits_gib * 2**30)
        self._compile = compile
        self._kept: Callable[[], AbstractContextManager[Any]] = kept_on_host if offload_activations else nullcontext

    def forward(
        self,
        input_ids_T: torch.Tensor,
        targets_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        layout: Layout,
        temperature: float,
        *,
        entropy_grad: bool = False,
        positions_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences stand end to end; `layout` says where. With `positions_N`, both results are computed at these
        positions alone and are 0 elsewhere; in a team each rank computes those of its own stretch, and all get all. The
        entropy has a gradient only with `entropy_grad`."""
        positions_N = layout.own_positions if positions_N is None else positions_N
        hidden_TD = self.hidden(input_ids_T, position_ids_T, layout, positions_N=positions_N)
        if positions_N is not None:
            targets_T = targets_T.index_select(0, positions_N)
        output = self.causal_lm.get_output_embeddings()
        logprobs, entropy = linear_logprobs(
            hidden_TD,
            output.weight,
            targets_T,
            bias_V=getattr(output, "bias", None),
            temperature=temperature,
            scale=self.head.scale,
            cap=self.head.cap,
            entropy_grad=entropy_grad,
            tile_bytes=self._tile_bytes,
            compile=self._compile,
        )
        if positions_N is None:
            return logprobs, entropy
        zeros_T = logprobs.new_zeros(len(input_ids_T))
        of_own = (zeros_T.index_copy(0, positions_N, values_N) for values_N in (logprobs, entropy))
        logprobs_T, entropy_T = (on_all(values_T, layout.team) for values_T in of_own)
        return logprobs_T, entropy_T

    def hidden(
        self,
        input_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        layout: Layout,
        *,
        positions_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last layer's normalised states, [T, D]: what the output matrix, or a critic's head, is applied to. With
        `positions_N` only those, [N, D]; in a team those of `layout.own_positions`, or these of them."""
        positions_N = layout.own_positions if positions_N is None else positions_N
        if (taken_S := layout.taken_S) is not None:
            input_ids_T, position_ids_T = input_ids_T.index_select(0, taken_S), position_ids_T.index_select(0, taken_S)
        with in_layout(layout), self.routers, self._kept():
            states: torch.Tensor = decoder_of(self.causal_lm)(
                input_ids=input_ids_T[None], position_ids=position_ids_T[None], use_cache=False
            ).last_hidden_state
        if layout.team is not None:
            self.routers.share(layout.team, num_tokens=layout.num_computed)
        states_SD, rows_N = states.squeeze(0), layout.states_at(positions_N)
        return states_SD if rows_N is None else states_SD.index_select(0, rows_N)

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer blocks, the units of sharding, compiling and activation checkpointing."""
        layers = decoder_of(self.causal_lm).layers
        assert isinstance(layers, nn.ModuleList)
        return layers


def load_model(
    folder: Path,
    *,
    lora: LoraSettings | None = None,
    activation_checkpointing: bool = False,
    offload_activations: bool = False,
    compile: bool = False,
    logits_gib: float = 0.5,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PolicyModel:
    """A policy folder as a module of type `dtype` with exact packed attention, on the CPU and in evaluation mode.

    `activation_checkpointing` keeps only each layer's input and computes the layer again in the backward pass;
    `offload_activations` keeps in host memory what is kept of the layers; `compile` compiles every layer. None of them
    changes names of parameters, and all work under a later `fully_shard`. `logits_gib` bounds what a pack's logits take
    at a time. With `lora`, only adapters are trained, drawn from `seed`.

    Raises `OSError` or `ValueError` when the folder is no HF model, and `ValueError` for an architecture without
    decoder layers, or one whose packed logprobs are not those of transformers' own forward pass.
    """
    causal_lm, loading = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name, stored, wanted in sorted(loading["mismatched_keys"]):
        its = f"{list(stored)} in its files and {list(wanted)} by its config.json"
        raise InvalidInput(f"{folder}: {name} is of shape {its}; copy or download the folder again")
    if drawn := set(loading["missing_keys"]) & {name for name, _ in causal_lm.named_parameters()}:
        raise InvalidInput(f"{folder} lacks {min(drawn)}, which {type(causal_lm).__name__} would draw at random")
    if not isinstance(getattr(decoder_of(causal_lm), "layers", None), nn.ModuleList):
        raise InvalidInput(f"{folder}: {type(causal_lm).__name__} has no decoder layers in a list")
    prefix = next(name for name, its in causal_lm.named_modules() if its is decoder_of(causal_lm).layers)
    matches = [re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in loading["unexpected_keys"]]
    count = len(decoder_of(causal_lm).layers)
    above = {int(match[1]) for match in matches if match and int(match[1]) >= count}
    if above and not getattr(causal_lm.config, "num_nextn_predict_layers", None):  # those stand behind the others
        what = f"config.json has {count} layers, and the weights have a layer {min(above)}, counted from 0"
        raise InvalidInput(f"{folder}: {what}; copy or download the folder again")
    causal_lm.config.use_cache = False
    if dtype == torch.float64:  # which the other one does not have
        causal_lm.set_experts_implementation("eager")
    computed = {*decoder_of(causal_lm).parameters(), *causal_lm.get_output_embeddings().parameters()}
    for parameter in causal_lm.parameters():
        parameter.requires_grad_(parameter in computed)  # not of an encoder of images
    model = PolicyModel(causal_lm, logits_gib=logits_gib, compile=compile, offload_activations=offload_activations)
    replace_attention(model, folder)
    if lora is not None:
        from trainers.model.lora import add_adapters

        add_adapters(model.causal_lm, rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, seed=seed)
    for layer in model.layers:
        # On the method rather than the module: FSDP's hooks stay outside, and parameters keep their names.
        if compile:
            layer.forward = torch.compile(layer.forward)
        if activation_checkpointing:
            layer.forward = checkpointed(layer.forward)
    return model
