"""A step whose first groups are added up while others are still sampled: the same bits as with all of them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import Claim, ClaimedGroup
from storage.log.run_log import RunLog
from storage.shards.shards import DamagedShard
from tests.unit.trainers.builders import (
    Row,
    commit,
    config_of,
    gradients,
    groups_of,
    largest_difference,
    new_run,
    open_trainer,
    random_rows,
    replayed,
    samples_of,
    take_step,
    trainer_of,
    weights,
)
from trainers.data.samples import Samples
from trainers.health import GapTooLarge
from trainers.trainer import Trainer
from trainers.worker import TrainerWorker

BATCH = 4


def _with_parts(folder: Path, samples: Samples, cuts: list[int], **settings: Any) -> tuple[Trainer, dict[str, float]]:
    """Trainer and metrics after a step whose parts end before these groups."""
    trainer = trainer_of(folder, **settings)
    for start, stop in zip([0, *cuts], cuts, strict=False):
        trainer.accumulate(samples.part(start, stop), step=1, base_version=0)
    metrics = take_step(trainer, samples)
    return trainer, metrics


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregation": "sequence_mean", "advantage": {"kind": "leave_one_out"}},
        {"aggregation": "sequence_sum", "loss": {"kind": "gspo"}},
        {"aggregation": "constant", "advantage": {"kind": "opo"}, "entropy_bonus": 0.01},
        {"kl": {"coefficient": 0.1}, "reference": {"kind": "base"}, "loss": "cispo"},
        {"kl": {"coefficient": 0.1, "place": "reward"}, "reference": {"kind": "base"}},
        {"decoupled": {"proximal": "recompute"}, "reject": [{"statistic": "ratio", "high": 1.01}]},
        {"loss": {"kind": "sft", "min_reward": 0.5}},
        {"lora": {"rank": 4}},
    ],
    ids=str,
)
def test_parts_add_up_to_the_step_of_all(tiny_folder: Path, rows: list[Row], settings: dict[str, Any]) -> None:
    settings = {**settings, "learning_rate": 1e-4}
    samples = samples_of(rows)
    whole = trainer_of(tiny_folder, **settings)
    expected = take_step(whole, samples)
    for cuts in ([1, 4], [1, 2, 3, 4]):
        ours, metrics = _with_parts(tiny_folder, samples, cuts, **settings)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        largest = max(float(gradient.abs().max()) for gradient in gradients(whole).values())
        assert largest_difference(gradients(ours), gradients(whole)) < 1e-5 * largest


def test_parts_without_any_signal_have_a_gradient_of_zero(tiny_folder: Path, rows: list[Row]) -> None:
    samples = samples_of([Row(**{**vars(row), "reward": 1.0}) for row in rows])
    before = weights(trainer_of(tiny_folder))
    ours, metrics = _with_parts(tiny_folder, samples, [2, 4])
    assert metrics["grad_norm"] == 0 and largest_difference(weights(ours), before) == 0


def test_a_part_of_the_samples_is_what_is_gathered_alone(rows: list[Row]) -> None:
    whole, alone = samples_of(rows), samples_of([row for row in rows if row.group in (1, 2)])
    for name, values in vars(whole.part(1, 3)).items():
        if name not in ("groups_B", "shards_B"):
            np.testing.assert_array_equal(values, getattr(alone, name), err_msg=name)


# On a run


class _Arrivals:
    """A run with a batch whose groups arrive one after the other, the last ones first."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.log = new_run(folder, model)
        self.folder = folder
        self._groups = groups_of(random_rows(model, num_groups=BATCH))
        self.config = self.with_settings()
        self.parts: list[list[ClaimedGroup]] = []

    def with_settings(self, **train: Any) -> RunConfig:
        config = config_of(stream=True, learning_rate=1e-4, **train)
        return config.model_copy(update={"batch_size": BATCH})

    def worker(self, name: str = "cache") -> TrainerWorker:
        return open_trainer(self.log, self.config, cache=self.folder / name)

    def arrive(self, *numbers: int) -> None:
        commit(self.log, f"shard-{numbers[0]}", [self._groups[number] for number in numbers])

    def part(self) -> Claim:
        claim = next_claim(self.log.refresh(), self.config, self.parts, whole=False)
        assert claim is not None
        self.parts.append(claim.trained[-claim.parts[-1] :])
        return claim

    def claim(self) -> Claim:
        claim = next_claim(self.log.refresh(), self.config, self.parts)
        assert claim is not None
        return claim


