"""Whatever a session stands on dies or is stopped: its calls end with what has died, and never wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from infra.ray import liveness
from infra.ray.cluster import Cluster
from infra.ray.hosted import WorkerDied
from infra.ray.liveness import RayLost
from settings.errors import UserError

pytestmark = [pytest.mark.anyio, pytest.mark.server, pytest.mark.timeout(240)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
RAYLET, GCS = "Ray's raylet has died on this machine", "Ray's GCS, which knows all workers, has died"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("name", "number", "error", "says"),
    [
        ("raylet", KILL, RayLost, RAYLET),
        ("raylet", STOP, RayLost, RAYLET),
        ("gcs_server", KILL, RayLost, GCS),
        ("gcs_server", STOP, RayLost, GCS),
        ("ray::RuntimeEnvAgent", KILL, UserError, f"{RAYLET}|worker died"),  # a raylet ends its workers, and itself
        ("ray::Host", STOP, WorkerDied, "worker died during die"),
    ],
)
async def test_every_call_ends_when_a_process_of_ray_is_killed_or_stopped(
    name: str,
    number: int,
    error: type[UserError],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.2)
    async with asyncio.timeout(60), Cluster(log_folder=tmp_path, num_workers=2) as cluster:
        worker = await cluster.host("worker", "tests.unit.infra.ray.counting:Counting")
        await worker.call("open", start=0)
        waiting = asyncio.create_task(worker.call("die", 1))  # as rank 0 it waits for ever
        family = psutil.Process().children(recursive=True)
        next(process for process in family if process.name() == name).send_signal(number)
        with pytest.raises(error, match=says):
            await waiting
        if error is WorkerDied:
            idle = await cluster.run("function", "os:getpid")
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has done its work keeps no memory
                await asyncio.to_thread(psutil.Process(idle).wait, 30)
            return
        assert says.partition("|")[0] in await cluster._watch.lost
        for new in (cluster.host("other", ""), cluster.run("function", ""), worker.call("open")):
            with pytest.raises(RayLost, match=says.partition("|")[0]):
                await new
    if name == "raylet" and number == KILL:
        assert "Raylet is terminated" in (tmp_path / "ray.log").read_text()
    assert "raylet" not in capfd.readouterr().out


def test_an_engine_is_watched_however_deep_it_is_and_other_processes_of_a_worker_are_not(tmp_path: Path) -> None:
    for name in ("VLLM::Core", "reward"):
        (tmp_path / name).symlink_to("/bin/sleep")
    worker = f"sh -c '{tmp_path}/VLLM::Core 300 & wait' & {tmp_path}/reward 300 & wait"  # a fork server is between
    with subprocess.Popen(["/bin/sh", "-c", f'sh -c "{worker}" & wait'], start_new_session=True) as ray:
        try:
            while not {"VLLM::Core", "reward"} <= {each.name() for each in psutil.Process().children(recursive=True)}:
                assert ray.poll() is None
            watched = [each for each in liveness._below(psutil.Process()) if os.getpgid(each.pid) == ray.pid]
            assert sorted(each.name() for each in watched) == ["VLLM::Core", "sh", "sh"]
        finally:
            os.killpg(ray.pid, signal.SIGKILL)
