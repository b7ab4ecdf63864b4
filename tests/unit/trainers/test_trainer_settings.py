"""Every setting of the trainer is in the update it makes: one step beside the same written down naively."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from settings.train import TrainSettings
from tests.unit.trainers.builders import (
    NO_CLIPPING,
    Row,
    config_of,
    gradients,
    largest_difference,
    load_causal_lm,
    random_rows,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from tests.unit.trainers.naive import (
    Reply,
    Term,
    assert_same_gradient,
    fixed_logprobs,
    gradient_of,
    num_tokens,
    policy_of,
    replies_of,
    token_mean,
)
from trainers.data.samples import Samples
from trainers.step_batch import minibatches
from trainers.trainer import Trainer

_CAP = 1.25
_MAX_TOKENS = 8  # of every config here


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary: a reference that differs, or a teacher."""
    return tiny_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


def _with_reference(folder: Path, other: Path, **settings: object) -> Trainer:
    chosen = {"max_grad_norm": NO_CLIPPING, "reference": {"kind": "base"}, **settings}
    return Trainer(folder, config_of(**chosen), reference=other)


def _assert_step(
    trainer: Trainer, metrics: dict[str, float], loss: torch.Tensor, policy: torch.nn.Module, *, atol: float = 5e-6
) -> None:
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=2e-6)
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=atol)


def _clipped(reply: Reply) -> torch.Tensor:
    return -reply.clipped()


def _corrected(reply: Reply) -> torch.Tensor:
    """Around the weights the step began with, which are these; weighed by how far those are from the sampler."""
    weight = (reply.new.detach() - reply.old).exp().clamp(max=_CAP)
    return -weight * reply.clipped(old=reply.new.detach())


@pytest.mark.parametrize(
    ("settings", "count", "term"),
    [
        ({}, 12, _clipped),
        ({"temperature": 0.7}, 12, _clipped),
        ({}, 3, _clipped),
        ({"stale_policy": "correct", "decoupled": {"cap": _CAP}, "tokens_per_microbatch": 32}, 12, _corrected),
        ({"entropy_bonus": 0.5}, 12, lambda reply: -reply.clipped() - 0.5 * reply.entropy),
    ],
    ids=["grpo", "temperature", "a smaller batch divides by its own tokens", "correct", "entropy"],
)
def test_a_step_is_its_formula(tiny_folder: Path, settings: dict[str, Any], count: int, term: Term) -> None:
    temperature = settings.get("temperature", 1.0)
    rows = random_rows(tiny_folder, temperature=temperature)[:count]
    trainer, policy = trainer_of(tiny_folder, **settings), policy_of(tiny_folder)
    metrics = take_step(trainer, samples_of(rows))
    replies = replies_of(policy, rows, temperature=temperature)
    entropy = token_mean(replies, lambda reply: reply.entropy.detach())
    _assert_step(trainer, metrics, token_mean(replies, term), policy)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients(trainer).values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    if term is _corrected:
        assert metrics["clip_fraction"] == 0, "the clip is around the weights the step began with"
    elif count == 12:
        assert 0 < metrics["clip_fraction"] < 1, "both branches of the clip are taken"


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_aggregation_divides_by_what_its_name_says(tiny_folder: Path, rows: list[Row], aggregation: str) -> None:
    policy = policy_of(tiny_folder)
    terms = [-reply.clipped() for reply in replies_of(policy, rows)]
    loss = {
        "token_mean": torch.cat(terms).mean(),
        "sequence_mean": torch.stack([term.mean() for term in terms]).mean(),
        "sequence_sum": torch.stack([term.sum() for term in terms]).mean(),
        "constant": torch.stack([term.sum() for term in terms]).mean() / _MAX_TOKENS,
    }[aggregation]
    trainer = trainer_of(tiny_folder, aggregation=aggregation, tokens_per_microbatch=64)
    _assert_step(trainer, take_step(trainer, samples_of(rows)), loss, policy, atol=2e-5)


def test_the_second_epoch_trains_the_same_tokens_around_the_policy_that_sampled(
    tiny_folder: Path, rows: list[Row], samples: Samples
) -> None:
    once, twice = (trainer_of(tiny_folder, learning_rate=1e-2, num_epochs=epochs) for epochs in (1, 2))
    take_step(once, samples)
    metrics = take_step(twice, samples)
    policy = policy_of(tiny_folder, once)
    assert_same_gradient(twice, gradient_of(token_mean(replies_of(policy, rows), _clipped), policy))
    assert metrics["trained_tokens"] == samples.mask_T.sum() and metrics["trained_rows"] == samples.num_rows


