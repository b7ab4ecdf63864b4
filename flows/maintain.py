"""The housekeeping flow: remove what no kept policy, pending group or reader needs.

In: runs and retention rules. Out: bytes freed per run. It may run beside producers, trainers and itself.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.maintain import collect_from_runs


@flow(name="maintain", persist_result=False)
async def maintain(
    runs: list[str] = [],  # noqa: B006 - Prefect shows the default in the form; nothing changes it
    store: str = "",
    keep_last: int = 5,
    keep_every: int = 0,
    older_than: str = "30d",
    max_size: str = "",
    dry_run: bool = False,
    ignore_readers: bool = False,
) -> dict[str, Any]:
    """Remove policies, optimizer states and shards that no rule keeps, and leftovers of writers that died.

    A policy is also kept while it is the base model, live, has an alias or the best score. What a kept policy was
    trained on, what resumes the run, and what is waiting to be trained on stays in any case.

    Args:
        runs: Names of runs. Empty: every run in the store; one whose log is damaged is left alone then.
        store: Where the runs are. Empty: $MILLRACE_STORE, or .millrace/store.
        keep_last: Keep the newest so many policies of each run.
        keep_every: Keep every so many policy versions one more. 0: none.
        older_than: Remove only what is older: 12h, 30d, 8w. Empty: any age.
        max_size: Remove the oldest first, until the runs together are no larger: 50GB. Empty: all that may go.
        dry_run: Only say what would be removed.
        ignore_readers: Remove even while a replay, rescore, export, index, report or lineage check reads the run.
    """
    rules = {"keep_last": keep_last, "keep_every": keep_every, "older_than": older_than, "max_size": max_size}
    return await collect_from_runs(runs=runs, store=store, dry_run=dry_run, ignore_readers=ignore_readers, **rules)
