"""A run in a notebook: its tables, its trajectories, a policy as a folder; and what `train`, `eval` and `replay` start.

In: names as the commands take them. Out: Arrow tables, which have `.to_pandas()` and which `polars.from_arrow` reads;
and the records that the commands print.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.terminal.arguments import open_named
from settings.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

    from storage.log.run_log import RunLog

_LOOK_SECONDS = 0.2
"""Between two looks whether work in a thread has ended."""


class Run:
    """A run as its log is now; every property looks again. Made by `millrace.open_run`."""

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def __repr__(self) -> str:
        return f"<run {self._log.run_id!r} at step {self._log.refresh().step}>"

    @property
    def name(self) -> str:
        """The run's name."""
        return self._log.run_id

    @property
    def status(self) -> dict[str, Any]:
        """What `millrace status RUN --json` prints."""
        from cli.operate.status import run_status

        self._log.refresh()
        return run_status(self._log)

    @property
    def steps(self) -> pa.Table:
        """One row per optimizer step, with a column for each metric of docs/metrics.md."""
        return self.sql("SELECT * FROM steps ORDER BY step")

    @property
    def metrics(self) -> pa.Table:
        """The metrics of `steps` in long form: step, metric, value."""
        import pyarrow as pa

        steps = self.steps
        schema = pa.schema([("step", pa.int32()), ("metric", pa.string()), ("value", pa.float64())])
        metrics = [
            pa.table([steps["step"], pa.repeat(field.name, len(steps)), steps[field.name]], schema=schema)
            for field in steps.schema
            if pa.types.is_float64(field.type)
        ]
        return pa.concat_tables([schema.empty_table(), *metrics]).drop_null()

    @property
    def evaluations(self) -> pa.Table:
        """One row per held-out score of a policy version."""
        return self.sql("SELECT * FROM evaluations ORDER BY written_at")

    @property
    def trajectories(self) -> pa.Table:
        """One row per training sequence: prompt, reply, reward, outcome, step. For a part of a large run, use `sql`."""
        return self.sql("SELECT * FROM trajectories")

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """The result of a query over the views that `millrace traj sql` has. Raises `InvalidInput` for wrong SQL."""
        from storage.retention.retention import reading
        from storage.views.queries import open_queries

        if not isinstance(query, str):
            raise InvalidInput(f"{query!r} is no SQL: write it as text")
        if isinstance(parameters, str) or not isinstance(parameters, Sequence):
            raise InvalidInput(f"parameters = {parameters!r} is no list: write a value for each question mark")
        self._log.refresh()
        with reading(self._log, "notebook", quiet=True):
            return open_queries(self._log).select(query, parameters)

    def policy(self, version: int | None = None) -> Path:
        """A local folder with a policy in Hugging Face's layout, by default the newest; with LoRA, the adapter's.

        Raises `InvalidInput` for a version the run does not have, or not any more.
        """
        from infra.environment import cache_folder
        from storage.log.runs import find_policy
        from storage.policies.policies import PolicyReader

        self._log.refresh()
        return PolicyReader(self._log, cache_folder()).fetch(find_policy(self._log, version))


def open_run(name: str, *, store: str | Path = "") -> Run:
    """A run of a store, by default `$MILLRACE_STORE` or `.millrace/store`. Raises `NotFound`, naming its runs."""
    return Run(open_named(str(name), str(store)))


def _name_of(run: str) -> str:
    """The name that a call was given; of a `Run` its own is not enough, as its store may be another."""
    if not isinstance(run, str):
        raise InvalidInput(
            f"{run!r} is no name of a run: write its name, such as {getattr(run, 'name', 'arithmetic')!r}"
        )
    return run


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int):
        raise InvalidInput(f"{name} = {value!r} is no whole number")


def train(run_file: str | Path | dict[str, Any], /, **overrides: Any) -> dict[str, Any]:
    """Train the run of a run file, or of its content as a dictionary, as `millrace train` does; returns its status.

    An interrupt of a notebook's cell stops the run, and the same call continues it.
    `overrides` go over the settings: `train("my.toml", steps=50)`; for dotted keys write `**{"train.loss": "cispo"}`.
    """
    from cli.run.train import train_run

    if not isinstance(run_file, str | Path | dict):
        raise InvalidInput(f"{run_file!r} is no run file: name a file, or give its content as a dictionary")
    source = run_file if isinstance(run_file, dict) else Path(run_file)
    return _outside_of_a_loop(lambda: train_run(source, overrides))


def evaluate(run: str, *, version: int | None = None, store: str | Path = "", **changes: Any) -> dict[str, Any]:
    """Score a policy version on held-out tasks, as `millrace eval` does; returns the score and what it is made of.

    `changes` are `split`, `num_tasks`, `n_samples` and `temperature`.
    """
    from cli.run.eval import evaluate_run

    run = _name_of(run)
    return _outside_of_a_loop(lambda: evaluate_run(run, version=version, store=str(store), **changes))


def replay(
    run: str, *, first: int = 1, last: int | None = None, store: str | Path = "", **changes: Any
) -> dict[str, Any]:
    """Train recorded steps again, as `millrace replay` does; returns how each came out beside the record.

    `changes` are settings of the trainer that differ: `learning_rate=1e-5`, `**{"train.loss": "cispo"}`.
    """
    from cli.run.replay import replay_run

    run = _name_of(run)
    _check_whole("first", first)
    if last is not None:
        _check_whole("last", last)
    return _outside_of_a_loop(lambda: replay_run(run, first=first, last=last, store=str(store), changes=changes))


def _outside_of_a_loop(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Jupyter runs cells inside an event loop, in which no other one may start: then a thread has its own.

    An interrupt of the cell ends the work as Ctrl-C ends a command, and is raised when it has ended.
    """
    from infra.environment import prepare_environment

    prepare_environment()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    from cli.run.flow import stop_flow

    interrupted, threads = threading.Event(), queue.SimpleQueue[int]()

    def interrupt(*_: object) -> None:
        """An exception could be raised before the thread has its flow, or be lost while Python collects garbage."""
        if interrupted.is_set():
            raise KeyboardInterrupt  # the second one: the flow does not end
        interrupted.set()

    usual = signal.getsignal(signal.SIGINT)
    hears = callable(usual) and threading.current_thread() is threading.main_thread()
    pool = ThreadPoolExecutor(1, initializer=lambda: threads.put(threading.get_ident()))
    try:
        if hears:
            signal.signal(signal.SIGINT, interrupt)
        working = pool.submit(work)
        thread = threads.get()
        while not wait([working], _LOOK_SECONDS).done:
            if interrupted.is_set():
                stop_flow(thread)  # which it may not have come to yet
        if interrupted.is_set():
            raise KeyboardInterrupt
        return working.result()
    finally:
        pool.shutdown(wait=False)
        if hears:
            signal.signal(signal.SIGINT, usual)
