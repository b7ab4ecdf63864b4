"""PPO's critic: it begins at 0, learns what to expect, and with GAE the update is the paper's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.trainers.builders import (
    NO_CLIPPING,
    Row,
    config_of,
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
    policy_of,
    reply_logprobs,
    surrogate,
)
from trainers.checkpoint import load_state, save_state
from trainers.data.samples import Samples
from trainers.model.distributed import copy_into, full
from trainers.objective.credit import Credit, Looked, assign_credit
from trainers.trainer import Trainer

_GAE = {"kind": "gae", "gamma": 0.9, "lam": 0.8}
_CLIP = 0.05
_SETTINGS = {"advantage": _GAE, "critic": {"learning_rate": 1e-3, "clip": _CLIP}}


def _values(trainer: Trainer, samples: Samples) -> np.ndarray:
    """What the critic says of every sampled token."""
    values_T = trainer._look(samples).values_T
    assert values_T is not None
    return values_T[samples.mask_T]


def _critic_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.critic is not None
    return {name: full(parameter).clone() for name, parameter in trainer.critic.model.named_parameters()}


def _critic_gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer.critic is not None
    named = trainer.critic.model.named_parameters()
    return {name: full(p.grad).clone() for name, p in named if p.grad is not None}


def _with_random_head(trainer: Trainer) -> Trainer:
    """A head of zeros would hide the whole transformer below it."""
    assert trainer.critic is not None
    draw = torch.Generator().manual_seed(3)
    head = trainer.critic.model.value_head
    copy_into(head.weight, 0.3 * torch.randn(head.weight.shape, generator=draw))
    copy_into(head.bias, 0.1 * torch.randn(head.bias.shape, generator=draw))
    return trainer


class _NaiveCritic(torch.nn.Module):
    """transformers' own decoder and a linear layer, with the trainer's critic weights."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        super().__init__()
        self.causal_lm = load_causal_lm(folder)
        self.value_head = torch.nn.Linear(32, 1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_critic_weights(trainer)[self.name_in_trainer(name)])

    @staticmethod
    def name_in_trainer(name: str) -> str:
        return name if name.startswith("value_head") else f"policy.{name}"

    def forward(self, row: Row) -> torch.Tensor:
        """What is expected before each token of the reply is sampled."""
        states = self.causal_lm.model(input_ids=torch.tensor([row.prompt + row.reply])).last_hidden_state[0]
        return self.value_head(states)[len(row.prompt) - 1 : -1, 0]


