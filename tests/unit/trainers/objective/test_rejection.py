"""Bounds on how far tokens and sequences have moved are those of verl, OpenRLHF and DeepSeek-V3.2, here in numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from settings.loss import RejectSettings
from settings.train import TrainSettings
from tests.unit.trainers.loss_tokens import Arrays, arrays, inputs_of
from trainers.objective.importance import importance_weights
from trainers.objective.objective import objective
from trainers.objective.rejection import rejected

_LENGTHS = [7, 1, 12, 5, 20, 9]


def _tokens() -> Arrays:
    """Log-ratios of both signs; the fourth sequence has no trained token."""
    tokens = arrays(_LENGTHS, seed=5, spread=0.4)
    tokens["mask"][tokens["sequences"] == 3] = 0
    return tokens


def _rejected(tokens: Arrays, *rules: dict[str, Any]) -> np.ndarray:
    found, sums = rejected(inputs_of(tokens), [RejectSettings(**rule) for rule in rules])
    assert sums == {"rejected_fraction": found.sum()}
    return found.numpy()


def _by_sequence(tokens: Arrays, statistic: Any) -> np.ndarray:
    """At each token, what `statistic` says of the trained ones of its sequence; False where there is none."""
    kept = np.zeros(len(tokens["mask"]), bool)
    for sequence in np.unique(tokens["sequences"]):
        rows = tokens["sequences"] == sequence
        trained = rows & (tokens["mask"] > 0)
        kept[rows] = trained.any() and statistic(trained)
    return kept


def _verl(tokens: Arrays, option: str, *, lower: float, upper: float) -> np.ndarray:
    """The tokens that `compute_rollout_rejection_mask` of verl 0.9.1's rollout_corr_helper.py masks."""
    log_ratio = tokens["logprobs"] - tokens["sampled_logprobs"]
    value = {"k1": -log_ratio, "k2": 0.5 * log_ratio**2, "k3": np.exp(log_ratio) - 1.0 - log_ratio}[option[-2:]]
    bounds = (math.log(lower), math.log(upper)) if option.endswith("k1") else (-math.inf, upper)
    if option.startswith("token"):
        keep = (value >= bounds[0]) & (value <= bounds[1])
    else:
        reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[option.split("_")[1]]
        keep = _by_sequence(tokens, lambda trained: bounds[0] <= reduce(value[trained]) <= bounds[1])
    return (tokens["mask"] > 0) & ~keep


_OPTIONS = [f"token_k{k}" for k in "123"] + [f"seq_{over}_k{k}" for over in ("sum", "mean", "max") for k in "123"]


@pytest.mark.parametrize("option", sorted({*_OPTIONS} - {"seq_max_k1"}))
def test_rejection_is_verls_rollout_rs(option: str) -> None:
    """Its bounds of k1 are ratios of π_sampled / π, ours are nats."""
    tokens = _tokens()
    over = option[:-3].replace("seq", "sequence")
    one_bound = {"token": 0.1, "sequence_sum": 1.0, "sequence_mean": 0.12, "sequence_max": 0.3}[over]
    rule: dict[str, Any] = {"statistic": option[-2:], "over": over, "high": one_bound}
    lower, upper = (0.9, 1.2) if option != "seq_sum_k1" else (0.5, 2.0)
    if option.endswith("k1"):
        rule |= {"low": math.log(lower), "high": math.log(upper)}
    expected = _verl(tokens, option, lower=lower, upper=upper if option.endswith("k1") else one_bound)
    assert 0 < expected.sum() < tokens["mask"].sum()
    np.testing.assert_array_equal(_rejected(tokens, rule), expected)


@pytest.mark.parametrize("gating", ["ratio", "binary_kl", "tv"])
@pytest.mark.parametrize("over", ["token", "sequence_mean"])
def test_rejection_is_openrlhfs_gating(gating: Any, over: Any) -> None:
    """`PolicyLoss` of OpenRLHF 0.11.2's loss.py: it compares π_old with π_sampled, the ratio by its geometric mean."""
    tokens = _tokens()
    p, q = (np.exp(tokens[name]).clip(1e-6, 1 - 1e-6) for name in ("sampled_logprobs", "old_logprobs"))
    value = {
        "ratio": tokens["old_logprobs"] - tokens["sampled_logprobs"],
        "binary_kl": p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)),
        "tv": np.abs(p - q),
    }[gating]
    low, high = {"ratio": (0.9, 1.1), "binary_kl": (None, 0.01), "tv": (None, 0.05)}[gating]
    scale = np.exp if gating == "ratio" else np.asarray

    def inside(number: Any) -> Any:
        return (scale(number) >= (low or 0)) & (scale(number) <= high)

    kept = inside(value) if over == "token" else _by_sequence(tokens, lambda trained: inside(value[trained].mean()))
    expected = (tokens["mask"] > 0) & ~kept
    assert 0 < expected.sum() < tokens["mask"].sum()
    rule = {"statistic": gating, "over": over, "low": low, "high": high, "policy": "proximal"}
    np.testing.assert_array_equal(_rejected(tokens, rule), expected)


