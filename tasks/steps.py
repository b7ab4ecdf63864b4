"""The choice of the next batch, the Prefect tasks around the trainer, and the limit of every wait.

In: a session. Out: the claim and the committed step; or `Stalled` with the report of every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar, cast

from prefect import task
from prefect.context import FlowRunContext
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from infra.ray.hosted import WorkerDied
from settings.errors import UserError
from settings.run_file import RunConfig
from storage.log.claims import has_sampled_all, next_claim, streams
from storage.log.entries import Claim, ClaimedGroup, Step
from storage.log.run_state import RunState
from tasks.checks.learning_rate import FIRST_STEPS, nothing_moves
from tasks.checks.machine import precision_text
from tasks.checks.preflight import about_model
from tasks.clock import out_of_room
from tasks.prefect.task_runs import may_pass
from tasks.session import RunSession

logger = logging.getLogger("millrace.train")

Result = TypeVar("Result")


class Stalled(UserError):
    """Nothing has moved for too long; the message says what was waited for and where every worker stands."""


async def watched(session: RunSession, waiting: Awaitable[Result], *, what: str, seconds: float) -> Result:
    """Await `waiting`, but no longer than `seconds`. Raises `Stalled`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await waiting
    except TimeoutError:
        if not limit.expired():
            raise
        raise Stalled(f"{what} has taken more than {seconds:g} s\n{await session.fleet.report()}") from None


@task(name="start-trainer", persist_result=False)
async def start_trainer(session: RunSession, *, config: RunConfig) -> None:
    """Load the policy and resume the optimizer, re-training recorded steps if no state was saved since."""
    if replayed := await session.once("start-trainer", lambda: open_trainer(session, config)):
        logger.info("re-trained %d recorded steps from their shards to restore the optimizer", replayed)


async def open_trainer(session: RunSession, config: RunConfig) -> int:
    """How many recorded steps were trained again."""
    path, sends = "trainers.worker:TrainerWorker", config.engine.weight_transfer != "store"
    logger.info("the trainer computes in %s", await asyncio.to_thread(precision_text, config, about_model(config)))
    async with session.device.opening():
        opening = session.trainer.open("trainer-0", path, settings=config.train, config=config, sends=sends)
        return int(await opening)


async def next_batch(session: RunSession, *, config: RunConfig) -> Claim:
    """Wait until enough groups are committed, by producers here or elsewhere, and claim them.

    With `rollout.pace`, first wait for running groups that this step would push over the bound. With `train.stream`,
    let the trainer begin with those that have finished. Raises `NothingAccepted`, and `Stalled` as `_looks`.
    """
    started = time.perf_counter()
    streamed = _Streamed(session, config)
    # If the trainer masks or corrects old tokens no group is lost, and waiting would only cost.
    paced = not (config.rollout.pace and config.train.stale_policy == "strict")
    async with contextlib.aclosing(_looks(session, config)) as looks:
        async for state in looks:
            claim = None if state.paused else next_claim(state, config, streamed.parts)
            if claim is not None and not paced:
                await session.fleet.wait_for_stragglers(version=claim.base_version)
                paced = True
                session.fleet.arrivals.set()  # what has finished meanwhile may be in the log already, or a pause
            elif claim is not None:
                session.clock.waited_seconds += time.perf_counter() - started
                return claim
            elif not state.paused:
                streamed.look(state)
    raise AssertionError("there is always another look")


class _Streamed:
    """The parts of the next step that the trainer has been given before the batch was there."""

    def __init__(self, session: RunSession, config: RunConfig) -> None:
        self.parts: list[list[ClaimedGroup]] = []
        self._session, self._config = session, config
        self._is_on = streams(config) and not session.device.in_phases  # the engine has the GPU's memory until then
        self._task: asyncio.Task[bool] | None = None

    def look(self, state: RunState) -> None:
        """Give the trainer what has finished since the last part, if it has nothing to do."""
        trainer, arrivals = self._session.trainer, self._session.fleet.arrivals
        if not self._is_on or not trainer.is_open or (self._task is not None and not self._task.done()):
            return
        self._is_on = self._task is None or self._task.result()
        claim = next_claim(state, self._config, self.parts, whole=False) if self._is_on else None
        if claim is not None:
            self.parts.append(claim.trained[-claim.parts[-1] :])
            self._task = asyncio.create_task(trainer.begin_step(claim))
            self._task.add_done_callback(lambda _: arrivals.set())


