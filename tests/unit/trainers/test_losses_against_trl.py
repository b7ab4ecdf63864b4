"""TRL's own loss code, run on given log-probabilities in float64, and which of our settings is each of its losses."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from settings.train import TrainSettings
from tests.unit.trainers.loss_tokens import Arrays, arrays, inputs_of
from trainers.objective.aggregation import aggregation_weights, top_entropy_mask
from trainers.objective.divergence import kl_estimate
from trainers.objective.importance import importance_weights
from trainers.objective.objective import objective

LENGTHS = [7, 1, 12, 5, 20, 9]
MAX_TOKENS = 24


class _Accelerator:
    """Of one process."""

    num_processes = 1

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def pad_across_processes(self, tensor: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return tensor


def _padded(values: np.ndarray, *, fill: float = 0.0) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        list(torch.from_numpy(values.copy()).split(LENGTHS)), batch_first=True, padding_value=fill
    )


def _trl(tokens: Arrays, *, importance: torch.Tensor | None = None, **options: Any) -> tuple[float, np.ndarray, dict]:
    """Loss, gradient by log-probability and metrics of `GRPOTrainer._compute_loss` with these arguments."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": None,
        "entropy_coef": 0.0,
        "top_entropy_quantile": 1.0,
        "use_bias_correction_kl": False,
        **options,
    }
    logprobs, entropy = _padded(tokens["logprobs"]).requires_grad_(), _padded(tokens["entropy"])
    metrics: dict[str, dict[str, list[float]]] = {"train": {}}
    for name in ("kl", "entropy", "policy_loss", "entropy_coef", "cispo_clip_ratio"):
        metrics["train"][name] = []
    for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        metrics["train"][f"clip_ratio/{name}"] = []
    trainer = SimpleNamespace(
        accelerator=_Accelerator(),
        aux_loss_enabled=False,
        top_entropy_quantile=options["top_entropy_quantile"],
        off_policy_mask_threshold=None,
        importance_sampling_level=options["importance_sampling_level"],
        beta=options["beta"],
        loss_type=options["loss_type"],
        epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon_high"],
        use_vllm=importance is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        _entropy_bonus_enabled=options["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        entropy_coef=options["entropy_coef"],
        _metrics=metrics,
        args=SimpleNamespace(
            delta=options["delta"],
            use_bias_correction_kl=options["use_bias_correction_kl"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )
    trainer.accelerator.sync_gradients = True
    trainer.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, trainer)
    mask = _padded(tokens["mask"])
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.from_numpy(tokens["advantages"][np.cumsum([0, *LENGTHS[:-1]])]),
        "old_per_token_logps": _padded(tokens["old_logprobs"]),
        "ref_per_token_logps": _padded(tokens["reference_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if importance is not None:
        inputs["importance_sampling_ratio"] = importance
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    gradient = torch.cat([row[:length] for row, length in zip(logprobs.grad, LENGTHS, strict=True)])
    return loss.item(), gradient.numpy(), metrics["train"]


def _tokens(aggregation: str, *, seed: int = 0) -> Arrays:
    """One advantage per sequence, no importance, and the weights of `aggregation`."""
    tokens = arrays(LENGTHS, seed=seed, token_level=False)
    tokens["mask"][np.cumsum(LENGTHS) - 1] = 1  # TRL counts a sequence without trained tokens too; here is none
    counts = np.bincount(tokens["sequences"], weights=tokens["mask"]).astype(int)
    weights = aggregation_weights(
        counts,
        aggregation=aggregation,
        num_tokens=int(counts.sum()),
        num_sequences=len(LENGTHS),
        max_tokens=MAX_TOKENS,
    )
    return {**tokens, "weights": weights[tokens["sequences"]], "importance": np.ones(sum(LENGTHS))}


def _ours(tokens: Arrays, settings: dict[str, Any], **changes: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    train = TrainSettings.model_validate({"reference": {"kind": "base"}, **settings})
    inputs = inputs_of(tokens, **changes)
    output = objective(inputs, train)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return output.loss.item(), gradient.numpy(), output.sums


CLIP = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.28}
GSPO = {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03}
NARROW = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
KL = {"coefficient": 0.05}
SAME = [
    ("dapo", {"loss_type": "dapo"}, CLIP, "token_mean", {}),
    ("bnpo, one micro-batch", {"loss_type": "bnpo"}, CLIP, "token_mean", {}),
    ("grpo", {"loss_type": "grpo"}, CLIP, "sequence_mean", {}),
    ("dr_grpo", {"loss_type": "dr_grpo"}, CLIP, "constant", {}),
    ("delta", {"loss_type": "dapo", "delta": 1.5}, {**CLIP, "dual_clip": 1.5}, "token_mean", {}),
    ("cispo", {"loss_type": "cispo", "epsilon_high": 1.4}, {"kind": "cispo", "clip_high": 0.4}, "token_mean", {}),
    ("sapo", {"loss_type": "sapo"}, {"kind": "sapo"}, "sequence_mean", {}),
    ("gspo", {"loss_type": "grpo", **NARROW}, GSPO, "sequence_mean", {}),
    ("gspo by tokens", {"loss_type": "dapo", **NARROW}, GSPO, "token_mean", {}),
    ("luspo", {"loss_type": "luspo", **NARROW}, GSPO, "sequence_sum", {}),
    ("k3 in the loss", {"loss_type": "dapo", "beta": 0.05}, CLIP, "token_mean", {"kl": KL}),
    ("k3, grpo", {"loss_type": "grpo", "beta": 0.05}, CLIP, "sequence_mean", {"kl": KL}),
    ("entropy", {"loss_type": "dapo", "entropy_coef": 0.01}, CLIP, "token_mean", {"entropy_bonus": 0.01}),
]


@pytest.mark.parametrize(
    ("options", "loss", "aggregation", "more"), [row[1:] for row in SAME], ids=[r[0] for r in SAME]
)
def test_trl_loss_types_have_settings_of_equal_value_and_gradient(
    options: dict[str, Any], loss: dict[str, Any], aggregation: str, more: dict[str, Any]
) -> None:
    tokens = _tokens(aggregation)
    theirs, their_gradient, _ = _trl(tokens, **options)
    value, gradient, _ = _ours(tokens, {"loss": loss, **more})
    # SAPO's temperatures are float32 in TRL, whatever the loss is.
    rtol = 1e-6 if loss["kind"] == "sapo" else 1e-9
    assert value == pytest.approx(theirs, rel=rtol)
    np.testing.assert_allclose(gradient, their_gradient, rtol=rtol, atol=1e-13)
    assert np.count_nonzero(gradient) > 10


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_importance_corrections_multiply_the_loss_as_trl_does(mode: str) -> None:
    """TRL computes the weights where it generates; these lines are that code's, on padded rows."""
    tokens = _tokens("token_mean", seed=3)
    log_ratio = _padded((tokens["old_logprobs"] - tokens["sampled_logprobs"]) * tokens["mask"])
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    theirs = ratio.clamp(max=1.3) if mode.endswith("truncate") else ratio.masked_fill(ratio > 1.3, 0.0)
    importance, _ = importance_weights(
        *(torch.from_numpy(tokens[name]) for name in ("old_logprobs", "sampled_logprobs", "mask", "sequences")),
        correction=mode,
        cap=1.3,
    )
    value, gradient, _ = _ours(tokens, {"loss": CLIP}, importance=importance)
    their_value, their_gradient, _ = _trl(tokens, importance=theirs)
    assert value == pytest.approx(their_value, rel=1e-9)
    np.testing.assert_allclose(gradient, their_gradient, rtol=1e-9, atol=1e-13)


def test_top_entropy_tokens_are_trls_and_kl_keeps_all_tokens() -> None:
    tokens = _tokens("token_mean", seed=4)
    selected = top_entropy_mask(tokens["entropy"], tokens["mask"], fraction=0.37)
    value, gradient, _ = _ours({**tokens, "selected": selected.astype(np.float64)}, {"loss": CLIP, "kl": KL})
    theirs, their_gradient, _ = _trl(tokens, top_entropy_quantile=0.37, beta=0.05)
    assert value == pytest.approx(theirs, rel=1e-9)
    np.testing.assert_allclose(gradient, their_gradient, rtol=1e-9, atol=1e-13)


def test_k3_times_the_ratio_is_trls_bias_corrected_kl() -> None:
    tokens = _tokens("token_mean", seed=5)
    inputs = inputs_of(tokens)
    assert inputs.reference_logprobs is not None
    estimate = kl_estimate(
        inputs.logprobs,
        inputs.reference_logprobs,
        inputs.mask,
        estimator="k3",
        ratio_T=(inputs.logprobs - inputs.old_logprobs).exp(),
    )
    penalty = 0.05 * (inputs.weights * inputs.mask * estimate).sum()
    (gradient,) = torch.autograd.grad(penalty, inputs.logprobs)
    with_kl, their_gradient, _ = _trl(tokens, beta=0.05, use_bias_correction_kl=True)
    without, gradient_without, _ = _trl(tokens)
    assert penalty.item() == pytest.approx(with_kl - without, rel=1e-9)
    np.testing.assert_allclose(gradient.numpy(), their_gradient - gradient_without, rtol=1e-6, atol=1e-12)


def test_clip_counts_are_trls_over_all_tokens() -> None:
    tokens = _tokens("token_mean")
    _, _, sums = _ours(tokens, {"loss": CLIP})
    _, _, metrics = _trl(tokens)
    count = tokens["mask"].sum()
    for ours, theirs in (("", "region_mean"), ("_low", "low_mean"), ("_high", "high_mean")):
        assert sums[f"clip_fraction{ours}"] / count == pytest.approx(metrics[f"clip_ratio/{theirs}"][0], rel=1e-6)