def test_the_off_policy_sequence_mask_keeps_what_was_good() -> None:
    """`get_off_policy_mask` of TRL 1.16's grpo_trainer.py, DeepSeek-V3.2; test_against_trl.py trains with it."""
    tokens = arrays(_LENGTHS, seed=6, token_level=False)
    kl = tokens["sampled_logprobs"] - tokens["logprobs"]
    low_kl = _by_sequence(tokens, lambda trained: kl[trained].mean() <= 0.05)
    expected = (tokens["mask"] > 0) & ~((tokens["advantages"] >= 0) | low_kl)
    rule = {"statistic": "k1", "over": "sequence_mean", "high": 0.05, "advantage": "negative"}
    assert 0 < expected.sum() < (tokens["mask"] > 0)[~low_kl].sum()
    np.testing.assert_array_equal(_rejected(tokens, rule), expected)


def test_every_rule_has_to_be_kept_and_prime_rls_least_ratio_is_a_maximum() -> None:
    tokens = _tokens()
    least = {"statistic": "k1", "over": "sequence_max", "high": math.log(2)}
    token = {"low": 0.7, "high": 1.5}
    ratio = np.exp(tokens["logprobs"] - tokens["sampled_logprobs"])
    expected = (tokens["mask"] > 0) & ~_by_sequence(tokens, lambda trained: ratio[trained].min() >= 0.5)
    np.testing.assert_array_equal(_rejected(tokens, least), expected)
    np.testing.assert_array_equal(_rejected(tokens, least, token), expected | _rejected(tokens, token))


@pytest.mark.parametrize("over", ["token", "sequence"])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_masked_importance_weights_are_weights_and_a_bound(over: str, floor: float | None) -> None:
    """`decoupled.correction = "token_mask"` is `token_truncate` without bounds, and a rule for the proximal ratio."""
    tokens = inputs_of(_tokens())
    parts = (tokens.old_logprobs, tokens.sampled_logprobs, tokens.mask, tokens.sequences)
    masked, _ = importance_weights(*parts, correction=f"{over}_mask", cap=1.3, floor=floor)
    free, _ = importance_weights(*parts, correction=f"{over}_truncate", cap=math.inf)
    rule = {"over": "token" if over == "token" else "sequence_sum", "low": floor, "high": 1.3, "policy": "proximal"}
    outside, _ = rejected(tokens, [RejectSettings(**rule)])
    assert torch.equal(masked, torch.where(outside, 0, free)) and outside.any()


def test_rejected_tokens_have_no_policy_term_and_keep_their_penalty_and_their_place_in_the_denominator() -> None:
    tokens = _tokens()
    rule = {"statistic": "k2", "high": 0.1}
    terms = {"kl": {"coefficient": 0.1}, "reference": {"kind": "base"}, "entropy_bonus": 0.01}
    out = _rejected(tokens, rule)

    def run(tokens: Arrays, **settings: Any) -> tuple[float, dict[str, float], np.ndarray]:
        inputs = inputs_of(tokens)
        output = objective(inputs, TrainSettings.model_validate({**terms, **settings}))
        (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
        return output.loss.item(), output.sums, gradient.numpy()

    for loss in ("clip", "gspo", "dppo"):
        loss_value, sums, gradient = run(tokens, loss=loss, reject=[rule])
        expected = run({**tokens, "importance": np.where(out, 0, tokens["importance"])}, loss=loss)
        assert loss_value == expected[0] and sums == {**expected[1], "rejected_fraction": out.sum()}
        np.testing.assert_array_equal(gradient, expected[2])
        assert gradient[out].all(), "the penalty's"


def test_what_stands_at_masked_tokens_leaves_no_trace_and_infinity_is_out_of_bounds() -> None:
    clean = _tokens()
    wild = {name: values.copy() for name, values in clean.items()}
    for name, value in {"logprobs": -math.inf, "sampled_logprobs": math.nan, "advantages": math.nan}.items():
        wild[name][clean["mask"] == 0] = value
    for statistic, over in itertools.product(
        ["ratio", "k1", "k2", "k3", "tv", "binary_kl"], ["token", "sequence_sum", "sequence_mean", "sequence_max"]
    ):
        rule = {"statistic": statistic, "over": over, "high": 1.05, "advantage": "negative"}
        np.testing.assert_array_equal(_rejected(wild, rule), _rejected(clean, rule))
    far = arrays([2], seed=0)
    far |= {"mask": np.ones(2), "logprobs": np.array([-800.0, -1.0]), "sampled_logprobs": np.array([-1.0, -800.0])}
    for statistic in ("k2", "k3"):
        assert _rejected(far, {"statistic": statistic, "high": 10.0}).tolist() == [True, True]
    # A probability may be rounded to above 1, and that of all others to below 0.
    certain = far | {"logprobs": np.array([1e-7, -1.0]), "sampled_logprobs": np.array([-3.0, 1e-7])}
    assert _rejected(certain, {"statistic": "binary_kl", "high": 0.01}).all()
