"""A step is the paper's update, however it is cut into micro-batches, and the same every time."""

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
    logprobs_alone,
    random_rows,
    samples_of,
    take_step,
    trainer_of,
    weights,
)
from trainers.data.samples import Samples
from trainers.health import NonFinite
from trainers.model.batches import Pack
from trainers.model.model import PolicyModel
from trainers.objective.credit import Looked, assign_credit
from trainers.objective.objective import moved_by_advantages_alone

_CAP = 1.25
_NO_STD = {"kind": "grpo", "scale": "none"}


def _reference_loss(
    folder: Path, rows: list[Row], *, temperature: float = 1.0, correct: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of GRPO written down naively: one sequence at a time, in transformers' own model."""
    causal_lm = load_causal_lm(folder)
    denominator = sum(len(row.reply) for row in rows)
    total = torch.zeros(())
    for row in rows:
        siblings = [other.reward for other in rows if other.group == row.group]
        advantage = (row.reward - np.mean(siblings)) / (np.std(siblings, ddof=1) + 1e-4)
        new = logprobs_alone(causal_lm, row.prompt + row.reply, temperature=temperature)[len(row.prompt) - 1 :]
        old = torch.tensor(row.logprobs)
        weight = (new.detach() - old).exp().clamp(max=_CAP) if correct else torch.ones_like(old)
        ratio = (new - (new.detach() if correct else old)).exp()
        total = total + (weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)).sum()
    loss = -total / denominator
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in causal_lm.named_parameters()}


def _without_prefix(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("causal_lm."): gradient for name, gradient in gradients.items()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_equal_a_naive_implementation(tiny_folder: Path, temperature: float) -> None:
    rows = random_rows(tiny_folder, temperature=temperature)
    loss, expected = _reference_loss(tiny_folder, rows, temperature=temperature)
    trainer = trainer_of(tiny_folder, temperature=temperature)
    metrics = take_step(trainer, samples_of(rows))
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(_without_prefix(gradients(trainer)), expected) < 3e-6
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(float((g**2).sum()) for g in expected.values())), rel=1e-5)
    assert 0 < metrics["clip_fraction"] < 1  # both branches of the clip were taken


