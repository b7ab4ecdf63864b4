"""What a pack adds to the quantity that is minimised, and to the metrics.

In: a pack with its log-probabilities, and the settings. Out: `LossInputs`, and of them `LossOutput`.

    policy loss (one of `train.loss`) + β Σ w · KL(policy ‖ reference) − bonus Σ w · entropy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from settings.advantage import GaeAdvantage
from settings.loss import CispoLoss, ClipLoss, CustomLoss, DppoLoss, GspoLoss, Loss, SapoLoss, SftLoss
from settings.train import RouterSettings, TrainSettings
from trainers.model.batches import Pack
from trainers.model.experts import ROUTER_TERMS, Routed, router_terms
from trainers.objective.custom_loss import load_loss
from trainers.objective.divergence import kl_estimate
from trainers.objective.importance import importance_weights, loglinear_proximal
from trainers.objective.losses import (
    OF,
    LossInputs,
    LossOutput,
    cispo_loss,
    clip_loss,
    dppo_loss,
    gspo_loss,
    numbers,
    sapo_loss,
    sft_loss,
)
from trainers.objective.rejection import divergence, rejected

OFF_POLICY = ("off_policy_kl", "ratio", "ratio_squared")
"""Names of what `off_policy_sums` adds up."""


def loss_inputs(
    pack: Pack,
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    settings: TrainSettings,
    *,
    base_version: int,
    version: float,
) -> tuple[LossInputs, dict[str, float]]:
    """What the loss needs of a pack, and sums of the importance weights. `version` counts this step's updates too.

    Decoupled PPO (https://arxiv.org/abs/2505.24298 eq. 5) clips around the policy as it was when the step began, and
    weighs each token by how far that had moved from the policy that sampled it.
    """
    sampled_T, decoupled = pack.values["sampled_logprobs"], settings.decoupled
    old_T, importance_T, sums = sampled_T, torch.ones_like(logprobs_T), {}
    if decoupled is not None:
        if decoupled.proximal == "recompute":
            old_T = pack.values["proximal"]
        else:
            versions_T = pack.values["versions"]
            old_T = loglinear_proximal(
                logprobs_T, sampled_T, versions_T, proximal_version=base_version, current_version=version
            )
        correction = {name: getattr(decoupled, name) for name in ("correction", "cap", "floor")}
        importance_T, sums = importance_weights(old_T, sampled_T, pack.mask, pack.sequences, **correction)
    inputs = LossInputs(
        logprobs=logprobs_T,
        old_logprobs=old_T,
        sampled_logprobs=sampled_T,
        advantages=pack.values["advantages"],
        mask=pack.mask,
        weights=pack.values["weights"],
        importance=importance_T,
        sequences=pack.sequences,
        entropy=entropy_T,
        reference_logprobs=pack.values.get("reference"),
        selected=pack.values.get("selected"),
    )
    return inputs, sums


def objective(inputs: LossInputs, settings: TrainSettings) -> LossOutput:
    """A pack's share of the objective. Sums beside the loss's own: `approx_kl`, `entropy`, `reference_kl` if there is a
    reference, and `rejected_fraction` if there are bounds."""
    policy_inputs, selected_T, reject_sums = inputs, inputs.mask, {}
    if inputs.selected is not None:
        policy_inputs = dataclasses.replace(inputs, importance=inputs.importance * inputs.selected)
        selected_T = inputs.mask * inputs.selected
    if settings.reject:
        rejected_T, reject_sums = rejected(inputs, settings.reject)
        importance_T = torch.where(rejected_T, 0, policy_inputs.importance)
        policy_inputs = dataclasses.replace(policy_inputs, importance=importance_T)
    output = policy_loss(policy_inputs, settings.loss)
    loss = output.loss
    trained_T = inputs.mask > 0
    moved_T = torch.where(trained_T, inputs.logprobs - inputs.old_logprobs, 0)
    log_ratio_T = moved_T.detach()
    entropy_T = torch.where(trained_T, inputs.entropy, 0)
    sums = {"approx_kl": (log_ratio_T.expm1() - log_ratio_T).sum(), "entropy": entropy_T.sum()}
    if inputs.reference_logprobs is not None:
        kl_T = kl_estimate(
            inputs.logprobs,
            inputs.reference_logprobs,
            inputs.mask,
            estimator=settings.kl.estimator,
            clamp=settings.kl.clamp,
            ratio_T=moved_T.exp() if settings.kl.weighted else None,
            gradient=settings.kl.gradient,
        )
        sums["reference_kl"] = kl_T.sum()
        if settings.kl.coefficient and settings.kl.place == "loss":
            loss = loss + settings.kl.coefficient * (inputs.weights * inputs.mask * kl_T).sum()
    else:
        assert not (settings.kl.coefficient and settings.kl.place == "loss"), "a KL penalty without reference_logprobs"
    if settings.entropy_bonus:
        assert inputs.entropy.requires_grad or not inputs.logprobs.requires_grad, "an entropy bonus without gradient"
        loss = loss - settings.entropy_bonus * (inputs.weights * selected_T * entropy_T).sum()
    return LossOutput(loss=loss, sums={**numbers(sums), **reject_sums, **output.sums})


def with_routers(
    loss: torch.Tensor, seen: list[Routed], pack: Pack, settings: RouterSettings
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss with the terms of `train.router`, and sums of them; the loss alone for a model without experts."""
    if not seen:
        return loss, {}
    balance, router_z, counts = router_terms(
        seen, pack.layout, mask_T=pack.mask, weights_T=pack.values["weights"], sequences_T=pack.sequences
    )
    if settings.balance:
        loss = loss + settings.balance * balance
    if settings.z:
        loss = loss + settings.z * router_z
    terms = (float(term.detach()) for term in (balance, router_z))
    return loss, {**dict(zip(ROUTER_TERMS, terms, strict=True)), **counts}


def moved_by_advantages_alone(settings: TrainSettings) -> bool:
    """True if a token with the advantage 0 has no gradient: `objective` is a multiple of it, and no critic learns."""
    with_kl = settings.kl.coefficient and settings.kl.place == "loss"
    multiple = isinstance(settings.loss, ClipLoss | GspoLoss | CispoLoss | SapoLoss | DppoLoss)
    others = with_kl or settings.entropy_bonus or settings.router.balance or settings.router.z
    return multiple and not (others or isinstance(settings.advantage, GaeAdvantage))


def needs_entropy_grad(settings: TrainSettings) -> bool:
    """True if the objective may move the entropy: with a bonus, or in a loss of the user's."""
    return settings.entropy_bonus > 0 or isinstance(settings.loss, CustomLoss)


def policy_loss(inputs: LossInputs, loss: Loss) -> LossOutput:
    """The loss that `train.loss` names."""
    match loss:
        case ClipLoss():
            return clip_loss(inputs, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip)
        case GspoLoss():
            return gspo_loss(inputs, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case CispoLoss():
            return cispo_loss(inputs, clip_low=loss.clip_low, clip_high=loss.clip_high)
        case SapoLoss():
            return sapo_loss(inputs, tau_positive=loss.tau_positive, tau_negative=loss.tau_negative)
        case DppoLoss(clip_low=low, clip_high=high, cap=cap):
            divergence_T = divergence(loss.divergence, inputs.logprobs.detach(), inputs.old_logprobs)
            return dppo_loss(inputs, divergence_T=divergence_T, clip_low=low, clip_high=high, cap=cap)
        case SftLoss():
            return sft_loss(inputs)
        case CustomLoss():
            return load_loss(loss.path)(inputs, **loss.arguments)


@torch.no_grad()
def off_policy_sums(inputs: LossInputs) -> dict[str, float]:
    """How far the policy has moved from the ones that sampled, summed over trained tokens; ρ = now / when sampled.

    k3 = ρ − 1 − ln ρ, http://joschu.net/blog/kl-approx.html
    """
    log_ratio_T = torch.where(inputs.mask > 0, inputs.logprobs - inputs.sampled_logprobs, 0).double()  # ρ² is large
    ratio_T = log_ratio_T.exp() * inputs.mask
    k3_T = (log_ratio_T.expm1() - log_ratio_T) * inputs.mask
    sums = torch.stack([k3_T.sum(), ratio_T.sum(), ratio_T.square().sum()]).tolist()
    return dict(zip(OFF_POLICY, sums, strict=True))


def mean_metrics(sums: Mapping[str, float], *, num_tokens: float) -> dict[str, float]:
    """A step's metrics from the sums of all its packs and ranks, added up by name; `num_tokens` were trained.

    Each is divided by its own denominator `<name>/of` if there is one, and left out if that is 0. Out of Σw and Σw²
    comes the effective sample size (Σw)² / (n Σw²), Kong 1992.

    >>> mean_metrics({"entropy": 6.0, "clip_fraction_low": 1.0, "clip_fraction_low/of": 4.0}, num_tokens=8)
    {'entropy': 0.75, 'clip_fraction_low': 0.25}
    """
    means = {}
    for name, total in sums.items():
        of = sums.get(name + OF, num_tokens)
        if not name.endswith(OF) and of:
            means[name] = total / of
    squared = means.pop("importance_squared", 0.0)
    if squared:
        means["importance_effective_sample_size"] = means["importance"] ** 2 / squared
    return means
