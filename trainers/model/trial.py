"""Does a model compute in packs what it computes on each sequence alone? Tried on a few tokens before it is trained.

    transformers' own attention, one sequence after the other ─┐
    packed attention, all of them in one row ──────────────────┴─▶ equal, at the input of every part of every layer

In: a freshly loaded model. Out: the model with packed attention, or a sentence that names what it needs. Models differ
in ways that no list holds, by attention sinks, soft caps, scaled logits. The weights decide nothing: a new model's are
so small that a wrong layer moves no log-probability, and a window of 4,096 tokens is as long as 4 in here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from settings.errors import InvalidInput
from trainers.model.kinds import head_of, pack_layers, refusal
from trainers.model.layout import Layout

_LENGTHS = (9, 5)  # of two sequences, so different that no padding stands between their tokens
_WINDOW = 4
"""What windows and chunks are cut to in the trial: both sequences reach past it."""
_IS_WINDOW = re.compile(r"window|chunk")
_IS_NONE = re.compile(r"max_window_layers|feed_forward")  # counts layers; does not mix tokens

Seen = dict[str, list[torch.Tensor]]
"""What each part of each layer was given, call by call: [1, tokens, …]."""


@torch.no_grad()
def replace_attention(model: Any, folder: Path) -> None:
    """Give a `PolicyModel` packed attention. Raises `InvalidInput` if it would then compute something else."""
    causal_lm, what = model.causal_lm, f"{folder}: {type(model.causal_lm).__name__}"
    change = "is trained wrongly by packing; use a model of an architecture that docs/models.md lists"
    # What a few tokens do not show, for it matters to long rows.
    if reason := refusal(causal_lm.config.to_dict()):
        raise InvalidInput(f"{folder}: {reason}; it {change}")
    output, inputs = causal_lm.get_output_embeddings().weight, causal_lm.get_input_embeddings().weight
    if getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False) and output is not inputs:
        raise InvalidInput(
            f"{what} has an output matrix of its own in its files, while its config.json ties it to the "
            f"embeddings; it {change}"
        )
    # Any ids do.
    ids = torch.arange(1, 1 + sum(_LENGTHS)) % causal_lm.get_output_embeddings().weight.shape[0]
    targets, positions = ids.roll(-1), torch.cat([torch.arange(length) for length in _LENGTHS])
    layout = Layout(_LENGTHS, device=ids.device)
    with _short_windows(causal_lm):
        with _seen_by_parts(model.layers) as alone:
            parts = [causal_lm(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(_LENGTHS)]
        model.head = head_of(causal_lm)
        if not pack_layers(causal_lm):
            raise InvalidInput(f"{what} does not let its attention be replaced; it {change}")
        try:
            with _seen_by_parts(model.layers) as packed:
                logprobs, _ = model(ids, targets, positions, layout, 1.0)
            with _ruined_embeddings(causal_lm, _LENGTHS[0]):
                second_TD = model.hidden(ids, positions, layout)[_LENGTHS[0] :]
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{what} {change} ({error})") from error
    is_exact = next(causal_lm.parameters()).dtype in (torch.float32, torch.float64)
    log_p = torch.cat(parts).float().log_softmax(-1)
    if log_p.isnan().any():
        raise InvalidInput(f"{what} gives NaN, so its weights are damaged; copy or download the folder again")
    gap = (logprobs - log_p.gather(1, targets[:, None])[:, 0]).abs().max()
    if not gap < (1e-3 if is_exact else 0.5):
        raise InvalidInput(f"{what}: log-probabilities of a pack are {gap:.2g} nats off; it {change}")
    if name := _first_difference(alone, packed, tolerance=1e-3 if is_exact else 0.3):
        raise InvalidInput(
            f"{what}: model.layers.{name} is given other values in a pack than in its sequence alone, as by a "
            f"window or chunk that only the mask knows, or by a state that goes from token to token; it {change}"
        )
    if not second_TD.isfinite().all():
        raise InvalidInput(f"{what}: what one sequence of a pack says reaches the next; it {change}")


@contextlib.contextmanager
def _short_windows(causal_lm: nn.Module) -> Iterator[None]:
    """Inside, every window and chunk of the configuration, and of the modules that have copied it, is short."""
    model: Any = causal_lm
    owners: dict[int, Any] = {id(each): each for each in (model.config, model.config.get_text_config())}
    owners |= {id(module): module for module in causal_lm.modules()}
    owners |= {id(module.config): module.config for module in causal_lm.modules() if hasattr(module, "config")}
    before = [
        (owner, name, value)
        for owner in owners.values()
        for name, value in vars(owner).items()
        if type(value) is int and value > _WINDOW and _IS_WINDOW.search(name) and not _IS_NONE.search(name)
    ]
    try:
        for owner, name, _ in before:
            setattr(owner, name, _WINDOW)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _seen_by_parts(layers: nn.Module) -> Iterator[Seen]:
    """What the parts of the layers are given inside. The input of the output projection is what attention gave: the
    projection's weights cannot hide it, though they are 0."""
    seen: Seen = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].dim() > 2:
                seen.setdefault(name, []).append(arguments[0].detach().float().clone())

        return hook

    leaves = [(name, module) for name, module in layers.named_modules() if not list(module.children())]
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in leaves]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _first_difference(alone: Seen, packed: Seen, *, tolerance: float) -> str:
    """Name of the first part that was given other values for the same tokens; empty if there is none."""
    for name, calls in alone.items():
        shapes = [tuple(call.shape[:2]) for call in calls], [tuple(call.shape[:2]) for call in packed.get(name, [])]
        if shapes != ([(1, length) for length in _LENGTHS], [(1, sum(_LENGTHS))]):
            continue  # it is given something else than a value per token, or only some of the tokens, as experts are
        expected, packed_values = torch.cat(calls, 1), packed[name][0]
        if not (packed_values - expected).abs().max() <= tolerance * expected.abs().max():
            return name
    return ""


@contextlib.contextmanager
def _ruined_embeddings(causal_lm: nn.Module, num_tokens: int) -> Iterator[None]:
    """Inside, the first tokens of a row are NaN: what depends on them at all becomes NaN, whatever the weights."""
    model: Any = causal_lm

    def ruin(_: nn.Module, arguments: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.index_fill(1, torch.arange(num_tokens), torch.nan)

    hook = model.get_input_embeddings().register_forward_hook(ruin)
    try:
        yield
    finally:
        hook.remove()
