"""Housekeeping removes what nothing needs, records it first, and never removes what is needed, on a disk and on S3."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.log import segments as log_segments
from storage.log.entries import Alias, Evaluation, Quarantine, Rescore, Retire, TaskSet
from storage.log.replay_plan import plan_replay
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import create_run, open_run
from storage.objects.object_store import LocalStore, ObjectStore, StoreError
from storage.objects.opening import open_store
from storage.retention import retention
from storage.retention.retention import RunReport, RunRetention, collect_garbage, reading
from storage.retention.rules import Rules, kept_policies, make_rules
from storage.shards.shards import read_shard
from tests.builders import BASE, MemoryStore, a_group, a_log, a_shard, a_step, a_summary, commit, local_store

HOUR, DAY = 3600.0, 86400.0


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.server)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "disk":
        return local_store(tmp_path)
    return open_store(f"s3://{request.getfixturevalue('bucket')}/lake")


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """A run on a disk."""
    return a_log(local_store(tmp_path))


class Meanwhile(LocalStore):
    """A store in which another process does something just before, or after, retention writes its first entry."""

    def __init__(self, root: Path, deed: Callable[[RunLog], object], *, after: bool = False) -> None:
        super().__init__(root)
        self.deed, self.after, self.done = deed, after, False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        is_now = b'"retire"' in data and not self.done
        self.done = self.done or is_now
        if is_now and not self.after:
            self.deed(open_run(LocalStore(self.root), "run"))
        written = super().put_if_absent(key, data)
        if is_now and self.after:
            self.deed(open_run(LocalStore(self.root), "run"))
        return written


def _shard(log: RunLog, number: int, *, version: int = 0) -> None:
    """Commit one group as a shard of its own."""
    commit(log, f"s{number}", a_group(number, version=version))


def _eval_shard(log: RunLog, shard_id: str, *, version: int) -> None:
    commit(log, shard_id, a_group(-1, version=version, group_id=f"eval{version}.task"), is_eval=True)


def _score(log: RunLog, version: int, score: float, shard_id: str, **fields: object) -> None:
    counts = {"split": "test", "num_tasks": 1, "num_failed": 0, "seconds": 0.0, **fields}
    log.append(Evaluation(version=version, score=score, shard_id=shard_id, **counts))  # type: ignore[arg-type]


def _train(log: RunLog, *, steps: int = 0, state_every: int = 0, anchors: Sequence[int | None] = ()) -> RunLog:
    """Steps of one shard each, with a policy folder, and a state folder every so many.

    With `anchors`, a step for each of them, whose policy is a delta against that version.
    """
    for anchor in anchors or [None] * steps:
        number = log.state.step + 1
        _shard(log, number, version=number - 1)
        step = a_step(log.state, trained=[f"0.task{number}"])
        if state_every and number % state_every == 0:
            step = replace(step, state_path=log.key(f"state/{number}-a"))
            log.store.put(f"{step.state_path}/state.safetensors", b"moments")
        for file in ("model.safetensors" if anchor is None else "delta.safetensors", "digest.json"):
            log.store.put(f"{step.policy.path}/{file}", b"x" * 50)
        log.append(replace(step, policy=replace(step.policy, anchor=anchor)))
    return log


def _age(log: RunLog, name: str, seconds: float) -> None:
    """Make a file of the run so much older."""
    path = log.store.root / log.key(name)  # type: ignore[attr-defined]
    os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def _files(store: ObjectStore, *folders: str, run: str = "run") -> list[str]:
    """What is left, without the log: `shards/s1`, `policies/3-a`."""
    keys = [file.key.removeprefix(f"runs/{run}/") for file in store.walk(f"runs/{run}")]
    names = {name.rpartition("/")[0] if name.startswith(("policies", "state")) else name for name in keys}
    return sorted(name.removesuffix(".arrow") for name in names if name.split("/")[0] in folders)


def _data(store: ObjectStore) -> list[str]:
    return _files(store, "policies", "state", "shards")


def _collect(store: ObjectStore, *runs: str, dry_run: bool = False, **rules: object) -> RunReport:
    """The report of a run; one policy is kept unless the rules say otherwise."""
    chosen = Rules(**{"keep_last": 1, **rules})  # type: ignore[arg-type]
    [report, *_] = collect_garbage(store, runs, chosen, dry_run=dry_run)
    return report


def _names(report: RunReport) -> list[str]:
    return sorted(item.name.removeprefix("runs/run/") for item in report.items)


def _check(log: RunLog, rules: Rules) -> None:
    """Everything that a kept policy, a resume and the queue need is there."""
    state = RunLog(log.store, log.run_id).refresh()
    kept = [version for version in kept_policies(state, rules, {}) if version]
    needed = {f"{state.policies[version].path}/model.safetensors" for version in kept}
    needed |= {log.shard_key(state.shard_of[group_id]) for group_id in state.pending}
    states = {s.claim.step: s.state_path for s in state.steps if s.state_path not in (None, *state.retired_states)}
    newest = max(states, default=0)
    trained_again = [(version, version) for version in kept]
    trained_again += [(newest + 1, state.step)] if newest < state.step else []
    for first, last in trained_again:
        plan = plan_replay(state, run="run", first=first, last=last)
        needed |= {f"{states[plan.resumed_from]}/state.safetensors"} if plan.resumed_from else set()
        for number in plan.steps:
            needed |= {log.shard_key(shard_id) for shard_id in state.steps[number - 1].shard_sha256}
    needed |= {f"{states[newest]}/state.safetensors"} if newest else set()
    assert needed <= {file.key for file in log.store.walk(log.prefix)}


def test_only_what_kept_policies_and_a_resume_need_stays(store: ObjectStore):
    log = _train(a_log(store), steps=7, state_every=2)
    _shard(log, 8, version=7)
    log.append(Alias(name="shipped", version=3, checksum=""))
    before = store.walk(log.prefix)
    would = _collect(store, dry_run=True)
    assert not would.removed and store.walk(log.prefix) == before
    report = _collect(store)
    # Step 7 is trained again from the state of step 6, and so is the run resumed; step 3 from the state of step 2.
    # Group 8 waits to be trained on.
    kept = ["policies/3-a", "policies/7-a", "shards/s3", "shards/s7", "shards/s8", "state/2-a", "state/6-a"]
    assert _data(store) == kept and store.names("runs/run/state") == ["2-a", "6-a"], "no empty folders"
    assert report.kept == {0: "base model", 3: "alias shipped", 7: "live, among the newest"}
    assert report.removed and report.items == would.items
    assert {kind: count for kind, (count, _) in report.by_kind().items()} == {"policy": 5, "state": 1, "shard": 5}
    assert report.freed_bytes == sum(item.num_bytes for item in report.items) > 5 * 100
    state = log.refresh()
    assert state.retired_policies == {1, 2, 4, 5, 6} and state.retired_states == {"runs/run/state/4-a"}
    assert state.retired_shards == {"s1", "s2", "s4", "s5", "s6"}
    assert read_shard(log, state.shards["s7"]).num_rows == 2
    # What is retired stays retired when the rules change.
    entries = state.entries
    assert _collect(store, keep_last=5).items == [] and log.refresh().entries == entries
    _check(log, Rules(keep_last=1))


def test_without_a_saved_state_everything_back_to_the_base_model_is_needed():
    log = _train(a_log(MemoryStore()), steps=3)
    _collect(log.store)
    assert _data(log.store) == ["policies/3-a", "shards/s1", "shards/s2", "shards/s3"]


def test_policies_are_kept_by_count_interval_alias_and_score(log: RunLog):
    """All shards of an evaluation stay with the policy it scored. A score of 0 says nothing if every attempt failed."""
    _train(log, steps=10, state_every=1)
    for version, score in ((0, 0.1), (3, 0.9), (7, 0.4)):
        for shard_id in (f"eval{version}", f"eval{version}-1"):
            _eval_shard(log, shard_id, version=version)
        _score(log, version, score, f"eval{version}", num_shards=2)
    for version, score, num_failed in ((2, -0.7, 0), (4, -0.5, 0), (8, 0.0, 4)):
        _score(log, version, score, f"e{version}", split="hard", num_tasks=2, n_samples=2, num_failed=num_failed)
    log.append(Alias(name="rollout", version=6, checksum=""))
    rules = Rules(keep_last=2, keep_every=5)
    assert kept_policies(log.state, rules, {}) == {
        0: "base model, every 5",
        3: "best on test",
        4: "best on hard",
        5: "every 5",
        6: "alias rollout",
        9: "among the newest",
        10: "live, among the newest, every 5",
    }
    collect_garbage(log.store, [], rules, dry_run=False)
    evaluated = ["shards/eval0", "shards/eval0-1", "shards/eval3", "shards/eval3-1"]
    assert [name for name in _data(log.store) if "eval" in name] == evaluated
    _check(log, rules)


def test_the_best_is_best_among_scores_that_were_asked_as_the_run_asks(tmp_path: Path):
    """A few lucky tasks that a user asks by hand do not make a policy the best, nor does another temperature."""
    log = create_run(local_store(tmp_path), "run", {"evaluation": {"num_tasks": 4, "temperature": 0.0}})
    log.append(BASE)
    _train(log, steps=5, state_every=1)
    tasks = TaskSet(count=9, sha256="t", ids_sha256="i")
    asked: dict[str, object] = {"num_tasks": 4, "n_samples": 1, "temperature": 0.0, "tasks": tasks}
    _score(log, 1, 0.9, "e1", **asked)
    _score(log, 2, 0.5, "e2", **asked)
    _score(log, 3, 1.0, "e3", **{**asked, "num_tasks": 1})
    _score(log, 4, 1.0, "e4", **{**asked, "temperature": 1.0})
    kept = _collect(log.store).kept
    assert kept == {0: "base model", 1: "best on test", 5: "live, among the newest"}


def test_shards_of_an_evaluation_that_runs_stay_and_those_of_a_killed_one_go(log: RunLog):
    """Both are of the base model, which is always kept; only the running one has written something lately."""
    _train(log, steps=1)
    for number, age in enumerate((2 * HOUR, 1.5 * HOUR, 60.0)):
        _eval_shard(log, f"running-{number}", version=0)
        _age(log, f"shards/running-{number}.arrow", age)
    assert "shard" not in _collect(log.store).by_kind()
    _age(log, "shards/running-2.arrow", 2 * HOUR)
    items = _collect(log.store).items
    assert [(item.name, item.reason) for item in items] == [
        (f"running-{number}", "its evaluation never ended") for number in range(3)
    ]


def test_files_without_an_entry_go_when_no_writer_can_still_be_at_it(log: RunLog):
    store = _train(log, steps=1).store
    orphans = ["shards/lost.arrow", "policies/2-lost/model.safetensors", "state/2-lost/state.safetensors"]
    for name in [*orphans, "rewards/new/s1.arrow", "shards/.s9.arrow.0123.tmp"]:
        store.put(log.key(name), b"no entry came")
    store.put(log.key("index/rows.lance"), b"not ours to judge")
    assert _collect(store).items == [], "all of it may still get its entry"
    for name in ("rewards/new/s1.arrow", "shards/lost.arrow"):
        _age(log, name, DAY)
    assert _names(_collect(store)) == ["rewards/new/s1.arrow", "shards/lost"]
    kinds = {item.name.removeprefix("runs/run/"): item.kind for item in _collect(store, orphan_seconds=0.0).items}
    assert kinds == {"policies/2-lost": "orphan", "state/2-lost": "orphan", "shards/.s9.arrow.0123.tmp": "temporary"}
    left = ["index/rows.lance", "policies/1-a", "shards/s1"]
    assert _files(store, "policies", "state", "shards", "rewards", "index") == left
    assert store.unfinished(log.prefix) == []  # type: ignore[attr-defined]
    entries = log.refresh().entries
    assert log.state.retired_shards == {"lost"}
    assert log.state.retired_states == {"runs/run/policies/2-lost", "runs/run/state/2-lost"}
    assert _collect(store, orphan_seconds=0.0).items == [] and log.refresh().entries == entries


def test_what_is_retired_is_deleted_whatever_its_age_and_whatever_needs_it_now(log: RunLog):
    """The process that retired it was killed, or saw a reader."""
    _train(log, steps=3, state_every=3)
    log.store.put(log.shard_key("s9"), b"x")
    log.store.put(log.key("state/9-a/m"), b"x")
    log.append(Retire(shard_ids=["s1", "s9"], policy_versions=[], state_paths=[log.key("state/9-a")], reason=""))
    log.append(Alias(name="shipped", version=2, checksum=""))  # it was trained from s1 and s2
    items = {item.name.removeprefix("runs/run/"): item.kind for item in _collect(log.store).items if item.retired}
    assert items == {"s1": "shard", "shards/s9": "orphan", "state/9-a": "orphan"}
    assert _data(log.store) == ["policies/2-a", "policies/3-a", "shards/s2", "shards/s3", "state/3-a"]


def test_what_gets_its_entry_or_becomes_needed_while_the_plan_is_made_stays(log: RunLog, tmp_path: Path):
    """Writers slept between file and entry, and woke up while the plan called their files orphans."""

    def meanwhile(rival: RunLog) -> None:
        rival.append(replace(a_step(rival.state, trained=["0.task4"]), state_path=rival.key("state/4-a")))
        rival.append(Alias(name="shipped", version=1, checksum=""))
        _shard(rival, 50, version=4)

    _train(log, steps=3)
    _shard(log, 4, version=3)
    for name in ("policies/4-a/model.safetensors", "state/4-a/state.safetensors", "shards/s50.arrow"):
        log.store.put(log.key(name), b"not yet committed")
    store = Meanwhile(tmp_path / "store", meanwhile)
    report = _collect(store, orphan_seconds=0.0)
    assert store.done and report.by_kind().keys() == {"policy"} and report.kept[1] == "alias shipped"
    assert log.refresh().retired_states == set() and log.state.retired_policies == {2}, "3 was live in the plan"
    assert read_shard(log, log.state.shards["s50"]).num_rows == 2
    _check(log, Rules(keep_last=1))


def test_rewards_go_with_their_shard_and_a_quarantined_shard_with_its_step(log: RunLog):
    _train(log, steps=3, state_every=1)
    for shard_id in ("s1", "s3"):
        log.store.put(log.key(f"rewards/strict/{shard_id}.arrow"), b"rewards")
    log.append(Rescore(name="strict", reward="m:f", reward_sha256="d", files={"s1": "x", "s3": "x"}))
    _shard(log, 9)
    log.append(Quarantine(shard_id="s9", reason="cut off"))
    _collect(log.store)
    assert _files(log.store, "shards", "rewards") == ["rewards/strict/s3", "shards/s3"]


def test_if_it_is_killed_while_deleting_the_next_one_finishes(log: RunLog, tmp_path: Path):
    def kill(rival: RunLog) -> None:
        rival.store.delete([rival.key("policies/1-a/model.safetensors")])
        raise KeyboardInterrupt

    _train(log, steps=4, state_every=2)
    with pytest.raises(KeyboardInterrupt):
        _collect(Meanwhile(tmp_path / "store", kill, after=True))
    entries = log.refresh().entries
    assert log.state.retired_policies == {1, 2, 3} and len(_files(log.store, "policies")) > 1
    _check(log, Rules(keep_last=1))
    report = _collect(log.store, older_than_seconds=DAY)  # whatever the rules are now
    assert {item.reason for item in report.items} == {"retired before, and not deleted yet"}
    assert _files(log.store, "policies", "shards") == ["policies/4-a", "shards/s3", "shards/s4"]
    assert log.refresh().entries == entries


def test_a_reader_holds_everything_up_until_it_ends(store: ObjectStore):
    log = _train(a_log(store), steps=3, state_every=1)
    with pytest.raises(RuntimeError), reading(log, "replay"):
        report = _collect(store)
        [reader] = report.readers
        assert (reader.what, reader.pid) == ("replay", os.getpid()) and not report.removed
        assert report.items and log.refresh().retired_policies == set()
        [report] = collect_garbage(store, ["run"], Rules(keep_last=2), dry_run=False, ignore_readers=True)
        assert report.removed and log.refresh().retired_policies == {1}
        raise RuntimeError
    assert store.names("runs/run/readers") == []
    assert _collect(store).removed and log.refresh().retired_policies == {1, 2}


def test_a_reader_that_died_is_forgotten_after_three_hours(log: RunLog):
    _train(log, steps=3, state_every=1)
    dead = reading(log, "index")
    dead.__enter__()
    [name] = log.store.names("runs/run/readers")
    _age(log, f"readers/{name}", 3 * HOUR - 60)
    assert [reader.what for reader in _collect(log.store).readers] == ["index"]
    _age(log, f"readers/{name}", 120)
    report = _collect(log.store)
    assert report.removed and report.readers == [] and "temporary" in report.by_kind()
    assert log.store.names("runs/run/readers") == []


def test_a_reader_that_lives_long_renews_its_registration(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    renewed, delete = threading.Event(), LocalStore.delete
    monkeypatch.setattr(LocalStore, "delete", lambda store, keys: delete(store, keys) or renewed.set())
    monkeypatch.setattr(retention, "_RENEW_SECONDS", 0.01)
    with reading(log, "replay"):
        first = log.store.names("runs/run/readers")
        renewed.clear()
        assert renewed.wait(60)
        assert log.store.names("runs/run/readers") != first
    assert log.store.names("runs/run/readers") == []
    assert "reader" not in {thread.name for thread in threading.enumerate()}


def test_a_store_that_cannot_be_written_stops_no_reader(log: RunLog, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class ReadOnly(LocalStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            raise PermissionError("read-only")

    class Stuck(LocalStore):
        def delete(self, keys: Sequence[str]) -> None:
            raise StoreError("no connection")

    _train(log, steps=1)
    caplog.set_level(logging.INFO)
    for quiet in (True, False):
        log = RunLog(ReadOnly(tmp_path / "store"), "run")
        with reading(log, "report", quiet=quiet):
            assert log.state.step == 1
        assert ("cannot register" in caplog.text) == (not quiet)
    for error in (None, RuntimeError("the real one")):
        with pytest.raises(RuntimeError, match="the real one") if error else contextlib.nullcontext():  # noqa: SIM117
            with reading(RunLog(Stuck(tmp_path / "store"), "run"), "replay"):
                if error:
                    raise error


def test_a_reader_that_comes_after_the_entry_sees_it_and_stops_the_deletion(log: RunLog, tmp_path: Path):
    _train(log, steps=3, state_every=1)
    reader_log = open_run(local_store(tmp_path), "run")
    came = reading(reader_log, "report")
    report = _collect(Meanwhile(tmp_path / "store", lambda rival: came.__enter__(), after=True))
    assert not report.removed and [reader.what for reader in report.readers] == ["report"]
    assert reader_log.state.retired_policies == {1, 2}, "it folds the log after it has registered"
    assert len(_files(log.store, "policies")) == 3
    came.__exit__(None, None, None)
    assert _collect(log.store).removed and len(_files(log.store, "policies")) == 1


def test_the_log_is_decoded_once(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    _train(log, steps=60, state_every=10)
    log.append(Alias(name="shipped", version=33, checksum=""))
    decoded: Counter[int] = Counter()
    read = log_segments.read_entry
    monkeypatch.setattr(
        log_segments, "read_entry", lambda *a, number, **k: decoded.update([number]) or read(*a, number=number, **k)
    )
    # The least a cache can hold: what is asked for twice is decoded twice.
    uncached = SimpleNamespace(lru_cache=lambda maxsize: lambda function: function)
    monkeypatch.setattr(log_segments, "functools", uncached)
    assert _collect(log.store).removed
    # Once for the plans; sessions and aliases once for the fold; an aliased policy when `Retire` is checked and folded,
    # for its anchor.
    assert decoded and max(decoded.values()) <= 3


def test_age_chooses_among_what_may_go(log: RunLog):
    _train(log, steps=5, state_every=1)
    for number in range(1, 6):
        folder = f"policies/{number}-a"
        for name in (f"{folder}/model.safetensors", f"{folder}/digest.json", f"shards/s{number}.arrow"):
            _age(log, name, (10 - number) * DAY)
    old = _collect(log.store, dry_run=True, older_than_seconds=7.5 * DAY)
    assert _names(old) == ["1", "2", "s1", "s2"]
    assert _names(_collect(log.store, max_bytes=0, older_than_seconds=7.5 * DAY)) == _names(old)
    _check(log, Rules(keep_last=1))


def test_a_size_is_of_all_named_runs_together_oldest_first(tmp_path: Path):
    store = local_store(tmp_path)
    for run, age in (("young", 1), ("old", 2)):
        log = a_log(store, run_id=run)
        for version in (1, 2):
            log.append(a_shard(f"{run}{version}", [a_summary(version)]))
            step = a_step(log.state, trained=[f"0.task{version}"])
            policy = replace(step.policy, path=log.key(f"policies/{version}"))
            log.append(replace(step, policy=policy, state_path=log.key(f"state/{version}")))
            store.put(f"{policy.path}/model.safetensors", b"x" * 1000)
            _age(log, f"policies/{version}/model.safetensors", age * DAY)
    total = sum(file.num_bytes for file in store.walk("runs"))
    for max_bytes, removed in ((total, []), (total - 1, ["1"])):
        reports = collect_garbage(store, [], Rules(keep_last=1, max_bytes=max_bytes), dry_run=False)
        assert {report.run: _names(report) for report in reports} == {"old": removed, "young": []}


def test_ages_and_sizes_have_units():
    for text, seconds in {"30d": 30 * DAY, "12h": 12 * HOUR, "": 0.0}.items():
        assert make_rules(keep_last=1, keep_every=0, older_than=text, max_size="").older_than_seconds == seconds
    for text, num_bytes in {"50GB": 50 * 10**9, "1.5 GiB": 3 * 2**29, "": None}.items():
        assert make_rules(keep_last=1, keep_every=0, older_than="", max_size=text).max_bytes == num_bytes
    for text in ("3 years", "30"):
        with pytest.raises(ValueError, match=f"'{text}'.*for example 30d"):
            make_rules(keep_last=1, keep_every=0, older_than=text, max_size="")


def test_a_folder_that_several_versions_share_stays_while_one_of_them_is_kept(log: RunLog):
    """A skipped step makes a version with the weights, and so the files, of the one before."""
    _train(log, steps=2)
    for _ in range(2):  # versions 2, 3 and 4 are one folder
        step, live = a_step(log.state, trained=[]), log.state.policies[log.state.newest_version]
        log.append(replace(step, policy=replace(step.policy, path=live.path, weights_sha256=live.weights_sha256)))
    _collect(log.store)
    assert _files(log.store, "policies") == ["policies/2-a"] and log.refresh().retired_policies == {1}, "4 is live"
    _train(log, steps=3)
    log.append(Alias(name="best", version=3, checksum=""))
    report = _collect(log.store)
    assert _files(log.store, "policies") == ["policies/2-a", "policies/7-a"] and set(report.kept) == {0, 3, 7}
    log.append(Alias(name="best", version=7, checksum=""))
    [shared] = [item for item in _collect(log.store).items if item.kind == "policy"]
    assert shared.name == "2, 3, 4" and _files(log.store, "policies") == ["policies/7-a"]
    assert log.refresh().retired_policies == {1, 2, 3, 4, 5, 6}


def test_an_anchor_stays_while_a_kept_policy_is_a_delta_against_it_and_goes_with_its_deltas(log: RunLog):
    """Also if the oldest go first, down to a size: a delta is useless without its anchor."""
    _train(log, anchors=[None, 1, 1, None, 4, 4])
    num_bytes = sum(file.num_bytes for file in log.store.walk("runs/run"))
    report = _collect(log.store, max_bytes=num_bytes - 1)
    assert [item.name for item in report.items if item.kind == "policy"] == ["1, 2, 3"]
    assert log.refresh().retired_policies == {1, 2, 3}
    assert _files(log.store, "policies") == ["policies/4-a", "policies/5-a", "policies/6-a"]
    assert _collect(log.store).kept == {0: "base model", 4: "anchor of 6", 6: "live, among the newest"}
    assert _files(log.store, "policies") == ["policies/4-a", "policies/6-a"]


def test_the_log_refuses_to_retire_what_is_needed_and_writers_that_come_after_the_removal(log: RunLog):
    """A plan may miss them: its files' writers slept, or needed something since."""
    _train(log, anchors=[None, 1, None, 3])
    _shard(log, 9, version=4)
    log.append(Alias(name="shipped", version=2, checksum=""))
    for shards, policies, reason in (
        (["s9"], [], "hold groups no step has taken"),
        ([], [4], r"\[4\] are live or have an alias"),
        ([], [1], r"\[1\] are anchors"),
        ([], [3], r"\[3\] are anchors"),
    ):
        with pytest.raises(Conflict, match=reason):
            log.append(Retire(shard_ids=shards, policy_versions=policies, state_paths=[], reason=""))
    files = ["shards/late.arrow", "policies/5-late/m", "state/5-late/m"]
    for name in files:
        log.store.put(log.key(name), b"its writer sleeps")
    log.append(Alias(name="shipped", version=4, checksum=""))
    _collect(log.store, orphan_seconds=0.0)
    assert not [name for name in files if log.store.exists(log.key(name))]
    step = a_step(log.refresh(), trained=["0.task9"])
    with pytest.raises(Conflict, match="new id"):
        log.append(a_shard("late", [a_summary(10)]))
    for late in (
        replace(step, policy=replace(step.policy, path=log.key("policies/5-late"))),
        replace(step, state_path=log.key("state/5-late")),
        replace(step, policy=replace(step.policy, anchor=1)),
    ):
        with pytest.raises(Conflict, match="step 5 came so late that its files were removed; start this run again"):
            log.append(late)
    log.append(step)
    assert RunLog(log.store, "run").refresh() == log.state


