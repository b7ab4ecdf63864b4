"""Every setting of the trainer is in the update it makes: one step beside the same written down naively."""

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
    assert_same_gradient,
    everything,
    fixed_logprobs,
    gradient_of,
    grpo_advantage,
    policy_of,
    reply_logprobs,
    surrogate,
)
from trainers.checkpoint import load_state, save_state
from trainers.data.samples import Samples
from trainers.step_batch import minibatches
from trainers.trainer import Trainer

_CAP = 1.25
_MAX_TOKENS = 8  # of every config here


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same vocabulary: a reference that differs, or a teacher."""
    return tiny_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


def _num_tokens(rows: list[Row]) -> int:
    return sum(len(row.reply) for row in rows)


def _with_reference(folder: Path, other: Path, **settings: object) -> Trainer:
    chosen = {"max_grad_norm": NO_CLIPPING, "reference": {"kind": "base"}, **settings}
    return Trainer(folder, config_of(**chosen), reference=other)


def _grpo(rows: list[Row], rewards: list[float] | None = None) -> list[float]:
    rewards = [row.reward for row in rows] if rewards is None else rewards
    return [grpo_advantage(rewards, index, rows) for index in range(len(rows))]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_aggregation_divides_by_what_its_name_says(tiny_folder: Path, rows: list[Row], aggregation: str) -> None:
    policy, loss = policy_of(tiny_folder), torch.zeros(())
    for row, advantage in zip(rows, _grpo(rows), strict=True):
        terms = surrogate(reply_logprobs(policy, row)[0], torch.tensor(row.logprobs), advantage)
        loss = (
            loss
            - {
                "token_mean": terms.sum() / _num_tokens(rows),
                "sequence_mean": terms.mean() / len(rows),
                "sequence_sum": terms.sum() / len(rows),
                "constant": terms.sum() / (len(rows) * _MAX_TOKENS),
            }[aggregation]
        )
    trainer = trainer_of(tiny_folder, aggregation=aggregation, tokens_per_microbatch=64)
    assert take_step(trainer, samples_of(rows))["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=2e-5)


def test_the_second_epoch_trains_the_same_tokens_around_the_policy_that_sampled(
    tiny_folder: Path, rows: list[Row], samples: Samples
) -> None:
    once, twice = (trainer_of(tiny_folder, learning_rate=1e-2, num_epochs=epochs) for epochs in (1, 2))
    take_step(once, samples)
    metrics = take_step(twice, samples)
    policy, loss = policy_of(tiny_folder, once), torch.zeros(())
    for row, advantage in zip(rows, _grpo(rows), strict=True):
        terms = surrogate(reply_logprobs(policy, row)[0], torch.tensor(row.logprobs), advantage)
        loss = loss - terms.sum() / _num_tokens(rows)
    assert_same_gradient(twice, gradient_of(loss, policy))
    assert metrics["trained_tokens"] == samples.mask_T.sum() and metrics["trained_rows"] == samples.num_rows


def test_every_epoch_has_mini_batches_of_its_own_that_hold_each_group_once(samples: Samples) -> None:
    rows_of_each = minibatches(samples, TrainSettings(num_minibatches=2, num_epochs=8), seed=0, step=1)
    batches = [tuple(rows.tolist()) for rows in rows_of_each]
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
    start, policy, loss = policy_of(tiny_folder), policy_of(tiny_folder, once), torch.zeros(())
    alpha = 0.8 if version == 0 else 0.0
    for row, advantage in zip(rows, _grpo(rows), strict=True):
        new, sampled = reply_logprobs(policy, row)[0], torch.tensor(row.logprobs)
        between = sampled + alpha * (new.detach() - sampled)
        old = fixed_logprobs(start, row) if proximal == "recompute" else between
        weight = (old - sampled).exp().clamp(max=_CAP)
        loss = loss - (weight * surrogate(new, old, advantage)).sum() / _num_tokens(rows)
    assert_same_gradient(twice, gradient_of(loss, policy))


def test_before_the_first_update_both_ways_to_the_proximal_policy_agree(tiny_folder: Path, samples: Samples) -> None:
    found = []
    for proximal in ("recompute", "loglinear"):
        trainer = trainer_of(tiny_folder, decoupled={"proximal": proximal, "cap": _CAP})
        metrics = take_step(trainer, samples)
        found.append((gradients(trainer), [metrics[name] for name in ("importance", "importance_corrected")]))
    assert largest_difference(found[0][0], found[1][0]) < 1e-6
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-5) and found[0][1][1] > 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_pulls_towards_the_reference(
    tiny_folder: Path, other_folder: Path, rows: list[Row], estimator: str, weighted: bool
) -> None:
    kl = {"coefficient": 0.3, "estimator": estimator, "weighted": weighted}
    trainer = _with_reference(tiny_folder, other_folder, kl=kl)
    metrics = take_step(trainer, samples_of(rows))
    policy, other = policy_of(tiny_folder), load_causal_lm(other_folder)
    loss, total = torch.zeros(()), 0.0
    for row, advantage in zip(rows, _grpo(rows), strict=True):
        new, old = reply_logprobs(policy, row)[0], torch.tensor(row.logprobs)
        log_rho = fixed_logprobs(other, row) - new
        estimate = {"k1": -log_rho, "k2": 0.5 * log_rho**2, "k3": log_rho.exp() - 1 - log_rho}[estimator]
        if weighted:
            estimate = estimate * (new - old).exp()
        total += float(estimate.detach().sum())
        loss = loss + (0.3 * estimate - surrogate(new, old, advantage)).sum() / _num_tokens(rows)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["reference_kl"] == pytest.approx(total / _num_tokens(rows), rel=1e-5)
    expected = gradient_of(loss, policy)
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in expected.values()))
    assert_same_gradient(trainer, expected, atol=5e-6 * scale)


def test_kl_in_the_reward_is_summed_over_the_attempt_and_judged_with_it(
    tiny_folder: Path, other_folder: Path, rows: list[Row]
) -> None:
    kl = {"coefficient": 0.2, "estimator": "k1", "place": "reward"}
    trainer = _with_reference(tiny_folder, other_folder, kl=kl)
    metrics = take_step(trainer, samples_of(rows))
    policy, other, loss = policy_of(tiny_folder), load_causal_lm(other_folder), torch.zeros(())
    kls = [float((torch.tensor(row.logprobs) - fixed_logprobs(other, row)).sum()) for row in rows]
    rewards = [row.reward - 0.2 * penalty for row, penalty in zip(rows, kls, strict=True)]
    for row, advantage in zip(rows, _grpo(rows, rewards), strict=True):
        terms = surrogate(reply_logprobs(policy, row)[0], torch.tensor(row.logprobs), advantage)
        loss = loss - terms.sum() / _num_tokens(rows)
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=1e-5)
    assert metrics["reward"] == pytest.approx(np.mean([row.reward for row in rows]))


def test_adapters_switched_off_are_the_same_reference_as_a_frozen_copy(tiny_folder: Path, samples: Samples) -> None:
    found = []
    for kind in ("lora_off", "base"):
        settings = {"lora": {"rank": 4}, "reference": {"kind": kind}, "kl": {"coefficient": 0.5}}
        trainer = trainer_of(tiny_folder, learning_rate=1e-2, **settings)
        first = take_step(trainer, samples)
        assert first["reference_kl"] == 0  # B is zero at first
        found.append((take_step(trainer, samples, step=2, max_staleness=9), gradients(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6) and found[0][0]["reference_kl"] > 1e-4
    assert largest_difference(found[0][1], found[1][1]) < 1e-7


def test_metrics_of_rewards_are_of_the_scores_and_not_of_what_kl_takes_off(tiny_folder: Path, rows: list[Row]) -> None:
    kl = {"coefficient": 0.1, "estimator": "k1", "place": "reward"}
    trainer = trainer_of(tiny_folder, kl=kl, reference={"kind": "base"})
    take_step(trainer, samples_of(rows))  # now the policy is not its reference
    alike = samples_of([dataclasses.replace(row, reward=0.5) for row in rows])
    metrics = take_step(trainer, alike, step=2, max_staleness=9)
    assert (metrics["reward"], metrics["reward_std"], metrics["fraction_groups_without_signal"]) == (0.5, 0, 1)
    assert metrics["grad_norm"] > 0, "attempts that KL charges differently are worth differently"


def test_only_the_adapters_move(tiny_folder: Path, samples: Samples) -> None:
    trainer = trainer_of(tiny_folder, lora={"rank": 4}, weight_decay=0.1)
    before = weights(trainer)
    take_step(trainer, samples)
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    adapters = {name for name in before if ".lora_" in name}
    assert moved == adapters and adapters
    assert gradients(trainer).keys() == adapters


def test_the_entropy_bonus_has_the_gradient_of_the_mean_entropy(tiny_folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(tiny_folder, entropy_bonus=0.5)
    metrics = take_step(trainer, samples_of(rows))
    policy, loss, entropy_sum = policy_of(tiny_folder), torch.zeros(()), 0.0
    for row, advantage in zip(rows, _grpo(rows), strict=True):
        new, entropy = reply_logprobs(policy, row)
        terms = surrogate(new, torch.tensor(row.logprobs), advantage) + 0.5 * entropy
        loss, entropy_sum = loss - terms.sum() / _num_tokens(rows), entropy_sum + float(entropy.detach().sum())
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy_sum / _num_tokens(rows), rel=1e-5)
    assert_same_gradient(trainer, gradient_of(loss, policy))


def test_only_the_least_certain_tokens_are_trained_and_all_are_counted(tiny_folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(tiny_folder, top_entropy_fraction=0.3)
    take_step(trainer, samples_of(rows))
    policy, loss = policy_of(tiny_folder), torch.zeros(())
    found = [reply_logprobs(policy, row) for row in rows]
    threshold = np.quantile(torch.cat([entropy for _, entropy in found]).detach().numpy(), 0.7)
    for row, (new, entropy), advantage in zip(rows, found, _grpo(rows), strict=True):
        terms = surrogate(new, torch.tensor(row.logprobs), advantage)
        loss = loss - terms[entropy.detach() >= threshold].sum() / _num_tokens(rows)
    assert_same_gradient(trainer, gradient_of(loss, policy))


def test_sft_imitates_the_accepted_rows_and_divides_by_their_tokens_alone(tiny_folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(tiny_folder, loss={"kind": "sft", "min_reward": 0.5})
    metrics = take_step(trainer, samples_of(rows))
    accepted = [row for row in rows if row.reward >= 0.5]
    assert 0 < len(accepted) < len(rows)
    policy, loss = policy_of(tiny_folder), torch.zeros(())
    for row in accepted:
        loss = loss - reply_logprobs(policy, row)[0].sum() / _num_tokens(accepted)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["trained_tokens"] == _num_tokens(accepted)
    assert_same_gradient(trainer, gradient_of(loss, policy))


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
    reference = {"kind": "model", "model": "teacher"}
    null = [dataclasses.replace(row, reward=np.nan) for row in rows]  # nobody has to score them
    trainer = _with_reference(tiny_folder, other_folder, advantage=advantage, reference=reference)
    metrics = take_step(trainer, samples_of(null))
    policy, teacher, loss = policy_of(tiny_folder), load_causal_lm(other_folder), torch.zeros(())
    for row in rows:
        sampled = torch.tensor(row.logprobs)
        difference = fixed_logprobs(teacher, row) - sampled
        difference = difference if clip is None else difference.clamp(-clip, clip)
        terms = surrogate(reply_logprobs(policy, row)[0], sampled, 2.0 * difference)
        loss = loss - terms.sum() / _num_tokens(rows)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["trained_tokens"] == _num_tokens(rows) and "reward" not in metrics
    assert_same_gradient(trainer, gradient_of(loss, policy), atol=2e-5)


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
    built_in, own = trainer_of(tiny_folder, num_minibatches=2), trainer_of(tiny_folder, num_minibatches=2, loss=custom)
    metrics = [take_step(trainer, samples) for trainer in (built_in, own)]
    assert largest_difference(gradients(built_in), gradients(own)) == 0
    assert largest_difference(weights(built_in), weights(own)) == 0
    assert metrics[0]["loss"] == metrics[1]["loss"] and metrics[1]["mine"] == 1


def test_activation_checkpointing_changes_no_bit_of_the_update(tiny_folder: Path, samples: Samples) -> None:
    found = []
    for checkpointing in (False, True):
        trainer = trainer_of(tiny_folder, activation_checkpointing=checkpointing, entropy_bonus=0.1)
        metrics = take_step(trainer, samples)
        found.append((metrics, gradients(trainer), weights(trainer)))
    assert found[0][0] == found[1][0]
    assert largest_difference(found[0][1], found[1][1]) == 0 == largest_difference(found[0][2], found[1][2])


@pytest.mark.parametrize(
    ("schedule", "expected"), [("linear", [0.5, 1.0, 0.5, 0.0, 0.0]), ("cosine", [0.5, 1.0, 0.5, 0.0, 0.0])]
)
def test_a_decayed_learning_rate_ends_at_0_and_moves_nothing_more(
    tiny_folder: Path, samples: Samples, schedule: str, expected: list[float]
) -> None:
    settings = {"schedule": schedule, "warmup_steps": 2, "decay_steps": 4}
    trainer = trainer_of(tiny_folder, learning_rate=1e-3, **settings)
    rates = []
    for step in range(1, 6):
        before = weights(trainer)
        rates.append(take_step(trainer, samples, step=step, max_staleness=9)["learning_rate"])
        assert (largest_difference(weights(trainer), before) == 0) == (step >= 4)
    assert rates == pytest.approx([1e-3 * share for share in expected], abs=1e-12)


def test_the_moving_average_follows_the_weights_and_is_saved_with_the_state(
    tiny_folder: Path, tmp_path: Path, samples: Samples
) -> None:
    trainer = trainer_of(tiny_folder, learning_rate=1e-2, ema=0.75, num_minibatches=1)
    assert trainer.ema is not None
    expected = weights(trainer)
    for step in (1, 2):
        take_step(trainer, samples, step=step, max_staleness=9)
        expected = {name: 0.75 * tensor + 0.25 * weights(trainer)[name] for name, tensor in expected.items()}
    average = {name.removeprefix("ema/"): tensor for name, tensor in trainer.ema.state_tensors().items()}
    assert largest_difference(average, expected) < 1e-6 < largest_difference(average, weights(trainer))
    save_state(trainer, tmp_path / "state", step=2)
    resumed = trainer_of(tiny_folder, learning_rate=1e-2, ema=0.75)
    load_state(resumed, tmp_path / "state")
    for each in (trainer, resumed):
        take_step(each, samples, step=3, max_staleness=9)
    assert largest_difference(everything(trainer), everything(resumed)) == 0
    plain = trainer_of(tiny_folder, learning_rate=1e-2)
    for step in (1, 2, 3):
        take_step(plain, samples, step=step, max_staleness=9)
    assert largest_difference(weights(plain), weights(trainer)) == 0  # it changes nothing else
