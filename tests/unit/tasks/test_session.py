"""What a session gives its workers: threads of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tasks.session import RunSession
from tests.builders import a_log


class _Fleet:
    """Hosts nothing, and remembers what processes were told."""

    gpus_per_engine = 0.0

    def __init__(self, num_gpus: float) -> None:
        self.num_gpus = num_gpus
        self.told: list[dict[str, str]] = []

    async def host(self, *_: Any, **__: Any) -> _Fleet:
        return self

    async def prepare(self, environment: dict[str, str]) -> None:
        self.told.append(environment)


@pytest.mark.parametrize(
    ("num_engines", "num_gpus", "told"),
    [
        (1, 0, [{"OMP_NUM_THREADS": "7"}]),
        (2, 0, [{"OMP_NUM_THREADS": "3"}]),
        (3, 0, [{"OMP_NUM_THREADS": "2"}]),
        (16, 0, [{"OMP_NUM_THREADS": "1"}]),
        (2, 2, []),
    ],
)
def test_engines_on_cpus_divide_the_threads(
    num_engines: int, num_gpus: float, told: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    fleet: Any = _Fleet(num_gpus)
    nothing: Any = None
    session = RunSession(log=a_log(), fleet=fleet, memory=nothing, session_id="s", tracking="", num_engines=num_engines)
    asyncio.run(session.host("rollout-0", "module:Worker", arguments={}))
    assert fleet.told == told and session.hosted == {"rollout-0": fleet}
