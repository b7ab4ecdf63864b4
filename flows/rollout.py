"""The producer flow: rollouts for a run that another process trains, perhaps on another machine.

In: a run and its store, the only thing it shares with the training. Out: shards in the run's log.

    the run's driver ── policy, alias `rollout` ──▶ log ──▶ here: load it, lease prompts, attempt them ── shard ──▶ log

Start any number of them, at any time; end them as you like. What one has leased when it dies without a word is given
to others after `rollout.lease_timeout` seconds without a sign of life.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow

from settings.errors import InvalidInput
from settings.run_file import RunConfig, make_config
from tasks.checks.reproducible import check_producer
from tasks.prefect.run_logs import outside_session
from tasks.producers import follow, look_up_run, producer_name, wait_for_policy
from tasks.rollout import produce, start_rollout_worker
from tasks.session import in_flow_run, producing_session


@flow(name="rollout", flow_run_name="{run}", persist_result=False)
async def rollout(
    run: str = "arithmetic",
    store: str = "",
    name: str = "",
    shards: int = 0,
    patience: float = 3600.0,
) -> dict[str, Any]:
    """Produce shards for a run that is trained elsewhere.

    Args:
        run: Name of the run.
        store: Where the run is. Empty: $MILLRACE_STORE, or .millrace/store.
        name: What its workers are called in the log. Empty: as this machine.
        shards: End after so many shards. 0: when the run has all its steps.
        patience: Seconds for which nothing may happen in the run before this ends. A driver that is killed has that
            long to come back.
    """
    with outside_session():
        config = plan_rollouts(run=run, store=store, name=name, shards=shards, patience=patience)
    async with in_flow_run(producing_session(config, store=store, name=producer_name(name))) as session:
        reason = "the run is over"
        if await wait_for_policy(session, workflow=config.workflow, patience=patience):
            worker = session.fleet.next_name()
            await start_rollout_worker(session, name=worker)
            await session.fleet.join(worker)
            async with asyncio.TaskGroup() as beside:
                producing = beside.create_task(produce(session, worker))
                reason = await follow(session, shards=shards, patience=patience)
                producing.cancel()
        return {"run": run, "ended": reason}


def plan_rollouts(*, run: str, store: str, name: str, shards: int, patience: float) -> RunConfig:
    """The run's configuration. Raises `InvalidInput` or `NotFound` for what cannot work, before anything starts."""
    producer_name(name)
    if shards < 0 or patience <= 0:
        raise InvalidInput(f"shards = {shards} must not be negative, and patience = {patience:g} s be more than 0")
    config = make_config(look_up_run(store=store, run=run), source=f"producing for run {run}")
    check_producer(config)
    return config
