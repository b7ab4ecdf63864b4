"""A Prefect flow in this process: what `millrace train`, `eval`, `replay` and `produce` have in common.

    session ─▶ engines ─▶ first tokens ──────────────────────────────▶ goes on in the flow run
                   └─▶ Prefect's server starts ─▶ it answers ─▶ flow run ──┘

In: the flow. Out: what it returns, once Prefect's server beside this process has its history.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from infra import forks
from infra.environment import make_home
from infra.services.prefect_database import prepare_prefect_database
from infra.services.prefect_server import ServerBeside
from infra.services.services import ServiceFailed, running_services
from infra.structured_logs import log_driver, logs_are_json
from settings.places.hints import command
from settings.places.state_folder import home
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from tasks.session import RunSession

Result = TypeVar("Result")

logger = logging.getLogger("millrace.flow")

SECONDS_TO_STOP = 10.0
SECONDS_TO_ANSWER = 10.0
_stops: dict[int, Callable[[], object]] = {}
"""What ends a flow as Ctrl-C does, by the thread that it is in; those beside the main one get no signals."""
_beside: ServerBeside | None = None
"""Prefect's server of this process, for all its flows; None if there is another, or before the first flow."""


def run_flow(
    flow: Callable[[], Awaitable[Result]],
    console: Console,
    *,
    early: HeadStart | None = None,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Result:
    """Await a Prefect flow in this process: our messages on the console, Prefect's own only from warnings on. The first
    Ctrl-C calls `on_interrupt`, which may have a spinner to take away.

    Raises `ServiceFailed` if Prefect's server is away, `InvalidInput` for a state folder that cannot be made.
    """
    make_home()
    _choose_prefect()
    from tasks.prefect.run_logs import progress

    ours = logging.getLogger("millrace")
    ours.setLevel(logging.INFO)
    if logs_are_json():
        log_driver(dict, sys.stderr)  # until the session is there, which knows more
    else:
        handler: logging.Handler = logging.StreamHandler(console.file)  # which folds nothing
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%X"))
        if console.is_terminal:
            handler = RichHandler(
                console=console, show_path=False, show_level=False, markup=False, log_time_format="%X"
            )
        handler.setLevel(logging.INFO)
        handler.addFilter(lambda record: record.name != progress.name)
        ours.addHandler(handler)
    from prefect.exceptions import TerminationSignal

    try:
        return asyncio.run(_awaited(_in_order(flow, early), console, on_interrupt))
    except TerminationSignal:  # SIGTERM; the flow has ended as with Ctrl-C
        raise SystemExit(128 + signal.SIGTERM) from None


def stop_flow(thread: int) -> None:
    """End the flow in another thread as Ctrl-C does, if there is one."""
    if stop := _stops.get(thread):
        stop()


def use_running_services() -> None:
    """Let a flow in this process report to the Prefect server of `millrace up`, when there is one."""
    server = running_services(home()).get("prefect")
    if server is not None and "PREFECT_API_URL" not in os.environ:
        _report_to(server.url)


def _report_to(server: str) -> None:
    os.environ["PREFECT_API_URL"] = f"{server}/api"
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()  # Prefect may have been imported, and read its settings then


def _choose_prefect() -> None:
    """The server that flows of this process report to: one that is named, that of `millrace up`, or one of our own.

    Raises `ServiceFailed` if the named one does not answer, `UnusableDatabase` if ours could not open its.
    """
    global _beside
    if _beside is not None and os.environ.get("PREFECT_API_URL") == f"{_beside.url}/api":
        if _beside.home == home():
            return
        _beside.stop()
        _beside = None
        del os.environ["PREFECT_API_URL"]
    use_running_services()
    import httpx
    from prefect.settings import PREFECT_API_URL

    if url := PREFECT_API_URL.value():
        if not url.startswith(("http://", "https://")):
            raise ServiceFailed(
                f"PREFECT_API_URL = {without_secrets(url)!r} is no address: write http://HOST:PORT/api, or unset it "
                "and go without its pages"
            )
        try:
            httpx.get(f"{url}/health", timeout=SECONDS_TO_ANSWER)
        except httpx.TransportError as error:
            raise ServiceFailed(
                f"Prefect at {without_secrets(url)} does not answer ({type(error).__name__}): start it, on this "
                f"machine by `{command('up')}`, or unset PREFECT_API_URL and go without its pages"
            ) from error
        return
    prepare_prefect_database(home())
    _beside = ServerBeside(home())
    _report_to(_beside.url)


def imported_early(*, engine: str = "", trains: bool = False) -> contextlib.AbstractContextManager[None]:
    """Begin to import what workers need, in the process that they are forks of; `engine` is its kind, empty for none.

    Not on GPUs, on which forks are untested. Raises `InvalidInput` for a state folder that cannot be made.
    """
    make_home()
    from rollouts.engines.vllm.core_start import FRONT_END, IMPORTED, is_cpu_build

    modules = ["trainers.worker"] if trains else []
    if engine:
        modules = [*(IMPORTED + FRONT_END if engine == "vllm" else []), "rollouts.production.worker", *modules]
    return forks.imported_early(modules, log=home() / "logs" / "imports.log") if is_cpu_build() else nullcontext()


@dataclass(frozen=True, kw_only=True)
class HeadStart:
    """What a command does while Prefect's server starts."""

    open: Callable[[], contextlib.AbstractAsyncContextManager[RunSession]]
    """Opens the session of the flow."""
    begin: Callable[[RunSession], Awaitable[None]]
    """Begins its work. What fails meanwhile fails again in the flow run, so that Prefect shows it too."""


async def _in_order(flow: Callable[[], Awaitable[Result]], early: HeadStart | None) -> Result:
    """Head start, Prefect's server beside it, flow.

    Raises `ServiceFailed` if the server does not start.
    """
    from tasks.prefect.run_logs import kept_for_prefect

    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(kept_for_prefect())
        if early is not None:
            from tasks.session import OPENED

            try:
                session = await stack.enter_async_context(early.open())
                OPENED.set(session)
                if _beside is not None:
                    _beside.start()  # not sooner: the engine waits for what opens the session
                await early.begin(session)
            except Exception as error:  # noqa: BLE001 - whatever it is, the flow raises it
                logger.debug("before the flow run: %r", error)
        if _beside is not None:
            _beside.start()
            await _beside.answers()
        return await flow()


async def _awaited(flow: Awaitable[Result], console: Console, on_interrupt: Callable[[], None]) -> Result:
    from prefect.exceptions import Abort

    # Prefect attaches a console handler of its own at import; ours is enough.
    logging.getLogger("millrace").propagate = False
    for runs in ("prefect.flow_runs", "prefect.task_runs"):  # the command says an error, and Prefect its page
        logging.getLogger(runs).propagate = False
    task, interrupted = asyncio.ensure_future(flow), threading.Event()

    def stop() -> None:
        """First Ctrl-C or SIGTERM: cancel, with a deadline; Prefect's server may have got it too and answer no more."""
        if interrupted.is_set():
            return
        interrupted.set()
        on_interrupt()
        console.print("stopping; the same command continues from the run's log")
        logging.getLogger("prefect").setLevel(logging.CRITICAL)
        if is_main:  # a notebook has more in its process than this run
            loop.remove_signal_handler(signal.SIGINT)
            loop.call_later(SECONDS_TO_STOP, os._exit, 130)  # what was committed is safe, and our children die with us
        task.cancel()

    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)  # of the flow's SIGTERM: tasks/prefect/own_flow_run.py
    else:
        _stops[threading.get_ident()] = partial(loop.call_soon_threadsafe, stop)
    try:
        result = await task
    except BaseException as error:
        # Children get the signal too: what fails from then on, such as a server that was starting, follows from it.
        # Abort is Cancel in Prefect.
        if interrupted.is_set() or isinstance(error, asyncio.CancelledError | Abort):
            raise KeyboardInterrupt from None
        raise
    finally:
        _stops.pop(threading.get_ident(), None)
    if _beside is not None:
        from tasks.prefect.task_runs import task_runs_are_recorded

        await task_runs_are_recorded()
    return result
