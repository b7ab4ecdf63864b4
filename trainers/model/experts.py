"""What the routers of a model with experts do in a forward pass: experts that are given to them, losses that keep
experts in use, and counts.

In: a causal LM whose routers transformers names, and tokens with weights. Out: logits and choices of the last forward
pass, layer by layer; of them a term of the objective, and how many tokens each expert got.

    router replay   a layer's router takes the experts that the engine chose. It weighs them as its architecture does,
                    by its own logits, which have a gradient as ever (R3, https://arxiv.org/abs/2510.11370)

    balance   Σ_sequences w · E · Σ_e f_e · P_e   f: share of a sequence's choices, P: mean probability, w its weight
    router z  Σ_tokens w · (log Σ_e exp z_e)²

Balance is taken within each sequence (DeepSeek-V3, https://arxiv.org/abs/2412.19437 eq. 17–20, with a softmax as in
https://arxiv.org/abs/2101.03961), so it is a sum that packs and ranks do not change. Router z is that of ST-MoE,
https://arxiv.org/abs/2202.08906.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from settings.errors import InvalidInput
from trainers.model.kinds import decoder_of
from trainers.model.layout import Layout, current_layout, in_layout
from trainers.model.teams import Team, of_all_tokens

_TOKENS = "expert_tokens/"
ROUTER_TERMS = ("router_balance", "router_z")
"""Names of the two terms among a step's metrics."""


class Routed(NamedTuple):
    """One layer's router: logits of each computed token, [U, E], and the experts it chose, [U, K]."""

    logits: torch.Tensor
    chosen: torch.Tensor
    own: torch.Tensor | None = None
    """What it would have chosen, if experts were given to it."""


class RouteSizes(NamedTuple):
    """What a model's routes are made of."""

    layers: int
    choices: int
    experts: int


class Routers:
    """Notes what the routers of a model do; nothing for a model without experts."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self.seen: list[Routed] = []
        self._routers: list[tuple[int, nn.Module]] = []  # with the number of its layer
        self._is_noting = False
        self._own: torch.Tensor | None = None
        self._replays = False
        self.sizes: RouteSizes | None = None
        """Sizes of the routes that are replayed; None without them."""
        decoder = decoder_of(causal_lm)
        recorder: Any = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
        names = [] if recorder is None or isinstance(recorder, list) else list(decoder.named_modules())
        for name, module in names:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                module.register_forward_hook(self._hook_of(recorder.index))
                layer = re.search(r"layers\.(\d+)\.", name)
                self._routers.append((int(layer[1]) if layer else -1, module))

    @property
    def number(self) -> int:
        """How many layers have a router."""
        return len(self._routers)

    def _hook_of(self, index: int) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if not self._is_noting:
                return  # a layer that is computed again in the backward pass
            parts = output if isinstance(output, tuple) else (output,)
            choices = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.int64]
            if choices:
                self.seen.append(Routed(parts[index].flatten(0, -2), choices[0].flatten(0, -2), self._own))
                self._own = None

        return note

    @torch.no_grad()
    def replay(self, causal_lm: nn.Module) -> None:
        """From now on choose the experts of `Layout.replay`. Tried on a few tokens: raises `InvalidInput` for a model
        without experts, and for one whose routers do not take what they are given."""
        name, layers = type(causal_lm).__name__, len(decoder_of(causal_lm).layers)
        if not self._routers:
            raise InvalidInput(f"train.router_replay: {name} has no experts whose routers are known; leave it out")
        refusal = InvalidInput(
            f"train.router_replay: the routers of {name} do not take experts that are given to them; leave it out"
        )
        of_layer = [layer for layer, _ in self._routers]
        for layer, module in self._routers:
            module.forward = functools.partial(self._route, module.forward, layer)
        ids_T = torch.arange(1, 6)
        layout = Layout([len(ids_T)], device=ids_T.device)
        self._try(causal_lm, ids_T, layout)
        if len(self.seen) != len(of_layer) or len(set(of_layer)) != len(of_layer) or min(of_layer) < 0:
            raise refusal
        (_, choices), (_, experts) = self.seen[0].chosen.shape, self.seen[0].logits.shape
        self._replays, self.sizes = True, RouteSizes(layers, choices, experts)
        spread = torch.arange(choices) * (experts // choices)  # also over groups of experts
        routes_TLC = (ids_T[:, None, None] + torch.arange(layers)[:, None] + spread) % experts
        layout.replay(routes_TLC)
        weights = self._try(causal_lm, ids_T, layout)
        for layer, routed in zip(of_layer, self.seen, strict=True):
            if not torch.equal(routed.chosen, routes_TLC[:, layer]):
                raise refusal
        if any((each == 0).any() for each in weights if each.shape[-1] == choices):  # masked before they are taken
            raise refusal

    def _try(self, causal_lm: nn.Module, ids_T: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """A forward pass; returns all numbers that routers gave."""
        numbers: list[torch.Tensor] = []

        def note(_: nn.Module, __: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            numbers.extend(each for each in parts if isinstance(each, torch.Tensor) and each.is_floating_point())

        hooks = [module.register_forward_hook(note) for _, module in self._routers]
        with in_layout(layout), self:
            positions_T = torch.arange(len(ids_T))
            decoder_of(causal_lm)(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
        for hook in hooks:
            hook.remove()
        return numbers

    @contextlib.contextmanager
    def by_themselves(self) -> Iterator[None]:
        """Inside, they choose as if nothing were given."""
        before, self._replays = self._replays, False
        try:
            yield
        finally:
            self._replays = before

    @torch.compiler.disable
    def _route(self, forward: Callable[..., Any], layer: int, *arguments: Any, **named: Any) -> Any:
        layout = current_layout()
        if not self._replays or self.sizes is None or layout is None or layout.routes_SLC is None:
            return forward(*arguments, **named)
        with _Given(layout.routes_SLC[:, layer], num_experts=self.sizes.experts) as given:
            output = forward(*arguments, **named)
        self._own = given.own
        return output

    def share(self, team: Team, *, num_tokens: int) -> None:
        """What the ranks of a team have seen, each of its stretch, becomes known to all of them."""
        share = functools.partial(of_all_tokens, team=team, num_tokens=num_tokens)
        self.seen = [Routed(*(None if part is None else share(part) for part in each)) for each in self.seen]

    def __enter__(self) -> None:
        self.seen, self._own, self._is_noting = [], None, True

    def __exit__(self, *_: object) -> None:
        self._is_noting = False


class _Given(TorchFunctionMode):
    """Inside, the best `K` of a row of numbers of experts are those of `ids_UK`, or its own where these are −1: so what
    a router does with their numbers before and afterwards is what its architecture does."""

    def __init__(self, ids_UK: torch.Tensor, *, num_experts: int) -> None:
        super().__init__()
        self._ids_UK, self._num_experts = ids_UK, num_experts
        self.own: torch.Tensor | None = None
        """What it would have chosen, [U, K]."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        best = function(*arguments, **(named or {}))
        if function not in (torch.topk, torch.Tensor.topk) or best.indices.shape != self._ids_UK.shape:
            return best
        scores = arguments[0] if arguments else (named or {})["input"]
        if scores.shape[-1] != self._num_experts:
            return best
        self.own = best.indices
        ids_UK = torch.where(self._ids_UK < 0, best.indices, self._ids_UK)
        return torch.return_types.topk((scores.gather(-1, ids_UK), ids_UK))


