"""The worker commits a step once, resumes to the same weights, and never trains on weights the log does not name."""

import logging
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from storage.log.entries import Claim, Policy, Step
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.objects.digests import DIGEST_FILE, seal_folder, verify_folder
from storage.policies.policies import DELTA_FILE, DamagedDelta, PolicyReader
from storage.records import RolloutGroup
from storage.shards.shards import DamagedShard
from tests.builders import a_broadcast, a_config
from tests.unit.trainers.builders import (
    commit,
    config_of,
    full_model,
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

_SLOWLY = 1e-9
"""A learning rate by which most of the float32 weights stay what they are."""


@dataclass(frozen=True)
class Run:
    """A run with shards of two groups each, and workers on it."""

    log: RunLog
    folder: Path

    def worker(self, *, cache: str = "cache", sends: bool = False, **settings: Any) -> TrainerWorker:
        config = config_of(max_staleness=8, **settings)
        return open_trainer(self.log, config, cache=self.folder / cache, sends=sends)

    def claim(self, **rules: Any) -> Claim:
        settings = {"batch_size": 2, "max_staleness": 8, "stale_policy": "strict", "min_usable": 2, **rules}
        claim = next_claim(self.log.refresh(), a_config(**settings))
        assert claim is not None
        return claim

    def attempted(self, fallback: Fallback) -> Claim:
        return self.claim(dynamic_batch=True, on_nothing_accepted=fallback)

    def train(self, worker: TrainerWorker, claim: Claim | None = None, *, session_id: str = "session") -> Step:
        """A step on this claim, or on the next."""
        claim = claim or self.claim()
        return worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id=session_id)

    def fetch(self, policy: Policy) -> Path:
        """The policy's files, as a reader finds them; transformers loads them, and they are those recorded."""
        folder = PolicyReader(self.log, self.folder / "reader").fetch(policy)
        load_causal_lm(folder)
        assert verify_folder(folder) == policy.weights_sha256
        return folder

    def file(self, key: str) -> Path:
        return self.folder / "store" / key


def _run(folder: Path, model: Path, groups: list[RolloutGroup], *, rejected: Collection[int] = ()) -> Run:
    """Four shards: enough for four steps. A filter took both groups of some of them."""
    log = new_run(folder, model)
    for number in range(4):
        reason = "uniform reward 1" if number in rejected else ""
        both = groups[2 * number : 2 * number + 2]
        commit(log, f"shard-{number}", [replace(g, accepted=not reason, reject_reason=reason) for g in both])
    return Run(log, folder)


@pytest.fixture(scope="module")
def groups(tiny_folder: Path) -> list[RolloutGroup]:
    return groups_of(random_rows(tiny_folder, num_groups=8))


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path, groups: list[RolloutGroup]) -> Run:
    return _run(tmp_path, tiny_folder, groups)


@pytest.fixture
def rejecting(tmp_path: Path, tiny_folder: Path, groups: list[RolloutGroup]) -> Run:
    return _run(tmp_path, tiny_folder, groups, rejected=(0, 2))


def _weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return weights(worker._trainer.trainer)  # what a trainer holds has no other door


def _digest_of(worker: TrainerWorker, claim: Claim) -> str:
    """What this worker's weights are after training on a claim, without committing it."""
    worker._train(claim)
    with tempfile.TemporaryDirectory() as scratch:
        return worker._trainer.save_policy(Path(scratch) / "policy")


def test_a_step_is_committed_with_its_policy_and_digests(run: Run) -> None:
    worker, claim = run.worker(), run.claim()
    assert worker.opened == 0
    called = time.perf_counter()
    step = worker.train_step(claim, extra_metrics={}, round_seconds=100.0, session_id="session")
    assert 100 < step.metrics["round_seconds"] < 100 + time.perf_counter() - called
    state = run.log.refresh()
    assert state.steps == [step] and step.claim == claim and step.session_id == "session"
    assert state.live == step.policy and (step.policy.version, step.policy.parent) == (1, 0)
    counters = state.counters()
    assert (counters["submitted"], counters["trained"], counters["pending"]) == (8, 2, 6)
    assert step.shard_sha256 == {"shard-0": state.shards["shard-0"].sha256}
    run.fetch(step.policy)
    assert step.policy.weights_sha256 != state.policies[0].weights_sha256
    assert {f"{phase}_seconds" for phase in PHASES} < step.metrics.keys()
    assert step.metrics["trained_tokens"] > 0 and step.metrics["tokens_per_second"] > 0
    rate = step.metrics["train_flops"] / step.metrics["train_seconds"]
    assert step.metrics["train_flops_per_second"] == pytest.approx(rate) and "mfu" not in step.metrics
    assert step.state_path is None  # checkpoint_every is 10


