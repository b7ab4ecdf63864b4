"""What must not be trained leaves weights, moments and averages as they were, and is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.log.runs import model_key
from storage.objects.digests import DIGEST_FILE, seal_folder
from tests.unit.trainers.builders import (
    Row,
    config_of,
    largest_difference,
    new_run,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
)
from tests.unit.trainers.naive import everything
from trainers.data.samples import Samples
from trainers.health import GapTooLarge, NonFinite
from trainers.model.warmup import character_tokenizer
from trainers.run_trainer import RunTrainer
from trainers.trainer import Trainer

_EVERY_KIND: list[dict[str, Any]] = [
    {},
    {"num_minibatches": 2, "ema": 0.9},
    {"advantage": "gae"},
    {"lora": {"rank": 4}},
]


def _named(rows: list[Row], *, shards: int = 1) -> Samples:
    """Samples with names for groups and shards; groups go to the shards in turn."""
    samples = samples_of(rows)
    return dataclasses.replace(
        samples,
        group_ids=[f"0.prompt-{group}" for group in range(int(samples.groups_B.max()) + 1)],
        attempt_numbers_B=np.array([row.attempt for row in rows], dtype=np.int64),
        shards_B=(samples.groups_B % shards).astype(np.int64),
        shard_ids=[f"shard-{shard}" for shard in range(shards)],
    )


def _after_a_step(folder: Path, rows: list[Row], settings: dict[str, Any]) -> Trainer:
    trainer = trainer_of(folder, **settings)
    take_step(trainer, _named(rows))
    return trainer


@pytest.mark.parametrize("settings", _EVERY_KIND)
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
        take_step(trainer, _named(broken), step=2, max_staleness=9)
    named = {name.split(" ")[0] for name in error.value.rows}
    assert {f"0.prompt-{row.group}/{row.attempt}" for row in worst.values()} & named
    assert error.value.num_updates == 0
    assert largest_difference(everything(trainer), before) == 0
    take_step(trainer, _named(rows), step=2, max_staleness=9)  # and it can go on


def test_a_reward_that_is_infinite_names_its_group_alone(tiny_folder: Path, rows: list[Row]) -> None:
    broken = [dataclasses.replace(row, reward=np.inf) if (row.group, row.attempt) == (2, 1) else row for row in rows]
    trainer = _after_a_step(tiny_folder, rows, {})
    before = everything(trainer)
    with pytest.raises(NonFinite) as error:
        take_step(trainer, _named(broken), step=2, max_staleness=9)
    assert error.value.rows == [f"0.prompt-2/{attempt} (shard shard-0)" for attempt in range(3)]
    assert largest_difference(everything(trainer), before) == 0


@pytest.mark.parametrize("settings", _EVERY_KIND)
def test_an_engine_that_disagrees_names_its_shard_and_touches_nothing(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any]
) -> None:
    trainer = _after_a_step(tiny_folder, rows, settings)
    fresh = [dataclasses.replace(row, versions=[1] * len(row.reply)) for row in rows]
    off = [dataclasses.replace(row, logprobs=[p - 3 for p in row.logprobs]) if row.group % 2 else row for row in fresh]
    before = everything(trainer)
    with pytest.raises(GapTooLarge) as error:
        trainer.step(_named(off, shards=2), step=2, base_version=1, max_staleness=9, max_gap=2.0)
    assert list(error.value.gaps) == ["shard-1"] and "shard shard-1" in str(error.value)
    assert largest_difference(everything(trainer), before) == 0
    trainer.step(_named(fresh, shards=2), step=2, base_version=1, max_staleness=9, max_gap=2.0)


def _forget(folder: Path) -> None:
    """Give a model folder another vocabulary."""
    (folder / DIGEST_FILE).unlink()
    character_tokenizer(set("abcdefghij+=")).save_pretrained(folder)
    seal_folder(folder)


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_is_trained(
    tiny_folder: Path, tmp_path: Path
) -> None:
    log = new_run(tmp_path, tiny_folder)
    settings = {"advantage": "distill", "reference": {"kind": "model", "model": "teacher"}}
    for name in ("same", "other"):
        teacher = tiny_model(tmp_path / name, seed=1)
        if name == "other":
            _forget(teacher)
        log.store.put_folder(teacher, model_key("teacher"), last=DIGEST_FILE)
        cache = tmp_path / f"cache-{name}"
        if name == "same":
            RunTrainer(log, config_of(**settings), cache=cache)
            log.store.delete([f"{model_key('teacher')}/{file.name}" for file in teacher.iterdir()])
        else:
            with pytest.raises(ValueError, match="train.reference.model = 'teacher' has another vocabulary"):
                RunTrainer(log, config_of(**settings), cache=cache)


@pytest.mark.parametrize("settings", [{}, {"advantage": "gae"}, {"advantage": "reinforce++"}])
def test_rows_without_a_reward_have_no_gradient_forked_attempts_included(
    tiny_folder: Path, rows: list[Row], settings: dict[str, Any]
) -> None:
    # Two rows of attempt 0 of group 0, which nobody could score; what they say must not matter.
    forked = [rows[0], *rows]
    null = [dataclasses.replace(row, reward=np.nan) if (row.group, row.attempt) == (0, 0) else row for row in forked]
    garbled = [
        dataclasses.replace(row, reply=[5] * len(row.reply), logprobs=[-9.0] * len(row.reply))
        if (row.group, row.attempt) == (0, 0)
        else row
        for row in null
    ]
    found = []
    for each in (null, garbled):
        trainer = trainer_of(tiny_folder, **settings)
        metrics = take_step(trainer, samples_of(each))
        assert metrics["null_reward_fraction"] == pytest.approx(1 / 12)  # of attempts
        assert metrics["trained_tokens"] == sum(len(row.reply) for row in rows[1:])
        found.append(everything(trainer))
    assert largest_difference(*found) == 0
    assert all(tensor.isfinite().all() for tensor in found[0].values())
