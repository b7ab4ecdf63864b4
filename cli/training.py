"""`millrace train`: check, run the flow in this process, and show its log as it grows.

In: a run file and overrides. Out: the run, and a table a person wants to watch. What is shown is read from the run's
log, so the same view would follow a run on another machine.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from cli.errors import console
from cli.progress import Follower, print_ending
from flows.config import RunConfig, load_run_file
from infra.environment import store_uri
from storage.object_store import open_store
from storage.runs import create_run, trainer_lock


def train_run(run_file: Path, overrides: dict[str, Any]) -> None:
    """Train until the run's last step. Raises what `cli.errors.explained` knows how to say."""
    config = load_run_file(run_file, overrides)
    check_before_anything_starts(config)
    with Follower(store_uri(config.store), config, console) as follower:
        asyncio.run(_train_and_drain(config))
        follower.catch_up()
    print_ending(store_uri(config.store), config, console, run_file)


def check_before_anything_starts(config: RunConfig) -> None:
    """What a second can tell: workflow, data, model, store, the run's configuration and its lock."""
    from tasks.preflight import check_run

    check_run(
        workflow=config.workflow,
        dataset=config.dataset,
        model=config.model,
        store=config.store,
        evaluation_split=config.evaluation.split,
    )
    with trainer_lock(
        create_run(open_store(store_uri(config.store)), config.run, config.model_dump(mode="json"))
    ):
        pass


async def _train_and_drain(config: RunConfig) -> None:
    from flows.train_grpo import train_grpo

    logging.getLogger("prefect").setLevel(logging.WARNING)
    knobs = {
        name: getattr(config, name)
        for name in RunConfig.model_fields
        if name not in type(config.settings).model_fields
    }
    await train_grpo(**knobs, settings=config.settings)