def test_every_epoch_has_mini_batches_of_its_own_that_hold_each_group_once(samples: Samples) -> None:
    settings = TrainSettings(num_minibatches=2, num_epochs=8)
    batches = [tuple(rows.tolist()) for rows in minibatches(samples, settings, seed=0, step=1)]
    epochs = [batches[start : start + 2] for start in range(0, 16, 2)]
    assert all(sorted([*first, *second]) == list(range(samples.num_rows)) for first, second in epochs)
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "epochs are shuffled differently"


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_the_proximal_policy_is_where_the_step_began(
    tiny_folder: Path, rows: list[Row], proximal: str, version: int
) -> None:
    """In the second of two updates of step 3: recomputed exactly, or interpolated by the tokens' versions.

    What version 2, the step's own base, sampled has α = 0: sampler and proximal policy are one. What version 0 sampled
    has α = (2 − 0) / (2.5 − 0) = 0.8 of the way to the present policy.
    """
    samples = samples_of([dataclasses.replace(row, versions=[version] * len(row.reply)) for row in rows])
    decoupled = {"proximal": proximal, "cap": _CAP}
    once, twice = (
        trainer_of(tiny_folder, learning_rate=1e-2, num_epochs=epochs, decoupled=decoupled) for epochs in (1, 2)
    )
    for trainer in (once, twice):
        trainer.step(samples, step=3, base_version=2, max_staleness=9)
    start, policy = policy_of(tiny_folder), policy_of(tiny_folder, once)
    alpha = 0.8 if version == 0 else 0.0

    def term(reply: Reply) -> torch.Tensor:
        between = reply.old + alpha * (reply.new.detach() - reply.old)
        old = fixed_logprobs(start, reply.row) if proximal == "recompute" else between
        return -(old - reply.old).exp().clamp(max=_CAP) * reply.clipped(old=old)

    assert_same_gradient(twice, gradient_of(token_mean(replies_of(policy, rows), term), policy))


def test_before_the_first_update_both_ways_to_the_proximal_policy_agree(tiny_folder: Path, samples: Samples) -> None:
    trainers = [trainer_of(tiny_folder, decoupled={"proximal": way, "cap": _CAP}) for way in ("recompute", "loglinear")]
    one, other = (take_step(trainer, samples) for trainer in trainers)
    assert largest_difference(*map(gradients, trainers)) < 1e-6
    for name in ("importance", "importance_corrected"):
        assert one[name] == pytest.approx(other[name], abs=1e-5)
    assert one["importance_corrected"] > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_pulls_towards_the_reference(
    tiny_folder: Path, other_folder: Path, rows: list[Row], estimator: str, weighted: bool
) -> None:
    kl = {"coefficient": 0.3, "estimator": estimator, "weighted": weighted}
    trainer = _with_reference(tiny_folder, other_folder, kl=kl)
    metrics = take_step(trainer, samples_of(rows))
    policy, other = policy_of(tiny_folder), load_causal_lm(other_folder)

    def estimate(reply: Reply) -> torch.Tensor:
        log_rho = fixed_logprobs(other, reply.row) - reply.new
        value = {"k1": -log_rho, "k2": 0.5 * log_rho**2, "k3": log_rho.exp() - 1 - log_rho}[estimator]
        return value * (reply.new - reply.old).exp() if weighted else value

    replies = replies_of(policy, rows)
    assert metrics["reference_kl"] == pytest.approx(float(token_mean(replies, estimate).detach()), rel=1e-5)
    loss = token_mean(replies, lambda reply: 0.3 * estimate(reply) - reply.clipped())
    expected = gradient_of(loss, policy)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in expected.values()))
    assert_same_gradient(trainer, expected, atol=5e-6 * scale)


