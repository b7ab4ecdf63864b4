"""A Ray cluster of two nodes that loses one: its workers are rebuilt on the other, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.chaos.outcomes import check_trained_once
from tests.conftest import SCRIPTED, Home

STEPS = 250  # more than pass until the run is paused
PATIENCE = 240.0


@pytest.fixture
def cluster(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two raylets on this machine, each a node of its own to Ray; workers get their environment."""
    home.environment["RAY_AUTH_MODE"] = "disabled"
    for name, value in {**home.environment, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=8)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_costs_its_workers_and_nothing_that_was_committed(
    home: Home, base_model: Path, cluster: Cluster
) -> None:
    home.environment["RAY_ADDRESS"] = cluster.address
    process = home.start(
        *("train", str(SCRIPTED), f"model={base_model}", f"steps={STEPS}", "evaluation.every=0", "run=nodes"),
        *("rollout.num_workers=2", "rollout.max_concurrent=2"),
    )
    log = RunLog(LocalStore(home.path / "store"), "nodes")
    both = {"rollout-0", "rollout-1"}
    home.wait(process, lambda: both <= {shard.producer for shard in log.refresh().shards.values()}, seconds=PATIENCE)
    [node] = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    on_node = [name for name in both if raylet in {parent.pid for parent in home.process_of("nodes", name).parents()}]
    assert len(on_node) == 1, "workers without GPUs are spread over the nodes"
    home.run("pause", "nodes")  # so that it does not end before the lost worker is rebuilt
    before = set(log.refresh().groups)
    assert log.state.step < STEPS
    cluster.remove_node(node, allow_graceful=False)
    # The first in its place may still land on the lost node.
    home.wait(process, lambda: bool(log.refresh().producers.keys() - both), seconds=PATIENCE)
    home.run("resume", "nodes")
    assert process.wait(timeout=PATIENCE) == 0, home.said()

    state = log.refresh()
    check_trained_once(state, steps=STEPS, committed=before)
    joined = [entry.body.holder for entry in log.entries if isinstance(entry.body, Join)]
    left = {entry.body.holder: entry.body.reason for entry in log.entries if isinstance(entry.body, Release)}
    assert joined[:2] == ["rollout-0", "rollout-1"] and len(joined) == 3, joined  # one more in place of the lost one
    assert f"{on_node[0]} died during" in left[on_node[0]]
