"""What the routers of a model with experts did in a forward pass: losses that keep experts in use, and counts.

In: a causal LM whose routers transformers names, and tokens with weights. Out: logits and choices of the last forward
pass, layer by layer; of them a term of the objective, and how many tokens each expert got.

    balance   Σ_sequences w · E · Σ_e f_e · P_e   f: share of a sequence's choices, P: mean probability, w its weight
    router z  Σ_tokens w · (log Σ_e exp z_e)²

Balance is taken within each sequence (DeepSeek-V3, https://arxiv.org/abs/2412.19437 eq. 17–20, with a softmax as in
https://arxiv.org/abs/2101.03961), so it is a sum that packs and ranks do not change. Router z is that of ST-MoE,
https://arxiv.org/abs/2202.08906.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from trainers.model.kinds import decoder_of
from trainers.model.layout import Layout
from trainers.model.teams import Team, of_all_tokens

_TOKENS = "expert_tokens/"
ROUTER_TERMS = ("router_balance", "router_z")
"""Names of the two terms among a step's metrics."""


class Routed(NamedTuple):
    """One layer's router: logits of each computed token, [U, E], and the experts it chose, [U, K]."""

    logits: torch.Tensor
    chosen: torch.Tensor


class Routers:
    """Notes what the routers of a model do; nothing for a model without experts."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self.seen: list[Routed] = []
        self.number = 0  # of layers with a router
        self._is_noting = False
        decoder = decoder_of(causal_lm)
        recorder: Any = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
        names = [] if recorder is None or isinstance(recorder, list) else list(decoder.named_modules())
        for name, module in names:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                module.register_forward_hook(self._hook_of(recorder.index))
                self.number += 1

    def _hook_of(self, index: int) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if not self._is_noting:
                return  # a layer that is computed again in the backward pass
            parts = output if isinstance(output, tuple) else (output,)
            choices = [part for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.int64]
            if choices:
                self.seen.append(Routed(parts[index].flatten(0, -2), choices[0].flatten(0, -2)))

        return note

    def share(self, team: Team, *, num_tokens: int) -> None:
        """What the ranks of a team have seen, each of its stretch, becomes known to all of them."""
        self.seen = [Routed(*(of_all_tokens(part, team, num_tokens=num_tokens) for part in each)) for each in self.seen]

    def __enter__(self) -> None:
        self.seen, self._is_noting = [], True

    def __exit__(self, *_: object) -> None:
        self._is_noting = False


def router_terms(
    seen: list[Routed], layout: Layout, *, mask_T: torch.Tensor, weights_T: torch.Tensor, sequences_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Balance and router z, means over layers, with gradients; and how many of the tokens under the mask each expert of
    each layer got, by names that `load_metrics` takes."""
    balance, router_z = [], []
    counts: dict[str, float] = {}
    weight_T = weights_T * mask_T
    length_S = layout.lengths_S.to(weight_T.device)
    weight_S = weight_T.new_zeros(len(length_S)).index_add(0, sequences_T, weight_T)
    for layer, (logits_TE, chosen_TK) in enumerate(seen):
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
