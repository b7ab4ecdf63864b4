"""Prefect task: remove what no kept policy, pending group or reader needs from some runs.

In: retention rules. Out: bytes and counts per run; what went, and why, is in the task's log.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prefect import task

from infra.environment import prepare_environment
from settings.places.state_folder import store_uri
from storage.objects.opening import open_store, probe
from storage.retention.retention import collect_garbage
from storage.retention.rules import make_rules
from tasks.prefect.run_logs import log_to_prefect

logger = logging.getLogger("millrace.maintain")


@task(name="collect-garbage", retries=1, retry_delay_seconds=10, persist_result=False)
async def collect_from_runs(
    *, runs: list[str], store: str, dry_run: bool, ignore_readers: bool, **rules: Any
) -> dict[str, Any]:
    """What was, or would be, freed per run by rules as of `make_rules`. Raises `InvalidInput` and `NotFound`."""
    prepare_environment()
    log_to_prefect()
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
