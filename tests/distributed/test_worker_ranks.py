"""A trainer of two ranks commits each step once, fails as a whole, and makes the weights one rank makes.

The ranks are processes that run this very file, on a store each; two groups of a single rank are there to be compared.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from infra.weight_broadcast import Broadcast, receive, send
from storage.log.claims import next_claim
from storage.log.entries import Claim, Step
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from storage.shards.shards import DamagedShard
from tests.builders import a_broadcast, a_config
from tests.distributed.ranks import Ranks, fork_ranks
from tests.unit.trainers.builders import (
    commit,
    config_of,
    group_of,
    largest_difference,
    new_run,
    open_trainer,
    random_rows,
    tiny_model,
)
from trainers import run_trainer
from trainers.data.samples import Samples, gather_samples
from trainers.model import stored
from trainers.model.distributed import agreed, num_ranks, on_every_rank, on_first_rank, rank
from trainers.model.stored import as_stored
from trainers.worker import TrainerWorker

_GROUPS = {"one": 1, "another": 1, "two": 2}
_NUM_STEPS = 4
_FAILURES = {
    "full": ["OSError", "RankFailed"],
    "unwritten": ["RankFailed", "OSError"],
    "unanswered": ["OSError", "RankFailed"],
    "conflict": ["Conflict"] * 2,
    "damaged": ["DamagedShard"] * 2,
    "other_batch": ["RanksDiffer"] * 2,
}
"""Failed call → what each rank raises."""
_RULES = a_config(batch_size=2, max_staleness=8, stale_policy="strict", min_usable=2)


def _log(folder: Path) -> RunLog:
    return open_run(LocalStore(folder / "store"), "run")


def _opened(folder: Path) -> TrainerWorker:
    config = config_of(max_staleness=8, checkpoint_every=2, num_minibatches=2, max_gap=1e9)
    return open_trainer(_log(folder), config, cache=folder / "cache", sends=True)


def _claim(folder: Path) -> Claim:
    claim = next_claim(_log(folder).state, _RULES)
    assert claim is not None
    return claim


def _train(worker: TrainerWorker, claim: Claim, *, session_id: str = "session") -> Step:
    return worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id=session_id)


def _failure(action: Callable[[], object]) -> list[Any]:
    """Type, message, and whose failure it is, of what an action raises; nothing where it raises nothing."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the tests look at it
        return [type(error).__name__, str(error), getattr(error, "rank", None)]
    return []


def _refuse(*_: object, **__: object) -> None:
    raise OSError("the store is full")


