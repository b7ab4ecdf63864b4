"""Turns on one GPU, on a model of it: memory that is taken, refused and copied slowly; every change × every fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infra.ray.hosted import WorkerDied
from infra.ray.liveness import RayLost
from tasks.phases import NEXT, Phase, SharedDevice
from tests.simulation import run_in_virtual_time

TOTAL, ENGINE, TRAINER, LIBRARIES = 24, 18, 20, 1
"""GB: each fits alone, both do not."""
PATIENCE = 5.0
"""Seconds of the loop's clock, which jumps."""


class _OutOfMemory(Exception):
    """As CUDA's."""


class _Gpu:
    """Memory by process; refuses what does not fit."""

    def __init__(self) -> None:
        self.held: dict[_Worker, int] = {}
        self.most = 0

    def take(self, worker: _Worker, gigabytes: int) -> None:
        others = sum(held for each, held in self.held.items() if each is not worker)
        if others + gigabytes > TOTAL:
            raise _OutOfMemory(f"{worker.name} wants {gigabytes} GB of {TOTAL}, and others hold {others}")
        self.held[worker] = gigabytes
        self.most = max(self.most, sum(self.held.values()))


class _Worker:
    """A process on the GPU. `faults`: method → what goes wrong at its next call."""

    def __init__(self, gpu: _Gpu, name: str, needs: int) -> None:
        self.gpu, self.name, self.needs = gpu, name, needs
        self.faults: dict[str, str] = {}
        self.calls: list[str] = []
        self.is_alive, self.on_device = True, True
        gpu.take(self, needs)

    async def call(self, method: str) -> None:
        self.calls.append(method)
        fault = self.faults.pop(method, "")
        if not self.is_alive:
            raise WorkerDied(f"{self.name} died")
        if fault == "exception":
            raise RuntimeError("vLLM says no")
        if fault == "never":
            await asyncio.Event().wait()
        if fault == "slow":
            await asyncio.sleep(PATIENCE / 2)
        if fault == "killed":
            self.kill()
            raise WorkerDied(f"{self.name} died")
        if fault == "lost":
            raise RayLost("Ray is gone")
        comes = method in ("wake", "take_device")
        await asyncio.sleep(0.5)  # a copy
        self.gpu.take(self, self.needs if comes else LIBRARIES)
        self.on_device = comes

    def kill(self) -> None:
        self.is_alive = False
        self.gpu.held.pop(self, None)


class _Run:
    """A driver's loop: steps that are committed, workers that are replaced."""

    def __init__(self, *, in_phases: bool = True) -> None:
        self.gpu = _Gpu()
        self.trainer: _Worker | None = None
        self.engine: _Worker
        self.device = SharedDevice(lambda: self.trainer, in_phases=in_phases, seconds=PATIENCE)
        self.committed = 0
        self.served = -1

    async def start_engine(self) -> None:
        """What `produce` does whenever an engine is gone; a killed one has to be noticed first."""
        engine: Any = object()
        async with self.device.starting(f"engine-{id(engine)}", _Late(self)):
            self.engine = _Worker(self.gpu, "the engine", ENGINE)
        self.served = self.committed

    async def start_trainer(self) -> None:
        async with self.device.opening():
            self.trainer = _Worker(self.gpu, "the trainer", TRAINER)

    async def begin(self) -> None:
        await self.start_engine()
        await self.start_trainer()

    async def round(self, *, during: Callable[[], Awaitable[None]] | None = None) -> None:
        """Generate, train, publish; what has died is replaced, as the session's tasks do."""
        if not self.engine.is_alive:
            await self.start_engine()
        assert self.engine.on_device and self.served == self.committed, "generates with the newest policy"
        async with self.device.training():
            while True:
                try:
                    await self._step(during)
                    break
                except WorkerDied:
                    await self.start_trainer()
        if self.engine.is_alive and not self.engine.faults.get("wake"):
            await self._publish()
        await self.device.generate()
        self.served = self.committed  # a restarted engine starts with it, a woken one is told so

    async def _step(self, during: Callable[[], Awaitable[None]] | None) -> None:
        assert self.trainer is not None
        if not self.trainer.is_alive:
            raise WorkerDied("the trainer died")
        assert self.trainer.on_device, "trains where its weights are"
        assert self.engine not in self.gpu.held or self.gpu.held[self.engine] == LIBRARIES
        if during is not None:
            during, once = None, during
            await once()
        if not self.trainer.is_alive:
            raise WorkerDied("the trainer died")
        self.committed += 1

    async def _publish(self) -> None:
        if not self.engine.on_device:
            await self.engine.call("wake")


