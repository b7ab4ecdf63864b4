"""What must not be trained leaves weights, moments and averages as they were, and is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from storage.log.runs import model_key
from storage.objects.digests import DIGEST_FILE, seal_folder
from tests.unit.trainers.builders import (
    Row,
    config_of,
    largest_difference,
    named_samples_of,
    new_run,
    random_rows,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
)
from tests.unit.trainers.naive import everything, num_tokens
from trainers.health import GapTooLarge, NonFinite
from trainers.model.distributed import copy_into, full
from trainers.model.warmup import character_tokenizer
from trainers.run_trainer import RunTrainer
from trainers.trainer import Trainer

_EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"num_minibatches": 4, "ema": 0.9},
    {"advantage": "gae"},
    {"lora": {"rank": 4}},
]


def _after_a_step(folder: Path, rows: list[Row], settings: dict[str, Any]) -> Trainer:
    trainer = trainer_of(folder, **settings)
    take_step(trainer, named_samples_of(rows))
    return trainer


def _assert_as_before(trainer: Trainer, before: dict[str, torch.Tensor]) -> None:
    after = everything(trainer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in before.items())


@pytest.mark.parametrize(
    "settings", [*_EVERY_KIND, {"loss": {"kind": "cispo"}}, {"loss": {"kind": "clip", "dual_clip": 3.0}}]
)
def test_a_loss_that_is_no_number_names_the_rows_and_touches_nothing(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any]
) -> None:
    # exp(policy − sampled) overflows at one token; with a negative advantage the clip does not save it.
    worst = {row.group: min((r for r in rows if r.group == row.group), key=lambda r: r.reward) for row in rows}
    broken = [
        dataclasses.replace(row, logprobs=[-1e4] * len(row.reply)) if row is worst[row.group] else row for row in rows
    ]
    trainer = _after_a_step(tiny_folder, rows, {**settings, "tokens_per_microbatch": 16})
    before = everything(trainer)
    with pytest.raises(NonFinite, match="NaN or infinite at 0.prompt-") as error:
        take_step(trainer, named_samples_of(broken), step=2, max_staleness=9)
    named = {name.split(" ")[0] for name in error.value.rows}
    assert {f"0.prompt-{row.group}/{row.attempt}" for row in worst.values()} & named
    assert error.value.num_updates == 0
    _assert_as_before(trainer, before)
    take_step(trainer, named_samples_of(rows), step=2, max_staleness=9)  # and it can go on


def test_a_reward_that_is_infinite_names_its_group_alone(tiny_folder: Path, rows: list[Row]) -> None:
    broken = [dataclasses.replace(row, reward=np.inf) if (row.group, row.attempt) == (2, 1) else row for row in rows]
    trainer = _after_a_step(tiny_folder, rows, {})
    before = everything(trainer)
    with pytest.raises(NonFinite) as error:
        take_step(trainer, named_samples_of(broken), step=2, max_staleness=9)
    assert error.value.rows == [f"0.prompt-2/{attempt} (shard shard-0)" for attempt in range(3)]
    _assert_as_before(trainer, before)


def test_weights_that_are_no_number_name_the_rows_they_spoil_alone(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "untied", tied=False)
    rows = random_rows(folder, noise=0.0)
    trainer = trainer_of(folder, tokens_per_microbatch=16)
    # One token's embedding is ruined: what follows it in its row has no probability, other rows of its pack have.
    prompts = [[*row.prompt, *row.reply][:-1] for row in rows]
    ruined = next(token for token in prompts[-1] if any(token not in row for row in prompts))
    expected = [f"0.prompt-{row.group}/{row.attempt}" for row, ids in zip(rows, prompts, strict=True) if ruined in ids]
    embedding = next(parameter for name, parameter in trainer.model.named_parameters() if "embed_tokens" in name)
    whole = full(embedding).clone()
    whole[ruined] = torch.nan
    copy_into(embedding, whole)
    before = everything(trainer)
    with pytest.raises(NonFinite, match="the optimizer was not touched") as error:
        take_step(trainer, named_samples_of(rows, shards=2))
    assert [name.split(" ")[0] for name in error.value.rows] == expected and len(expected) < len(rows)
    assert error.value.num_updates == 0
    _assert_as_before(trainer, before)


@pytest.mark.parametrize("settings", _EVERY_KIND)
def test_an_engine_that_disagrees_names_its_shard_and_touches_nothing(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any]
) -> None:
    trainer = _after_a_step(tiny_folder, rows, settings)
    fresh = [dataclasses.replace(row, versions=[1] * len(row.reply)) for row in rows]
    off = [dataclasses.replace(row, logprobs=[p - 3 for p in row.logprobs]) if row.group % 2 else row for row in fresh]
    before = everything(trainer)
    with pytest.raises(GapTooLarge) as error:
        take_step(trainer, named_samples_of(off, shards=2), step=2, max_staleness=9, max_gap=2.0)
    assert list(error.value.gaps) == ["shard-1"] and "shard shard-1" in str(error.value)
    _assert_as_before(trainer, before)
    take_step(
        trainer, named_samples_of(fresh, shards=2), step=2, max_staleness=9, max_gap=2.0
    )  # the same trainer goes on


@pytest.mark.parametrize("settings", [*_EVERY_KIND, {"loss": {"kind": "cispo"}}, {"num_minibatches": 3}], ids=str)
@pytest.mark.parametrize(("version", "logprob"), [(1, -200.0), (1, -60.0), (0, -200.0), (0, -84.0)])
def test_one_token_that_no_engine_can_have_sampled_is_its_shard_s_fault_and_not_the_policy_s(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any], version: int, logprob: float
) -> None:
    # The policy's log-probability is about −3: the loss is infinite, or so large that the step would be ruined.
    trainer = _after_a_step(tiny_folder, rows, settings)
    before, fresh = everything(trainer), [dataclasses.replace(row, versions=[1] * len(row.reply)) for row in rows]
    for place in (0, 4, len(rows) - 1):  # in the first mini-batch or a later one
        row, broken = fresh[place], list(fresh)
        one = {"logprobs": [*row.logprobs[:-1], logprob], "versions": [*row.versions[:-1], version]}
        broken[place] = dataclasses.replace(row, **one)
        with pytest.raises(GapTooLarge, match="more than 30 nats at 1 token, .* no engine samples a token") as error:
            take_step(trainer, named_samples_of(broken, shards=2), step=2, max_staleness=9, max_gap=1e3)
        assert list(error.value.reasons) == [f"shard-{row.group % 2}"]
        _assert_as_before(trainer, before)


def test_tokens_of_an_older_policy_are_no_gap_unless_no_step_explains_them(tiny_folder: Path) -> None:
    rows = random_rows(tiny_folder, noise=0.0)
    off = [dataclasses.replace(row, logprobs=[p - 4 for p in row.logprobs]) if row.group % 2 else row for row in rows]
    trainer, samples = trainer_of(tiny_folder), named_samples_of(off, shards=2)
    metrics = take_step(trainer, samples, step=2, max_staleness=1)
    assert "engine_gap" not in metrics and metrics["off_policy_kl"] > 1
    before = everything(trainer)
    with pytest.raises(GapTooLarge) as error:
        take_step(trainer, samples, step=2, max_staleness=1, max_gap=1.0)
    assert error.value.reasons.keys() == {"shard-1"}
    _assert_as_before(trainer, before)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_is_trained(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = config_of(advantage="distill", reference={"kind": "model", "model": "teacher"})
    for name in ("same", "other"):
        log, teacher = new_run(tmp_path / name, tiny_folder), tiny_model(tmp_path / f"{name}-teacher", seed=1)
        if name == "other":
            (teacher / DIGEST_FILE).unlink()
            character_tokenizer(set("abcdefghij+=")).save_pretrained(teacher)
            seal_folder(teacher)
        log.store.put_folder(teacher, model_key("teacher"), last=DIGEST_FILE)
        if name == "same":
            RunTrainer(log, config, cache=tmp_path / "cache")
        else:
            with pytest.raises(ValueError, match="train.reference.model = 'teacher' has another vocabulary"):
                RunTrainer(log, config, cache=tmp_path / "cache")


def test_the_teacher_is_the_one_that_the_run_began_with_whatever_its_folder_holds_now(
    tiny_folder: Path, tmp_path: Path
) -> None:
    config = config_of(advantage="distill", reference={"kind": "model", "model": "teacher"})
    log = new_run(tmp_path, tiny_folder, reference="models/teacher-of-then")
    for key, seed in (("models/teacher-of-then", 1), (model_key("teacher"), 2), ("models/teacher-of-now", 3)):
        log.store.put_folder(tiny_model(tmp_path / key, seed=seed), key, last=DIGEST_FILE)
    for reference, seed in (("", 1), ("models/teacher-of-now", 3)):
        trainer = RunTrainer(log, config, cache=tmp_path / "cache", reference=reference).trainer
        expected = load_file(tiny_model(tmp_path / f"again-{seed}", seed=seed) / "model.safetensors")
        assert trainer._reference is not None
        embedded = {name: p for name, p in trainer._reference.causal_lm.named_parameters() if "embed" in name}
        assert all(torch.equal(full(p), expected[name]) for name, p in embedded.items()) and embedded


@pytest.mark.parametrize("settings", [{}, {"advantage": "gae"}, {"advantage": "reinforce++"}])
def test_rows_without_a_reward_have_no_gradient_forked_attempts_included(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any]
) -> None:
    # Two rows of attempt 0 of group 0, which has no reward; what they say must not matter.
    null = [dataclasses.replace(rows[0], reward=np.nan)] * 2
    garbled = [dataclasses.replace(row, reply=[5] * len(row.reply), logprobs=[-9.0] * len(row.reply)) for row in null]
    trainers = [trainer_of(tiny_folder, **settings) for _ in range(2)]
    for trainer, first in zip(trainers, (null, garbled), strict=True):
        for step in (1, 2):
            metrics = take_step(trainer, samples_of([*first, *rows[1:]]), step=step, max_staleness=9)
            assert metrics["null_reward_fraction"] == pytest.approx(1 / 12)  # of attempts
            assert metrics["trained_tokens"] == num_tokens(rows[1:])
    assert largest_difference(*map(everything, trainers)) == 0
    assert all(tensor.isfinite().all() for tensor in everything(trainers[0]).values())
