"""A trained run of two steps, its texts an attack on the page, and the page in a browser."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from cli.ui.curves import TIME
from storage.log.run_log import RunLog
from storage.objects.object_store import ObjectStore
from storage.records import Message, RolloutGroup, Task
from tests.builders import a_group, a_log, a_step
from tests.unit.cli.builders import an_evaluation, commit

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ DATA }} \u202e\x00\u2028 \"'&"

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH to open the page in")


def a_trained_run(store: ObjectStore, run_id: str = "run") -> RunLog:
    """Two steps, two evaluations; in step 2 one of two groups is a version behind, and one prompt comes again."""
    log = a_log(store, run_id=run_id)
    evaluate(log, 0, [0.0, 0.0, 1.0])
    commit(log, "s0", seen("a", 0, rewards=[0.0, 0.0], text=NASTY), seen("b", 0, rewards=[1.0, 0.0]))
    train(log, "0.a", loss=1.0)
    commit(log, "s1", seen("a", 1, rewards=[1.0, 0.0], version=1, text=NASTY))
    train(log, "0.b", "1.a", loss=3.0)
    evaluate(log, 2, [0.0, 1.0, 1.0])
    return log


def seen(prompt: str, epoch: int, *, text: str = "3", **fields: Any) -> RolloutGroup:
    """The group of a prompt in an epoch, and what its attempts were asked."""
    position = 100 * epoch + sum(prompt.encode()) % 100
    group = a_group(position, group_id=f"{epoch}.{prompt}", **fields)
    said = [Message(role="user", content=text), Message(role="assistant", content="7", is_completion=True)]
    return dataclasses.replace(
        group,
        epoch=epoch,
        task=Task(id=prompt, prompt=text),
        trajectories=[dataclasses.replace(t, messages=said) for t in group.trajectories],
    )


def train(log: RunLog, *group_ids: str, **metrics: float) -> None:
    seconds = {**{f"{phase}_seconds": 1.0 for phase in TIME}, "idle_seconds": 2.0, "round_seconds": 10.0}
    facts = {"reward": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0, "peak_memory_bytes": 2.0**30}
    facts["trained_tokens"] = 4.0 * len(group_ids)
    log.append(dataclasses.replace(a_step(log.state, trained=group_ids), metrics={**facts, **seconds, **metrics}))


def train_nothing(log: RunLog) -> None:
    """A step that filtered one group, failed another and has a metric that is no number."""
    commit(log, "s0", a_group(0, accepted=False), a_group(1, rewards=[None, None]))
    step = a_step(log.state, filtered=["0.task0"], failed=["0.task1"])
    log.append(dataclasses.replace(step, metrics={"grad_norm": math.nan, "loss": math.inf}))


def evaluate(log: RunLog, version: int, rewards: Sequence[float]) -> None:
    """One shard for each task."""
    for number, reward in enumerate(rewards):
        group = seen(f"q{number}", version, rewards=[reward], version=version)
        commit(log, f"e{version}" + (f"-{number}" if number else ""), group, is_eval=True)
    score, count = sum(rewards) / len(rewards), len(rewards)
    log.append(an_evaluation(version, score, num_tasks=count, num_shards=count))


QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-quic",
]


@contextlib.contextmanager
def a_screen(scratch: Path, asked: list[str] | None = None) -> Iterator[Callable[..., Any]]:
    """What tells the value of a script on the page of an address, on a screen of a width and in light or dark. What the
    page asks in a dialog is answered with OK, and added to `asked`."""
    asked = [] if asked is None else asked
    assert CHROMIUM is not None
    options = [*QUIET, "--remote-debugging-port=0", f"--user-data-dir={scratch / 'screen'}", "about:blank"]
    with subprocess.Popen([CHROMIUM, *options], stderr=subprocess.PIPE, text=True) as browser:
        assert browser.stderr is not None
        line = next(line for line in browser.stderr if "DevTools listening on" in line)
        host, numbers = line.split("//")[1].split("/")[0], itertools.count()

        def told(address: str, script: str, *, width: int = 1400, scheme: str = "light") -> Any:
            page = httpx.put(f"http://{host}/json/new?about:blank").json()
            with connect(page["webSocketDebuggerUrl"], max_size=None) as socket:

                def send(method: str, **parameters: Any) -> Any:
                    number = next(numbers)
                    socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
                    while (reply := json.loads(socket.recv(timeout=60))).get("id") != number:
                        if reply.get("method") == "Page.javascriptDialogOpening":
                            asked.append(reply["params"]["message"])
                            accept = {"method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                            socket.send(json.dumps({"id": next(numbers), **accept}))
                    return reply["result"]

                size = {"width": width, "height": 12_000, "deviceScaleFactor": 1, "mobile": False}
                send("Emulation.setDeviceMetricsOverride", **size)
                send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                send("Page.enable")
                send("Page.navigate", url=address)
                while json.loads(socket.recv(timeout=60)).get("method") != "Page.loadEventFired":
                    pass
                evaluated = send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
            return evaluated["result"]["value"]

        try:
            yield told
        finally:
            browser.kill()


def opened(address: str, scratch: Path, *, width: int = 1200, height: int = 16_000) -> tuple[str, list[str]]:
    """The document after its script ran, and everything the browser wrote to the console.

    The window is so high that every picture is on the screen.
    """
    assert CHROMIUM is not None
    options = [*QUIET, "--enable-logging=stderr", "--v=0", "--dump-dom"]
    limits = ["--virtual-time-budget=8000", f"--window-size={width},{height}", f"--user-data-dir={scratch / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, *limits, address], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
