"""Settings that TRL lacks (`test_against_trl.py` has the others): one step beside the same written down naively."""

from __future__ import annotations

import dataclasses
from pathlib import Path

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
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from tests.unit.trainers.naive import (
    Reply,
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


def test_seed_step_and_epoch_choose_the_mini_batches_which_hold_each_group_once(samples: Samples) -> None:
    settings = TrainSettings(num_minibatches=2, num_epochs=8)

    def epochs_of(seed: int, step: int) -> list[list[tuple[int, ...]]]:
        batches = [tuple(rows.tolist()) for rows in minibatches(samples, settings, seed=seed, step=step)]
        return [batches[start : start + 2] for start in range(0, 16, 2)]

    epochs = epochs_of(0, 1)
    assert epochs == epochs_of(0, 1)
    assert all(sorted([*first, *second]) == list(range(samples.num_rows)) for first, second in epochs)
    assert len({frozenset(epoch) for epoch in epochs}) > 1, "epochs are shuffled differently"
    assert epochs != epochs_of(1, 1) and epochs != epochs_of(0, 2)
    many = list(minibatches(samples, TrainSettings(num_minibatches=9), seed=0, step=1))
    assert len(many) == 4, "no more than there are groups"


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
    loss = token_mean(replies_of(policy, rows, rewards=rewards), lambda reply: -reply.clipped())
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=1e-5)
    assert metrics["reward"] == pytest.approx(np.mean([row.reward for row in rows]))


@pytest.mark.parametrize("min_reward", [0.5, 2.0], ids=["some", "none"])
def test_sft_imitates_the_accepted_rows_and_divides_by_their_tokens_alone(
    tiny_folder: Path, rows: list[Row], min_reward: float
) -> None:
    trainer, policy = trainer_of(tiny_folder, loss={"kind": "sft", "min_reward": min_reward}), policy_of(tiny_folder)
    before = weights(trainer)
    metrics = take_step(trainer, samples_of(rows))
    replies = [reply for reply in replies_of(policy, rows) if reply.row.reward >= min_reward]
    assert metrics["trained_tokens"] == num_tokens([reply.row for reply in replies])
    if min_reward == 2.0:
        assert metrics["loss"] == metrics["grad_norm"] == largest_difference(weights(trainer), before) == 0
    else:
        assert 0 < len(replies) < len(rows)
        _assert_step(trainer, metrics, token_mean(replies, lambda reply: -reply.new), policy)


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


def test_activation_checkpointing_changes_no_bit_of_the_update(tiny_folder: Path, samples: Samples) -> None:
    settings = {"num_minibatches": 2, "entropy_bonus": 0.1}
    trainers = [trainer_of(tiny_folder, activation_checkpointing=again, **settings) for again in (False, True)]
    one, other = (take_step(trainer, samples) for trainer in trainers)
    assert one == other
    for tensors in (gradients, weights):
        assert largest_difference(*map(tensors, trainers)) == 0


def test_adapters_switched_off_are_the_same_reference_as_a_frozen_copy(tiny_folder: Path, samples: Samples) -> None:
    settings = {"learning_rate": 1e-2, "lora": {"rank": 4}, "kl": {"coefficient": 0.5}, "weight_decay": 0.1}
    trainers = [trainer_of(tiny_folder, reference={"kind": kind}, **settings) for kind in ("lora_off", "base")]
    first, second = (
        [take_step(trainer, samples, step=step, max_staleness=9) for trainer in trainers] for step in (1, 2)
    )
    assert [metrics["reference_kl"] for metrics in first] == [0, 0], "B is zero at first"
    assert second[0] == second[1] and second[0]["reference_kl"] > 1e-4
    assert largest_difference(*map(weights, trainers)) == 0
    before = weights(trainer_of(tiny_folder, **settings, reference={"kind": "base"}))
    moved = {name for name, tensor in weights(trainers[0]).items() if not torch.equal(tensor, before[name])}
    assert moved == gradients(trainers[0]).keys() == {name for name in before if ".lora_" in name}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_learning_rates_of_policy_and_critic_fall_to_0_where_nothing_moves_any_more(
    tiny_folder: Path, samples: Samples, schedule: str
) -> None:
    critic = {"advantage": "gae", "critic": {"learning_rate": 4e-2}}
    trainer = trainer_of(tiny_folder, schedule=schedule, warmup_steps=2, decay_steps=4, **critic)
    assert trainer.critic is not None
    rates, of_critic = [], []
    for step in range(1, 6):
        before = weights(trainer)
        rates.append(take_step(trainer, samples, step=step, max_staleness=9)["learning_rate"])
        of_critic.append(trainer.critic.optimizer.param_groups[0]["lr"])
        moved = largest_difference(weights(trainer), before)
        assert (moved == 0) == (step >= 4)
        # Adam's first update is the learning rate times the gradient's sign.
        assert step > 1 or moved == pytest.approx(rates[0], rel=1e-2)
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.5e-3, 0.0, 0.0], abs=1e-12)
    assert of_critic == pytest.approx([2e-2, 4e-2, 2e-2, 0.0, 0.0], abs=1e-12)


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