def test_the_newest_policy_can_be_broadcast_and_without_receivers_that_is_a_warning(
    run: Run, caplog: LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = run.worker(sends=True)
    assert not worker.can_send(0)
    policy = run.train(worker).policy
    assert worker.can_send(1) and not worker.can_send(2)
    broadcast = a_broadcast(policy)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(worker.send_policy, broadcast)
        received = {name: tensor.clone() for name, tensor in receive(broadcast, rank=1)}
        sending.result()
    assert largest_difference(received, load_file(str(run.fetch(policy) / "model.safetensors"))) == 0
    assert "was not broadcast" not in caplog.text
    monkeypatch.setattr("infra.weight_broadcast.SECONDS", 1.0)
    worker.send_policy(a_broadcast(policy))
    assert "policy 1 was not broadcast" in caplog.text


@pytest.mark.parametrize("anchor_every", [1, 3])
def test_a_run_keeps_the_tensors_and_types_of_its_first_policy(
    tmp_path: Path, groups: list[RolloutGroup], caplog: LogCaptureFixture, anchor_every: int
) -> None:
    base = full_model(tmp_path / "base")
    digests = {}
    for name in ("new", "before"):
        run = _run(tmp_path / name, tmp_path / "base", groups)
        worker = run.worker(anchor_every=anchor_every)
        if name == "before":  # as earlier versions wrote: in one type, and what the trainer computes with alone
            parameters = worker._trainer.trainer.model.causal_lm.named_parameters()
            worker._trainer._dtypes = {name: torch.bfloat16 for name, _ in parameters}
        run.train(worker)
        again = run.worker(cache="other", anchor_every=anchor_every)
        assert again.opened == 1 and "gave other weights" not in caplog.text
        step = run.train(again)
        digests[name] = {n: t.dtype for n, t in load_file(run.fetch(step.policy) / "model.safetensors").items()}
    assert digests["new"] == {name: tensor.dtype for name, tensor in base.items()}
    assert set(digests["before"].values()) == {torch.bfloat16} and len(digests["before"]) == len(base) - 4


@pytest.mark.parametrize("fault", ["", "the files could not be written", "the commit's answer was lost"])
def test_the_same_claim_again_is_the_same_step_and_is_not_trained_twice(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    worker, twin, claim = run.worker(), run.worker(), run.claim()
    append, is_answer = worker._log.append, "answer" in fault

    def fails(*arguments: Any, **_: Any) -> None:
        if is_answer:
            append(*arguments)
        raise OSError(fault)

    with monkeypatch.context() as patch, pytest.raises(OSError) if fault else nullcontext():
        if fault:
            patch.setattr(*((worker._log, "append") if is_answer else (worker._policies, "put")), fails)
        run.train(worker, claim)
    assert len(run.log.refresh().steps) == ("files" not in fault)
    step = run.train(worker, claim)
    assert run.log.refresh().steps == [step] and step.policy.weights_sha256 == _digest_of(twin, claim)
    following = run.claim()
    assert run.train(worker, following).policy.weights_sha256 == _digest_of(twin, following)


@pytest.mark.parametrize(("checkpoint_every", "retrained"), [(10, 3), (2, 1), (3, 0)])
def test_a_fresh_worker_resumes_to_the_same_weights_from_the_last_saved_state(
    run: Run, caplog: LogCaptureFixture, checkpoint_every: int, retrained: int
) -> None:
    settings = {"checkpoint_every": checkpoint_every, "num_minibatches": 2}
    steady = run.worker(**settings)
    steps = [run.train(steady) for _ in range(3)]
    saved = [step.claim.step for step in steps if step.state_path is not None]
    assert saved == ([checkpoint_every] if checkpoint_every <= 3 else [])
    with caplog.at_level(logging.WARNING):
        resumed = run.worker(**settings)
    assert resumed.opened == retrained
    assert not caplog.records  # the re-trained digest is the recorded one
    claim = run.claim()
    assert run.train(resumed, claim).policy.weights_sha256 == _digest_of(steady, claim)


@pytest.mark.parametrize("fault", ["other weights", "a lost shard"])
def test_a_resume_that_cannot_make_the_recorded_weights_says_so_and_goes_on_from_them(
    run: Run, caplog: LogCaptureFixture, fault: str
) -> None:
    first = run.worker()
    steps = [run.train(first) for _ in range(2)]
    if fault == "a lost shard":  # of the first step, not the last one of those to be trained
        run.file(run.log.shard_key(steps[0].claim.trained[0].shard_id)).unlink()
    with caplog.at_level(logging.WARNING, logger="millrace.trainer"):
        resumed = run.worker(learning_rate=2e-3 if fault == "other weights" else 1e-3)
    assert "re-training up to step 2 gave other weights than recorded" in caplog.text
    assert ("step 1 cannot be trained again" in caplog.text) == (fault == "a lost shard")
    assert largest_difference(_weights(resumed), _weights(first)) == 0


def test_a_step_with_nothing_accepted_is_skipped_and_keeps_the_weights(rejecting: Run) -> None:
    log, worker = rejecting.log, rejecting.worker()
    steps = [rejecting.train(worker, rejecting.attempted("skip_step")) for _ in range(4)]
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


def test_a_masked_step_goes_on_with_the_optimizer(rejecting: Run) -> None:
    worker = rejecting.worker()
    steps = [rejecting.train(worker, rejecting.attempted("masked")) for _ in range(4)]
    # Before the first gradient there is no momentum; after it, a zero gradient still moves the weights.
    assert len({step.policy.weights_sha256 for step in steps}) == len({step.policy.path for step in steps}) == 4
    first, second, third, _ = (load_file(rejecting.fetch(step.policy) / "model.safetensors") for step in steps)
    assert largest_difference(first, second) > 0 and largest_difference(second, third) > 0
    assert [step.metrics["trained_tokens"] > 0 for step in steps] == [False, True, False, True]
    assert steps[2].metrics["learning_rate"] == steps[3].metrics["learning_rate"]


@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
@pytest.mark.parametrize("checkpoint_every", [2, 10])
def test_a_resume_after_steps_with_nothing_accepted_has_the_same_weights(
    rejecting: Run, caplog: LogCaptureFixture, fallback: Fallback, checkpoint_every: int
) -> None:
    steady = rejecting.worker(checkpoint_every=checkpoint_every)
    for steps_done in range(4):
        with caplog.at_level(logging.WARNING):
            resumed = rejecting.worker(checkpoint_every=checkpoint_every)
        assert resumed.opened == steps_done % checkpoint_every
        assert not caplog.records
        claim = rejecting.attempted(fallback)
        expected = _digest_of(resumed, claim)
        step = rejecting.train(steady, claim)
        if claim.fallback != "skip_step":
            assert step.policy.weights_sha256 == expected


@pytest.mark.parametrize(
    ("batch_size", "session_id"), [(3, "a"), (2, "b")], ids=["another claim", "an equal claim of another session"]
)
def test_the_trainer_that_commits_second_gets_a_conflict_however_often_it_is_asked(
    run: Run, batch_size: int, session_id: str
) -> None:
    first, second = run.worker(), run.worker(learning_rate=2e-3)
    claim, other = run.claim(), run.claim(batch_size=batch_size)
    committed = run.train(first, claim, session_id="a")
    for _ in range(2):  # as the flow's task asks again
        with pytest.raises(Conflict, match="step 1 is committed: another trainer is working on this run"):
            run.train(second, other, session_id=session_id)
    assert run.log.refresh().steps == [committed]


def test_a_trainer_overtaken_while_it_trains_is_in_conflict_however_often_it_is_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, claim = run.worker(), run.worker(learning_rate=2e-3), run.claim()
    save, committed = second._trainer.save_policy, []

    def overtaken(folder: Path) -> str:
        committed.append(run.train(first, claim, session_id="a"))
        return save(folder)

    monkeypatch.setattr(second._trainer, "save_policy", overtaken)
    for _ in range(2):
        with pytest.raises(Conflict, match="another trainer"):
            run.train(second, claim, session_id="b")
    # Nor does it go on from a step it did not make, though that one's claim is what its weights were trained on.
    with pytest.raises(Conflict, match="not policy version 1"):
        run.train(second, session_id="b")
    assert run.log.refresh().steps == committed


def test_a_claim_refused_for_its_shards_changes_no_weight_so_that_the_next_one_is_trained(run: Run) -> None:
    worker = run.worker(max_gap=1e-6)
    before = _weights(worker)
    for _ in range(2):  # no conflict: the weights are still the policy's
        with pytest.raises(GapTooLarge, match="shard-0"):
            run.train(worker)
    assert largest_difference(before, _weights(worker)) == 0 and run.log.refresh().steps == []


def test_after_an_update_that_broke_off_nothing_is_trained_until_a_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = run.worker(num_minibatches=2)
    optimizer = worker._trainer.trainer.optimizer
    update, updates = optimizer.step, []

    def breaks_at_the_second() -> None:
        if updates:
            raise RuntimeError("out of memory")
        updates.append(update())

    monkeypatch.setattr(optimizer, "step", breaks_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.train(worker)
    with pytest.raises(Conflict, match="broke off, so start this run again: RuntimeError: out of memory"):
        run.train(worker)
    assert run.log.refresh().steps == []


def test_a_damaged_shard_is_found_before_any_weight_changes(run: Run) -> None:
    worker, claim = run.worker(), run.claim(batch_size=4)  # two shards, the second one damaged
    path = run.file(run.log.shard_key("shard-1"))
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    before = _weights(worker)
    with pytest.raises(DamagedShard, match="shard-1"):
        run.train(worker, claim)
    assert run.log.refresh().steps == [] and largest_difference(_weights(worker), before) == 0
    assert run.train(worker).claim.step == 1, "a claim on what is whole trains"


def test_policies_keep_the_type_of_the_base_models_weights(
    tmp_path: Path, tiny_folder: Path, groups: list[RolloutGroup]
) -> None:
    base = tmp_path / "bfloat16"
    load_causal_lm(tiny_folder).to(torch.bfloat16).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(base)
    seal_folder(base)
    run = _run(tmp_path, base, groups)
    tensors = load_file(run.fetch(run.train(run.worker()).policy) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_policies_between_anchors_are_deltas_and_a_resume_goes_on_from_them(run: Run) -> None:
    worker = run.worker(learning_rate=_SLOWLY)
    first, second = (run.train(worker) for _ in range(2))
    assert (first.policy.anchor, second.policy.anchor) == (None, 1)
    assert second.metrics["policy_bytes"] < 0.5 * first.metrics["policy_bytes"]
    assert 0 < second.metrics["policy_changed_fraction"] < 0.4 and "policy_changed_fraction" not in first.metrics
    run.fetch(second.policy)
    resumed = run.worker(learning_rate=_SLOWLY, cache="elsewhere")
    assert resumed.opened == 2
    assert run.train(resumed).policy.anchor == 1


@pytest.mark.parametrize("damaged", [DELTA_FILE, DIGEST_FILE])
def test_a_resume_writes_a_damaged_newest_policy_whole(run: Run, caplog: LogCaptureFixture, damaged: str) -> None:
    worker = run.worker(learning_rate=_SLOWLY)
    *_, policy = (run.train(worker).policy for _ in range(2))
    run.file(f"{policy.path}/{damaged}").write_bytes(b"broken")
    with pytest.raises(DamagedDelta):
        run.fetch(policy)
    run.worker(learning_rate=_SLOWLY)
    assert "policy 2 is written again, whole" in caplog.text
    run.fetch(policy)


def test_a_resume_to_other_weights_does_not_go_on_without_the_recorded_ones(run: Run) -> None:
    worker = run.worker(learning_rate=_SLOWLY)
    *_, policy = (run.train(worker).policy for _ in range(2))
    run.file(f"{policy.path}/{DELTA_FILE}").write_bytes(b"broken")
    run.file(run.log.shard_key("shard-1")).write_bytes(b"broken")  # so that step 2 cannot be trained again
    with pytest.raises(DamagedDelta, match="policy 2 .* anchor, policy 1"):
        run.worker(learning_rate=_SLOWLY)
