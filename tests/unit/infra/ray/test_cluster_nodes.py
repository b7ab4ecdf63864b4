"""Places of engines in a Ray cluster whose nodes come and go, with GPUs that only Ray believes in.

The cluster and its driver are a process that runs this very file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_COUNTING = "tests.unit.infra.ray.counting:Counting"
_SMALL = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
_BUNDLE = {0: {"CPU": 1.0, "GPU": 2.0}}


@pytest.mark.server
def test_an_engine_ends_when_its_node_is_lost_and_when_it_is_stopped_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert done.returncode == 0 and done.stdout.endswith("two engines, one after another\n"), done.stdout + done.stderr
    waits = "rollout-1 waits for 2 GPUs of one node; the nodes of the cluster have 2, 0, and 0 are free in all"
    assert waits in done.stderr


async def _two_engines_on_two_gpus(log_folder: Path) -> None:
    from ray.cluster_utils import Cluster

    from infra.ray import cluster as ours
    from infra.ray import liveness, placement

    placement._LOOK_SECONDS = 0.5
    liveness._below = lambda top, depth=0: []  # the raylets are below this process, as those of no other cluster are
    cluster = Cluster(initialize_head=True, head_node_args={**_SMALL, "num_gpus": 0, "include_dashboard": False})
    node = cluster.add_node(**_SMALL, num_gpus=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    async with ours.Cluster(log_folder=log_folder, num_workers=2, gpus_per_engine=2) as fleet:

        async def host(name: str) -> Any:
            hosted = await fleet.host(name, _COUNTING, num_gpus=fleet.gpus_per_engine)
            await hosted.call("open", start=1)
            return hosted

        first = await host("rollout-0")
        await first.call("process")
        second = asyncio.create_task(host("rollout-1"))
        working = asyncio.create_task(first.call("die", 1))  # only rank 1 would die: this one works for ever
        await asyncio.sleep(2)  # so that it is working, and the other has said that it waits
        assert not second.done() and not working.done()
        assert sorted(_places()) == ["CREATED", "PENDING"]
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(ours.WorkerDied):
            await working
        async with asyncio.timeout(10):  # Ray would look for another node for the engine that is dead
            while _places() != ["PENDING"]:
                await asyncio.sleep(0.05)
        cluster.add_node(**_SMALL, num_gpus=2)
        engine = await second
        assert await engine.call("add", 1) == 2
        assert _places() == ["CREATED"]
        process = await engine.call("process")
        working = asyncio.create_task(engine.call("die", 1))
        os.kill(process, signal.SIGSTOP)
        said: list[str] = []
        logging.getLogger("millrace.workers").addFilter(lambda record: not said.append(record.getMessage()))
        async with asyncio.timeout(60):
            with pytest.raises(ours.WorkerDied):
                await working
            while not said:  # the node's watch says it right behind
                await asyncio.sleep(0.05)
        where = f"(process {process}) has been stopped for 10 s, so it is killed"
        assert len(said) == 1 and said[0].startswith(f"on {socket.gethostname()}: ray::Host") and where in said[0]
    cluster.shutdown()


def _places() -> list[str]:
    """States of all that is not removed."""
    from ray.util import placement_group_table

    places = [place for place in placement_group_table().values() if place["state"] != "REMOVED"]
    assert all(place["bundles"] == _BUNDLE for place in places), places
    return [place["state"] for place in places]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_two_engines_on_two_gpus(Path(sys.argv[1])))
    print("two engines, one after another")