async def all_sampled(session: RunSession, *, config: RunConfig) -> None:
    """Wait until the policy that engines serve has sampled all that it is to. Raises `Stalled` as `_looks`."""
    started = time.perf_counter()
    served = session.fleet.served()
    async with contextlib.aclosing(_looks(session, config)) as looks:
        async for state in looks:
            if served is None or has_sampled_all(served.version, state, config):
                break
    session.clock.waited_seconds += time.perf_counter() - started


async def _looks(session: RunSession, config: RunConfig) -> AsyncGenerator[RunState, None]:
    """What is true now, and again after every arrival in the log. Raises `Stalled` if no group finished for
    `rollout.stall_timeout` seconds."""
    log, fleet, stall_timeout = session.log, session.fleet, config.rollout.stall_timeout
    seen, last_progress = -1, time.monotonic()
    while True:
        fleet.arrivals.clear()
        state = log.refresh()
        if state.paused:
            last_progress = time.monotonic()
        yield state
        await fleet.release_silent()
        waited = time.monotonic() - last_progress
        if waited > min(1.0, stall_timeout) and (progress := state.entries + await fleet.num_finished()) != seen:
            seen, last_progress = progress, time.monotonic()
        elif waited > stall_timeout:
            raise Stalled(
                f"no progress for {waited:.0f} s: {state.pending_accepted} of {config.batch_size} groups are ready for "
                f"step {state.step + 1}\n{await fleet.report()}"
            )
        # Our own producer sets the event; the next look at the log sees a producer on another machine.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(fleet.arrivals.wait(), timeout=1.0)


def unsearched(claim: Claim) -> Claim:
    """A task's argument as it is: Prefect looks for futures in every field of a record, and a claim has many."""
    return cast(Claim, quote(claim))


def forget_results() -> None:
    """Let Prefect forget which task returned what, and from which assets: it keeps both of every task run."""
    if context := FlowRunContext.get():
        context.run_results.clear()
        context.task_run_assets.clear()


@task(
    name="train",
    task_run_name="train-{claim.step}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    retry_condition_fn=may_pass,
    persist_result=False,
)
async def train_step(session: RunSession, *, claim: Claim, config: RunConfig) -> Step | None:
    """One optimizer step on a claim: new policy in the store, step in the log; see `TrainerHandle.step`.

    If the trainer dies another one starts. Prefect's retry gives it the claim, unless the dead one committed the step.
    """
    shards = session.log.state.shards
    groups = [*claim.trained, *claim.stale, *claim.filtered, *claim.failed, *claim.cancelled]
    claimed = [shards[shard_id] for shard_id in dict.fromkeys(group.shard_id for group in groups)]
    metrics = await session.clock.metrics(claimed, num_producers=len(session.fleet.workers))
    metrics |= out_of_room(claimed, {group.group_id for group in groups})
    metrics |= {f"{change}_seconds": seconds for change, seconds in session.device.seconds.items()}
    facts = {"round_seconds": session.clock.round_seconds, "extra_metrics": metrics, "session_id": session.id}
    try:
        step = await session.trainer.step(claim, **facts)
    except WorkerDied as death:
        logger.warning("%s; another trainer takes its place", death)
        await start_trainer(session, config=config)
        raise
    if step is None:
        await session.fleet.refresh()  # the prompts of what was quarantined are free again
    else:
        session.progress.took(step)
        session.clock.next_round()
        session.clock.say_above_plan(step)
        if claim.step == FIRST_STEPS and (problem := nothing_moves(session.log.state.steps, config)):
            logger.warning(problem)
    return step
