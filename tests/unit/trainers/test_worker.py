"""The worker commits a step once, resumes to the same weights, and never trains on weights the log does not name."""

import logging
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import LogCaptureFixture
from safetensors.torch import load_file
from transformers import AutoTokenizer

from infra.weight_broadcast import receive
from settings.rollout import Fallback
from storage.log.claims import next_claim
from storage.log.entries import Claim, Step
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.objects.digests import DIGEST_FILE, seal_folder, verify_folder
from storage.objects.object_store import LocalStore
from storage.objects.opening import open_store
from storage.policies.policies import DELTA_FILE, DamagedDelta, PolicyReader
from storage.records import RolloutGroup
from storage.shards.shards import DamagedShard
from tests.builders import a_broadcast, a_config
from tests.unit.trainers.builders import (
    commit,
    config_of,
    groups_of,
    largest_difference,
    load_causal_lm,
    new_run,
    open_trainer,
    random_rows,
    weights,
)
from trainers.health import GapTooLarge
from trainers.timing import PHASES
from trainers.worker import TrainerWorker

_BATCH = 2
_SLOWLY = 1e-9
"""A learning rate by which most of the float32 weights stay what they are."""


@pytest.fixture(scope="module")
def groups(tiny_folder: Path) -> list[RolloutGroup]:
    return groups_of(random_rows(tiny_folder, num_groups=8))


def _run(tmp_path: Path, model: Path, groups: list[RolloutGroup], *, rejected: Collection[int] = ()) -> RunLog:
    """A run with four shards of two groups each: enough for four steps. A filter took both groups of some shards."""
    log = new_run(tmp_path, model)
    for number in range(4):
        reason = "uniform reward 1" if number in rejected else ""
        both = groups[2 * number : 2 * number + 2]
        commit(log, f"shard-{number}", [replace(g, accepted=not reason, reject_reason=reason) for g in both])
    return log


@pytest.fixture
def log(tmp_path: Path, tiny_folder: Path, groups: list[RolloutGroup]) -> RunLog:
    return _run(tmp_path, tiny_folder, groups)


@pytest.fixture
def rejecting(tmp_path: Path, tiny_folder: Path, groups: list[RolloutGroup]) -> RunLog:
    return _run(tmp_path, tiny_folder, groups, rejected=(0, 2))


def _worker(
    log: RunLog, tmp_path: Path, *, learning_rate: float = 1e-3, sends: bool = False, **settings: object
) -> TrainerWorker:
    config = config_of(learning_rate=learning_rate, max_staleness=8, **settings)
    return open_trainer(log, config, cache=tmp_path / "cache", sends=sends)


def _claim(log: RunLog, *, batch_size: int = _BATCH, **rules: Any) -> Claim:
    settings = {"batch_size": batch_size, "max_staleness": 8, "stale_policy": "strict", "min_usable": 2, **rules}
    claim = next_claim(log.refresh(), a_config(**settings))
    assert claim is not None
    return claim


def _attempted(log: RunLog, fallback: Fallback) -> Claim:
    return _claim(log, dynamic_batch=True, on_nothing_accepted=fallback)


def _train(
    worker: TrainerWorker, claim: Claim, *, session_id: str = "session", round_started: float | None = None
) -> Step:
    return worker.train_step(claim, extra_metrics={}, round_started=round_started or time.time(), session_id=session_id)


def _train_steps(worker: TrainerWorker, log: RunLog, count: int) -> list[Step]:
    return [_train(worker, _claim(log)) for _ in range(count)]


def _weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return weights(worker._trainer.trainer)  # what a trainer holds has no other door


def _digest_of(worker: TrainerWorker, claim: Claim) -> str:
    """What this worker's weights are after training on a claim, without committing it."""
    worker._train(claim)
    with tempfile.TemporaryDirectory() as scratch:
        return worker._trainer.save_policy(Path(scratch) / "policy")