def router_terms(
    seen: list[Routed], layout: Layout, *, mask_T: torch.Tensor, weights_T: torch.Tensor, sequences_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Balance and router z, means over layers, with gradients; and how many of the tokens under the mask each expert of
    each layer got, by names that `load_metrics` takes, and how many would have gone to others without replay."""
    balance, router_z = [], []
    counts: dict[str, float] = {}
    weight_T = weights_T * mask_T
    length_S = layout.lengths_S.to(weight_T.device)
    weight_S = weight_T.new_zeros(len(length_S)).index_add(0, sequences_T, weight_T)
    for layer, (logits_TE, chosen_TK, own_TK) in enumerate(seen):
        if own_TK is not None:
            is_other_U = (own_TK.sort(-1).values != chosen_TK.sort(-1).values).any(-1)
            is_other_T = is_other_U if layout.computed_T is None else is_other_U.index_select(0, layout.computed_T)
            others = {"routes_changed": float((is_other_T * mask_T).sum()), "routes_changed/of": float(mask_T.sum())}
            counts |= {name: counts.get(name, 0.0) + number for name, number in others.items()}
        if layout.computed_T is not None:
            logits_TE, chosen_TK = (part.index_select(0, layout.computed_T) for part in (logits_TE, chosen_TK))
        logits_TE = logits_TE.float()
        is_chosen_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, 1.0)
        zeros_SE = logits_TE.new_zeros(len(length_S), logits_TE.shape[1])
        chosen_SE = zeros_SE.index_add(0, sequences_T, is_chosen_TE) / chosen_TK.shape[1]
        p_SE = zeros_SE.index_add(0, sequences_T, logits_TE.softmax(-1))
        balance.append((weight_S / length_S.square() * (chosen_SE * p_SE).sum(1)).sum() * logits_TE.shape[1])
        router_z.append((weight_T * logits_TE.logsumexp(-1).square()).sum())
        of_layer = (is_chosen_TE * mask_T[:, None]).sum(0).tolist()
        counts |= {f"{_TOKENS}{layer}/{expert}": count for expert, count in enumerate(of_layer)}
    return torch.stack(balance).mean(), torch.stack(router_z).mean(), counts


def load_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Take the counts out of `totals`: tokens of the busiest and of the least busy expert of any layer, 1 for as many
    as all would have by an even spread, and how many experts of all layers got none."""
    layers: dict[str, list[float]] = {}
    for name in [name for name in totals if name.startswith(_TOKENS)]:
        layers.setdefault(name.split("/")[1], []).append(totals.pop(name))
    loads = [len(counts) * count / max(1.0, sum(counts)) for counts in layers.values() for count in counts]
    if not loads:
        return {}
    return {"expert_load_max": max(loads), "expert_load_min": min(loads), "experts_unused": float(loads.count(0.0))}