def _naive_gae(rewards: list[float], values: list[float], *, gamma: float, lam: float) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, summed for each t on its own."""
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    return [sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def test_values_start_at_0_whatever_the_model(tmp_path: Path, samples: Samples) -> None:
    for tied in (True, False):
        folder = tiny_model(tmp_path / f"tied-{tied}", tied=tied)
        assert (_values(trainer_of(folder, **_SETTINGS), samples) == 0).all()


def test_the_value_head_learns_what_every_attempt_is_worth(tiny_folder: Path, rows: list[Row]) -> None:
    constant = samples_of([dataclasses.replace(row, reward=0.7) for row in rows])
    critic = {"learning_rate": 1e-2, "clip": None, "warmup_steps": 100}
    trainer = trainer_of(tiny_folder, advantage="gae", critic=critic)
    errors = [take_step(trainer, constant, step=step, max_staleness=99)["value_error"] for step in range(1, 41)]
    assert errors[0] == pytest.approx(0.7, rel=1e-5)  # |0 − R|, with γ = λ = 1 the return is the reward
    assert np.abs(_values(trainer, constant) - 0.7).max() < 0.1


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_policy_and_critic_have_the_gradient_of_a_naive_ppo_update(
    tiny_folder: Path, rows: list[Row], num_epochs: int
) -> None:
    """In the second epoch ratios and values have moved away from where the step began, and both clips bite."""

    def trained(epochs: int) -> tuple[Trainer, dict[str, float]]:
        settings = {"learning_rate": 1e-2, "num_epochs": max(1, epochs), **_SETTINGS}
        trainer = _with_random_head(trainer_of(tiny_folder, **settings))
        return trainer, take_step(trainer, samples_of(rows)) if epochs else {}

    (start, _), (before, _), (trainer, metrics) = trained(0), trained(num_epochs - 1), trained(num_epochs)
    old_critic, critic = _NaiveCritic(tiny_folder, start), _NaiveCritic(tiny_folder, before)
    policy = policy_of(tiny_folder, before)
    with torch.no_grad():
        old_values = [old_critic(row) for row in rows]
    advantages = [
        _naive_gae([0.0] * (len(row.reply) - 1) + [row.reward], values.tolist(), gamma=0.9, lam=0.8)
        for row, values in zip(rows, old_values, strict=True)
    ]
    mean, deviation = np.mean(np.concatenate(advantages)), np.std(np.concatenate(advantages), ddof=1)
    num_tokens = sum(len(row.reply) for row in rows)
    policy_loss, value_loss, num_clipped = torch.zeros(()), torch.zeros(()), 0
    for row, old, advantage in zip(rows, old_values, advantages, strict=True):
        new, _ = reply_logprobs(policy, row)
        whitened = (torch.tensor(advantage) - mean) / deviation
        policy_loss = policy_loss - surrogate(new, torch.tensor(row.logprobs), whitened).sum() / num_tokens
        returns, values = torch.tensor(advantage) + old, critic(row)
        clipped = old + (values - old).clamp(-_CLIP, _CLIP)
        square, clipped_square = (values - returns) ** 2, (clipped - returns) ** 2
        num_clipped += int((clipped_square > square).sum())
        value_loss = value_loss + 0.5 * torch.maximum(square, clipped_square).sum() / num_tokens
    assert_same_gradient(trainer, gradient_of(policy_loss, policy), atol=1e-5)
    found = _critic_gradient(trainer)
    expected = {critic.name_in_trainer(name): g for name, g in gradient_of(value_loss, critic).items()}
    assert largest_difference(found, expected) < 1e-5 < float(found["value_head.weight"].abs().max()) / 100
    if num_epochs == 1:
        assert metrics["loss"] == pytest.approx(float(policy_loss.detach()), abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
        norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in expected.values()))
        assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
    else:
        assert num_clipped > 0 and metrics["value_clip_fraction"] == pytest.approx(num_clipped / num_tokens / 2)


def test_packing_and_mini_batches_of_memory_do_not_change_critic_or_policy(tiny_folder: Path, samples: Samples) -> None:
    found = []
    for tokens in (32, 4096):
        trainer = _with_random_head(trainer_of(tiny_folder, tokens_per_microbatch=tokens, **_SETTINGS))
        take_step(trainer, samples)
        found.append(_critic_gradient(trainer))
    assert largest_difference(*found) < 1e-6


def test_a_saved_state_resumes_policy_and_critic_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, samples: Samples
) -> None:
    trainer = trainer_of(tiny_folder, **_SETTINGS)
    for step in (1, 2):
        take_step(trainer, samples, step=step, max_staleness=9)
    save_state(trainer, tmp_path / "state", step=2)
    resumed = trainer_of(tiny_folder, **_SETTINGS)
    assert load_state(resumed, tmp_path / "state") == 2
    assert largest_difference(everything(trainer), everything(resumed)) == 0
    metrics = [take_step(each, samples, step=3, max_staleness=9) for each in (trainer, resumed)]
    assert metrics[0] == metrics[1]
    # A step that trains nothing leaves moments behind: on the resumed one there is no gradient of the step before.
    for each in (trainer, resumed):
        each.step_without_gradient(step=4)
    assert largest_difference(everything(trainer), everything(resumed)) == 0


def test_a_step_without_gradient_after_a_resume_is_the_uninterrupted_one(
    tiny_folder: Path, tmp_path: Path, samples: Samples
) -> None:
    trainer = trainer_of(tiny_folder, **_SETTINGS)
    take_step(trainer, samples)
    save_state(trainer, tmp_path / "state", step=1)
    resumed = trainer_of(tiny_folder, **_SETTINGS)
    load_state(resumed, tmp_path / "state")
    before = _critic_weights(trainer)
    for each in (trainer, resumed):
        each.step_without_gradient(step=2)
    assert largest_difference(everything(trainer), everything(resumed)) == 0
    assert largest_difference(_critic_weights(trainer), before) > 0  # the momentum goes on


def test_warm_up_steps_train_the_critic_alone(tiny_folder: Path, samples: Samples) -> None:
    critic = {**_SETTINGS["critic"], "warmup_steps": 2}
    trainer = trainer_of(tiny_folder, advantage=_GAE, critic=critic)
    policy, value = weights(trainer), _critic_weights(trainer)
    metrics = [take_step(trainer, samples, step=1, max_staleness=9)]
    trainer.step_without_gradient(step=2)
    assert largest_difference(weights(trainer), policy) == 0 and not trainer.optimizer.state
    assert largest_difference(_critic_weights(trainer), value) > 0
    metrics.append(take_step(trainer, samples, step=3, max_staleness=9))
    assert largest_difference(weights(trainer), policy) > 0
    assert "grad_norm" not in metrics[0] and metrics[1]["grad_norm"] > 0


def _credit(rows: list[Row], settings: dict[str, object], reference: np.ndarray | None = None) -> Credit:
    samples = samples_of(rows)
    zeros = np.zeros(len(samples.mask_T), np.float32)
    looked = Looked(values_T=zeros, reference_T=reference)
    return assign_credit(samples, config_of(**settings).train, looked, reward_weights={})


def test_with_a_critic_the_kl_in_the_reward_is_charged_at_the_token_that_causes_it(
    tiny_folder: Path, tmp_path: Path, rows: list[Row]
) -> None:
    other = load_causal_lm(tiny_model(tmp_path / "other", seed=1))
    beta, expected, references = 0.1, [], []
    for row in rows:
        reference = fixed_logprobs(other, row).numpy()
        penalty = beta * (np.array(row.logprobs, np.float32) - reference)
        rewards = -penalty
        rewards[-1] += row.reward
        expected += [rewards[t:].sum() for t in range(len(row.reply))]  # γ = λ = 1, V = 0: the reward still to come
        references += [np.zeros(len(row.prompt)), reference]
    settings = {
        "advantage": {"kind": "gae", "whiten": False},
        "kl": {"coefficient": beta, "estimator": "k1", "place": "reward"},
        "reference": {"kind": "base"},
    }
    credit = _credit(rows, settings, np.concatenate(references).astype(np.float32))
    mask_T = samples_of(rows).mask_T
    np.testing.assert_allclose(credit.advantages_T[mask_T], expected, atol=1e-5)
    np.testing.assert_allclose(credit.returns_T[mask_T], expected, atol=1e-5)  # type: ignore[index]
    assert credit.metrics["reward"] == pytest.approx(np.mean([row.reward for row in rows]))


def test_attempts_without_a_reward_teach_neither_policy_nor_critic(tiny_folder: Path, rows: list[Row]) -> None:
    null = [dataclasses.replace(row, reward=np.nan) if row.attempt == 1 else row for row in rows]
    garbled = [dataclasses.replace(row, logprobs=[-5.0] * len(row.reply)) if row.attempt == 1 else row for row in null]
    found = []
    for each in (null, garbled):
        trainer = _with_random_head(trainer_of(tiny_folder, **_SETTINGS))
        metrics = take_step(trainer, samples_of(each))
        found.append(everything(trainer))
        assert metrics["trained_tokens"] == sum(len(row.reply) for row in rows if row.attempt != 1)
        assert metrics["null_reward_fraction"] == pytest.approx(1 / 3)
    assert largest_difference(*found) == 0
    assert all(tensor.isfinite().all() for tensor in found[0].values())


def test_the_critics_learning_rate_follows_the_schedule_from_its_own_peak(tiny_folder: Path, samples: Samples) -> None:
    trainer = trainer_of(
        tiny_folder, advantage="gae", critic={"learning_rate": 4e-2}, schedule="linear", warmup_steps=2, decay_steps=4
    )
    rates = []
    for step in range(1, 5):
        take_step(trainer, samples, step=step, max_staleness=9)
        assert trainer.critic is not None
        rates.append(trainer.critic.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2e-2, 4e-2, 2e-2, 0.0])


def test_the_critics_gradient_is_clipped_on_its_own(tiny_folder: Path, samples: Samples) -> None:
    free, clipped = (
        _with_random_head(trainer_of(tiny_folder, max_grad_norm=norm, **_SETTINGS)) for norm in (NO_CLIPPING, 0.01)
    )
    norms = [take_step(trainer, samples)["critic_grad_norm"] for trainer in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1])
    left = np.sqrt(sum(float((g**2).sum()) for g in _critic_gradient(clipped).values()))
    assert norms[0] > 0.01 and left == pytest.approx(0.01, rel=1e-3)