def test_kl_in_the_reward_is_summed_over_the_attempt_and_judged_with_it(
    tiny_folder: Path, other_folder: Path, rows: list[Row]
) -> None:
    kl = {"coefficient": 0.2, "estimator": "k1", "place": "reward"}
    trainer = _with_reference(tiny_folder, other_folder, kl=kl)
    metrics = take_step(trainer, samples_of(rows))
    policy, other = policy_of(tiny_folder), load_causal_lm(other_folder)
    rewards = [
        row.reward - 0.2 * float((torch.tensor(row.logprobs) - fixed_logprobs(other, row)).sum()) for row in rows
    ]
    loss = token_mean(replies_of(policy, rows, rewards=rewards), _clipped)
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=1e-5)
    assert metrics["reward"] == pytest.approx(np.mean([row.reward for row in rows]))


def test_metrics_of_rewards_are_of_the_scores_and_not_of_what_kl_takes_off(tiny_folder: Path, rows: list[Row]) -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}
    trainer = trainer_of(tiny_folder, kl=kl, reference={"kind": "base"})
    take_step(trainer, samples_of(rows))  # now the policy is not its reference
    alike = samples_of([dataclasses.replace(row, reward=0.5) for row in rows])
    metrics = take_step(trainer, alike, step=2, max_staleness=9)
    assert (metrics["reward"], metrics["reward_std"], metrics["fraction_groups_without_signal"]) == (0.5, 0, 1)
    assert metrics["grad_norm"] > 0, "attempts that KL charges differently are worth differently"


def test_only_the_least_certain_tokens_are_trained_and_all_are_counted(tiny_folder: Path, rows: list[Row]) -> None:
    trainer, policy = trainer_of(tiny_folder, top_entropy_fraction=0.3), policy_of(tiny_folder)
    take_step(trainer, samples_of(rows))
    replies = replies_of(policy, rows)
    threshold = np.quantile(torch.cat([reply.entropy for reply in replies]).detach().numpy(), 0.7)
    loss = token_mean(replies, lambda reply: -reply.clipped() * (reply.entropy.detach() >= threshold))
    assert_same_gradient(trainer, gradient_of(loss, policy))


def test_sft_imitates_the_accepted_rows_and_divides_by_their_tokens_alone(tiny_folder: Path, rows: list[Row]) -> None:
    trainer, policy = trainer_of(tiny_folder, loss={"kind": "sft", "min_reward": 0.5}), policy_of(tiny_folder)
    metrics = take_step(trainer, samples_of(rows))
    replies = [reply for reply in replies_of(policy, rows) if reply.row.reward >= 0.5]
    assert 0 < len(replies) < len(rows)
    assert metrics["trained_tokens"] == num_tokens([reply.row for reply in replies])
    _assert_step(trainer, metrics, token_mean(replies, lambda reply: -reply.new), policy)


def test_sft_on_nothing_accepted_changes_nothing(tiny_folder: Path, samples: Samples) -> None:
    trainer = trainer_of(tiny_folder, loss={"kind": "sft", "min_reward": 2.0})
    before = weights(trainer)
    metrics = take_step(trainer, samples)
    assert metrics["loss"] == metrics["trained_tokens"] == metrics["grad_norm"] == 0
    assert largest_difference(weights(trainer), before) == 0


@pytest.mark.parametrize("clip", [None, 0.5])
def test_distillation_judges_every_token_by_what_the_teacher_thinks_of_it(
    tiny_folder: Path, other_folder: Path, rows: list[Row], clip: float | None
) -> None:
    advantage = {"kind": "distill", "scale": 2.0, "clip": clip}
    trainer = _with_reference(
        tiny_folder, other_folder, advantage=advantage, reference={"kind": "model", "model": "teacher"}
    )
    metrics = take_step(trainer, samples_of([dataclasses.replace(row, reward=np.nan) for row in rows]))  # no scores
    policy, teacher = policy_of(tiny_folder), load_causal_lm(other_folder)

    def term(reply: Reply) -> torch.Tensor:
        difference = fixed_logprobs(teacher, reply.row) - reply.old
        return -reply.clipped(2.0 * (difference if clip is None else difference.clamp(-clip, clip)))

    assert metrics["trained_tokens"] == num_tokens(rows) and "reward" not in metrics
    _assert_step(trainer, metrics, token_mean(replies_of(policy, rows), term), policy, atol=2e-5)


_CUSTOM = """
import torch
from trainers.objective.losses import LossInputs, LossOutput

def mine(inputs: LossInputs, low: float, high: float) -> LossOutput:
    ratio = torch.where(inputs.mask > 0, inputs.logprobs - inputs.old_logprobs, 0).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    surrogate = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    weight = inputs.weights * inputs.importance * inputs.mask
    return LossOutput(loss=-(weight * surrogate).sum(), sums={"mine": float(inputs.mask.sum())})
"""