def test_beside_a_training_the_last_steps_can_be_replayed_and_nothing_else_grows(log: RunLog) -> None:
    rules = Rules(keep_last=2, keep_evaluated=None, evaluate_every=10, replay_steps=6)
    beside = RunRetention(open_run(log.store, "run"), rules)
    most = {"state": 0, "shards": 0}
    for step in range(1, 41):
        anchor = (step - 1) // 5 * 5 + 1  # as `anchor_every` = 5 makes them
        _train(log, state_every=2, anchors=[anchor if anchor < step else None])
        kept = beside.collect().kept
        if step % 10 == 3:  # an evaluation that took three steps
            assert kept[step - 3] == ("to be evaluated" if step > 3 else "base model")
            _eval_shard(log, f"e{step - 3}", version=step - 3)
            _score(log, step - 3, 1 / step if step > 3 else 0.0, f"e{step - 3}")
        plan = plan_replay(log.refresh(), run="run", first=max(1, step - 5), last=step)
        files = _data(log.store)
        needed = [log.state.steps[number - 1] for number in plan.steps]
        assert {f"shards/{shard_id}" for each in needed for shard_id in each.shard_sha256} <= set(files)
        assert not plan.resumed_from or f"state/{plan.resumed_from}-a" in files
        most = {folder: max(count, len(_files(log.store, folder))) for folder, count in most.items()}
    assert most == {"state": 4, "shards": 2 * 6 + 3}
    assert _files(log.store, "policies") == sorted(f"policies/{v}-a" for v in (6, 10, 16, 20, 26, 30, 36, 39, 40))
    reasons = {10: "best on test, evaluated", 26: "anchor of 30", 30: "evaluated", 40: "live, to be evaluated"}
    assert {v: r.removesuffix(", among the newest") for v, r in kept.items() if v in reasons} == reasons
    assert beside.collect().items == [] and str(rules) == "keep_last 2, keep_evaluated all, replay_steps 6"
    assert {*kept_policies(log.state, Rules(keep_last=1, keep_evaluated=1), {})} == {0, 10, 30, 40}


