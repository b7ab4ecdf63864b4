"""Prefect tasks around the replay worker: train recorded steps again, nothing generated, nothing committed.

In: a session, a plan, settings. Out: how each step came out.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from prefect import task

from infra.environment import code_version
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.log.history import to_json
from storage.log.replay_plan import Replay, ReplayedStep, ReplayPlan, plan_replay
from storage.log.runs import local_config
from tasks.session import RunSession, run_log

logger = logging.getLogger("millrace.replay")


def check_replay(
    *, store: str, run: str, first: int, last: int | None, rewards: str, save: str
) -> tuple[ReplayPlan, dict[str, Any]]:
    """What will be trained again, and the run's configuration. Raises `CannotReplay`, `InvalidInput`, `NotFound`."""
    log = run_log(store=store, run=run)
    if save and Path(save).exists():
        raise InvalidInput(f"{save} exists already; name a folder that does not, for the replayed policy")
    last = log.state.step if last is None else last
    return plan_replay(log.state, run=run, first=first, last=last, rewards=rewards), local_config(log)


@task(name="start-replay", persist_result=False)
async def start_replay(
    session: RunSession,
    *,
    plan: ReplayPlan,
    recorded: RunConfig,
    changed: RunConfig,
    rewards: str,
    reference: str = "",
) -> int:
    """Load the nearest saved state before the span; returns its step, 0 for the base policy. `reference` is the store's
    folder of the span's reference model, if that is another than the run's."""
    # Once more: retention may have taken what the plan needs before this session began.
    plan = plan_replay(session.log.refresh(), run=session.log.run_id, first=plan.first, last=plan.last, rewards=rewards)
    # Hosted as the trainer is: other threads, or ranks, would add up in another order.
    loaded: int = await session.trainer.open(
        "replay-0",
        "trainers.replay:ReplayWorker",
        settings=changed.train,
        plan=plan,
        recorded=recorded,
        changed=changed,
        rewards=rewards,
        reference=reference,
    )
    logger.info("starting from %s", f"the state saved at step {loaded}" if loaded else "the base policy")
    return loaded


@task(name="lead-up", task_run_name="lead-up-{step}", persist_result=False)
async def lead_up(session: RunSession, *, step: int, progress: str) -> bool:
    """Train a step before the span as it was recorded; False when the span cannot start from the recorded weights."""
    identical: bool = await session.trainer.call("lead_up", step)
    logger.info("%s: step %d, as recorded", progress, step)
    if not identical:
        other = f"step {step} came out with other weights than recorded (other hardware, threads or code?)"
        logger.warning("%s; the span starts from the recorded ones", other)
    return identical


@task(name="retrain", task_run_name="retrain-{step}", persist_result=False)
async def retrain(session: RunSession, *, step: int, progress: str) -> ReplayedStep:
    """Train a step of the span and compare it with the record."""
    replayed: ReplayedStep = await session.trainer.call("retrain", step)
    logger.info("%s: step %d, %s", progress, step, "same weights" if replayed.identical else "other weights")
    return replayed


@task(name="save-replayed-policy", persist_result=False)
async def save_policy(session: RunSession, *, folder: str) -> None:
    """Write the newest replayed policy to a folder, in HF layout and sealed."""
    digest = await session.trainer.call("save_policy", str(Path(folder).resolve()))
    logger.info("policy %s saved to %s", digest[:12], folder)


def describe_replay(session: RunSession, *, plan: ReplayPlan, loaded: int, **facts: Any) -> dict[str, Any]:
    """A `storage.log.replay_plan.Replay` as plain JSON; NaN and infinity become None."""
    made_by = session.log.state.steps[plan.last - 1].session_id
    recorded_code = next((s.code_version for s in session.log.state.sessions if s.id == made_by), "unknown")
    replay = Replay(
        run=session.log.run_id,
        plan=dataclasses.replace(plan, resumed_from=loaded),  # a damaged state makes it an earlier one than planned
        recorded_code=recorded_code,
        code=code_version(),
        **facts,
    )
    verdicts = {name: getattr(replay, name) for name in ("unchanged", "identical", "agrees")}
    document = {**to_json(replay), **verdicts}
    return dict(json.loads(json.dumps(document), parse_constant=lambda _: None))
