"""Producers that share only the store with the training: they come, die, hang and come back, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home
from tests.flows.meetings import GO

STEPS = 8
BATCH = 4
SAMPLES = 4
PATIENCE = 300.0
"""Seconds without which a wait has failed."""


class _Crowd:
    """A driver that only trains, and producers in state folders of their own."""

    def __init__(self, folder: Path, prefect_api: str, base_model: Path) -> None:
        self.store = LocalStore(folder / "store")
        self.homes = {name: Home(folder / name, prefect_api) for name in ("driver", "a", "b", "c")}
        for home in self.homes.values():
            home.path.mkdir()
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._training = [
            *("train", str(SCRIPTED), f"model={base_model}", f"store={self.store.uri}", f"steps={STEPS}"),
            *("workflow=tests.flows.meetings:Held", "evaluation.every=0"),
            # So that one producer does not take all prompts of a step before the other one is there.
            *("rollout.num_workers=0", "rollout.max_concurrent=2", "rollout.lease_timeout=6"),
        ]

    def train(self) -> None:
        self.running["driver"] = self.homes["driver"].start(*self._training)

    def produce(self, name: str) -> None:
        self.running[name] = self.homes[name].start("produce", "scripted", "--name", name, "--store", self.store.uri)

    def kill(self, name: str) -> None:
        os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def let_go(self, name: str, attempts: int | None = None) -> None:
        """Let so many attempts of a producer go on, or all."""
        folder = self.homes[name].path
        (folder / "next").write_text("" if attempts is None else str(attempts))
        (folder / "next").replace(folder / GO)

    def log(self) -> RunLog:
        log = RunLog(self.store, "scripted")
        log.refresh()
        return log

    def holders(self) -> dict[str, str]:
        """By producer, the worker that has leased something."""
        return {name.partition("-")[0]: name for name in self.log().state.leased.values()}

    def until(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not met():
            ended = {name: process.returncode for name, process in self.running.items() if process.poll() is not None}
            assert not ended and time.monotonic() < deadline, self.said(str(ended))
            time.sleep(0.1)

    def said(self, problem: str) -> str:
        outputs = {name: (home.path / "output.txt") for name, home in self.homes.items()}
        texts = [f"== {name}\n{file.read_text()[-3000:]}" for name, file in outputs.items() if file.exists()]
        return "\n".join([problem, str(self.log().state.counters()), *texts])


@pytest.fixture
def crowd(tmp_path: Path, prefect_api: str, base_model: Path) -> Iterator[_Crowd]:
    crowd = _Crowd(tmp_path, prefect_api, base_model)
    yield crowd
    for process in crowd.running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(900)
def test_producers_come_and_die_and_come_back_and_every_prompt_is_trained_once(crowd: _Crowd) -> None:
    crowd.train()
    crowd.until(lambda: crowd.store.exists("runs/scripted/run.json"))
    crowd.produce("a")
    crowd.produce("b")
    crowd.until(lambda: crowd.holders().keys() == {"a", "b"})
    dead, hung = crowd.holders()["a"], crowd.holders()["b"]
    halves = [psutil.Process(crowd.running["b"].pid), crowd.homes["b"].process_of("scripted", hung)]
    crowd.kill("a")
    for half in halves:  # the driver first: it would end a worker that alone has been stopped
        half.suspend()
    crowd.let_go("c", attempts=BATCH * SAMPLES)  # with more, c might take all prompts of the next step too
    crowd.produce("c")
    # Nobody is left who could take a step's worth of prompts, until c is here and theirs are free again.
    crowd.until(lambda: crowd.log().state.step >= 1)
    released = {e.body.holder: e.body.reason for e in crowd.log().entries if isinstance(e.body, Release)}
    assert released.keys() == {dead, hung} and all(r.startswith("no sign of life") for r in released.values())
    crowd.until(lambda: "c" in crowd.holders())
    leased = dict(crowd.log().state.leased)
    crowd.kill("driver")
    crowd.train()
    crowd.until(lambda: len(crowd.log().state.sessions) == 2)
    now = crowd.log().state
    lost = [p for p, holder in leased.items() if now.leased.get(p) != holder and p not in now.positions]
    assert not lost, "a producer's work does not end with the driver's"
    crowd.let_go("b")
    for half in reversed(halves):
        half.resume()
    crowd.until(lambda: hung in {shard.producer for shard in crowd.log().state.shards.values()})
    crowd.let_go("c")
    for name in ("driver", "b", "c"):
        process = crowd.running.pop(name)
        assert process.wait(timeout=PATIENCE) == 0, crowd.said(f"{name} ended with {process.returncode}")

    log = crowd.log()
    state, counters = log.state, log.state.counters()
    assert state.step == STEPS and counters["trained"] == STEPS * BATCH
    assert state.positions == set(range(len(state.groups))), "a prompt was lost, or committed twice"
    assert not state.leased and not state.producers
    joins = Counter(entry.body.holder for entry in log.entries if isinstance(entry.body, Join))
    assert joins[dead] == 1 and joins[hung] == 2, "what was given up and lives has joined again"
    made = {shard.producer.partition("-")[0] for shard in state.shards.values()}
    assert made == {"b", "c"}
    assert state.aliases["rollout"].version == STEPS and state.aliases["rollout"].checksum == ""
    assert "the run has its 8 steps" in (crowd.homes["c"].path / "output.txt").read_text()