class _Late:
    """The engine that is there by the time it is asked."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._engine: _Worker | None = None

    def _its(self) -> _Worker:
        self._engine = self._engine or self._run.engine
        return self._engine

    async def call(self, method: str) -> None:
        engine = self._its()
        if method == "wake" and engine.on_device and engine.is_alive and not engine.faults.get("wake"):
            return  # a new policy has woken it
        await engine.call(method)

    def kill(self) -> None:
        self._its().kill()


async def _rounds(run: _Run, number: int) -> None:
    for _ in range(number):
        await run.round()


def _assert_in_order(run: _Run, rounds: int) -> None:
    assert run.committed == rounds, "nothing committed is lost, nothing is trained twice"
    assert run.device.phase is Phase.GENERATING
    assert run.gpu.most <= TOTAL
    if run.engine.is_alive:
        assert run.engine.on_device, "no engine is left asleep"
    living = {worker for worker in (run.engine, run.trainer) if worker is not None and worker.is_alive}
    assert set(run.gpu.held) == living, "no zombie holds the card"


def test_the_table_is_one_round() -> None:
    phase, seen = Phase.GENERATING, []
    for _ in Phase:
        phase = NEXT[phase]
        seen.append(phase)
    assert phase is Phase.GENERATING and set(seen) == set(Phase)


def test_rounds_take_turns_and_the_memory_suffices() -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        await _rounds(run, 3)
        _assert_in_order(run, 3)
        assert run.trainer is not None
        assert run.trainer.calls == ["leave_device"] + 3 * ["take_device", "leave_device"]
        assert run.engine.calls == 4 * ["sleep", "wake"], "one time for the trainer's start"
        assert run.device.seconds.keys() == {"sleep", "take_device", "leave_device", "wake"}
        assert all(seconds >= 0 for seconds in run.device.seconds.values())

    run_in_virtual_time(script())


def test_both_at_once_would_not_fit() -> None:
    async def script() -> None:
        run = _Run(in_phases=False)
        await run.start_engine()
        with pytest.raises(_OutOfMemory, match="the trainer wants 20 GB of 24, and others hold 18"):
            await run.start_trainer()

    run_in_virtual_time(script())


@pytest.mark.parametrize("fault", ["exception", "never", "killed", "slow"])
@pytest.mark.parametrize("method", ["sleep", "take_device", "leave_device", "wake"])
def test_a_fault_in_any_change_costs_a_process_and_no_step(method: str, fault: str) -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        await _rounds(run, 2)
        assert run.trainer is not None
        victim = run.engine if method in ("sleep", "wake") else run.trainer
        victim.faults[method] = fault
        await run.round()
        assert victim.is_alive == (fault == "slow"), "who does not do its part is ended"
        _assert_in_order(run, 3)
        await _rounds(run, 2)
        _assert_in_order(run, 5)

    run_in_virtual_time(script())


@pytest.mark.parametrize("who", ["engine", "trainer"])
def test_a_death_in_the_middle_of_a_step_costs_no_step(who: str) -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        victim = getattr(run, who)

        async def die() -> None:
            victim.kill()

        await run.round(during=die)
        _assert_in_order(run, 1)
        await _rounds(run, 2)
        _assert_in_order(run, 3)

    run_in_virtual_time(script())


def test_an_engine_that_takes_the_place_of_a_dead_one_waits_until_the_trainer_has_left() -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        starting: list[asyncio.Task[None]] = []

        async def die_and_start() -> None:
            run.engine.kill()
            starting.append(asyncio.create_task(run.start_engine()))
            await asyncio.sleep(10.0)
            assert not starting[0].done() and run.device.phase is Phase.TRAINING

        await run.round(during=die_and_start)
        await starting[0]
        _assert_in_order(run, 1)
        await _rounds(run, 2)
        _assert_in_order(run, 3)

    run_in_virtual_time(script())


def test_a_step_that_trains_nothing_leaves_the_engine_awake_with_the_policy_of_before() -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        async with run.device.training():
            pass
        assert run.device.phase is Phase.FREE and not run.engine.on_device
        await run.device.generate()
        await run.device.generate()
        _assert_in_order(run, 0)
        async with run.device.training():
            pass
        async with run.device.training():  # `generate` was not called
            pass
        await run.device.generate()
        _assert_in_order(run, 0)

    run_in_virtual_time(script())


@pytest.mark.parametrize("method", ["sleep", "take_device", "leave_device"])
def test_what_ends_all_ends_the_round(method: str) -> None:
    """Ray is gone, or the user stops the run: no other process takes a place, and the error is the one of the end."""

    async def script() -> None:
        run = _Run()
        await run.begin()
        assert run.trainer is not None
        victim = run.engine if method == "sleep" else run.trainer
        victim.faults[method] = "lost"
        with pytest.raises(RayLost):
            await run.round()
        stopped = _Run()
        await stopped.begin()
        assert stopped.trainer is not None
        (stopped.engine if method == "sleep" else stopped.trainer).faults[method] = "never"
        playing = asyncio.create_task(stopped.round())
        await asyncio.sleep(PATIENCE / 2)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert stopped.engine.is_alive and stopped.trainer.is_alive, "they close in their own way"

    run_in_virtual_time(script())


def test_an_error_of_the_step_is_the_one_that_is_raised_and_the_device_is_free() -> None:
    async def script() -> None:
        run = _Run()
        await run.begin()
        with pytest.raises(ValueError, match="the step"):
            async with run.device.training():
                raise ValueError("the step")
        assert run.device.phase is Phase.FREE and sum(run.gpu.held.values()) == 2 * LIBRARIES

    run_in_virtual_time(script())


def test_without_turns_no_worker_is_asked() -> None:
    async def script() -> None:
        run = _Run(in_phases=False)
        await run.start_engine()
        async with run.device.training():
            assert run.device.phase is Phase.GENERATING
        await run.device.generate()
        assert run.engine.calls == []

    run_in_virtual_time(script())
