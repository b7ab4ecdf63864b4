"""PPO's critic: it begins at 0, learns what to expect, and with GAE the update is the paper's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.trainers.builders import (
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
    fixed_logprobs,
    gradient_of,
    num_tokens,
    policy_of,
    replies_of,
)
from trainers.data.samples import Samples
from trainers.model.distributed import copy_into
from trainers.objective.advantages import gae
from trainers.objective.credit import Looked, assign_credit, metrics_of_rewards
from trainers.trainer import Trainer

_GAE = {"kind": "gae", "gamma": 0.9, "lam": 0.8}
_CLIP = 0.05
_SETTINGS = {"advantage": _GAE, "critic": {"learning_rate": 1e-3, "clip": _CLIP}}


def _values(trainer: Trainer, samples: Samples) -> np.ndarray:
    """What the critic says of every sampled token."""
    values_T = trainer._look(samples, np.arange(samples.num_rows), {"values"}).values_T
    assert values_T is not None
    return values_T[samples.mask_T]


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
                parameter.copy_(weights(trainer.critic)[self.name_in_trainer(name)])

    @staticmethod
    def name_in_trainer(name: str) -> str:
        return name if name.startswith("value_head") else f"policy.{name}"

    def forward(self, row: Row) -> torch.Tensor:
        """What is expected before each token of the reply is sampled."""
        states = self.causal_lm.model(input_ids=torch.tensor([row.prompt + row.reply])).last_hidden_state[0]
        return self.value_head(states)[len(row.prompt) - 1 : -1, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_values_start_at_0_and_become_what_every_attempt_is_worth(tmp_path: Path, rows: list[Row], tied: bool) -> None:
    constant = samples_of([dataclasses.replace(row, reward=0.7) for row in rows])
    critic = {"learning_rate": 1e-2, "clip": None, "warmup_steps": 100}
    trainer = trainer_of(tiny_model(tmp_path / "model", tied=tied), advantage="gae", critic=critic)
    assert (_values(trainer, constant) == 0).all()
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
    advantages = []
    for row, values in zip(rows, old_values, strict=True):
        rewards, everywhere = np.append(np.zeros(len(row.reply) - 1), row.reward), np.ones(len(row.reply), bool)
        of_row, _ = gae(rewards, values.numpy(), everywhere, np.array([0, len(rewards)]), gamma=0.9, lam=0.8)
        advantages.append(torch.from_numpy(of_row).float())
    mean, deviation = torch.cat(advantages).mean(), torch.cat(advantages).std()
    surrogates, errors, num_clipped = [], [], 0
    for reply, old, advantage in zip(replies_of(policy, rows), old_values, advantages, strict=True):
        surrogates.append(reply.clipped((advantage - mean) / deviation))
        returns, values = advantage + old, critic(reply.row)
        clipped = old + (values - old).clamp(-_CLIP, _CLIP)
        square, clipped_square = (values - returns) ** 2, (clipped - returns) ** 2
        num_clipped += int((clipped_square > square).sum())
        errors.append(0.5 * torch.maximum(square, clipped_square))
    policy_loss, value_loss = -torch.cat(surrogates).mean(), torch.cat(errors).mean()
    assert_same_gradient(trainer, gradient_of(policy_loss, policy), atol=1e-5)
    found = gradients(trainer.critic)
    expected = {critic.name_in_trainer(name): g for name, g in gradient_of(value_loss, critic).items()}
    assert largest_difference(found, expected) < 1e-5 < float(found["value_head.weight"].abs().max()) / 100
    if num_epochs == 1:
        assert metrics["loss"] == pytest.approx(float(policy_loss.detach()), abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
        norm = np.sqrt(sum(float((gradient**2).sum()) for gradient in expected.values()))
        assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
        clipped = _with_random_head(trainer_of(tiny_folder, max_grad_norm=0.01, **_SETTINGS))
        assert take_step(clipped, samples_of(rows))["critic_grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 0.01
        left = np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients(clipped.critic).values()))
        assert left == pytest.approx(0.01, rel=1e-3), "by its own norm"
    else:
        assert num_clipped > 0
        assert metrics["value_clip_fraction"] == pytest.approx(num_clipped / num_tokens(rows) / 2)


def test_warm_up_steps_train_the_critic_alone(tiny_folder: Path, samples: Samples) -> None:
    critic = {**_SETTINGS["critic"], "warmup_steps": 2}
    trainer = trainer_of(tiny_folder, advantage=_GAE, critic=critic)
    policy, value = weights(trainer), weights(trainer.critic)
    metrics = [take_step(trainer, samples, step=1, max_staleness=9)]
    trainer.step_without_gradient(step=2)
    assert largest_difference(weights(trainer), policy) == 0 and not trainer.optimizer.state
    assert largest_difference(weights(trainer.critic), value) > 0
    metrics.append(take_step(trainer, samples, step=3, max_staleness=9))
    assert largest_difference(weights(trainer), policy) > 0
    assert "grad_norm" not in metrics[0] and metrics[1]["grad_norm"] > 0


def test_with_a_critic_the_kl_in_the_reward_is_charged_at_the_token_that_causes_it(
    tmp_path: Path, rows: list[Row]
) -> None:
    other = load_causal_lm(tiny_model(tmp_path / "other", seed=1))
    samples, beta, expected = samples_of(rows), 0.1, []
    reference_T = np.zeros_like(samples.logprobs_T)
    reference_T[samples.mask_T] = np.concatenate([fixed_logprobs(other, row).numpy() for row in rows])
    penalty = beta * (samples.logprobs_T - reference_T)[samples.mask_T]
    for row, charged in zip(rows, np.split(penalty, np.cumsum([len(row.reply) for row in rows])[:-1]), strict=True):
        rewards = -charged
        rewards[-1] += row.reward
        expected += [rewards[t:].sum() for t in range(len(row.reply))]  # γ = λ = 1, V = 0: the reward still to come
    settings = config_of(
        advantage={"kind": "gae", "whiten": False},
        kl={"coefficient": beta, "estimator": "k1", "place": "reward"},
        reference={"kind": "base"},
    ).train
    looked = Looked(values_T=np.zeros_like(reference_T), reference_T=reference_T)
    credit = assign_credit(samples, settings, looked, reward_weights={})
    np.testing.assert_allclose(credit.advantages_T[samples.mask_T], expected, atol=1e-5)
    np.testing.assert_allclose(credit.returns_T[samples.mask_T], expected, atol=1e-5)  # type: ignore[index]
    assert metrics_of_rewards(samples)["reward"] == pytest.approx(np.mean([row.reward for row in rows]))
