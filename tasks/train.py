"""Around the trainer worker: the Prefect tasks that start it and take one optimizer step, and the choice of its batch.

In: a session. Out: the claim and the committed step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from infra.fleet import WorkerDied
from settings.errors import UserError
from settings.rollout import RolloutSettings
from settings.run_file import RunConfig
from settings.train import TrainSettings
from storage.log.claims import ClaimRules, next_claim
from storage.log.entries import Claim, Quarantine, Step
from storage.shards.shards import DamagedShard
from tasks.session import RunSession
from tasks.watchdog import Stalled, num_finished, where_everybody_stands
from tasks.workers import refresh_workers, release_silent, wait_for_stragglers
from trainers.health import GapTooLarge, NonFinite
from trainers.refusals import RefusedShards
from trainers.timing import split_wait

logger = logging.getLogger("millrace.train")


Argument = TypeVar("Argument")

SUSPICIOUS_GAP = 0.1
"""Nats per token; bfloat16 rounding stays an order of magnitude below."""
REFUSALS = 3
"""Claims in a row that may be refused for their shards, without a step in between, before a run gives up."""


class EveryClaimRefused(UserError):
    """Claim after claim had shards that must not be trained: collecting more of them is of no use."""


@task(name="start-trainer", cache_policy=NO_CACHE, persist_result=False)
async def start_trainer(
    session: RunSession,
    *,
    config: RunConfig,
) -> None:
    """Load the policy and resume the optimizer, re-training recorded steps where no state was saved since."""
    session.config = config
    arguments = {
        "store_uri": session.log.store.uri,
        "run_id": session.log.run_id,
        "config": config,
        "cache": str(session.cache),
        "sends": session.weight_transfer != "store",
    }
    await session.host_trainer("trainer-0", "trainers.worker:TrainerWorker", arguments=arguments, settings=config.train)
    replayed = await session.trainer.call("open")
    if replayed:
        logger.info("re-trained %d recorded steps from their shards to restore the optimizer", replayed)


def claim_rules(*, batch_size: int, max_staleness: float, rollout: RolloutSettings, train: TrainSettings) -> ClaimRules:
    """What the claims of a run depend on besides its log."""
    return ClaimRules(
        batch_size=batch_size,
        max_staleness=max_staleness,
        stale_policy=train.stale_policy,
        min_usable=rollout.min_usable,
        steps_per_update=train.steps_per_update,
        dynamic_batch=rollout.dynamic_batch,
        max_attempts=rollout.max_attempts,
        on_nothing_accepted=rollout.on_nothing_accepted,
    )


async def next_batch(
    session: RunSession, *, rules: ClaimRules, pace: bool, stall_timeout: float, lease_timeout: float
) -> Claim:
    """Wait until enough groups are committed, by producers here or elsewhere, and claim them.

    With `pace`, groups that are running and that this step's policy would push over the bound are waited for, as long
    as their engines have other work too.
    Raises `storage.log.claims.NothingAccepted`, and `Stalled` after `stall_timeout` seconds in which no group finished.
    """
    log, started = session.log, time.perf_counter()
    # Where the trainer masks or corrects old tokens no group is lost, and waiting would only cost.
    seen, last_progress, paced = -1, time.monotonic(), not (pace and rules.stale_policy == "strict")
    while True:
        session.arrivals.clear()
        state = log.refresh()
        claim = None if state.paused else next_claim(state, rules)
        if state.paused:
            last_progress = time.monotonic()
        if claim is not None:
            if paced:
                session.waited_seconds += time.perf_counter() - started
                return claim
            await wait_for_stragglers(session, version=claim.base_version)
            paced = True
            continue  # what has finished meanwhile may be in the log already, committed by `produce`
        await release_silent(session, patience=lease_timeout)
        waited = time.monotonic() - last_progress
        if waited > min(1.0, stall_timeout) and (progress := state.entries + await num_finished(session)) != seen:
            seen, last_progress = progress, time.monotonic()
        elif waited > stall_timeout:
            raise Stalled(
                f"no progress for {waited:.0f} s: {state.pending_accepted} of {rules.batch_size} groups are ready for "
                f"step {state.step + 1}\n{await where_everybody_stands(session)}"
            )
        try:
            # Our own producer sets the event; a producer on another machine is seen by the next look at the log.
            async with asyncio.timeout(1.0):
                await session.arrivals.wait()
        except TimeoutError:
            continue


def unsearched(argument: Argument) -> Argument:
    """A task's argument as it is: Prefect looks for futures in every field of a record, and a claim has many."""
    return cast(Argument, quote(argument))


