"""200 kill −9 over a run with several producers and a trainer: nothing lost, nothing skipped, nothing trained twice."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from storage.log.entries import OUTCOMES
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.opening import open_store
from tests.builders import a_log
from tests.chaos import storm

PRODUCERS = 4


def weather(uri: str, *, kills: int, longest_pause: float, environment: dict[str, str]) -> RunState:
    """Let the processes work, kill one at a random moment, start another in its place; then let them finish.

    Raises `AssertionError` as soon as something committed is gone. `longest_pause` in seconds, between two kills.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos.storm"])
    store = open_store(uri)
    a_log(store)
    draw = random.Random(3)
    seeds = iter(range(10**6))

    def start(role: int) -> BaseProcess:
        work = storm.train if role == 0 else storm.produce
        process = context.Process(target=work, args=(uri, "run", next(seeds), environment), daemon=True)
        process.start()
        return process

    crew = [start(role) for role in range(1 + PRODUCERS)]
    seen: dict[str, str] = {}
    watcher = RunLog(store, "run")
    for _ in range(kills):
        time.sleep(draw.uniform(0, longest_pause))  # the random moment itself
        role = draw.randrange(len(crew))
        crew[role].kill()
        crew[role].join()
        assert crew[role].exitcode == -9, "it had ended by itself"
        crew[role] = start(role)
        state = watcher.refresh()  # raises where the conservation law does not hold
        now = {**dict.fromkeys(state.pending, "pending"), **state.outcomes}
        assert seen.keys() <= now.keys(), "a committed group was lost"
        changed = {now[group_id] for group_id, before in seen.items() if before not in ("pending", now[group_id])}
        assert not changed, f"a group that was done became {changed}"
        seen = now
    deadline = time.monotonic() + 120
    while min(watcher.refresh().counters()[outcome] for outcome in OUTCOMES) == 0:
        assert time.monotonic() < deadline, "every outcome was to be seen"
        time.sleep(0.05)
    end = max(watcher.refresh().positions) + 1
    store.put(storm.ENDING, str(end).encode())
    for process in crew:
        process.join(timeout=240)
        assert process.exitcode == 0
    state = watcher.refresh()
    assert state.positions >= set(range(end)), "a prompt was skipped"
    return state


def check(uri: str, state: RunState) -> None:
    """Count what was trained from what the trainers left, not from the log's own fold."""
    store = open_store(uri)
    reopened = RunLog(store, "run")
    assert reopened.refresh() == state
    assert [entry.number for entry in reopened.entries] == list(range(state.entries))
    rows = [tuple(row) for step in state.steps for row in json.loads(store.get(step.policy.path))]
    assert len(rows) == len(set(rows)), "a row was trained twice"
    trained = [group.group_id for step in state.steps for group in step.claim.trained]
    assert len(trained) == len(set(trained)) == storm.BATCH * state.step
    assert len(rows) == sum(state.groups[group_id].rows for group_id in trained), "a committed trajectory was lost"
    assert not state.quarantined
    counters = state.counters()
    assert counters["submitted"] == sum(counters[name] for name in (*OUTCOMES, "pending")) == len(state.positions)
    assert min(counters[name] for name in OUTCOMES) > 0, "every outcome was to be seen"


def test_200_kills_over_several_producers_and_a_trainer_lose_nothing(tmp_path: Path):
    uri = (tmp_path / "store").as_uri()
    check(uri, weather(uri, kills=200, longest_pause=0.2, environment={}))
