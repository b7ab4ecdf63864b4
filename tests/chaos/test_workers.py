"""Rollout workers that die or hang: the run goes on without them, or says who hangs and where."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.object_store import LocalStore
from storage.shards.shards import read_shard
from tests.chaos.outcomes import check_trained_once, state_of
from tests.chaos.test_faults import LONG
from tests.conftest import PROJECT, SCRIPTED, Home

ARITHMETIC = PROJECT / "examples" / "arithmetic.toml"
ENGINE_REPLACED = 400.0
"""Seconds from the death of an engine to the next step; most of them are the start of another engine."""
PUBLICATION_ENDED = 120.0
"""Seconds beyond `rollout.stall_timeout` until a run has ended whose engine does not load."""
REWARD_ENDED = 60.0
"""Seconds beyond `reward.timeout` until groups are committed of which an attempt's reward never comes."""


@pytest.mark.slow
def test_a_worker_whose_loop_hangs_ends_the_run_with_a_report(home: Home, base_model: Path) -> None:
    stuck = ["workflow=tests.chaos.stuck:Blocks", "rollout.attempt_timeout=4", "rollout.stall_timeout=5"]
    done = home.run("train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0", *stuck, check=False)
    assert done.returncode == 2
    assert "no progress for" in done.stderr and "0 of 4 groups are ready for step 1" in done.stderr
    assert "rollout-0 does not answer: see the stacks in its log" in done.stderr


@pytest.mark.parametrize("inflict", [psutil.Process.kill, psutil.Process.suspend])
def test_a_warm_up_that_dies_or_is_stopped_begins_again(home: Home, inflict: Callable[[psutil.Process], None]) -> None:
    warm_up = ["workflow=examples.arithmetic:Arithmetic", "warmup.num_steps=30"]
    process = home.start("train", str(SCRIPTED), *warm_up, "evaluation.every=0", "steps=1", "run=warm")
    log = home.path / "logs" / "warm" / "warmup.log"
    home.wait(process, log.exists)
    inflict(home.process_of("warm", "warmup"))
    assert process.wait(timeout=240) == 0, home.said()
    assert re.search(r"warmup died; its log is \S+; it is tried once more", home.said())
    assert state_of(home, "warm").step == 1


def _engine_of(worker: psutil.Process) -> list[psutil.Process]:
    """vLLM's core: a child of a fork server in the worker's process group."""
    parents = {}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == os.getpgid(worker.pid):
                parents[process] = process.ppid()
    servers = {process.pid for process in parents} - {worker.pid}
    return [process for process, parent in parents.items() if parent in servers]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_stopped_engine_is_killed_and_replaced_with_its_worker(home: Home, base_model: Path) -> None:
    """While requests are running, and in the long form also while it loads new weights."""
    batch_size, num_steps, run = 8, 40, "arithmetic"
    process = home.start(
        *("train", str(ARITHMETIC), f"model={base_model}", f"steps={num_steps}"),
        *(f"batch_size={batch_size}", "n_samples=2", "evaluation.every=0", "max_staleness=0"),
        "rollout.max_concurrent=2",  # most of a step is generation, so it is met there however seldom one looks
    )

    def loads_weights(state: RunState) -> bool:
        served = state.aliases.get("rollout")
        return served is not None and state.newest_version > served.version

    def runs_requests(state: RunState) -> bool:
        return state.step < num_steps and not loads_weights(state) and state.pending_accepted < batch_size

    def stop_while(busy: Callable[[RunState], bool], family: list[psutil.Process]) -> None:
        """Stop an engine's processes at a moment in which it is `busy`, and leave it there."""
        while True:
            home.wait(process, lambda: busy(state_of(home, run)))
            for member in family:
                member.suspend()
            time.sleep(1)  # whatever needs no engine comes to its end
            if busy(state_of(home, run)):
                return
            for member in family:
                member.resume()

    committed: set[str] = set()
    kills = (("rollout-0", runs_requests), ("rollout-1", loads_weights))
    for worker, busy in kills if LONG else kills[:1]:
        home.wait(process, lambda name=worker: name in {s.producer for s in state_of(home, run).shards.values()})  # type: ignore[misc]
        family = _engine_of(home.process_of(run, worker))
        assert family
        stop_while(busy, family)
        before = state_of(home, run)
        home.wait(process, lambda goal=before.step + 1: state_of(home, run).step >= goal, seconds=ENGINE_REPLACED)  # type: ignore[misc]
        assert "engine core has ended" in (home.path / "logs" / run / f"{worker}.log").read_text()
        said = (home.path / "output.txt").read_text()
        assert said.count(f"{worker} died during") == 1 and "Traceback" not in said, "a handled death is one line"
        committed |= before.groups.keys()
    assert process.wait(timeout=120) == 0, home.said() + home.worker_logs()
    state = state_of(home, run)
    check_trained_once(state, steps=num_steps, batch_size=batch_size, committed=committed)
    assert not any(group.failures for group in state.groups.values()), "a dead engine was asked"


@pytest.mark.slow
def test_an_engine_that_never_loads_a_policy_ends_the_run_and_the_same_command_goes_on(
    home: Home, base_model: Path
) -> None:
    stall_timeout, num_steps = 20, 4
    command = ["train", str(SCRIPTED), f"model={base_model}", f"steps={num_steps}", "evaluation.every=0"]
    command += ["workflow=tests.chaos.stuck:LoadsForEver"]
    command += [f"rollout.stall_timeout={stall_timeout}", f"rollout.attempt_timeout={stall_timeout - 1}"]
    process = home.start(*command)
    home.wait(process, lambda: state_of(home, "scripted").step == 2)
    assert process.wait(timeout=stall_timeout + PUBLICATION_ENDED) == 2
    said = (home.path / "output.txt").read_text()
    assert f"publishing policy 2 has taken more than {stall_timeout} s" in said, said
    assert "live policy 2" in said and "rollout-0: policy 1" in said and "StuckEngine._load at stuck.py" in said, said
    before = state_of(home, "scripted")
    home.run(*command)
    state = state_of(home, "scripted")
    check_trained_once(state, steps=num_steps, committed=before.groups.keys())
    assert state.steps[:2] == before.steps[:2]


@pytest.mark.slow
def test_a_reward_that_never_comes_costs_its_attempt_alone(home: Home, base_model: Path) -> None:
    timeout, num_steps = 8, 2
    home.run(
        *("train", str(SCRIPTED), f"model={base_model}", f"steps={num_steps}", "evaluation.every=0"),
        *("workflow=tests.chaos.stuck:ScoresForEver", f"reward.timeout={timeout}", "reward.processes=4"),
    )
    log = RunLog(LocalStore(home.path / "store"), "scripted")
    state = log.refresh()
    check_trained_once(state, steps=num_steps)
    for group in state.groups.values():
        assert group.accepted and group.usable == group.expected - 1 == 3 and group.failures == {"timeout": 1}
    for entry in log.entries:
        if isinstance(entry.body, Shard):
            rows = read_shard(log, entry.body).to_pylist()
            assert {row["attempt"] for row in rows} == {1, 2, 3} and {row["status"] for row in rows} == {"ok"}
            assert timeout <= entry.written_at - min(row["queued_at"] for row in rows) < timeout + REWARD_ENDED