def forget_results() -> None:
    """Let Prefect forget which task returned what: it keeps a state for each result of a flow, however long that runs,
    to draw who used it. Our tasks meet in the log."""
    if context := FlowRunContext.get():
        context.run_results.clear()


def _may_pass(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed step is worth another try: what the data or the settings forbid stays forbidden."""
    return not isinstance(state.data, NonFinite | EveryClaimRefused | ValueError)


@task(
    name="train",
    task_run_name="train-{claim.step}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    retry_condition_fn=_may_pass,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def train_step(session: RunSession, *, claim: Claim, round_started: float) -> Step | None:
    """One optimizer step on a claim: new policy in the store, step in the log.

    Where the trainer dies another one is started, and Prefect's retry gives it the claim; it finds the step in the log
    where the dead one had committed it.
    Null where a claimed shard is damaged or must not be trained: it is quarantined, its prompts run again, and the next
    claim goes without it. Raises `EveryClaimRefused` when that has become of `REFUSALS` claims in a row, and
    `trainers.health.NonFinite`.
    """
    shards = session.log.state.shards
    groups = [*claim.trained, *claim.stale, *claim.filtered, *claim.failed, *claim.cancelled]
    taken = [shards[shard_id] for shard_id in dict.fromkeys(group.shard_id for group in groups)]
    try:
        step: Step = await session.trainer.call(
            "train_step",
            claim,
            round_started=round_started,
            extra_metrics={
                **split_wait(session.waited_seconds, taken, num_producers=len(session.workers)),
                "publish_seconds": session.publish_seconds,
                "peak_memory_bytes": float(session.memory.peak_bytes),
                **await asyncio.to_thread(session.system.sample),
            },
            session_id=session.session_id,
        )
    except WorkerDied as death:
        logger.warning("%s; another trainer takes its place", death)
        await start_trainer(session, config=session.config)
        raise
    except DamagedShard as damaged:
        await _quarantine(session, {damaged.shard_id: damaged.reason})
        return None
    except RefusedShards as refused:
        await _quarantine(session, refused.reasons)
        session.refusals += 1
        if session.refusals >= REFUSALS:
            raise EveryClaimRefused(_give_up(claim, refused)) from refused
        return None
    session.refusals = 0
    session.publish_seconds = session.waited_seconds = 0.0  # they were of the round that is over
    session.log.refresh()
    # Absent where no token was sampled by the very policy that was trained.
    suspicious = step.metrics.get("engine_gap", 0.0) > SUSPICIOUS_GAP
    if suspicious and not session.warned_of_gap:
        session.warned_of_gap = True
        logger.warning(
            "step %d: engine and trainer differ by %.2f nats per token on the same policy; "
            "the engine may hold other weights",
            claim.step,
            step.metrics["engine_gap"],
        )
    return step


async def _quarantine(session: RunSession, reasons: dict[str, str]) -> None:
    for shard_id, reason in reasons.items():
        ids = {"shard": shard_id}
        logger.warning("shard %s: %s: quarantined, its prompts run again", shard_id, reason, extra=ids)
        session.log.append(Quarantine(shard_id=shard_id, reason=reason))
    await refresh_workers(session)


def _give_up(claim: Claim, refused: RefusedShards) -> str:
    """The sentence a run stops with."""
    count = f"step {claim.step}: {REFUSALS} claims in a row were refused, so collecting more is of no use"
    if not isinstance(refused, GapTooLarge):
        return f"{count}; the last one because of {refused}"
    gap = max(refused.gaps.values())
    return (
        f"{count}: engine and trainer disagree by {gap:.3g} nats per token about policy {claim.base_version}, above "
        f"train.max_gap = {refused.max_gap:g}. Check that the engine loads this very policy (`millrace lineage RUN "
        f"--policy {claim.base_version} --verify` checks its files), that it runs the model in the trainer's precision "
        "and code, and that top_p, top_k and min_p do not cut its probabilities short; then start this run again"
    )
