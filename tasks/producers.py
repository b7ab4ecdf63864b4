"""A producer beside a run that another process trains, perhaps on another machine: it follows the run's log.

    wait_for_policy ─▶ start a worker ─▶ follow: a new entry ─▶ the workers look at the log again: room?
                                           │ a new alias `rollout` ─▶ load_policy
                                           └▶ the run is over, enough shards, or nothing new for too long: done

In: the log of the run, and nothing else of its driver. Out: shards in it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

from infra.user_code import source_sha256
from settings.errors import InvalidInput, counted
from storage.log.entries import Shard
from storage.log.producers import check_name
from storage.log.run_state import RunState
from storage.log.runs import local_config
from storage.objects.object_store import StoreError
from tasks.rollout import load_policy
from tasks.session import RunSession, run_log

logger = logging.getLogger("millrace.producers")

LOOK_SECONDS = 1.0
"""Between two looks at the log: one small request to the store each."""
SHARDS_PER_LINE = 20
SILENCE_SECONDS = 60.0
"""After which a producer says that it waits for the run's driver."""


def look_up_run(*, store: str, run: str) -> dict[str, Any]:
    """The configuration a run was started with. Raises `NotFound` for an unknown run."""
    return local_config(run_log(store=store, run=run))


def producer_name(name: str) -> str:
    """The name of this process's workers, by default the machine's. Raises `InvalidInput` for an unusable name."""
    chosen = name or socket.gethostname().split(".")[0]
    check_name(chosen)
    return chosen


async def wait_for_policy(session: RunSession, *, workflow: str, patience: float) -> bool:
    """Wait for the run's first policy; False if the run is over. Raises `InvalidInput` for other workflow code."""
    deadline = time.monotonic() + patience
    while not (state := session.log.refresh()).sessions or state.live is None:
        if time.monotonic() > deadline:
            raise InvalidInput(
                f"run {session.log.run_id!r} has had no policy for {patience:g} s: start its driver first"
            )
        await asyncio.sleep(LOOK_SECONDS)
    ours, theirs = source_sha256(workflow), state.sessions[-1].reward_sha256
    if theirs and ours != theirs:
        raise InvalidInput(
            f"the source of {workflow} here is not that of the run's driver: rewards of two kinds would be mixed; "
            "put the same version of it here"
        )
    return not _is_over(state)


async def follow(session: RunSession, *, shards: int, patience: float) -> str:
    """Keep this session's workers up to the run's log until there is no more to do; returns why.

    That is when the run has the steps of its newest session, after `shards` shards of ours (0: any number), or when
    nothing was written for `patience` seconds: a killed driver, or a store out of reach, may come back until then.
    """
    seen, made, loaded = session.log.state.entries, 0, -1
    heard, waiting = time.monotonic(), ""
    while True:
        try:
            state, problem = session.log.refresh(), ""
        except (OSError, StoreError) as error:
            state, problem = session.log.state, f": {error}"
        silence = time.monotonic() - heard
        if new := session.log.entries[seen:]:
            seen, heard, waiting = state.entries, time.monotonic(), ""
            ours = [e for e in new if isinstance(e.body, Shard) and e.body.producer in session.fleet.hosted]
            for _ in ours:
                made += 1
                if made == 1 or not made % SHARDS_PER_LINE:
                    logger.info("%s committed, at step %d of the run", counted(made, "shard"), state.step)
            if len(new) > len(ours):
                await session.fleet.refresh()
        elif silence > patience:
            return f"nothing new in its log for {silence:.0f} s{problem}"
        elif silence > min(SILENCE_SECONDS, patience / 2) and not waiting:
            waiting = f"nothing new in the log of run {session.log.run_id} for {silence:.0f} s{problem}"
            logger.warning("%s; waiting for its driver, at most %.0f s in all", waiting, patience)
        if _is_over(state):
            return f"the run has its {counted(state.step, 'step')}"
        if 0 < shards <= made:
            return f"{counted(made, 'shard')} committed"
        loaded = await _load_newest(session, loaded)
        await asyncio.sleep(LOOK_SECONDS)


async def _load_newest(session: RunSession, loaded: int) -> int:
    """Serve what the alias `rollout` names if it is newer than version `loaded`; returns the version served."""
    policy = session.fleet.served()
    if policy is None or policy.version <= loaded:
        return loaded
    try:
        await load_policy(session, policy=policy)
    except (OSError, StoreError):
        if session.fleet.served(refresh=True) == policy:
            raise  # else it took so long that the next policy has come, and this one may be gone
        return loaded
    return policy.version


def _is_over(state: RunState) -> bool:
    return 0 < state.sessions[-1].steps <= state.step