def test_groups_without_signal_are_measured_and_never_go_backwards(
    tiny_folder: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = [dataclasses.replace(row, reward=1.0) if row.group in (0, 2) else row for row in rows]
    loss, expected = _reference_loss(tiny_folder, flat)
    trainer = trainer_of(tiny_folder)
    forwards: list[tuple[bool, int]] = []
    forward = trainer._forward

    def watched(model: PolicyModel, pack: Pack, **keywords: bool) -> tuple[torch.Tensor, torch.Tensor]:
        forwards.append((torch.is_grad_enabled(), int(pack.mask.sum())))
        return forward(model, pack, **keywords)

    monkeypatch.setattr(trainer, "_forward", watched)
    metrics = take_step(trainer, samples_of(flat))
    num_tokens = {has: sum(len(r.reply) for r in flat if (r.group in (1, 3)) is has) for has in (True, False)}
    assert forwards == [(True, num_tokens[True]), (False, num_tokens[False])]
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(_without_prefix(gradients(trainer)), expected) < 3e-6
    assert metrics["trained_tokens"] == sum(num_tokens.values())


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo", "sapo"])
def test_what_goes_forward_only_would_have_changed_nothing(
    tiny_folder: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    flat = samples_of([dataclasses.replace(row, reward=1.0) if row.group in (0, 2) else row for row in rows])
    found = []
    for everywhere in (False, True):
        if everywhere:
            monkeypatch.setattr("trainers.trainer.moved_by_advantages_alone", lambda settings: False)
        trainer = trainer_of(tiny_folder, learning_rate=1e-4, loss={"kind": kind}, num_minibatches=2, lora={"rank": 2})
        metrics = [take_step(trainer, flat, step=step, max_staleness=1) for step in (1, 2)]
        found.append((metrics, weights(trainer)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert largest_difference(found[0][1], found[1][1]) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_bonus": 0.01},
        {"kl": {"coefficient": 0.1, "estimator": "k1"}, "reference": {"kind": "base"}},
        {"loss": {"kind": "sft"}},
        {"advantage": {"kind": "gae"}},
    ],
    ids=str,
)
def test_without_an_advantage_other_terms_still_have_their_gradient(
    tiny_folder: Path, rows: list[Row], settings: dict[str, object]
) -> None:
    assert not moved_by_advantages_alone(config_of(**settings).train)
    flat = samples_of([dataclasses.replace(row, reward=1.0) if row.group else row for row in rows])
    alone = samples_of([row for row in rows if not row.group])
    found = [trainer_of(tiny_folder, **settings) for _ in range(2)]
    for trainer, samples in zip(found, (flat, alone), strict=True):
        take_step(trainer, samples)
    share = alone.mask_T.sum() / flat.mask_T.sum()
    only_its = {name: gradient * share for name, gradient in gradients(found[1]).items()}
    assert largest_difference(gradients(found[0]), only_its) > 1e-4


def test_a_step_without_any_signal_has_a_gradient_of_zero(tiny_folder: Path, rows: list[Row]) -> None:
    trainer = trainer_of(tiny_folder)
    metrics = take_step(trainer, samples_of([dataclasses.replace(row, reward=1.0) for row in rows]))
    assert metrics["grad_norm"] == 0 and all(float(g.abs().max()) == 0 for g in gradients(trainer).values())
    assert gradients(trainer).keys() == weights(trainer).keys()


def test_micro_batches_of_32_and_of_4096_tokens_give_the_same_step(tiny_folder: Path, samples: Samples) -> None:
    small, large = (trainer_of(tiny_folder, learning_rate=1e-5, tokens_per_microbatch=n) for n in (32, 4096))
    metrics = [take_step(trainer, samples) for trainer in (small, large)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-7)
    assert largest_difference(gradients(small), gradients(large)) < 1e-6
    assert largest_difference(weights(small), weights(large)) < 1e-6


def test_a_row_that_begins_with_a_sampled_token_learns_nothing_from_the_row_before_it(
    tiny_folder: Path, rows: list[Row]
) -> None:
    # Nothing predicts a first token, least of all the last one of a stranger in the same pack.
    bare = samples_of([dataclasses.replace(row, prompt=[]) for row in rows])
    apart, together = (trainer_of(tiny_folder, tokens_per_microbatch=tokens) for tokens in (16, 4096))
    found = [take_step(trainer, bare) for trainer in (apart, together)]
    assert found[0]["trained_tokens"] == found[1]["trained_tokens"] == bare.mask_T.sum() - bare.num_rows
    assert largest_difference(gradients(apart), gradients(together)) < 1e-6


def test_tokens_of_equal_entropy_are_chosen_alike_in_any_pack(tiny_folder: Path) -> None:
    for seed in (5, 11):  # in whose packs of 16 and 4096 tokens the quantile used to cut through a tie
        samples = samples_of(random_rows(tiny_folder, num_groups=3, attempts=12, seed=seed))
        found = []
        for budget in (16, 24, 64, 4096):
            trainer = trainer_of(tiny_folder, tokens_per_microbatch=budget, top_entropy_fraction=0.1)
            loss = take_step(trainer, samples)["loss"]
            found.append((loss, gradients(trainer)))
        for loss, gradient in found[1:]:
            assert loss == pytest.approx(found[0][0], abs=1e-6)
            assert largest_difference(gradient, found[0][1]) < 1e-5


@pytest.mark.parametrize("loss", [{"kind": "cispo"}, {"kind": "clip", "dual_clip": 3.0}, {"kind": "clip"}], ids=str)
def test_a_ratio_that_overflows_stops_the_step_under_every_loss(
    tiny_folder: Path, rows: list[Row], loss: dict[str, object]
) -> None:
    rows = [
        dataclasses.replace(row, logprobs=[-120.0, *row.logprobs[1:]]) if i == 1 else row for i, row in enumerate(rows)
    ]
    trainer = trainer_of(tiny_folder, loss=loss)
    before = weights(trainer)
    with pytest.raises(NonFinite, match="the optimizer was not touched"):
        take_step(trainer, samples_of(rows))
    assert largest_difference(before, weights(trainer)) == 0


@pytest.mark.parametrize("preset", ["", "verl", "openrlhf"])
def test_equal_attempts_are_charged_alike_whatever_the_engine_rounds(
    tiny_folder: Path, rows: list[Row], preset: str
) -> None:
    draw = np.random.default_rng(0)
    same = [dataclasses.replace(rows[0], attempt=attempt, reward=1.0) for attempt in range(4)]
    same = [
        dataclasses.replace(row, logprobs=(np.array(row.logprobs) - draw.uniform(0, 0.01)).tolist()) for row in same
    ]
    others = [dataclasses.replace(row, group=row.group + 1) for row in rows]
    samples = samples_of(same + others)
    settings = config_of(
        preset=preset,
        advantage={"kind": "grpo"},
        kl={"coefficient": 0.05, "place": "reward", "estimator": "k1", "weighted": False},
        reference={"kind": "base"},
    ).train
    reference_T = np.where(samples.mask_T, -1.0, 0.0).astype(np.float32)
    credit = assign_credit(samples, settings, Looked(reference_T=reference_T), reward_weights={})
    is_same_T = np.arange(len(samples.mask_T)) < samples.offsets[4]
    assert not credit.advantages_T[is_same_T].any()
    assert credit.advantages_T[~is_same_T & samples.mask_T].any()


def test_the_order_of_groups_in_the_claim_does_not_matter(tiny_folder: Path, rows: list[Row], samples: Samples) -> None:
    one, other = trainer_of(tiny_folder), trainer_of(tiny_folder)
    take_step(one, samples)
    take_step(other, samples_of(rows[::-1]))
    assert largest_difference(gradients(one), gradients(other)) < 1e-6


@pytest.mark.parametrize("stale_policy", ["strict", "correct"])
def test_the_same_inputs_give_bit_identical_weights(tiny_folder: Path, samples: Samples, stale_policy: str) -> None:
    found = []
    for _ in range(2):
        trainer = trainer_of(tiny_folder, num_minibatches=2, tokens_per_microbatch=32, stale_policy=stale_policy)
        metrics = [take_step(trainer, samples, step=step) for step in (1, 2)]
        found.append((metrics, weights(trainer)))
    assert found[0][0] == found[1][0]
    assert largest_difference(found[0][1], found[1][1]) == 0


def test_the_seed_and_the_step_choose_the_mini_batches(tiny_folder: Path, samples: Samples) -> None:
    def after(seed: int, step: int) -> dict[str, torch.Tensor]:
        trainer = trainer_of(tiny_folder, num_minibatches=2, seed=seed)
        take_step(trainer, samples, step=step)
        return weights(trainer)

    reference = after(0, 1)
    assert any(largest_difference(reference, after(seed, 1)) > 0 for seed in range(1, 4))
    assert any(largest_difference(reference, after(0, step)) > 0 for step in range(2, 5))


def test_mini_batches_train_every_token_once(tiny_folder: Path, samples: Samples) -> None:
    metrics = take_step(trainer_of(tiny_folder, num_minibatches=3), samples)
    assert metrics["trained_tokens"] == samples.mask_T.sum()
    assert metrics["trained_rows"] == samples.num_rows


def test_a_batch_of_fewer_groups_than_mini_batches_makes_one_of_each_group(tiny_folder: Path, samples: Samples) -> None:
    found = []
    for num_minibatches in (4, 9):
        trainer = trainer_of(tiny_folder, num_minibatches=num_minibatches)
        found.append((take_step(trainer, samples), weights(trainer)))
    assert found[0][0] == found[1][0] and found[0][0]["trained_groups"] == 4
    assert largest_difference(found[0][1], found[1][1]) == 0


def test_a_smaller_batch_divides_by_its_own_tokens(tiny_folder: Path, rows: list[Row]) -> None:
    loss, expected = _reference_loss(tiny_folder, rows[:3])
    trainer = trainer_of(tiny_folder)
    assert take_step(trainer, samples_of(rows[:3]))["loss"] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(_without_prefix(gradients(trainer)), expected) < 3e-6


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_step_without_gradient_is_one_whose_every_token_is_masked(
    tiny_folder: Path, rows: list[Row], samples: Samples, num_minibatches: int
) -> None:
    """Schedule, moments and weight decay go on, and the weights follow their momentum."""
    settings = {"num_minibatches": num_minibatches, "weight_decay": 0.1, "warmup_steps": 5, "stale_policy": "mask"}
    found = []
    for masked in (True, False):
        trainer = trainer_of(tiny_folder, **settings)
        take_step(trainer, samples, step=1)
        before = weights(trainer)
        if masked:
            metrics = take_step(trainer, samples, step=9)  # tokens of version 0 and a bound of 0
            assert metrics["masked_stale_fraction"] == 1
        else:
            assert trainer.step_without_gradient(step=9) == {"learning_rate": 1e-3}
        assert largest_difference(weights(trainer), before) > 0
        found.append(weights(trainer))
        take_step(trainer, samples, step=10, max_staleness=10)
        found[-1] |= {f"next.{name}": tensor for name, tensor in weights(trainer).items()}
    assert largest_difference(found[0], found[1]) == 0


def test_staleness_is_counted_in_weight_updates(tiny_folder: Path, rows: list[Row]) -> None:
    # Three steps per update: at version 5 the engine serves 3, and what 0 sampled is one update behind.
    aged = samples_of([dataclasses.replace(row, versions=[0] + [3] * (len(row.reply) - 1)) for row in rows])
    num_old, num_tokens = len(rows), int(aged.mask_T.sum())
    for max_staleness, masked in ((0, num_old), (0.5, 0), (1, 0)):
        trainer = trainer_of(tiny_folder, steps_per_update=3, stale_policy="mask")
        metrics = trainer.step(aged, step=6, base_version=5, max_staleness=max_staleness)
        assert metrics["staleness_max"] == 1
        assert metrics["staleness_mean"] == pytest.approx(num_old / num_tokens)
        assert metrics["trained_tokens"] == num_tokens - masked
        assert metrics["masked_stale_fraction"] == pytest.approx(masked / num_tokens)


def _aged(rows: list[Row], is_stale: list[list[bool]]) -> list[Row]:
    """Rows of version 2 whose stale tokens are of version 0."""
    return [
        dataclasses.replace(row, versions=[0 if stale else 2 for stale in flags])
        for row, flags in zip(rows, is_stale, strict=True)
    ]


def _first_half_stale(rows: list[Row]) -> list[list[bool]]:
    return [[index < len(row.reply) // 2 for index in range(len(row.reply))] for row in rows]


def test_masked_tokens_leave_no_gradient(tiny_folder: Path, rows: list[Row]) -> None:
    is_stale = _first_half_stale(rows)
    wild = [
        dataclasses.replace(row, logprobs=[-9.0 if s else p for s, p in zip(flags, row.logprobs, strict=True)])
        for row, flags in zip(rows, is_stale, strict=True)
    ]
    found = []
    for variant in (rows, wild):
        trainer = trainer_of(tiny_folder, stale_policy="mask")
        found.append((take_step(trainer, samples_of(_aged(variant, is_stale)), step=3, max_staleness=1), trainer))
    assert largest_difference(gradients(found[0][1]), gradients(found[1][1])) == 0
    num_stale, num_tokens = sum(map(sum, is_stale)), sum(map(len, is_stale))
    assert found[0][0]["trained_tokens"] == num_tokens - num_stale
    assert found[0][0]["masked_stale_fraction"] == pytest.approx(num_stale / num_tokens)
    assert found[0][0]["staleness_max"] == 2
    assert found[0][0]["staleness_mean"] == pytest.approx(2 * num_stale / num_tokens)


def test_masking_does_not_make_the_remaining_tokens_louder(tiny_folder: Path, rows: list[Row]) -> None:
    is_stale = _first_half_stale(rows)
    masked, never_sampled = trainer_of(tiny_folder, stale_policy="mask"), trainer_of(tiny_folder)
    take_step(masked, samples_of(_aged(rows, is_stale)), step=3, max_staleness=1)
    samples = samples_of(rows)
    fresh_T = samples.mask_T & ~np.concatenate(
        [[False] * len(row.prompt) + flags for row, flags in zip(rows, is_stale, strict=True)]
    )
    take_step(never_sampled, dataclasses.replace(samples, mask_T=fresh_T))
    # The same tokens are trained; the second one divides by their number alone.
    share = fresh_T.sum() / samples.mask_T.sum()
    expected = {name: gradient * share for name, gradient in gradients(never_sampled).items()}
    assert largest_difference(gradients(masked), expected) < 1e-6


@pytest.mark.parametrize("stale_policy", ["strict", "mask"])
def test_tokens_within_the_bound_are_all_trained(tiny_folder: Path, rows: list[Row], stale_policy: str) -> None:
    aged = samples_of(_aged(rows, _first_half_stale(rows)))
    metrics = take_step(trainer_of(tiny_folder, stale_policy=stale_policy), aged, step=3, max_staleness=2)
    assert metrics["trained_tokens"] == aged.mask_T.sum()
    assert metrics["masked_stale_fraction"] == 0


def test_correct_weighs_every_token_by_its_capped_importance(tiny_folder: Path, rows: list[Row]) -> None:
    loss, expected = _reference_loss(tiny_folder, rows, correct=True)
    trainer = trainer_of(tiny_folder, stale_policy="correct", decoupled={"cap": _CAP}, tokens_per_microbatch=32)
    metrics = take_step(trainer, samples_of(rows))
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert largest_difference(_without_prefix(gradients(trainer)), expected) < 3e-6
    assert metrics["clip_fraction"] == 0  # the clip is around the weights the step began with


def test_correct_clips_around_the_start_of_the_step_in_every_mini_batch(tiny_folder: Path, rows: list[Row]) -> None:
    # The same group twice, one optimizer update each: the second sees weights that moved.
    twice = [*rows[:3], *(dataclasses.replace(row, group=1) for row in rows[:3])]
    trainer = trainer_of(tiny_folder, stale_policy="correct", num_minibatches=2, learning_rate=0.05)
    assert take_step(trainer, samples_of(twice))["clip_fraction"] > 0


def test_a_forked_attempt_counts_once_in_its_group(tiny_folder: Path, rows: list[Row]) -> None:
    first, second, third = (dataclasses.replace(row, reward=r) for row, r in zip(rows[:3], (1, 0, 0), strict=True))
    samples = samples_of([first, first, second, third])  # two rows of one attempt
    credit = assign_credit(samples, config_of(advantage=_NO_STD).train, Looked(), reward_weights={})
    assert credit.advantages_T[samples.offsets[:-1]].tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert credit.metrics["reward"] == pytest.approx(1 / 3)


def test_groups_with_equal_rewards_give_no_gradient_and_are_counted(tiny_folder: Path, rows: list[Row]) -> None:
    equal = [dataclasses.replace(row, reward=0.1) for row in rows]
    trainer = trainer_of(tiny_folder, advantage=_NO_STD)
    before = weights(trainer)
    metrics = take_step(trainer, samples_of(equal))
    assert metrics["fraction_groups_without_signal"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert largest_difference(weights(trainer), before) == 0


@pytest.mark.parametrize("stale_policy", ["strict", "correct"])
def test_what_is_off_policy_is_measured_before_the_first_update(
    tiny_folder: Path, rows: list[Row], stale_policy: str
) -> None:
    causal_lm = load_causal_lm(tiny_folder)
    with torch.no_grad():
        new = [logprobs_alone(causal_lm, row.prompt + row.reply)[len(row.prompt) - 1 :].double() for row in rows]
    log_ratio = np.concatenate([n.numpy() - np.array(row.logprobs) for n, row in zip(new, rows, strict=True)])
    ratio = np.exp(log_ratio)
    metrics = take_step(trainer_of(tiny_folder, stale_policy=stale_policy), samples_of(rows))
    assert metrics["engine_gap"] == pytest.approx(np.abs(log_ratio).mean(), rel=1e-4)
    assert metrics["off_policy_kl"] == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-4)
    size = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    assert metrics["effective_sample_size"] == pytest.approx(size, rel=1e-4) and size < 1


def test_the_histogram_of_staleness_counts_sampled_tokens_by_lag(tiny_folder: Path, rows: list[Row]) -> None:
    aged = _aged(rows, _first_half_stale(rows))
    stale = sum(len(row.reply) // 2 for row in rows) / sum(len(row.reply) for row in rows)
    metrics = take_step(trainer_of(tiny_folder), samples_of(aged), step=3, max_staleness=1)
    shares = {name: value for name, value in metrics.items() if name.startswith("staleness_share")}
    assert shares == pytest.approx(
        {"staleness_share_0": 1 - stale, "staleness_share_1": 0.0, "staleness_share_over": stale}
    )


def test_the_learning_rate_warms_up_linearly(tiny_folder: Path, samples: Samples) -> None:
    trainer = trainer_of(tiny_folder, learning_rate=1e-3, warmup_steps=4)
    start = weights(trainer)
    rates = [take_step(trainer, samples, step=1)["learning_rate"]]
    # Adam's first update is the learning rate times the gradient's sign.
    assert largest_difference(weights(trainer), start) == pytest.approx(0.25e-3, rel=1e-2)
    rates += [take_step(trainer, samples, step=step)["learning_rate"] for step in range(2, 7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_without_warm_up_the_first_step_is_at_full_rate(tiny_folder: Path, samples: Samples) -> None:
    assert take_step(trainer_of(tiny_folder, learning_rate=1e-3), samples)["learning_rate"] == 1e-3


def test_the_gradient_norm_is_clipped_and_reported_unclipped(tiny_folder: Path, samples: Samples) -> None:
    free, clipped = trainer_of(tiny_folder), trainer_of(tiny_folder, max_grad_norm=0.01)
    norm = take_step(free, samples)["grad_norm"]
    assert take_step(clipped, samples)["grad_norm"] == pytest.approx(norm)
    clipped_norm = np.sqrt(sum(float((g**2).sum()) for g in gradients(clipped).values()))
    assert norm > 0.01 and clipped_norm == pytest.approx(0.01, rel=1e-3)


def test_bfloat16_computes_roughly_the_same_gradient_on_float32_weights(tiny_folder: Path, samples: Samples) -> None:
    exact, rough = trainer_of(tiny_folder), trainer_of(tiny_folder, dtype="bfloat16")
    norms = [take_step(trainer, samples)["grad_norm"] for trainer in (exact, rough)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    assert {tensor.dtype for tensor in weights(rough).values()} == {torch.float32}