def test_a_writer_and_two_collectors_at_once(tmp_path: Path):
    """Nothing that is needed vanishes: not what was just written, and not what waits."""
    rounds, rules = 10, Rules(keep_last=1)
    log = a_log(local_store(tmp_path))
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            collect_garbage(local_store(tmp_path), ["run"], rules, dry_run=False)

    with ThreadPoolExecutor(2) as pool:
        collectors = [pool.submit(collect), pool.submit(collect)]
        try:
            for version in range(1, rounds + 1):
                _shard(log, 100 + version, version=version - 1)
                _train(log, steps=1, state_every=4)
                assert read_shard(log, log.state.shards[f"s{100 + version}"]).num_rows
                log.append(Alias(name="rollout", version=version, checksum=""))
        finally:
            done.set()
        for collector in collectors:
            collector.result(timeout=120)
    assert log.refresh().retired_policies and len(log.state.pending) == rounds, "they met"
    _check(log, rules)
    _collect(log.store)
    assert _files(log.store, "policies") == [f"policies/{rounds}-a"]
    _check(log, rules)


@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["step", "state", "eval", "alias", "shard", "gc"]), st.integers(0, 3)), max_size=25
    ),
    keep_last=st.integers(0, 3),
    keep_every=st.integers(0, 3),
)
def test_whatever_happened_before_what_is_kept_can_be_trained_again(
    events: list[tuple[str, int]], keep_last: int, keep_every: int
):
    rules = Rules(keep_last=keep_last, keep_every=keep_every)
    log = a_log(MemoryStore())

    def a_file_shard(*, is_eval: bool = False, version: int = 0) -> str:
        number = len(log.state.shards)
        log.store.put(log.shard_key(f"s{number}"), b"rows")
        log.append(replace(a_shard(f"s{number}", [a_summary(number)], is_eval=is_eval), head_version=version))
        return f"s{number}"

    for kind, number in [*events, ("gc", 0)]:
        state = log.refresh()
        alive = sorted(set(state.policies) - state.retired_policies)
        version = alive[number % len(alive)]
        match kind:
            case "step" | "state":
                a_file_shard()
                step = a_step(state, trained=list(state.pending)[: number + 1])
                log.store.put(f"{step.policy.path}/model.safetensors", b"w")
                if kind == "state":
                    step = replace(step, state_path=log.key(f"state/{step.claim.step}"))
                    log.store.put(f"{step.state_path}/state.safetensors", b"m")
                log.append(step)
            case "eval":
                _score(log, version, number / 3, a_file_shard(is_eval=True, version=version))
            case "alias":
                log.append(Alias(name="name", version=version, checksum=""))
            case "shard":
                a_file_shard()
            case "gc":
                collect_garbage(log.store, ["run"], rules, dry_run=False)
                _check(log, rules)
                assert _collect(log.store, "run", keep_last=keep_last, keep_every=keep_every).items == []