def test_a_custom_loss_that_copies_the_built_in_one_gives_its_gradient(
    tiny_folder: Path, tmp_path: Path, samples: Samples
) -> None:
    (tmp_path / "mine.py").write_text(_CUSTOM)
    custom = {"kind": "custom", "path": f"{tmp_path}/mine.py:mine", "arguments": {"low": 0.2, "high": 0.28}}
    _, metrics = _assert_same_updates(tiny_folder, samples, {"num_minibatches": 2}, {"loss": custom})
    assert metrics["mine"] == 1


def test_activation_checkpointing_changes_no_bit_of_the_update(tiny_folder: Path, samples: Samples) -> None:
    _assert_same_updates(tiny_folder, samples, {"entropy_bonus": 0.1}, {"activation_checkpointing": True})


def _assert_same_updates(
    folder: Path, samples: Samples, settings: dict[str, Any], changes: dict[str, Any]
) -> Sequence[dict[str, float]]:
    trainers = [trainer_of(folder, **settings), trainer_of(folder, **settings, **changes)]
    one, other = metrics = [take_step(trainer, samples) for trainer in trainers]
    assert all(one[name] == other[name] for name in one.keys() & other.keys())
    for tensors in (gradients, weights):
        assert largest_difference(*map(tensors, trainers)) == 0
    return metrics


def test_adapters_switched_off_are_the_same_reference_as_a_frozen_copy(tiny_folder: Path, samples: Samples) -> None:
    settings = {"learning_rate": 1e-2, "lora": {"rank": 4}, "kl": {"coefficient": 0.5}}
    trainers = [trainer_of(tiny_folder, reference={"kind": kind}, **settings) for kind in ("lora_off", "base")]
    first, second = (
        [take_step(trainer, samples, step=step, max_staleness=9) for trainer in trainers] for step in (1, 2)
    )
    assert [metrics["reference_kl"] for metrics in first] == [0, 0], "B is zero at first"
    assert second[0] == second[1] and second[0]["reference_kl"] > 1e-4
    assert largest_difference(*map(weights, trainers)) == 0


def test_only_the_adapters_move(tiny_folder: Path, samples: Samples) -> None:
    trainer = trainer_of(tiny_folder, lora={"rank": 4}, weight_decay=0.1)
    before = weights(trainer)
    take_step(trainer, samples)
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    adapters = {name for name in before if ".lora_" in name}
    assert moved == adapters and adapters
    assert gradients(trainer).keys() == adapters


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decayed_learning_rate_ends_at_0_and_moves_nothing_more(
    tiny_folder: Path, samples: Samples, schedule: str
) -> None:
    settings = {"schedule": schedule, "warmup_steps": 2, "decay_steps": 4}
    trainer, rates = trainer_of(tiny_folder, learning_rate=1e-3, **settings), []
    for step in range(1, 6):
        before = weights(trainer)
        rates.append(take_step(trainer, samples, step=step, max_staleness=9)["learning_rate"])
        moved = largest_difference(weights(trainer), before)
        assert (moved == 0) == (step >= 4)
        # Adam's first update is the learning rate times the gradient's sign.
        assert step > 1 or moved == pytest.approx(rates[0], rel=1e-2)
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.5e-3, 0.0, 0.0], abs=1e-12)


def test_the_moving_average_follows_the_weights_and_changes_nothing_else(tiny_folder: Path, samples: Samples) -> None:
    plain, trainer = (trainer_of(tiny_folder, learning_rate=1e-2, **settings) for settings in ({}, {"ema": 0.75}))
    assert trainer.ema is not None
    expected = weights(trainer)
    for step in (1, 2):
        for each in (plain, trainer):
            take_step(each, samples, step=step, max_staleness=9)
        expected = {name: 0.75 * tensor + 0.25 * weights(trainer)[name] for name, tensor in expected.items()}
    average = {name.removeprefix("ema/"): tensor for name, tensor in trainer.ema.state_tensors().items()}
    assert largest_difference(average, expected) < 1e-6 < largest_difference(average, weights(trainer))
    assert largest_difference(weights(plain), weights(trainer)) == 0
