"""Prefect tasks around the fleet of rollout workers: start one, replace a dead one, publish a policy to all of them.

In: a session. Out: workers in `session.workers`, and entries in the log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from infra.fleet import WorkerDied
from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import WeightUpdate
from settings.engine import EngineSettings
from settings.errors import InvalidInput
from settings.train import TrainSettings
from storage.log.entries import Alias, Policy
from storage.log.producers import withdraw
from storage.policies.policies import PolicyReader
from tasks.session import REPLACEMENTS, RunSession

logger = logging.getLogger("millrace.workers")

ROLLOUT_ALIAS = "rollout"


@task(name="start-rollout-worker", task_run_name="start-{name}", cache_policy=NO_CACHE, persist_result=False)
async def start_rollout_worker(
    session: RunSession, *, name: str, arguments: dict[str, Any], version: int | None = None
) -> str:
    """Load a policy, the live one by default, into an engine; returns the checksum of its weights, empty where it
    serves an older one for now because the live one is damaged.

    Nothing is produced before the worker joins.
    """
    logger.info("starting the inference engine of %s", name)
    arguments = {**arguments, "name": name, "outside": session.outside}
    worker = await session.host(name, "rollouts.production.worker:RolloutWorker", arguments=arguments)
    checksum: str = await worker.call("start", version)
    return checksum


def mark_served(session: RunSession, *, checksums: list[str]) -> None:
    """Put the alias `rollout` on the live policy; warn where an engine holds other weights under the same version."""
    live = session.log.refresh().live
    assert live is not None, "the base policy comes first"
    recorded = session.log.state.aliases.get(ROLLOUT_ALIAS)
    if not checksums:  # only producers elsewhere, which go by the alias
        if recorded is None or recorded.version != live.version:
            session.log.append(Alias(name=ROLLOUT_ALIAS, version=live.version, checksum=""))
        return
    serving = [checksum for checksum in checksums if checksum]
    if not serving:
        return  # each of them goes on to the live policy as soon as it can, or says why it cannot
    known = recorded.checksum if recorded is not None and recorded.version == live.version else ""
    expected = known or serving[0]
    if set(serving) != {expected}:
        logger.warning("an engine's checksum of policy %d differs from another's", live.version)
    session.log.append(Alias(name=ROLLOUT_ALIAS, version=live.version, checksum=serving[0]))
    logger.info("%d engine(s) serve policy %d", len(serving), live.version)


def newest_is_served(session: RunSession) -> bool:
    """Whether the alias `rollout` is on the live policy, and that one can be made from what the store has of it."""
    live, served = session.log.state.live, session.log.state.aliases.get(ROLLOUT_ALIAS)
    if live is None or served is None or served.version != live.version:
        return False
    return not PolicyReader(session.log, session.cache).damage_of(live)  # a trainer that starts makes it anew


@task(
    name="publish",
    task_run_name="publish-{policy.version}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def publish_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap the weights of every engine of this session and move the alias `rollout`, by which those elsewhere go."""
    started = time.perf_counter()
    answers = await _broadcast(session, policy)
    if answers is None:
        answers = await _swap(session, policy)
    if not answers:  # whoever takes the place of the dead starts with it, or hears of it by the alias
        session.log.append(Alias(name=ROLLOUT_ALIAS, version=policy.version, checksum=""))
    if updates := [update for update in answers if update is not None]:
        session.log.append(
            Alias(
                name=ROLLOUT_ALIAS,
                version=policy.version,
                checksum=updates[0].checksum,
                update_mode=updates[0].mode,
                cache_cleared=updates[0].cache_cleared,
                paused_seconds=max(update.paused_seconds for update in updates),
                transfer=updates[0].transfer,
            )
        )
    session.publish_seconds = time.perf_counter() - started


