"""`millrace train`: check, run the flow in this process, and show its log as it grows.

In: a run file and overrides. Out: the run, and a table a person wants to watch. What is shown is read from the run's
log, so the same view would follow a run on another machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from cli.operate.progress import Follower, print_ending
from cli.operate.services import use_running_services
from infra.environment import home, store_uri
from infra.orphans import end_orphaned_servers
from infra.services import ServiceFailed
from infra.structured_logs import log_driver, logs_are_json
from settings.redaction import without_secrets
from settings.run_file import RunConfig, Settings, default_values, load_run_file
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.opening import open_store

Result = TypeVar("Result")

logger = logging.getLogger("millrace.training")

SECONDS_TO_STOP = 10.0
SECONDS_TO_ANSWER = 10.0


def train_run(run_file: Path, overrides: dict[str, Any]) -> None:
    """Train until the run's last step. Raises what `cli.terminal.errors.explained` knows how to say."""
    config = load_run_file(run_file, overrides)
    check_before_anything_starts(config)
    console = Console(highlight=False)
    with Follower(store_uri(config.store), config, console):
        run_flow(_train(config), console)
    print_ending(store_uri(config.store), config, console, run_file)


def check_before_anything_starts(config: RunConfig) -> None:
    """What a second can tell: workflow, data, model, store, the run's configuration and its lock."""
    from tasks.preflight import check_run

    check_run(config)
    store, document = open_store(store_uri(config.store)), config.model_dump(mode="json")
    with trainer_lock(create_run(store, config.run, document, defaults=default_values())):
        pass


def run_flow(flow: Coroutine[Any, Any, Result], console: Console) -> Result:
    """Await a Prefect flow in this process: our messages on the console, Prefect's own only from warnings on.

    Raises `ServiceFailed` where Prefect's server is not there, before anything is started.
    """
    end_orphaned_servers(home())
    use_running_services()
    try:
        _check_prefect_answers()
    except ServiceFailed:
        flow.close()
        raise
    ours = logging.getLogger("millrace")
    ours.setLevel(logging.INFO)
    if logs_are_json():
        log_driver(dict, sys.stderr)  # until the session is there, which knows more
    else:
        handler = RichHandler(console=console, show_path=False, show_level=False, markup=False, log_time_format="%X")
        handler.setLevel(logging.INFO)
        ours.addHandler(handler)
    return asyncio.run(_awaited(flow, console))


def _check_prefect_answers() -> None:
    """Raises `ServiceFailed` where `PREFECT_API_URL` names a server that is not there."""
    import httpx
    from prefect.settings import PREFECT_API_URL

    if not (url := PREFECT_API_URL.value()):
        return  # one is started in this process
    try:
        httpx.get(f"{url}/health", timeout=SECONDS_TO_ANSWER)
    except httpx.TransportError as error:
        raise ServiceFailed(
            f"Prefect at {without_secrets(url)} does not answer ({type(error).__name__}): start it, on this machine "
            "by `millrace up`, or unset PREFECT_API_URL and go without its pages"
        ) from error


async def _awaited(flow: Coroutine[Any, Any, Result], console: Console) -> Result:
    # Prefect attaches a console handler of its own at import; ours is enough.
    logging.getLogger("millrace").propagate = False
    task = asyncio.ensure_future(flow)

    def stop() -> None:
        """First Ctrl-C: cancel, with a deadline; the in-process API got the signal too and may never answer again."""
        console.print("stopping; the same command continues from the run's log")
        logging.getLogger("prefect").setLevel(logging.CRITICAL)
        loop.remove_signal_handler(signal.SIGINT)
        loop.call_later(SECONDS_TO_STOP, os._exit, 130)  # what was committed is safe, and our children die with us
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        result = await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    await drain_history()
    return result


async def _train(config: RunConfig) -> None:
    import httpx

    from flows.train_grpo import train_grpo

    knobs = {name: getattr(config, name) for name in RunConfig.model_fields if name not in Settings.model_fields}
    try:
        await train_grpo(**knobs, settings=config.settings)
    except httpx.TransportError as error:
        if open_run(open_store(store_uri(config.store)), config.run).state.step < config.steps:
            raise
        logger.warning(
            "Prefect does not know that the run has ended, its server is away (%r): there it is crashed, as `millrace "
            "up` says too, and the run's log has everything",
            error,
        )


async def drain_history(*, quiet_seconds: float = 2.0, at_most_seconds: float = 20.0) -> None:
    """Wait until Prefect's server in this process has taken in every task run it was told about.

    It dies with us, and what it has queued dies with it; so look until the counts stand still. A server elsewhere
    lives on, and Prefect sends it at our exit what it has not been told yet.
    """
    from prefect import get_client
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return

    deadline = asyncio.get_running_loop().time() + at_most_seconds
    seen, since = -1, asyncio.get_running_loop().time()
    async with get_client() as client:
        while (now := asyncio.get_running_loop().time()) < deadline:
            runs = await client.read_task_runs(limit=200)
            unfinished = [run for run in runs if run.state is None or not run.state.is_final()]
            count = await _count_task_runs(client)
            if count != seen or unfinished:
                seen, since = count, now
            elif now - since >= quiet_seconds:
                return
            await asyncio.sleep(0.25)


async def _count_task_runs(client: Any) -> int:
    response = await client.request("POST", "/task_runs/count", json={})
    return int(response.json())
