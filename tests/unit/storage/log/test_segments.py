"""Segments only save time: with them, without them, or with damaged ones, a log says the same."""

from __future__ import annotations

import gc
import json
import logging
import operator
from typing import Any

import pytest

from storage.log.entries import Alias, LogEntry, Session, Shard
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict, LogDamaged, RunState
from storage.log.segments import _ENTRIES_UNPACKED, read_entry
from storage.objects.object_store import StoreError
from tests.builders import MemoryStore, a_log, a_shard, a_step, a_summary

SIZE = 5


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLog, "segment_sizes", (SIZE, 2 * SIZE))


def _run(num_rounds: int, store: MemoryStore | None = None, *, run_id: str = "run") -> RunLog:
    """Two entries, then a shard of two groups, a step on one of them and an alias per round."""
    log = a_log(store, run_id=run_id)
    for number in range(num_rounds):
        log.append(a_shard(f"s{number}", [a_summary(2 * number), a_summary(2 * number + 1)]))
        log.append(a_step(log.state, trained=[f"0.task{2 * number}"]))
        log.append(Alias(name="rollout", version=number + 1, checksum=str(number)))
    return log


def _segments(log: RunLog) -> list[str]:
    return log.store.names("runs/run/log/segments")


def test_every_complete_block_of_entries_becomes_a_segment():
    log = _run(7)
    assert log.state.entries == 23
    assert _segments(log) == [
        f"{number:020d}.{size}.arrow" for number, size in [(0, 10), (0, 5), (5, 5), (10, 10), (10, 5), (15, 5)]
    ]


def test_only_what_is_asked_for_is_unpacked(monkeypatch: pytest.MonkeyPatch):
    log = _run(7)
    kinds = [type(entry.body) for entry in log.entries]
    group = log.state.groups["0.task3"]
    read: list[int] = []

    def reading(document: bytes, *, number: int, source: str) -> Any:
        read.append(number)
        return read_entry(document, number=number, source=source)

    monkeypatch.setattr("storage.log.segments.read_entry", reading)
    reopened = RunLog(log.store, "run")
    reopened.refresh()
    eager = list(read)
    assert {kinds[number] for number in eager} == {Session}
    assert reopened.state.groups["0.task3"] == group
    assert [kinds[number] for number in read[len(eager) :]] == [Shard]


def test_a_reopened_log_knows_the_groups_and_steps_in_its_segments():
    """Everything else that a log opened from segments does: see `ConservationLaw` in test_run_log."""
    store = MemoryStore()
    _run(4, store)
    log = RunLog(store, "run")
    with pytest.raises(Conflict, match="already committed at other positions"):
        log.append(a_shard("moved", [a_summary(99, group_id="0.task3")]))
    assert log.append(log.state.steps[1]).step == 4
    assert log.state.steps[1:3] == _run(4).state.steps[1:3]


def test_a_log_that_stays_open_holds_all_but_the_newest_entries_packed():
    reader = RunLog(store := MemoryStore(), "run")
    reader.refresh()
    writer = _run(4, store)
    for number in range(4, 20):
        writer.append(a_shard(f"s{number}", [a_summary(2 * number), a_summary(2 * number + 1)]))
        writer.append(a_step(writer.state, trained=[f"0.task{2 * number}"]))
        reader.refresh()
    grown = RunLog(store, "run")
    grown.segment_sizes = (10**6, 10**7)  # never there, so it reads entry by entry
    grown.refresh()
    assert grown.entries.num_unpacked == grown.state.entries
    assert len(reader._segments) == reader.state.entries // SIZE
    assert all(map(operator.is_, writer._segments, reader._segments)), "the logs of a process share them"
    for log in (writer, reader):
        assert len(log.entries) == log.state.entries > 40 and log.entries.num_unpacked < SIZE
        assert grown.state == log.state and list(grown.entries) == list(log.entries)