@task(
    name="load",
    task_run_name="load-{policy.version}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def load_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap the weights of every engine of this session; somebody else has published the policy."""
    await _swap(session, policy)


def choose_transfer(session: RunSession, *, engine: EngineSettings, train: TrainSettings) -> None:
    """How policies come to the engines, from here on. Raises `ValueError` where GPUs cannot be joined by NCCL."""
    if engine.weight_transfer == "nccl" and (session.fleet.gpus_per_worker < 1 or train.device == "cpu"):
        raise InvalidInput(
            "engine.weight_transfer = 'nccl' needs a GPU of its own for the trainer and for each engine; there are "
            f"{session.fleet.num_gpus:g}. Use 'gloo', or leave it out"
        )
    session.weight_transfer, session.parts_per_engine = engine.weight_transfer, engine.num_gpus


async def _broadcast(session: RunSession, policy: Policy) -> list[WeightUpdate | None] | None:
    """`_swap`, with the weights straight from the trainer. Null where not everybody can take part at once."""
    workers, parts = list(session.workers.values()), session.parts_per_engine
    if session.weight_transfer == "store" or not workers:
        return None
    ready = asyncio.gather(
        session.trainer.call("can_send", policy.version),
        *(worker.call("can_receive") for worker in workers),
        return_exceptions=True,
    )
    if any(answer is not True for answer in await ready):
        return None
    try:
        host, port = await session.trainer.rendezvous()
    except WorkerDied:
        return None
    broadcast = Broadcast(
        host=host,
        port=port,
        backend=session.weight_transfer,
        version=policy.version,
        weights_sha256=policy.weights_sha256,
        num_receivers=len(workers) * parts,
    )
    _, *answers = await asyncio.gather(
        session.trainer.call("send_policy", broadcast),
        *(
            worker.call("receive", policy, dataclasses.replace(broadcast, first_rank=1 + number * parts))
            for number, worker in enumerate(workers)
        ),
        return_exceptions=True,
    )
    _raise_all_but_deaths(answers)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _swap(session: RunSession, policy: Policy) -> list[WeightUpdate | None]:
    """Under their running requests; what each worker answers that lives. The dead are their producers' business."""
    answers = await asyncio.gather(
        *(worker.call("publish", policy) for worker in session.workers.values()), return_exceptions=True
    )
    _raise_all_but_deaths(answers)
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def refresh_workers(session: RunSession, *, but: str = "") -> None:
    """Let the workers look at the log again: it may leave room for more. The dead are their producers' business."""
    others = [worker for name, worker in session.workers.items() if name != but]
    _raise_all_but_deaths(await asyncio.gather(*(w.call("refresh") for w in others), return_exceptions=True))


async def wait_for_stragglers(session: RunSession, *, version: int) -> None:
    """Let groups finish that the step on policy `version` would push over the bound, while their engines are busy."""
    workers = list(session.workers.values())
    answers = await asyncio.gather(*(w.call("wait_for_stragglers", version) for w in workers), return_exceptions=True)
    _raise_all_but_deaths(answers)


async def take_part(session: RunSession, names: Sequence[str]) -> None:
    """Started workers produce from now on, and divide what may be in flight among all who do."""
    for name in names:
        await session.hosted[name].call("join")
    session.workers |= {name: session.hosted[name] for name in names}
    if names:
        session.has_workers.set()


async def join(session: RunSession, name: str) -> None:
    """A started worker takes part from now on, with the newest policy that engines serve."""
    await take_part(session, [name])
    served = session.log.refresh().aliases.get(ROLLOUT_ALIAS)
    if served is not None:  # one may have been published while it was starting
        await session.workers[name].call("publish", session.log.state.policies[served.version])


async def replace(session: RunSession, start_engine: Callable[[str], Awaitable[str]]) -> str:
    """A worker takes the place of a dead one; `start_engine` starts the engine of a worker of a name.

    One that dies meanwhile, on a node that is being lost perhaps, is replaced too. Returns the name, empty where no
    other may be started; raises as `leave`.
    """
    while True:
        name = session.next_worker_name()
        try:
            await start_engine(name)
            await join(session, name)
            return name
        except WorkerDied as death:
            if not await leave(session, name, death=death):
                return ""


async def leave(session: RunSession, name: str, *, death: WorkerDied) -> bool:
    """Take a dead worker out: its prompts are free for the others. True when another may be started in its place.

    Raises `death` where no worker is left and too many have died in a row.
    """
    session.workers.pop(name, None)
    if not session.workers:
        session.has_workers.clear()
    withdraw(session.log, name, reason=str(death))
    await refresh_workers(session)
    session.replacements_left -= 1
    if session.replacements_left >= 0:
        logger.warning("%s; its prompts run elsewhere, another worker takes its place", death)
        return True
    if not session.workers:
        raise death
    logger.warning("%s; %d in a row: the run goes on with %d workers", death, REPLACEMENTS, len(session.workers))
    return False


async def release_silent(session: RunSession, *, patience: float) -> None:
    """Give the prompts of producers elsewhere to others where they have not been heard of for `patience` seconds."""
    silent = session.lookout.silent(patience=patience)
    for name, seconds in silent.items():
        logger.warning("%s: no sign of life for %.0f s; its prompts run elsewhere", name, seconds)
        withdraw(session.log, name, reason=f"no sign of life for {seconds:.0f} s")
    if silent:
        await refresh_workers(session)


def _raise_all_but_deaths(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
            raise answer
