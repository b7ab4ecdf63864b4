"""What a session gives its workers: threads of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from settings.train import TrainSettings
from tasks.session import RunSession
from tests.builders import a_log


class _Fleet:
    """Hosts nothing, and remembers what processes were told."""

    gpus_per_engine = gpus_per_worker = 0.0

    def __init__(self, num_gpus: float) -> None:
        self.num_gpus = num_gpus
        self.told: list[dict[str, str]] = []

    async def host(self, *_: Any, **__: Any) -> _Fleet:
        return self

    async def host_group(self, *_: Any, **__: Any) -> _Fleet:
        return self

    async def prepare(self, environment: dict[str, str]) -> None:
        self.told.append(environment)


def _session(fleet: Any, *, num_engines: int = 1) -> RunSession:
    nothing: Any = None
    return RunSession(log=a_log(), fleet=fleet, memory=nothing, session_id="s", tracking="", num_engines=num_engines)


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
    session = _session(fleet, num_engines=num_engines)
    asyncio.run(session.host("rollout-0", "module:Worker", arguments={}))
    assert fleet.told == told and session.hosted == {"rollout-0": fleet}


@pytest.mark.parametrize(("num_threads", "told"), [(0, []), (1, [{"OMP_NUM_THREADS": "1"}])])
def test_the_trainer_has_the_threads_that_it_is_given(num_threads: int, told: list[dict[str, str]]) -> None:
    fleet: Any = _Fleet(0)
    settings = TrainSettings(num_threads=num_threads)
    asyncio.run(_session(fleet).host_trainer("trainer-0", "module:Worker", arguments={}, settings=settings))
    assert fleet.told == told