def test_a_fold_goes_as_soon_as_its_log_does_and_holds_no_more_than_it_must():
    """Without the garbage collector, which may not come by for hours; a record is 30 times its entry in a segment."""
    store = MemoryStore()
    _run(200, store)

    def alive() -> list[int]:
        return [sum(isinstance(each, kind) for each in gc.get_objects()) for kind in (RunState, LogEntry)]

    gc.collect()
    gc.disable()
    try:
        of_other_tests = alive()
        for _ in range(3):
            log = RunLog(store, "run")
            log.refresh()
            assert (len(list(log.entries)), log.state.outcomes["0.task0"]) == (602, "trained")
        folds, records = (now - before for now, before in zip(alive(), of_other_tests, strict=True))
        assert folds == 1 and records <= _ENTRIES_UNPACKED + SIZE
    finally:
        gc.enable()


def test_entries_that_arrow_does_not_take_stay_as_they_are():
    log = _run(2)
    number = log.state.entries
    document = {
        "number": number,
        "kind": "session",
        "written_at": 1.0,
        "body": {"id": "half \ud800", "code_version": ""},
    }
    log.store.put(f"runs/run/log/{number:020d}.json", json.dumps(document).encode())
    for reopened in (log, RunLog(log.store, "run")):
        for name in ("next", "last", "least"):
            reopened.append(Session(id=name, code_version=""))
        assert [session.id for session in reopened.state.sessions[1:]] == ["half \ud800", "next", "last", "least"]
    assert log.entries.num_unpacked == 7


@pytest.mark.parametrize("damage", ["truncated", "bit-flipped", "empty", "another place's", "another run's", "missing"])
@pytest.mark.parametrize(("number", "size"), [(20, 5), (10, 10)])
def test_a_damaged_segment_is_said_and_its_entries_are_read(
    damage: str, number: int, size: int, caplog: pytest.LogCaptureFixture
):
    log, other = _run(8), _run(8, run_id="other")
    name = f"log/segments/{number:020d}.{size}.arrow"
    whole = log.store.get(log.key(name))
    data = {
        "truncated": whole[:-20],
        "bit-flipped": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        "empty": b"",
        "another place's": log.store.get(log.key(f"log/segments/{0:020d}.{size}.arrow")),
        "another run's": other.store.get(other.key(name)),
    }
    log.store.delete([log.key(name)])
    if damage in data:
        log.store.put(log.key(name), data[damage])
    with caplog.at_level(logging.WARNING):
        reopened = RunLog(log.store, "run")
        assert reopened.refresh() == log.state
    assert (log.key(name) in caplog.text) == (damage != "missing")
    caplog.clear()
    reopened.append(Session(id="next", code_version=""))
    assert log.store.get(log.key(name)) == whole, "the next append mends it"
    assert RunLog(log.store, "run").refresh() == reopened.state and not caplog.text


def test_a_full_disk_costs_the_segment_and_not_the_entry(caplog: pytest.LogCaptureFixture):
    class Full(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise StoreError("no space left")

    log = _run(3, Full())
    assert log.state.entries == 11 and not _segments(log)
    assert "no space left" in caplog.text
    assert RunLog(log.store, "run").refresh() == log.state


@pytest.mark.parametrize("missing", [3, 21])
def test_a_missing_entry_with_later_ones_behind_it_is_a_gap_and_not_an_end(missing: int):
    log = _run(7)
    log.store.delete([f"runs/run/log/segments/{name}" for name in _segments(log)])
    log.store.delete([f"runs/run/log/{missing:020d}.json"])
    with pytest.raises(LogDamaged, match=rf"log/{missing:020d}.json is missing"):
        RunLog(log.store, "run").refresh()


def test_an_entry_committed_between_two_reads_is_no_gap():
    grown = _run(2)

    class Slow(MemoryStore):
        """Reads the first missing entry just before a rival commits it, and the next one just after."""

        def get_many(self, keys: Any) -> list[bytes | None]:
            found = []
            for key in keys:
                found += super().get_many([key])
                if key == late[0]:
                    self.files.update(held)
            return found

    late = [f"runs/run/log/{number:020d}.json" for number in (6, 7)]
    store = Slow()
    store.files = {key: data for key, data in grown.store.files.items() if "segments" not in key}  # type: ignore[attr-defined]
    held = {key: store.files.pop(key) for key in late}
    assert RunLog(store, "run").refresh() == grown.state
