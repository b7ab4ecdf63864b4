"""Retention as a Prefect task for some runs, and beside the training of one.

In: retention rules, or a run's `[retention]`. Out: bytes and counts per run; what went, and why, is in the task's log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from prefect import task

from settings.errors import free_bytes, ranges, size
from settings.places.state_folder import store_uri
from settings.run_file import RunConfig
from storage.log.claims import is_fixed, oldest_needed
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import run_config, teller_lock
from storage.objects.object_store import LocalStore, StoreError
from storage.objects.opening import open_store, probe
from storage.retention.retention import RunReport, RunRetention, collect_garbage
from storage.retention.rules import Rules, make_rules
from tasks.checks.space import expected_space
from tasks.prefect.run_logs import outside_session
from tasks.prefect.task_runs import may_pass

logger = logging.getLogger("millrace.maintain")


@task(name="collect-garbage", retries=1, retry_delay_seconds=10, retry_condition_fn=may_pass, persist_result=False)
async def collect_from_runs(
    *, runs: list[str], store: str, dry_run: bool, ignore_readers: bool, **rules: Any
) -> dict[str, Any]:
    """What was, or would be, freed per run by rules as of `make_rules`. Raises `InvalidInput` and `NotFound`."""
    with outside_session():
        opened = open_store(store_uri(store))
        if not dry_run:
            await asyncio.to_thread(probe, opened, with_data=False)
        reports = await asyncio.to_thread(
            collect_garbage,
            opened,
            runs,
            make_rules(**rules),
            dry_run=dry_run,
            ignore_readers=ignore_readers,
        )
    for report in reports:
        counts = ", ".join(f"{count} × {kind}" for kind, (count, _) in report.by_kind().items()) or "nothing"
        if report.problem:
            logger.warning("%s: left alone: %s", report.run, report.problem)
        elif report.readers and not report.removed:
            names = ", ".join(f"{reader.what} (process {reader.pid} on {reader.host})" for reader in report.readers)
            logger.warning("%s: in use by %s; nothing was removed", report.run, names)
        else:
            verb = "would remove" if dry_run else "removed"
            logger.info("%s: %s %s, %d of %d bytes", report.run, verb, counts, report.freed_bytes, report.num_bytes)
        for item in report.items:
            logger.debug("%s: %s %s: %s", report.run, item.kind, item.name, item.reason)
    return {report.run: {"freed_bytes": report.freed_bytes, "removed": report.removed} for report in reports}


class Housekeeping:
    """Removes what the `retention` of a run does not keep, every so many of its steps."""

    def __init__(self, log: RunLog, config: RunConfig) -> None:
        """`log` is for background threads, which fold it one at a time, under `teller_lock`."""
        settings, recorded = config.retention, run_config(log)
        # A run that began before there was the table keeps everything, unless the user has written the table since.
        self._every = settings.every if "retention" in recorded or settings.model_fields_set else 0
        self._config, self._log, self._is_busy, self._has_failed, self._announced = config, log, False, False, False
        self._done_at: int | None = None
        rules = Rules(
            keep_last=max(settings.keep_last, oldest_needed(config) if is_fixed(config) else 0),
            keep_evaluated=None if settings.keep_evaluated == "all" else settings.keep_evaluated,
            evaluate_every=config.evaluation.every,
            replay_steps=settings.replay_steps,
        )
        self._retention = RunRetention(log, rules)
        self._freed_bytes = 0
        self._report: RunReport | None = None

    def announce(self) -> None:
        """Say once what will be kept, and the space that the whole run will take; a warning if there is less."""
        if self._announced:
            return
        self._announced = True
        settings, store = self._config.retention, self._log.store
        kept = "retention is off, so everything is kept"
        if self._every:
            scored = "all" if settings.keep_evaluated == "all" else f"the newest {settings.keep_evaluated}"
            kept = (
                f"retention keeps the {settings.keep_last} newest policies, {scored} that were evaluated, the best, "
                f"those with an alias, their anchors, and what a replay of the last {settings.replay_steps} steps needs"
            )
        space = expected_space(self._config, removes=self._every > 0)
        if space is None:
            logger.info("%s", kept)
            return
        free = free_bytes(store.root) if isinstance(store, LocalStore) else math.inf
        takes = f"the run takes about {size(space.store)} of its store"
        takes += f", without retention {size(space.everything)}" if self._every else ""
        takes += f", and {size(space.databases)} in databases"
        if free < space.store:
            logger.warning("%s; %s: more than the %s that are free", kept, takes, size(free))
        else:
            logger.info("%s; %s", kept, takes)

    async def tidy(self, step: int, *, is_last: bool = False) -> None:
        """Remove what may go if it is time after this step. Whatever goes wrong is no reason to end a training."""
        self._done_at = step if self._done_at is None else self._done_at
        if not self._every or self._is_busy or (step - self._done_at < self._every and not is_last):
            return
        self._done_at, self._is_busy = step, True
        try:
            await asyncio.to_thread(self._collect)
        finally:
            self._is_busy = False
        if is_last and self._report is not None:
            logger.info("%s", kept_text(self._report, self._freed_bytes))

    def _collect(self) -> None:
        try:
            with teller_lock(self._log):
                self._report = self._retention.collect()
        except (StoreError, OSError, Conflict) as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            logger.log(level, "retention could not remove anything this time; the next one tries again: %s", error)
            self._has_failed = True
            return
        self._has_failed = False
        self._freed_bytes += self._report.freed_bytes if self._report.removed else 0


def kept_text(report: RunReport, freed_bytes: int) -> str:
    """What retention has kept of a run, in a sentence."""
    versions: dict[str, list[int]] = {}
    for version, reason in report.kept.items():
        versions.setdefault(reason.partition(",")[0].partition(" of ")[0], []).append(version)
    kept = "; ".join(f"{ranges(numbers)} ({reason})" for reason, numbers in versions.items())
    left = size(report.num_bytes - (report.freed_bytes if report.removed else 0))
    return f"retention removed {size(freed_bytes)} during training and kept {left}: policies {kept}"
