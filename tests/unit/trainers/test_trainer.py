"""What a step leaves out leaves no trace: groups without signal, masked tokens; and what it measures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from settings.train import SUSPICIOUS_GAPS
from tests.unit.trainers.builders import (
    Row,
    config_of,
    gradients,
    largest_difference,
    named_samples_of,
    random_rows,
    samples_of,
    take_step,
    trainer_of,
    weights,
)
from tests.unit.trainers.naive import (
    everything,
    fixed_logprobs,
    num_tokens,
    policy_of,
)
from trainers.data.samples import Samples
from trainers.model.batches import Pack
from trainers.model.model import PolicyModel
from trainers.objective.credit import Looked, assign_credit, metrics_of_rewards
from trainers.trainer import Trainer


def _after_steps(folder: Path, samples: Samples, *, steps: int = 1, **settings: Any) -> tuple[Trainer, Any]:
    """A trainer after steps on the same samples, and their metrics; no token is too old."""
    trainer = trainer_of(folder, **settings)
    return trainer, [take_step(trainer, samples, step=step, max_staleness=steps) for step in range(1, steps + 1)]


def _flat(rows: list[Row], *groups: int) -> list[Row]:
    """With equal rewards in these groups."""
    return [dataclasses.replace(row, reward=1.0) if row.group in groups else row for row in rows]


# Groups whose rewards are equal


@pytest.mark.parametrize("kind", ["clip", "gspo", "cispo", "sapo", "dppo"])
def test_groups_without_signal_are_not_computed_which_changes_nothing(
    tiny_folder: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # A mini-batch with both kinds of groups, and one with neither: seed 0 puts groups 0 and 2 into the second.
    settings = {"learning_rate": 1e-4, "loss": {"kind": kind}, "num_minibatches": 2, "weight_decay": 0.1}
    flat = samples_of(_flat(rows, 0, 2))
    computed: list[int] = []
    forward = Trainer._forward

    def watched(self: Trainer, model: PolicyModel, pack: Pack, **keywords: bool) -> Any:
        computed.append(int(pack.mask.sum()))
        return forward(self, model, pack, **keywords)

    monkeypatch.setattr(Trainer, "_forward", watched)
    lean, metrics = _after_steps(tiny_folder, flat, steps=2, **settings)
    with_signal = [row for row in rows if row.group in (1, 3)]
    assert sum(computed) == 2 * num_tokens(with_signal)
    assert [(m["trained_tokens"], m["trained_groups"], m["measured_groups"]) for m in metrics] == [
        (num_tokens(rows), 4, 2)
    ] * 2
    monkeypatch.setattr("trainers.step_batch.moved_by_advantages_alone", lambda settings: False)
    everywhere, expected = _after_steps(tiny_folder, flat, steps=2, **settings)
    assert sum(computed) == 2 * num_tokens(with_signal) + 2 * num_tokens(rows)
    for name in ("loss", "grad_norm", "trained_tokens", "reward"):
        assert [m[name] for m in metrics] == pytest.approx([m[name] for m in expected], rel=1e-4, abs=1e-6)
    assert largest_difference(weights(lean), weights(everywhere)) < 1e-6
    monkeypatch.undo()
    # What the means are over is what was computed.
    _, [alone] = _after_steps(tiny_folder, samples_of(with_signal), **{**settings, "num_minibatches": 1})
    _, [mixed] = _after_steps(tiny_folder, flat, **{**settings, "num_minibatches": 1})
    same = ("entropy", "approx_kl", "off_policy_kl", "effective_sample_size")
    assert [mixed[name] for name in same] == pytest.approx([alone[name] for name in same], rel=1e-5, abs=1e-9)


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
    flat, alone = samples_of(_flat(rows, 1, 2, 3)), samples_of([row for row in rows if not row.group])
    (trainer, _), (only, _) = (_after_steps(tiny_folder, samples, **settings) for samples in (flat, alone))
    share = alone.mask_T.sum() / flat.mask_T.sum()
    only_its = {name: gradient * share for name, gradient in gradients(only).items()}
    assert largest_difference(gradients(trainer), only_its) > 1e-4


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_step_without_any_signal_has_a_gradient_of_zero_and_is_counted(
    tiny_folder: Path, rows: list[Row], scale: str
) -> None:
    equal = samples_of([dataclasses.replace(row, reward=0.1) for row in rows])
    before = weights(trainer_of(tiny_folder))
    trainer, [metrics] = _after_steps(tiny_folder, equal, advantage={"kind": "grpo", "scale": scale})
    assert metrics["fraction_groups_without_signal"] == 1.0 and metrics["grad_norm"] == 0
    assert metrics["measured_groups"] == metrics["loss"] == 0 and not {"entropy", "off_policy_kl"} & metrics.keys()
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients(trainer).values())
    assert gradients(trainer).keys() == weights(trainer).keys()
    assert largest_difference(weights(trainer), before) == 0


def test_equal_attempts_are_charged_alike_whatever_the_engine_rounds(rows: list[Row]) -> None:
    noise = np.random.default_rng(0).uniform(0, 0.01, (4, len(rows[0].reply)))
    same = [
        dataclasses.replace(rows[0], attempt=attempt, logprobs=(np.array(rows[0].logprobs) - rounding).tolist())
        for attempt, rounding in enumerate(noise)
    ]
    samples = samples_of(same + [dataclasses.replace(row, group=row.group + 1) for row in rows])
    kl = {"coefficient": 0.05, "place": "reward", "estimator": "k1"}
    settings = config_of(kl=kl, reference={"kind": "base"}).train
    reference_T = np.where(samples.mask_T, -1.0, 0.0).astype(np.float32)
    credit = assign_credit(samples, settings, Looked(reference_T=reference_T), reward_weights={})
    is_same_T = np.arange(len(samples.mask_T)) < samples.offsets[4]
    assert not credit.advantages_T[is_same_T].any()
    assert credit.advantages_T[~is_same_T & samples.mask_T].any()


def test_a_forked_attempt_counts_once_in_its_group(rows: list[Row]) -> None:
    first, second, third = (dataclasses.replace(row, reward=r) for row, r in zip(rows[:3], (1, 0, 0), strict=True))
    samples = samples_of([first, first, second, third])  # two rows of one attempt
    settings = config_of(advantage={"kind": "grpo", "scale": "none"}).train
    credit = assign_credit(samples, settings, Looked(), reward_weights={})
    assert credit.advantages_T[samples.offsets[:-1]].tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert metrics_of_rewards(samples)["reward"] == pytest.approx(1 / 3)


# Packs and mini-batches


def test_a_row_that_begins_with_a_sampled_token_learns_nothing_from_the_row_before_it(
    tiny_folder: Path, rows: list[Row]
) -> None:
    # Nothing predicts a first token, least of all the last one of a stranger in the same pack.
    bare = samples_of([dataclasses.replace(row, prompt=[]) for row in rows])
    apart, together = (_after_steps(tiny_folder, bare, tokens_per_microbatch=tokens) for tokens in (16, 4096))
    counts = [metrics["trained_tokens"] for _, [metrics] in (apart, together)]
    assert counts == [bare.mask_T.sum() - bare.num_rows] * 2
    assert largest_difference(gradients(apart[0]), gradients(together[0])) < 1e-6


def test_tokens_of_equal_entropy_are_chosen_alike_in_any_pack(tiny_folder: Path) -> None:
    for seed in (5, 11):  # in whose packs of 16 and 4096 tokens the quantile used to cut through a tie
        samples = samples_of(random_rows(tiny_folder, num_groups=3, attempts=12, seed=seed))
        first, *others = (
            _after_steps(tiny_folder, samples, tokens_per_microbatch=budget, top_entropy_fraction=0.1)
            for budget in (16, 24, 64, 4096)
        )
        for trainer, [metrics] in others:
            assert metrics["loss"] == pytest.approx(first[1][0]["loss"], abs=1e-6)
            assert largest_difference(gradients(trainer), gradients(first[0])) < 1e-5


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_step_without_gradient_is_one_whose_every_token_is_masked(
    tiny_folder: Path, samples: Samples, num_minibatches: int
) -> None:
    """Schedule, moments and weight decay go on, and the weights follow their momentum."""
    settings = {"num_minibatches": num_minibatches, "weight_decay": 0.1, "warmup_steps": 5, "stale_policy": "mask"}
    (masked, _), (without, _) = (_after_steps(tiny_folder, samples, **settings) for _ in range(2))
    before = weights(masked)
    assert take_step(masked, samples, step=9)["masked_stale_fraction"] == 1  # tokens of version 0 and a bound of 0
    assert without.step_without_gradient(step=9) == {"learning_rate": 1e-3}
    assert largest_difference(weights(masked), before) > 0
    for _ in range(2):
        assert largest_difference(weights(masked), weights(without)) == 0
        for each in (masked, without):
            take_step(each, samples, step=10, max_staleness=10)


@pytest.mark.parametrize("lora", [None, {"rank": 3}])
def test_bfloat16_computes_roughly_the_same_gradient_on_float32_weights(
    tiny_folder: Path, samples: Samples, lora: dict[str, int] | None
) -> None:
    (_, [exact]), (trainer, [rough]) = (
        _after_steps(tiny_folder, samples, dtype=dtype, lora=lora) for dtype in ("float32", "bfloat16")
    )
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    tensors = [*weights(trainer).values(), *gradients(trainer).values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


# Staleness


@pytest.mark.parametrize(
    ("stale_policy", "max_staleness", "is_masked"),
    [("mask", 0, True), ("mask", 0.5, False), ("mask", 1, False), ("strict", 0, False)],
)
def test_staleness_is_counted_in_weight_updates(
    tiny_folder: Path, rows: list[Row], stale_policy: str, max_staleness: float, is_masked: bool
) -> None:
    # Three steps per update: at version 5 the engine serves 3, and what 0 sampled is one update behind.
    aged = samples_of([dataclasses.replace(row, versions=[0] + [3] * (len(row.reply) - 1)) for row in rows])
    trainer = trainer_of(tiny_folder, steps_per_update=3, stale_policy=stale_policy)
    metrics = trainer.step(aged, step=6, base_version=5, max_staleness=max_staleness)
    count, masked = num_tokens(rows), len(rows) if is_masked else 0
    assert metrics["staleness_max"] == 1 and metrics["staleness_mean"] == pytest.approx(len(rows) / count)
    assert metrics["trained_tokens"] == count - masked
    assert metrics["masked_stale_fraction"] == pytest.approx(masked / count)


def test_masked_tokens_leave_no_gradient_and_do_not_make_the_others_louder(tiny_folder: Path, rows: list[Row]) -> None:
    samples = samples_of(rows)
    # The first half of each reply is two versions older than the rest.
    halves = [[False] * len(r.prompt) + [i < len(r.reply) // 2 for i in range(len(r.reply))] for r in rows]
    is_stale_T = np.concatenate(halves)
    versions_T = np.where(samples.mask_T, np.where(is_stale_T, 0, 2), -1).astype(np.int32)
    aged = dataclasses.replace(samples, versions_T=versions_T)
    wild = dataclasses.replace(aged, logprobs_T=np.where(is_stale_T, -9.0, samples.logprobs_T).astype(np.float32))
    never_sampled = dataclasses.replace(samples, mask_T=samples.mask_T & ~is_stale_T)
    trainers = [trainer_of(tiny_folder, stale_policy="mask") for _ in range(3)]
    metrics = take_step(trainers[0], aged, step=3, max_staleness=1)
    take_step(trainers[1], wild, step=3, max_staleness=1)
    take_step(trainers[2], never_sampled)
    masked, without_trace, alone = map(gradients, trainers)
    assert largest_difference(masked, without_trace) == 0
    share = is_stale_T.sum() / num_tokens(rows)
    # The same tokens are trained; the last one divides by their number alone.
    expected = {name: gradient * (1 - share) for name, gradient in alone.items()}
    assert largest_difference(masked, expected) < 1e-6
    assert metrics["trained_tokens"] == num_tokens(rows) - is_stale_T.sum()
    assert metrics["masked_stale_fraction"] == pytest.approx(share)
    assert metrics["staleness_max"] == 2 and metrics["staleness_mean"] == pytest.approx(2 * share)
    shares = {name: value for name, value in metrics.items() if name.startswith("staleness_share")}
    assert shares == pytest.approx(
        {"staleness_share_0": 1 - share, "staleness_share_1": 0.0, "staleness_share_over": share}
    )


def test_rows_that_a_grammar_restricted_are_trained_and_are_no_gap(tiny_folder: Path, rows: list[Row]) -> None:
    policy = policy_of(tiny_folder)
    rows = [dataclasses.replace(row, logprobs=fixed_logprobs(policy, row).tolist()) for row in rows]
    rows[0] = dataclasses.replace(rows[0], logprobs=[0.0] * len(rows[0].reply))  # forced: probability 1
    samples = samples_of(rows)
    constrained = dataclasses.replace(samples, constrained_B=np.arange(len(rows)) == 0)
    trainers, [plain, excused] = zip(*(_after_steps(tiny_folder, each) for each in (samples, constrained)), strict=True)
    assert excused[0]["engine_gap"] < 1e-5 < plain[0]["engine_gap"]
    assert excused[0]["loss"] == plain[0]["loss"]


@pytest.mark.parametrize("stale_policy", ["strict", "correct"])
def test_what_is_off_policy_is_measured_before_the_first_update(
    tiny_folder: Path, rows: list[Row], stale_policy: str
) -> None:
    policy = policy_of(tiny_folder)
    log_ratio = np.concatenate([fixed_logprobs(policy, row).double().numpy() - np.array(row.logprobs) for row in rows])
    ratio = np.exp(log_ratio)
    _, [metrics] = _after_steps(tiny_folder, samples_of(rows), stale_policy=stale_policy)
    assert metrics["engine_gap"] == pytest.approx(np.abs(log_ratio).mean(), rel=1e-4)
    assert metrics["off_policy_kl"] == pytest.approx((ratio - 1 - log_ratio).mean(), rel=1e-4)
    size = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    assert metrics["effective_sample_size"] == pytest.approx(size, rel=1e-4) and size < 1


@pytest.mark.parametrize(("settings", "wrong_by"), [({}, 0.0), ({}, 0.1), ({"num_minibatches": 2, "ema": 0.9}, 0.1)])
def test_one_step_behind_the_gap_is_measured_under_the_policy_that_sampled_and_the_alarm_fires(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any], wrong_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled_by(trainer: Trainer, version: int) -> Samples:
        """All rows, as an engine with the trainer's present weights samples them; its log-probabilities are off."""
        policy = policy_of(tiny_folder, trainer)
        replies = [fixed_logprobs(policy, row).tolist() for row in rows]
        return named_samples_of(
            [
                dataclasses.replace(row, logprobs=[p + wrong_by for p in reply], versions=[version] * len(reply))
                for row, reply in zip(rows, replies, strict=True)
            ],
            shards=2,
        )

    kept_beside_gradients: list[int] = []
    given_back: list[int] = []
    monkeypatch.setattr("trainers.gap_probes.give_back_beside_large", given_back.append)

    def run() -> tuple[Trainer, list[dict[str, float]]]:
        """What is trained was always sampled one policy before; the first claim has no other."""
        trainer = trainer_of(tiny_folder, learning_rate=1e-2, **settings)
        forward = trainer._forward

        def look(*arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                kept_beside_gradients.append(trainer.kept.num_bytes)
            return forward(*arguments, **named)

        monkeypatch.setattr(trainer, "_forward", look)
        samples, metrics = sampled_by(trainer, 0), []
        for step in range(1, 5):
            coming = sampled_by(trainer, step - 1)
            metrics.append(take_step(trainer, samples, step=step, max_staleness=1))
            samples = coming
        return trainer, metrics

    trainer, metrics = run()
    assert ["engine_gap" in each for each in metrics] == [True, False, True, True]
    measured = [each for each in metrics if "engine_gap" in each]
    assert [each["engine_gap"] for each in measured] == pytest.approx([wrong_by] * 3, abs=1e-5)
    assert (measured[-1]["engine_gap"] > SUSPICIOUS_GAPS["float32"]) == bool(wrong_by)
    # The first mini-batch keeps a policy, for the next step: a second one has it beside its own gradients.
    later = trainer.kept.num_bytes if "num_minibatches" in settings else 0
    assert set(kept_beside_gradients) == {0, later}, "an earlier policy takes no memory while there are gradients"
    assert given_back == [0, trainer.kept.num_bytes, trainer.kept.num_bytes]
    expected = sum(len(row.reply) for shard in (0, 1) for row in [r for r in rows if r.group % 2 == shard][:4])
    assert measured[-1]["engine_gap_tokens"] == expected
    monkeypatch.setattr("trainers.gap_probes.KeptPolicy.is_due", lambda *_, **__: False)
    unwatched, _ = run()
    assert all(torch.equal(tensor, everything(unwatched)[name]) for name, tensor in everything(trainer).items())
