"""A producer behind a slow link to the object store, which goes down and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.opening import open_store
from tests.conftest import MILLRACE, PROJECT, SCRIPTED, Home
from tests.flows.meetings import GO

STEPS, BATCH = 3, 4
PATIENCE = 300.0
DELAY = 0.04
"""Seconds that a chunk is under way."""
BYTES_PER_SECOND = 2_000_000


class _SlowRelay:
    """Passes bytes on to a server, late and slowly; none while it is down."""

    def __init__(self, server: str) -> None:
        self._server = urlsplit(server)
        self.port = 0
        self.num_bytes = 0
        self.is_down = False
        self._loop = asyncio.new_event_loop()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await asyncio.sleep(DELAY + len(data) / BYTES_PER_SECOND)
                while self.is_down:
                    await asyncio.sleep(DELAY)
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._server.hostname, self._server.port)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    @contextlib.contextmanager
    def running(self) -> Iterator[_SlowRelay]:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it started, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_producer_behind_a_slow_link_that_is_cut_comes_back_and_nothing_is_lost(
    home: Home, base_model: Path, tmp_path: Path, moto: dict[str, str], bucket: str
) -> None:
    store = f"s3://{bucket}/lake"
    home.environment |= moto
    log = RunLog(open_store(store), "scripted")
    far, output = tmp_path / "far", home.path / "logs" / "far" / "producer.log"  # where a failing `wait` reads it
    for folder in (far, output.parent):
        folder.mkdir(parents=True)
    with _SlowRelay(moto["AWS_ENDPOINT_URL"]).running() as relay, contextlib.ExitStack() as started:
        driver = home.start(
            *("train", str(SCRIPTED), f"model={base_model}", f"store={store}", f"steps={STEPS}"),
            *("workflow=tests.flows.meetings:Held", "evaluation.every=0"),
            *("rollout.num_workers=0", "rollout.lease_timeout=6"),
        )
        started.callback(_kill, driver)
        home.wait(driver, lambda: log.store.exists("runs/scripted/run.json"), seconds=PATIENCE)
        environment = {**os.environ, "MILLRACE_HOME": str(far)}
        environment |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
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
        passed = relay.num_bytes
        relay.is_down = True
        home.wait(driver, lambda: not log.refresh().producers, seconds=PATIENCE)
        [release] = [entry.body for entry in log.entries if isinstance(entry.body, Release)]
        assert release.reason.startswith("no sign of life") and not log.state.leased
        relay.is_down = False
        (far / GO).touch()
        for process in (driver, producer):
            assert process.wait(timeout=PATIENCE) == 0, home.said()

    state = log.refresh()
    assert state.step == STEPS and state.counters()["trained"] == STEPS * BATCH
    assert state.positions == set(range(len(state.groups))) and not state.leased
    joins = [entry.body.holder for entry in log.entries if isinstance(entry.body, Join)]
    assert len(joins) == 2 and set(joins) == {release.holder}, "given up, and back under its name"
    assert {shard.producer for shard in state.shards.values()} == {release.holder}
    assert relay.num_bytes > passed > 0
