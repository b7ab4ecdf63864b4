"""A replay's plan is made again once retention waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from storage.log.entries import Retire
from storage.log.replay_plan import CannotReplay, plan_replay
from tasks.replay import start_replay
from tests.builders import a_log, a_session, a_shard, a_step, a_summary


def test_what_retention_took_since_the_first_look_is_found_before_a_worker_starts() -> None:
    log = a_log()
    log.append(a_shard("s0", [a_summary(0)]))
    log.append(a_step(log.state, trained=["0.task0"]))
    plan = plan_replay(log.state, run="run", first=1, last=1)
    log.append(Retire(shard_ids=["s0"], policy_versions=[], state_paths=[], reason="test"))
    nothing: Any = None  # there is no cluster, so starting a worker would break
    session = a_session(log, id="")
    with pytest.raises(CannotReplay, match="shard s0, which retention removed"):
        asyncio.run(start_replay.fn(session, plan=plan, recorded=nothing, changed=nothing, rewards=""))