def _unwritten(causal_lm: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As what a rank has gathered, and not as the plan of the file, which all ranks make."""
    if any(not tensor.is_meta for tensor in weights.values()):
        raise OSError("the disk is full")
    return as_stored(causal_lm, weights)


def _damaged(*_: object, **__: object) -> None:
    raise DamagedShard("shard-2", "sha256 differs")


def _other_rewards(*arguments: Any) -> Samples:
    samples = gather_samples(*arguments)
    return dataclasses.replace(samples, rewards_B=samples.rewards_B + 1)


def _two_ranks(folder: Path) -> dict[str, Any]:
    """Four steps with a failure before each; what every rank saw of them."""
    worker = _opened(folder)
    append = worker._log.append

    def unanswered(step: Step) -> None:
        append(step)
        raise OSError("no answer")

    seen: dict[str, Any] = {
        "all": on_every_rank(lambda: [rank(), num_ranks()]),
        "first": on_first_rank(lambda: f"said by {rank()}"),
        "differing": _failure(lambda: agreed(on_every_rank(rank), what="number")),
        "same": agreed(on_every_rank(lambda: "yes"), what="word"),
        "one_fails": _failure(lambda: on_every_rank(lambda: 1 // rank())),
    }
    claim = _claim(folder)
    with patch.object(worker._policies, "put", _refuse):
        seen["full"] = _failure(lambda: _train(worker, claim))
    with patch.object(stored, "as_stored", _unwritten if rank() == 1 else as_stored):
        seen["unwritten"] = _failure(lambda: _train(worker, claim))
    steps = [_train(worker, claim)]
    claim = _claim(folder)
    with patch.object(worker._log, "append", unanswered):
        seen["unanswered"] = _failure(lambda: _train(worker, claim))
    steps.append(_train(worker, claim))
    seen["conflict"] = _failure(lambda: _train(worker, claim, session_id="another"))
    claim = _claim(folder)
    with patch.object(run_trainer, "read_shard", _damaged if rank() == 1 else run_trainer.read_shard):
        seen["damaged"] = _failure(lambda: _train(worker, claim))
    steps.append(_train(worker, claim))
    claim = _claim(folder)
    with patch.object(run_trainer, "gather_samples", _other_rewards if rank() == 1 else gather_samples):
        seen["other_batch"] = _failure(lambda: _train(worker, claim))
    steps.append(_train(worker, claim))
    seen["steps"] = [step.policy.weights_sha256 for step in steps]
    seen["sendable"] = worker.can_send(_NUM_STEPS)
    broadcast = Broadcast(**on_first_rank(lambda: dataclasses.asdict(a_broadcast(steps[-1].policy))))
    with ThreadPoolExecutor() as pool, patch("trainers.worker.send", wraps=send) as sending:
        received = pool.submit(lambda: [name for name, _ in receive(broadcast, rank=1)] if rank() == 0 else [])
        worker.send_policy(broadcast)
        seen["sent"], seen["received"] = sending.call_count, len(received.result())
    return seen


def _rank_main(folder: Path) -> None:
    if folder.name == "two":
        seen = _two_ranks(folder)
    else:
        worker = _opened(folder)
        seen = {"steps": [_train(worker, _claim(folder)).policy.weights_sha256 for _ in range(_NUM_STEPS)]}
    on_every_rank(lambda: None)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("millrace.trainer").addHandler(handler)
    newest = _log(folder).state.steps[-1].state_path
    on_first_rank(lambda: shutil.rmtree(folder / "store" / newest))  # so that a resume has to train
    seen["retrained"] = _opened(folder).opened
    seen["warnings"] = warnings
    (folder / f"seen-{rank()}.json").write_text(json.dumps(seen))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps per group, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("workers")
    model = tiny_model(folder / "model")
    rows = random_rows(model, num_groups=2 * _NUM_STEPS)
    for name in _GROUPS:
        log = new_run(folder / name, model)
        for number in range(_NUM_STEPS):
            positions = (2 * number, 2 * number + 1)
            groups = [group_of([row for row in rows if row.group == p], position=p) for p in positions]
            commit(log, f"shard-{number}", groups)
    ranks = Ranks("tests.distributed.test_worker_ranks", folder)
    ranks.finish()
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each of the two ranks saw."""
    return [json.loads((folder / "two" / f"seen-{number}.json").read_text()) for number in range(2)]


def _policies(folder: Path) -> list[Path]:
    log = _log(folder)
    return [log.store.fetch_folder(step.policy.path, folder / "cache") for step in log.state.steps]


def test_what_is_done_on_every_rank_is_known_to_all_and_a_failure_names_whose_it_is(seen: list[dict[str, Any]]) -> None:
    for rank_seen in seen:
        assert rank_seen["all"] == [[0, 2], [1, 2]]
        assert rank_seen["first"] == "said by 0" and rank_seen["same"] == "yes"
        kind, message, _ = rank_seen["differing"]
        assert kind == "RanksDiffer" and "the same number (rank 0: 0, rank 1: 1), so nothing was done" in message
    division = seen[0]["one_fails"]
    assert division[0] == "ZeroDivisionError"
    assert seen[1]["one_fails"] == ["RankFailed", f"rank 0: ZeroDivisionError: {division[1]}", 0]


def test_a_step_that_fails_on_one_rank_fails_on_all(seen: list[dict[str, Any]]) -> None:
    """A store that is full, a share of a policy that cannot be written, an answer that is lost, another session, a
    damaged shard, and different batches."""
    kinds = {what: [rank_seen[what][0] for rank_seen in seen] for what in seen[0] if what in _FAILURES}
    assert kinds == _FAILURES
    assert seen[0]["full"][1] == "the store is full"
    assert seen[1]["full"] == ["RankFailed", "rank 0: OSError: the store is full", 0]
    for rank_seen in seen:
        assert "shard-2: sha256 differs" in rank_seen["damaged"][1]
        assert "do not have the same batch for step 4 (rank 0: " in rank_seen["other_batch"][1]


def test_each_step_of_two_ranks_is_committed_once_and_makes_the_weights_that_one_rank_makes(
    folder: Path, seen: list[dict[str, Any]]
) -> None:
    log = _log(folder / "two")
    assert [step.claim.step for step in log.state.steps] == [1, 2, 3, 4]
    assert [step.policy.weights_sha256 for step in log.state.steps] == seen[0]["steps"] == seen[1]["steps"]
    assert len(log.store.names(log.key("policies"))) == _NUM_STEPS and len(log.store.names(log.key("state"))) == 1
    state = log.store.fetch_folder(log.state.steps[1].state_path or "", folder / "cache")
    assert json.loads((state / "state.json").read_text()) == {"step": 2, "world_size": 2}
    for one, two in zip(_policies(folder / "one"), _policies(folder / "two"), strict=True):
        _assert_close(one, two)
    digests = [json.loads((folder / name / "seen-0.json").read_text())["steps"] for name in ("one", "another")]
    assert digests[0] == digests[1] and len(set(digests[0])) == _NUM_STEPS, "bit for bit in separate processes"


def test_one_rank_broadcasts_what_both_have_trained(seen: list[dict[str, Any]]) -> None:
    assert [(rank_seen["sendable"], rank_seen["sent"]) for rank_seen in seen] == [(True, 1), (False, 0)]
    assert seen[0]["received"] > 5


@pytest.mark.parametrize("group", _GROUPS)
def test_a_resume_at_the_same_number_of_ranks_gives_the_same_digests(folder: Path, group: str) -> None:
    for number in range(_GROUPS[group]):
        rank_seen = json.loads((folder / group / f"seen-{number}.json").read_text())
        [warning] = rank_seen["warnings"]
        assert rank_seen["retrained"] == 2 and "state of step 4 cannot be loaded" in warning


def _assert_close(one: Path, two: Path) -> None:
    """Equal but for the order of sums; Adam makes the most of a gradient that is next to nothing."""
    weights = [load_file(folder / "model.safetensors") for folder in (one, two)]
    assert largest_difference(*weights) < 1e-5


if __name__ == "__main__":
    _names: Sequence[str] = list(_GROUPS)
    fork_ranks(lambda group: _rank_main(Path(sys.argv[1]) / _names[group]), groups=list(_GROUPS.values()))