def test_a_step_is_committed_with_its_policy_and_digests(log: RunLog, tmp_path: Path) -> None:
    worker = _worker(log, tmp_path)
    claim = _claim(log)
    assert worker.opened == 0
    step = _train(worker, claim)

    state = log.refresh()
    assert state.steps == [step] and step.claim == claim and step.session_id == "session"
    assert state.live == step.policy and (step.policy.version, step.policy.parent) == (1, 0)
    counters = state.counters()
    assert (counters["submitted"], counters["trained"], counters["pending"]) == (8, 2, 6)
    assert step.shard_sha256 == {"shard-0": state.shards["shard-0"].sha256}
    folder = open_store(log.store.uri).fetch_folder(step.policy.path, tmp_path)
    assert verify_folder(folder) == step.policy.weights_sha256 != state.policies[0].weights_sha256
    load_causal_lm(folder)
    assert {f"{phase}_seconds" for phase in PHASES} < step.metrics.keys()
    assert step.metrics["trained_tokens"] > 0 and step.metrics["tokens_per_second"] > 0
    assert step.state_path is None  # checkpoint_every is 10


def test_the_newest_policy_can_be_broadcast_and_without_receivers_that_is_a_warning(
    log: RunLog, tmp_path: Path, caplog: LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(log, tmp_path, sends=True)
    assert not worker.can_send(0)
    policy = _train(worker, _claim(log)).policy
    assert worker.can_send(1) and not worker.can_send(2)
    broadcast = a_broadcast(policy)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(worker.send_policy, broadcast)
        received = {name: tensor.clone() for name, tensor in receive(broadcast, rank=1)}
        sending.result()
    stored = load_file(str(log.store.fetch_folder(policy.path, tmp_path) / "model.safetensors"))
    assert received.keys() == stored.keys() and all(torch.equal(received[name], stored[name]) for name in stored)
    assert "was not broadcast" not in caplog.text
    monkeypatch.setattr("infra.weight_broadcast.SECONDS", 1.0)
    worker.send_policy(a_broadcast(policy))
    assert "policy 1 was not broadcast" in caplog.text


def test_the_same_claim_again_returns_the_same_step_and_trains_nothing(log: RunLog, tmp_path: Path) -> None:
    worker = _worker(log, tmp_path)
    claim = _claim(log)
    first = _train(worker, claim)
    assert _train(worker, claim) == first
    assert log.refresh().steps == [first]

    # Had it trained twice, the next step would not be the one a worker makes that resumes after the first.
    once, second = _worker(log, tmp_path), _claim(log)
    expected = _train(once, second)
    assert expected.policy.weights_sha256 == _digest_of(worker, second)


def test_a_retry_after_a_failed_save_does_not_train_the_claim_twice(log: RunLog, tmp_path: Path) -> None:
    worker, twin = _worker(log, tmp_path), _worker(log, tmp_path)
    claim = _claim(log)
    blocker = tmp_path / "store" / log.key("policies")
    blocker.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        _train(worker, claim)
    assert log.refresh().steps == []
    blocker.unlink()
    assert _train(worker, claim).policy.weights_sha256 == _digest_of(twin, claim)


@pytest.mark.parametrize(("checkpoint_every", "retrained"), [(10, 3), (2, 1), (3, 0)])
def test_a_fresh_worker_resumes_to_the_same_weights_from_the_last_saved_state(
    log: RunLog, tmp_path: Path, caplog: LogCaptureFixture, checkpoint_every: int, retrained: int
) -> None:
    steady = _worker(log, tmp_path, checkpoint_every=checkpoint_every, num_minibatches=2)
    steps = _train_steps(steady, log, 3)
    saved = [step.claim.step for step in steps if step.state_path is not None]
    assert saved == ([checkpoint_every] if checkpoint_every <= 3 else [])
    with caplog.at_level(logging.WARNING):
        resumed = _worker(log, tmp_path, checkpoint_every=checkpoint_every, num_minibatches=2)
    assert resumed.opened == retrained
    assert not caplog.records  # the re-trained digest is the recorded one
    claim = _claim(log)
    assert _train(resumed, claim).policy.weights_sha256 == _digest_of(steady, claim)


def test_a_resume_that_gives_other_weights_says_so_and_goes_on_from_the_recorded_ones(
    log: RunLog, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    first = _worker(log, tmp_path)
    _train_steps(first, log, 1)
    with caplog.at_level(logging.WARNING, logger="millrace.trainer"):
        resumed = _worker(log, tmp_path, learning_rate=2e-3)
    assert "re-training up to step 1 gave other weights than recorded" in caplog.text
    assert largest_difference(_weights(resumed), _weights(first)) == 0


def test_a_recorded_step_whose_shard_is_lost_resumes_from_the_recorded_weights(
    log: RunLog, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    first = _worker(log, tmp_path)
    _train_steps(first, log, 2)
    shard_id = log.refresh().steps[0].claim.trained[0].shard_id
    (log.store.root / log.shard_key(shard_id)).unlink()  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, logger="millrace.trainer"):
        resumed = _worker(log, tmp_path)
    assert "step 1 cannot be trained again" in caplog.text, "not the last one of those to be trained"
    assert largest_difference(_weights(resumed), _weights(first)) == 0


def test_a_step_with_nothing_accepted_is_skipped_and_keeps_the_weights(rejecting: RunLog, tmp_path: Path) -> None:
    log, worker = rejecting, _worker(rejecting, tmp_path)
    steps = [_train(worker, _attempted(log, "skip_step")) for _ in range(4)]
    policies = [log.state.policies[0], *(step.policy for step in steps)]
    assert [policy.version for policy in policies] == [0, 1, 2, 3, 4]
    for skipped, same in ((1, 0), (3, 2)):
        assert policies[skipped].path == policies[same].path
        assert policies[skipped].weights_sha256 == policies[same].weights_sha256
        assert steps[skipped - 1].metrics["skipped"] == 1 and steps[skipped - 1].metrics["trained_tokens"] == 0
        assert not steps[skipped - 1].shard_sha256
    assert len({policy.path for policy in policies}) == 3 and "skipped" not in steps[1].metrics
    assert len(log.store.names(log.key("policies"))) == 2, "a skipped step writes no files"
    assert log.refresh().counters()["filtered"] == log.state.counters()["trained"] == 4


def test_a_masked_step_goes_on_with_the_optimizer(rejecting: RunLog, tmp_path: Path) -> None:
    worker = _worker(rejecting, tmp_path)
    steps = [_train(worker, _attempted(rejecting, "masked")) for _ in range(4)]
    # Before the first gradient there is no momentum; after it, a zero gradient still moves the weights.
    digests = [step.policy.weights_sha256 for step in steps]
    assert len(set(digests)) == 4 and len({step.policy.path for step in steps}) == 4
    folders = [rejecting.store.fetch_folder(step.policy.path, tmp_path / "cache") for step in steps]
    first, second, third, _ = (load_file(folder / "model.safetensors") for folder in folders)
    assert largest_difference(first, second) > 0 and largest_difference(second, third) > 0
    assert [step.metrics["trained_tokens"] > 0 for step in steps] == [False, True, False, True]
    assert steps[2].metrics["learning_rate"] == steps[3].metrics["learning_rate"]


@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
@pytest.mark.parametrize("checkpoint_every", [2, 10])
def test_a_resume_after_steps_with_nothing_accepted_has_the_same_weights(
    rejecting: RunLog, tmp_path: Path, caplog: LogCaptureFixture, fallback: Fallback, checkpoint_every: int
) -> None:
    steady = _worker(rejecting, tmp_path, checkpoint_every=checkpoint_every)
    for steps_done in range(4):
        with caplog.at_level(logging.WARNING):
            resumed = _worker(rejecting, tmp_path, checkpoint_every=checkpoint_every)
        assert resumed.opened == steps_done % checkpoint_every
        assert not caplog.records
        claim = _attempted(rejecting, fallback)
        expected = _digest_of(resumed, claim)
        step = _train(steady, claim)
        if claim.fallback != "skip_step":
            assert step.policy.weights_sha256 == expected


@pytest.mark.parametrize(
    ("batch_size", "session_id"), [(3, "a"), (_BATCH, "b")], ids=["another claim", "an equal claim of another session"]
)
def test_the_trainer_that_commits_second_gets_a_conflict_however_often_it_is_asked(
    log: RunLog, tmp_path: Path, batch_size: int, session_id: str
) -> None:
    first, second = _worker(log, tmp_path), _worker(log, tmp_path, learning_rate=2e-3)
    claim, other = _claim(log), _claim(log, batch_size=batch_size)
    committed = _train(first, claim, session_id="a")
    for _ in range(2):  # as the flow's task asks again
        with pytest.raises(Conflict, match="step 1 is committed: another trainer is working on this run"):
            _train(second, other, session_id=session_id)
    assert log.refresh().steps == [committed]


def test_a_claim_refused_for_its_shards_changes_no_weight_so_that_the_next_one_is_trained(
    log: RunLog, tmp_path: Path
) -> None:
    worker = _worker(log, tmp_path, max_gap=1e-6)
    before = _weights(worker)
    for _ in range(2):  # no conflict: the weights are still the policy's
        with pytest.raises(GapTooLarge, match="shard-0"):
            _train(worker, _claim(log))
    assert largest_difference(before, _weights(worker)) == 0 and log.refresh().steps == []


def test_a_trainer_overtaken_while_it_trains_is_in_conflict_however_often_it_is_asked(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _worker(log, tmp_path), _worker(log, tmp_path, learning_rate=2e-3)
    claim = _claim(log)
    save, committed = second._trainer.save_policy, []

    def overtaken(folder: Path) -> str:
        committed.append(_train(first, claim, session_id="a"))
        return save(folder)

    monkeypatch.setattr(second._trainer, "save_policy", overtaken)
    for _ in range(2):
        with pytest.raises(Conflict, match="another trainer"):
            _train(second, claim, session_id="b")
    # Nor does it go on from a step it did not make, though that one's claim is what its weights were trained on.
    with pytest.raises(Conflict, match="not policy version 1"):
        _train(second, _claim(log), session_id="b")
    assert log.refresh().steps == committed


def test_a_commit_whose_answer_was_lost_is_found_by_the_retry(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(log, tmp_path)
    append = worker._log.append

    def unanswered(step: Step) -> None:
        append(step)
        raise OSError("no answer")

    claim = _claim(log)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(worker._log, "append", unanswered)
        _train(worker, claim)
    assert log.refresh().steps == [_train(worker, claim)]
    assert _train(worker, _claim(log)).policy.version == 2


def test_a_round_is_never_shorter_than_what_was_measured_of_it(log: RunLog, tmp_path: Path) -> None:
    later = time.time() + 3600  # another machine's clock
    metrics = _train(_worker(log, tmp_path), _claim(log), round_started=later).metrics
    assert metrics["round_seconds"] == pytest.approx(sum(metrics[f"{phase}_seconds"] for phase in PHASES))
    assert metrics["tokens_per_second"] > 0 and metrics["idle_seconds"] == pytest.approx(0, abs=1e-9)


def test_after_an_update_that_broke_off_nothing_is_trained_until_a_restart(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = _worker(log, tmp_path, num_minibatches=2)
    optimizer = worker._trainer.trainer.optimizer
    update, updates = optimizer.step, []

    def breaks_at_the_second() -> None:
        if updates:
            raise RuntimeError("out of memory")
        updates.append(update())

    monkeypatch.setattr(optimizer, "step", breaks_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        _train(worker, _claim(log))
    with pytest.raises(Conflict, match="broke off"):
        _train(worker, _claim(log))
    assert log.refresh().steps == []


def test_a_damaged_shard_is_found_before_any_weight_changes(log: RunLog, tmp_path: Path) -> None:
    worker = _worker(log, tmp_path)
    claim = _claim(log, batch_size=4)  # two shards, the second one damaged
    assert isinstance(log.store, LocalStore)
    path = log.store.root / log.shard_key("shard-1")
    intact = path.read_bytes()
    path.write_bytes(intact[:-100] + bytes(100))
    before = _weights(worker)
    with pytest.raises(DamagedShard, match="shard-1"):
        _train(worker, claim)
    assert log.refresh().steps == []
    assert largest_difference(_weights(worker), before) == 0
    # Nothing was lost: a claim on what is whole trains.
    assert _train(worker, _claim(log)).claim.step == 1


def test_policies_keep_the_type_of_the_base_models_weights(tmp_path: Path, tiny_folder: Path) -> None:
    base = tmp_path / "bfloat16"
    load_causal_lm(tiny_folder).to(torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(base)
    seal_folder(base)
    log = new_run(tmp_path, base)
    commit(log, "shard", groups_of(random_rows(tiny_folder, num_groups=2)))
    worker = _worker(log, tmp_path)
    step = _train(worker, _claim(log))
    tensors = load_file(log.store.fetch_folder(step.policy.path, tmp_path) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_policies_between_anchors_are_deltas_and_a_resume_goes_on_from_them(log: RunLog, tmp_path: Path) -> None:
    worker = _worker(log, tmp_path, learning_rate=_SLOWLY)
    first, second = _train_steps(worker, log, 2)
    assert (first.policy.anchor, second.policy.anchor) == (None, 1)
    assert second.metrics["policy_bytes"] < 0.5 * first.metrics["policy_bytes"]
    assert 0 < second.metrics["policy_changed_fraction"] < 0.4 and "policy_changed_fraction" not in first.metrics
    folder = PolicyReader(log, tmp_path / "reader").fetch(second.policy)
    assert verify_folder(folder) == second.policy.weights_sha256
    load_causal_lm(folder)

    resumed = _worker(log, tmp_path / "elsewhere", learning_rate=_SLOWLY)
    assert resumed.opened == 2
    assert _train(resumed, _claim(log)).policy.anchor == 1


@pytest.mark.parametrize("damaged", [DELTA_FILE, DIGEST_FILE])
def test_a_resume_writes_a_damaged_newest_policy_whole(
    log: RunLog, tmp_path: Path, caplog: LogCaptureFixture, damaged: str
) -> None:
    worker = _worker(log, tmp_path, learning_rate=_SLOWLY)
    policy = _train_steps(worker, log, 2)[1].policy
    (tmp_path / "store" / policy.path / damaged).write_bytes(b"broken")
    with pytest.raises(DamagedDelta):
        PolicyReader(log, tmp_path / "reader").fetch(policy)

    _worker(log, tmp_path, learning_rate=_SLOWLY)
    assert "policy 2 is written again, whole" in caplog.text
    folder = PolicyReader(log, tmp_path / "reader").fetch(policy)
    assert verify_folder(folder) == policy.weights_sha256
    load_causal_lm(folder)


def test_a_resume_to_other_weights_does_not_go_on_without_the_recorded_ones(log: RunLog, tmp_path: Path) -> None:
    worker = _worker(log, tmp_path, learning_rate=_SLOWLY)
    policy = _train_steps(worker, log, 2)[1].policy
    (tmp_path / "store" / policy.path / DELTA_FILE).write_bytes(b"broken")
    (tmp_path / "store" / log.shard_key("shard-1")).write_bytes(b"broken")  # so that step 2 cannot be trained again
    with pytest.raises(DamagedDelta, match="policy 2 .* anchor, policy 1"):
        _worker(log, tmp_path, learning_rate=_SLOWLY)
