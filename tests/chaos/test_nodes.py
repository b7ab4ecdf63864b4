"""A Ray cluster of two nodes that loses one: its workers are rebuilt on the other, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.chaos.outcomes import check_trained_once
from tests.conftest import SCRIPTED, Home

STEPS = 250  # more than pass until the run is paused
RAY = Path(sys.executable).parent / "ray"
PATIENCE = 240.0


class _Cluster:
    """Two raylets on this machine, each a node of its own to Ray."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._home = environment["MILLRACE_HOME"]
        self._nodes: list[psutil.Process] = []
        self._sessions: set[str] = set()
        """What Ray calls this cluster, in the command line of all its processes."""
        self.address = ""

    def start(self) -> None:
        self.address = self._start_node("--head", "--port=0", "--include-dashboard=false")
        self._start_node(f"--address={self.address}")

    def _start_node(self, *arguments: str) -> str:
        before = {process.pid for process in self._raylets()}
        done = subprocess.run(
            [str(RAY), "start", *arguments, "--num-cpus=8", "--object-store-memory=134217728", "--disable-usage-stats"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        raylet = next(process for process in self._raylets() if process.pid not in before)
        self._nodes.append(raylet)
        self._sessions |= set(re.findall(r"session_\d[\w-]+", " ".join(raylet.cmdline())))
        return next(word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address="))

    def _raylets(self) -> list[psutil.Process]:
        """Those of this state folder, the oldest first: what one has just forked has its name too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet" and process.environ().get("MILLRACE_HOME") == self._home:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def node_of(self, worker: psutil.Process) -> int:
        """Which node's raylet a worker is a child of."""
        ancestors = {process.pid for process in worker.parents()}
        return next(number for number, node in enumerate(self._nodes) if node.pid in ancestors)

    def kill_node(self, number: int) -> None:
        self._nodes[number].kill()

    def stop(self) -> None:
        """Everything of this cluster, and of no other one on this machine."""
        for process in psutil.process_iter(["cmdline"]):
            if any(session in part for session in self._sessions for part in process.info["cmdline"] or []):
                for member in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()


@pytest.fixture
def cluster(home: Home) -> Iterator[_Cluster]:
    environment = {**home.environment, "RAY_AUTH_MODE": "disabled"}
    environment |= {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    cluster = _Cluster(environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_costs_its_workers_and_nothing_that_was_committed(
    home: Home, base_model: Path, cluster: _Cluster
) -> None:
    home.environment |= {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    process = home.start(
        *("train", str(SCRIPTED), f"model={base_model}", f"steps={STEPS}", "evaluation.every=0", "run=nodes"),
        *("rollout.num_workers=2", "rollout.max_concurrent=2"),
    )
    log = RunLog(LocalStore(home.path / "store"), "nodes")
    both = {"rollout-0", "rollout-1"}
    home.wait(process, lambda: both <= {shard.producer for shard in log.refresh().shards.values()}, seconds=PATIENCE)
    nodes = {name: cluster.node_of(home.process_of("nodes", name)) for name in sorted(both)}
    assert sorted(nodes.values()) == [0, 1], "workers without GPUs are spread over the nodes"
    lost = next(name for name, node in nodes.items() if node == 1)
    home.run("pause", "nodes")  # so that it does not end before the lost worker is rebuilt
    before = set(log.refresh().groups)
    assert log.state.step < STEPS
    cluster.kill_node(1)
    # The first in its place may still land on the lost node.
    home.wait(process, lambda: bool(log.refresh().producers.keys() - both), seconds=PATIENCE)
    home.run("resume", "nodes")
    assert process.wait(timeout=PATIENCE) == 0, home.said()

    state = log.refresh()
    check_trained_once(state, steps=STEPS, committed=before)
    joined = [entry.body.holder for entry in log.entries if isinstance(entry.body, Join)]
    left = {entry.body.holder: entry.body.reason for entry in log.entries if isinstance(entry.body, Release)}
    assert joined[:2] == ["rollout-0", "rollout-1"] and len(joined) == 3, joined  # one more in place of the lost one
    assert f"{lost} died during" in left[lost]
