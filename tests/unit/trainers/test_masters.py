"""Weights stored and computed in bfloat16, moved by an optimizer that keeps them in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import Step
from storage.log.run_log import RunLog
from storage.objects.digests import seal_folder
from storage.records import RolloutGroup
from tests.unit.trainers.builders import (
    commit,
    config_of,
    groups_of,
    largest_difference,
    load_causal_lm,
    new_run,
    open_trainer,
    random_rows,
    replayed,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from trainers.checkpoint import save_policy
from trainers.worker import TrainerWorker

STEPS, RATE = 20, 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model stored in bfloat16."""
    base, folder = tiny_model(tmp_path_factory.mktemp("base") / "tiny"), tmp_path_factory.mktemp("stored") / "tiny"
    load_causal_lm(base).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    seal_folder(folder)
    return folder


def test_small_learning_rates_move_weights_that_bfloat16_alone_would_round_back(folder: Path, tmp_path: Path) -> None:
    trainer, samples = trainer_of(folder, learning_rate=RATE, dtype="bfloat16"), samples_of(random_rows(folder))
    masters = [weights(trainer)]
    assert all(each.dtype == torch.float32 for each in masters[0].values())
    alone = {name: weight.bfloat16() for name, weight in masters[0].items()}
    for step in range(1, STEPS + 1):
        take_step(trainer, samples, step=step)
        masters.append(weights(trainer))
        alone = {
            name: (weight.float() + masters[-1][name] - masters[-2][name]).bfloat16() for name, weight in alone.items()
        }
    save_policy(trainer.model, folder, tmp_path / "policy")
    published, base = load_file(tmp_path / "policy" / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = stuck = 0
    for name, weight in base.items():
        master = masters[-1][f"causal_lm.{name}"]
        assert published[name].dtype == torch.bfloat16 and published[name].equal(master.bfloat16()), "its rounding"
        # A single update is less than half of a unit in the last of 8 bits.
        is_large = weight.abs().float() > 2**8 * 2 * RATE
        moved += int((published[name] != weight)[is_large].sum())
        stuck += int((alone[f"causal_lm.{name}"] != weight)[is_large].sum())
    assert moved > 20 and stuck == 0


def test_a_resume_restores_the_masters_bit_for_bit_and_a_replay_repeats_them(folder: Path, tmp_path: Path) -> None:
    config = config_of(learning_rate=RATE, max_staleness=8, dtype="bfloat16", checkpoint_every=2)
    groups = groups_of(random_rows(folder, num_groups=6))
    straight, broken = (_run(tmp_path / name, folder, groups) for name in ("straight", "broken"))
    worker = open_trainer(straight, config, cache=tmp_path / "cache-0")
    steps = [_step(straight, worker, config) for _ in range(3)]
    first = open_trainer(broken, config, cache=tmp_path / "cache-1")
    for _ in range(2):
        _step(broken, first, config)
    resumed = open_trainer(broken, config, cache=tmp_path / "cache-2")
    assert resumed.opened == 0, "from the saved state alone"
    assert largest_difference(weights(resumed._trainer.trainer), weights(first._trainer.trainer)) == 0
    assert any((weight != weight.bfloat16().float()).any() for weight in weights(resumed._trainer.trainer).values()), (
        "what the published policy cannot hold"
    )
    assert _step(broken, resumed, config).policy.weights_sha256 == steps[-1].policy.weights_sha256
    assert largest_difference(weights(resumed._trainer.trainer), weights(worker._trainer.trainer)) == 0
    same = {"recorded": config, "changed": config}
    assert all(step.identical for step in replayed(broken, tmp_path / "cache-3", 1, 3, **same))


def _run(root: Path, model: Path, groups: list[RolloutGroup]) -> RunLog:
    """A run with three shards of two groups each."""
    log = new_run(root, model)
    for number in range(3):
        commit(log, f"shard-{number}", groups[2 * number : 2 * number + 2])
    return log


def _step(log: RunLog, worker: TrainerWorker, config: RunConfig) -> Step:
    claim = next_claim(log.refresh(), config.model_copy(update={"batch_size": 2, "max_staleness": 8}))
    assert claim is not None
    return worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="session")