@pytest.fixture
def arrivals(tmp_path: Path, tiny_folder: Path) -> _Arrivals:
    return _Arrivals(tmp_path, tiny_folder)


def _train(worker: TrainerWorker, claim: Claim) -> dict[str, float]:
    return worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="session").metrics


def _digest(log: RunLog) -> str:
    return log.refresh().steps[-1].policy.weights_sha256


def test_a_streamed_step_is_bit_identical_to_the_same_claim_at_once_and_to_its_replay(
    arrivals: _Arrivals, tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = arrivals.worker()
    for numbers in ((3,), (1, 2)):
        arrivals.arrive(*numbers)
        worker.begin_step(arrivals.part())
    arrivals.arrive(0)
    claim = arrivals.claim()
    assert claim.parts == [1, 2, 1]
    metrics = _train(worker, claim)
    assert metrics["streamed_fraction"] == 0.75 and metrics["streamed_seconds"] > 0
    streamed = _digest(arrivals.log)

    at_once = _Arrivals(tmp_path / "again", tiny_folder)
    for numbers in ((3,), (1, 2), (0,)):
        at_once.arrive(*numbers)
    assert _train(at_once.worker(), claim)["streamed_fraction"] == 0 and _digest(at_once.log) == streamed
    same = {"recorded": arrivals.config, "changed": arrivals.config}
    [step] = replayed(arrivals.log, tmp_path / "replay", 1, 1, **same)
    assert step.identical and not caplog.messages


def test_another_claim_drops_what_was_begun(arrivals: _Arrivals, tmp_path: Path, tiny_folder: Path) -> None:
    worker = arrivals.worker()
    arrivals.arrive(3)
    worker.begin_step(arrivals.part())
    arrivals.arrive(0, 1, 2)
    arrivals.parts.clear()  # as after a new start of the driver
    claim = arrivals.claim()
    assert not claim.parts and claim.trained == sorted(claim.trained, key=lambda group: group.group_id)
    assert "streamed_fraction" not in _train(worker, claim)
    plain = _Arrivals(tmp_path / "again", tiny_folder)
    plain.arrive(3)
    plain.arrive(0, 1, 2)
    _train(plain.worker(), claim)
    assert _digest(arrivals.log) == _digest(plain.log)


def test_a_damaged_part_leaves_the_rest_to_the_step_which_names_it(arrivals: _Arrivals) -> None:
    worker = arrivals.worker()
    arrivals.arrive(3)
    first = arrivals.part()
    arrivals.arrive(1, 2)
    second = arrivals.part()
    [file] = (arrivals.folder / "store").rglob("shard-1.arrow")
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    worker.begin_step(first)
    with pytest.raises(DamagedShard, match="shard-1"):
        worker.begin_step(second)
    arrivals.arrive(0)
    with pytest.raises(DamagedShard, match="shard-1"):
        _train(worker, arrivals.claim())
    assert arrivals.log.refresh().step == 0


def test_an_engine_that_disagrees_is_found_before_the_update(arrivals: _Arrivals) -> None:
    arrivals.config = arrivals.with_settings(max_gap=1e-6)
    worker = arrivals.worker()
    arrivals.arrive(3)
    worker.begin_step(arrivals.part())
    before = {name: tensor.clone() for name, tensor in weights(worker._trainer.trainer).items()}
    arrivals.arrive(0, 1, 2)
    with pytest.raises(GapTooLarge):
        _train(worker, arrivals.claim())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(worker._trainer.trainer).items())
