"""A producer whose way to the object store is cut, and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.opening import open_store
from tests.conftest import MILLRACE, PROJECT, SCRIPTED, Home
from tests.faulty_s3 import FaultyS3
from tests.flows.meetings import GO

STEPS, BATCH = 3, 4
PATIENCE = 300.0


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it started, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_producer_that_loses_its_network_comes_back_and_nothing_is_lost(
    home: Home, base_model: Path, tmp_path: Path, moto: dict[str, str], bucket: str
) -> None:
    store = f"s3://{bucket}/lake"
    home.environment |= moto
    log = RunLog(open_store(store), "scripted")
    far, output = tmp_path / "far", home.path / "logs" / "far" / "producer.log"  # where a failing `wait` reads it
    for folder in (far, output.parent):
        folder.mkdir(parents=True)
    with FaultyS3(moto).running() as proxy, contextlib.ExitStack() as started:
        driver = home.start(
            *("train", str(SCRIPTED), f"model={base_model}", f"store={store}", f"steps={STEPS}"),
            *("workflow=tests.flows.meetings:Held", "evaluation.every=0"),
            *("rollout.num_workers=0", "rollout.lease_timeout=6"),
        )
        started.callback(_kill, driver)
        home.wait(driver, lambda: log.store.exists("runs/scripted/run.json"), seconds=PATIENCE)
        environment = {**os.environ, **proxy.variables, "MILLRACE_HOME": str(far)}
        environment.pop("PREFECT_API_URL", None)  # nothing but the store is in reach
        producer = subprocess.Popen(
            [str(MILLRACE), "produce", "scripted", "--store", store],
            env=environment,
            stdout=started.enter_context(open(output, "w")),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=PROJECT,
        )
        started.callback(_kill, producer)
        home.wait(driver, lambda: bool(log.refresh().leased), seconds=PATIENCE)
        num_requests = len(proxy.requests)
        proxy.is_up.clear()
        home.wait(driver, lambda: not log.refresh().producers, seconds=PATIENCE)
        [release] = [entry.body for entry in log.entries if isinstance(entry.body, Release)]
        assert release.reason.startswith("no sign of life") and not log.state.leased
        proxy.is_up.set()
        (far / GO).touch()
        for process in (driver, producer):
            assert process.wait(timeout=PATIENCE) == 0, home.said()

    state = log.refresh()
    assert state.step == STEPS and state.counters()["trained"] == STEPS * BATCH
    assert state.positions == set(range(len(state.groups))) and not state.leased
    joins = [entry.body.holder for entry in log.entries if isinstance(entry.body, Join)]
    assert len(joins) == 2 and set(joins) == {release.holder}, "given up, and back under its name"
    assert {shard.producer for shard in state.shards.values()} == {release.holder}
    assert len(proxy.requests) > num_requests > 0
