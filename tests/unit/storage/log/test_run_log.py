"""The log is the truth: its fold conserves every group, a retry changes nothing, and of two rivals one is refused."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.log import entries as records
from storage.log.claims import next_claim
from storage.log.entries import OUTCOMES, Alias, Entry, GroupSummary, Quarantine, Session, claimed_groups
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict, LogDamaged, RunState
from tests.builders import BASE, MemoryStore, a_config, a_log, a_shard, a_step, a_summary


def _with_groups() -> RunLog:
    """A log with one shard `s0` of groups at positions 0 to 3: three entries."""
    log = a_log()
    log.append(a_shard("s0", [a_summary(position) for position in range(4)]))
    return log


def _evaluation(shard_id: str = "e0") -> records.Evaluation:
    return records.Evaluation(
        version=0, split="test", score=0.5, num_tasks=2, num_failed=0, shard_id=shard_id, seconds=1.0
    )


def test_a_retried_step_is_recognised_by_its_policy_even_when_its_clock_differs():
    log = _with_groups()
    step = a_step(log.state, trained=["0.task0"])
    log.append(step)
    assert log.append(replace(step, metrics={"loss": 0.5, "seconds": 9.0})).steps == [step]


class _Racing(MemoryStore):
    """Lets a rival commit in the instant before or after our next entry."""

    def __init__(self, log: RunLog, *, before: Entry | None = None, after: Entry | None = None) -> None:
        super().__init__()
        self.files = log.store.files  # type: ignore[attr-defined]
        self.before, self.after = before, after

    def put_if_absent(self, key: str, data: bytes) -> bool:
        before, after, self.before, self.after = self.before, self.after, None, None
        if before is not None:
            RunLog(self, "run").append(before)
        won = super().put_if_absent(key, data)
        if after is not None:
            RunLog(self, "run").append(after)
        return won


def test_a_lost_race_reads_the_winner_and_an_entry_that_is_overtaken_is_not_written_again():
    store = _Racing(a_log(), before=Session(id="rival", code_version=""))
    state = RunLog(store, "run").append(Session(id="ours", code_version=""))
    assert [session.id for session in state.sessions] == ["first", "rival", "ours"]
    store = _Racing(a_log(), after=Alias(name="rollout", version=0, checksum="rival"))
    state = RunLog(store, "run").append(Alias(name="rollout", version=0, checksum="ours"))
    assert state.entries == 4 and state.aliases["rollout"].checksum == "rival"


class _Slow(MemoryStore):
    """A store whose reads let other threads go first."""

    def get_many(self, keys: Any) -> Any:
        values = super().get_many(keys)
        time.sleep(0.001)
        return values


@pytest.mark.parametrize("segment_sizes", [(100, 10_000), (5, 10)])
def test_threads_that_share_a_log_fold_each_entry_once_and_leave_no_gap(
    monkeypatch: pytest.MonkeyPatch, segment_sizes: tuple[int, int]
):
    """A call that is cancelled leaves its thread behind, and the next call begins beside it; also while entries are
    packed."""
    monkeypatch.setattr(RunLog, "segment_sizes", segment_sizes)
    store = _Slow()
    log = a_log(store)
    with ThreadPoolExecutor(8) as threads:
        for call in [threads.submit(log.append, Session(id=f"{n}", code_version="")) for n in range(32)]:
            call.result()
    assert log.state.entries == 34 == RunLog(store, "run").refresh().entries
    assert {session.id for session in log.state.sessions} == {"first", *map(str, range(32))}


def test_what_contradicts_the_log_is_refused_and_changes_nothing():
    log = _with_groups()
    state = log.append(a_step(log.state, trained=["0.task0"], stale=["0.task1"]))
    step = a_step(state, trained=["0.task2"])
    for body, message in [
        (a_step(state, trained=["0.task2"], failed=["0.task0"]), r"not pending.*0\.task0"),
        (a_step(state, trained=["0.task2"], failed=["0.task1"]), r"not pending.*0\.task1"),
        (a_step(state, trained=["0.task2"], failed=["0.nonsense"]), r"not pending.*0\.nonsense"),
        (a_step(state, trained=["0.task2"], stale=["0.task2"]), r"twice.*0\.task2"),
        (a_shard("s1", [a_summary(1, group_id="0.other"), a_summary(9)]), r"positions \[1\] are already"),
        # A data set that changed under the run puts a known task at a free position.
        (a_shard("s1", [a_summary(9, group_id="0.task0")]), r"0\.task0"),
        (a_shard("s1", [a_summary(8), a_summary(9, group_id="0.task8")]), r"0\.task8"),
        (a_shard("s1", [a_summary(8), a_summary(8, group_id="0.task9")]), r"\[8\]"),
        (replace(BASE, path="models/other"), "version 0 is already published"),
        (replace(BASE, version=2, parent=1), "version 2 has no step"),
        (replace(step, policy=replace(step.policy, version=7)), "step 2 makes policy version 2, and not 7"),
        (Quarantine(shard_id="s9", reason=""), "s9 is not in this log"),
    ]:
        with pytest.raises(Conflict, match=message):
            log.append(body)
        assert RunLog(log.store, "run").refresh().entries == log.refresh().entries == 4


_SESSION = {"number": 3, "kind": "session", "written_at": 1.0, "body": {"id": "x", "code_version": ""}}
_CHANGES: list[dict[str, Any]] = [
    {"kind": "colour"},
    {"body": {"id": "x"}},
    {"body": []},
    {"kind": "step", "body": {"claim": [], "metrics": []}},
    {"kind": "shard", "body": {"seconds": []}},
]
_DAMAGED = [b"", b'{"number": 3, "kind": "sess', b"\xff\xfe", b"[]", b"null", b'{"kind": "pause", "body": {}}']
_DAMAGED += [json.dumps({**_SESSION, **changes}).encode() for changes in _CHANGES]


@pytest.mark.parametrize("document", _DAMAGED)
def test_a_broken_entry_is_damage_and_named(document: bytes):
    log = _with_groups()
    log.store.put("runs/run/log/00000000000000000003.json", document)
    with pytest.raises(LogDamaged, match="00000000000000000003.json"):
        log.refresh()


def test_an_entry_that_contradicts_the_ones_before_is_damage():
    log = _with_groups()
    log.append(a_step(log.state, trained=["0.task0"]))
    copied = log.store.get("runs/run/log/00000000000000000003.json")
    log.store.put("runs/run/log/00000000000000000004.json", copied)
    with pytest.raises(LogDamaged, match=r"00000000000000000004.json cannot be read: .*it is entry 3"):
        log.refresh()
    log.store.put("runs/run/log/00000000000000000004.json", copied.replace(b'"number":3', b'"number":4'))
    with pytest.raises(LogDamaged, match="log entry 4: step 1 does not follow step 1"):
        log.refresh()


def test_a_fold_that_lost_a_group_is_damage():
    log = _with_groups()
    del log.state.pending["0.task2"]
    with pytest.raises(LogDamaged, match="conservation law"):
        log.state.check()


def _retire(state: RunState) -> Entry:
    free = set(state.policies) - {a.version for a in state.aliases.values()} - {state.newest_version, 0}
    return records.Retire(shard_ids=[], policy_versions=sorted(free)[:1], state_paths=["s"], reason="age")


OTHERS: list[Callable[[RunState], Entry]] = [
    lambda state: a_shard(f"e{state.entries}", [a_summary(-1, group_id="eval.task0")], is_eval=True),
    lambda state: _evaluation(f"e{state.entries}"),
    lambda state: Alias(name="rollout", version=state.step, checksum=""),
    lambda state: Alias(name="champion", version=state.step, checksum=""),
    lambda state: records.Registration(version=state.step, model_name="run", registry_version=str(state.step)),
    lambda state: records.Rescore(
        name="stricter", reward="my:reward", reward_sha256="e" * 64, files=dict.fromkeys(state.shards, "d" * 64)
    ),
    lambda state: records.Pause(reason=f"asked at {state.entries}"),
    lambda state: records.Resume(reason="asked"),
    lambda state: records.End(session_id=state.sessions[-1].id if state.sessions else "", outcome="stopped"),
    _retire,
]


class ConservationLaw(RuleBasedStateMachine):
    """Any order of shards, steps, quarantines, retries and late readers: every group is in exactly one state.

    The model is a dictionary: group id → its state, kept by these rules and never read from the log. Segments are of
    four and twelve entries, so that most of what is opened again comes out of them. The clock jumps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(RunLog, "segment_sizes", (4, 12))
        clock = itertools.cycle([4e9, -5.0, 0.0, 1e9])
        self.patch.setattr("storage.log.run_log.time", SimpleNamespace(time=lambda: next(clock)))
        self.log = a_log()
        self.late_reader = RunLog(self.log.store, "run")
        self.states: dict[str, str] = {}
        self.shards: dict[str, list[str]] = {}
        self.position_of: dict[str, int] = {}
        self.lost: list[int] = []
        self.retries: Counter[int] = Counter()
        self.retried: set[str] = set()
        self.leased: dict[int, str] = {}
        self.joined: dict[str, bool] = {}
        """Producers that take part → whether they outlive a session."""
        self.next_position = 0
        self.last: Entry = BASE

    def _append(self, body: Entry) -> None:
        self.log.append(body)
        self.last = body

    def _new_group(self, rewards: list[float | None], accepted: bool, retried: bool) -> GroupSummary:
        if self.lost:
            position = self.lost.pop(0)
        else:
            position, self.next_position = self.next_position, self.next_position + 1
        retry = f".retry{self.retries[position]}" if self.retries[position] else ""
        group_id = f"0.task{position}{retry}"
        self.position_of[group_id] = position
        accepted, version = accepted and not retried, self.log.state.step
        summary = a_summary(position, group_id=group_id, rewards=rewards, accepted=accepted, version=version)
        if retried:
            self.retried.add(group_id)
            self.retries[position] += 1
            self.lost.append(position)
        else:
            self.leased.pop(position, None)
        return replace(summary, retried=retried)

    rewards = st.lists(st.sampled_from([1.0, 0.0, None]), min_size=3, max_size=3)
    groups = st.lists(st.tuples(rewards, st.booleans(), st.sampled_from([False, False, True])))

    @rule(wanted=groups)
    def commit_a_shard(self, wanted: list[tuple[list[float | None], bool, bool]]) -> None:
        groups = [self._new_group(rewards, accepted, retried) for rewards, accepted, retried in wanted]
        shard_id = f"s{self.log.state.entries}"
        self._append(a_shard(shard_id, groups))
        self.shards[shard_id] = [group.id for group in groups]
        self.states |= {group.id: "pending" for group in groups}

    @rule(batch_size=st.integers(1, 4), max_staleness=st.integers(0, 2))
    def take_a_step(self, batch_size: int, max_staleness: int) -> None:
        rules = {"stale_policy": "strict", "min_usable": 2, "on_nothing_accepted": "skip_step"}
        config = a_config(batch_size=batch_size, max_staleness=max_staleness, **rules)
        claim = next_claim(self.log.state, config)
        if claim is None:
            return
        step = a_step(self.log.state, claim)
        self._append(step)
        for outcome, claimed in claimed_groups(step):
            assert self.states[claimed.group_id] == "pending"
            self.states[claimed.group_id] = outcome

    @precondition(lambda self: self.shards)
    @rule(choice=st.randoms())
    def lose_a_shard(self, choice: Any) -> None:
        shard_id = choice.choice(sorted(self.shards))
        self._append(Quarantine(shard_id=shard_id, reason="lost"))
        for group_id in self.shards.pop(shard_id):
            if self.states[group_id] == "pending":
                del self.states[group_id]
                if group_id not in self.retried:
                    self.lost.append(self.position_of[group_id])
                    self.retries[self.position_of[group_id]] += 1

    holders = st.sampled_from(["rollout-0", "elsewhere-0", "elsewhere-1"])

    @rule(holder=holders, count=st.integers(1, 4))
    def lease(self, holder: str, count: int) -> None:
        state = self.log.state
        positions = state.free_positions(count)
        self._append(records.Lease(holder=holder, positions=positions, number=state.num_leases))
        self.leased.update(dict.fromkeys(positions, holder))

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        self._append(records.Release(holder=holder, reason="died"))
        self.leased = {position: name for position, name in self.leased.items() if name != holder}
        self.joined.pop(holder, None)

    @rule(holder=holders)
    def join(self, holder: str) -> None:
        outside = holder.startswith("elsewhere")
        self._append(records.Join(holder=holder, id=f"join{self.log.state.entries}", outside=outside))
        self.leased = {position: name for position, name in self.leased.items() if name != holder}
        self.joined[holder] = outside

    @rule(make=st.sampled_from(OTHERS))
    def append_what_moves_no_group(self, make: Callable[[RunState], Entry]) -> None:
        self._append(body := make(self.log.state))
        if isinstance(body, records.Pause | records.Resume):
            assert bool(self.log.state.paused) == isinstance(body, records.Pause)

    @rule(is_rival=st.booleans())
    def start_again(self, is_rival: bool) -> None:
        session = Session(id=f"session{self.log.state.entries}", code_version="")
        if is_rival:  # then the other one has to write the next segment
            self.late_reader.append(session)
        self._append(session)
        self.joined = {holder: outside for holder, outside in self.joined.items() if outside}
        self.leased = {position: name for position, name in self.leased.items() if name in self.joined}

    @rule()
    def retry_the_last_append(self) -> None:
        entries = self.log.state.entries
        assert RunLog(self.log.store, "run").append(self.last).entries == entries

    @rule()
    def read_late(self) -> None:
        assert self.late_reader.refresh() == self.log.state

    @invariant()
    def every_group_is_in_exactly_one_state(self) -> None:
        state = self.log.state
        counters = state.counters()
        assert counters["submitted"] == sum(counters[name] for name in (*OUTCOMES, "pending"))
        assert {**state.outcomes, **dict.fromkeys(state.pending, "pending")} == self.states
        assert len(state.outcomes) + len(state.pending) == len(self.states)
        assert state.positions == {
            self.position_of[group_id] for group_id in self.states if group_id not in self.retried
        }
        assert state.retries == self.retries
        assert state.leased == self.leased
        assert {holder: join.outside for holder, join in state.producers.items()} == self.joined
        taken = state.positions | state.leased.keys()
        assert state.free_positions(2) == [p for p in range(len(taken) + 2) if p not in taken][:2]

    @rule()
    def open_again(self) -> None:
        self.log = RunLog(self.log.store, "run")
        self.log.refresh()

    def teardown(self) -> None:
        reopened = RunLog(self.log.store, "run")
        folded_one_by_one = RunState()
        for entry in self.log.entries:
            folded_one_by_one.apply(entry)
        assert reopened.refresh() == self.log.state == folded_one_by_one
        assert list(reopened.entries) == list(self.log.entries)
        self.patch.undo()


test_the_conservation_law_holds_after_any_entries = ConservationLaw.TestCase
test_the_conservation_law_holds_after_any_entries.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
