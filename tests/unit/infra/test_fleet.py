"""Objects in other processes, alone and as a group of ranks; a real Ray cluster, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from infra.fleet import Fleet, Hosted, HostedGroup, WorkerDied

Result = TypeVar("Result")
_COUNTING = "tests.unit.infra.counting:Counting"
_SECONDS = 60.0
"""A call that has not ended by then hangs."""


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[Callable], object]]:
    """Runs a coroutine function with one fleet, the same one for all tests."""
    runner = asyncio.Runner()
    with runner:
        fleet = Fleet(log_folder=tmp_path_factory.mktemp("logs"), num_workers=4)
        runner.run(fleet.__aenter__())

        def run(script: Callable[[Fleet], Awaitable[Result]]) -> Result:
            async def limited() -> Result:
                async with asyncio.timeout(_SECONDS):
                    return await script(fleet)

            return runner.run(limited())

        yield run
        runner.run(fleet.__aexit__())


async def _group(fleet: Fleet, num_ranks: int, name: str, **options: float) -> Hosted | HostedGroup:
    return await fleet.host_group(name, _COUNTING, arguments={"start": 10}, num_ranks=num_ranks, **options)


def test_one_rank_is_an_ordinary_worker_without_rendezvous(inside) -> None:
    async def script(fleet: Fleet) -> tuple[object, ...]:
        hosted = await _group(fleet, 1, "single")
        return hosted, await hosted.call("add", 2, times=3), await hosted.call("environment")

    hosted, total, environment = inside(script)
    assert isinstance(hosted, Hosted) and total == 16 and environment == {}


def test_a_call_runs_on_every_rank_and_returns_the_first_ones_result(inside) -> None:
    async def script(fleet: Fleet) -> tuple[object, ...]:
        group = await _group(fleet, 3, "trio")
        first = await group.call("environment")
        return group, first, await group.call("meet"), await group.call("add", 1), await group.call("add", 1)

    group, environment, met, *sums = inside(script)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "0" and environment["WORLD_SIZE"] == "3"
    assert met == (1 + 2 + 3, 3)
    assert sums == [11, 12]
    assert [rank.log_file.name for rank in group._ranks] == ["trio.log", "trio-rank-1.log", "trio-rank-2.log"]


def test_an_error_of_all_ranks_is_raised_once_and_the_group_goes_on(inside) -> None:
    async def script(fleet: Fleet) -> int:
        group = await _group(fleet, 2, "failing")
        with pytest.raises(ValueError, match="says 0") as caught:
            await group.call("fail")
        assert "rank 0 of 2 of failing" in caught.value.__notes__[0]
        return await group.call("add", 1)

    assert inside(script) == 11


def test_an_error_that_others_follow_is_raised_as_it_was_where_it_began(inside) -> None:
    async def script(fleet: Fleet) -> int:
        group = await _group(fleet, 3, "following")
        with pytest.raises(ValueError, match="rank 2 cannot do this") as caught:
            await group.call("fail_together", 2)
        assert "rank 2 of 3 of following" in caught.value.__notes__[0]
        return await group.call("add", 1)

    assert inside(script) == 11


def test_ranks_that_wait_for_one_that_failed_are_killed(inside) -> None:
    async def script(fleet: Fleet) -> list[int]:
        group = await _group(fleet, 2, "stuck", lag_seconds=0.5)
        processes = [await rank.call("process") for rank in group._ranks]
        with pytest.raises(ValueError, match="rank 1 cannot do this"):
            await group.call("fail_alone", 1)
        with pytest.raises(WorkerDied, match=r"stuck cannot do add\(\) any more: rank 1 failed in fail_alone"):
            await group.call("add", 1)
        return processes

    _wait_for_the_end_of(inside(script))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group_and_is_named(inside, rank: int) -> None:
    async def script(fleet: Fleet) -> list[int]:
        group = await _group(fleet, 2, f"killed-{rank}", lag_seconds=0.5)
        processes = [await member.call("process") for member in group._ranks]
        with pytest.raises(WorkerDied, match=rf"rank {rank} of killed-{rank} died during die\(\); its log is"):
            await group.call("die", rank)
        with pytest.raises(WorkerDied, match="any more"):
            await group.call("count")
        return processes

    _wait_for_the_end_of(inside(script))


def test_an_object_that_cannot_be_built_says_why(inside) -> None:
    async def script(fleet: Fleet) -> None:
        hosted = await fleet.host("unbuildable", _COUNTING, arguments={"begin": 10})
        with pytest.raises(TypeError, match="begin"):
            await hosted.call("count")

    inside(script)


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "num_gpus", "fits"),
    [(1, 2, 1, True), (2, 3, 0, True), (2, 3, 3, True), (2, 3, 4, True), (2, 3, 2, False), (2, 2, 1, False)],
)
def test_ranks_do_not_share_a_gpu(num_ranks: int, num_workers: int, num_gpus: float, fits: bool) -> None:
    fleet = Fleet(log_folder=Path("unused"), num_workers=num_workers)
    fleet.num_gpus = num_gpus
    if fits:
        fleet.check_ranks(num_ranks)
    else:
        with pytest.raises(ValueError, match=f"train.num_ranks = {num_ranks}: {num_workers} processes"):
            fleet.check_ranks(num_ranks)


@pytest.mark.parametrize(
    ("gpus_per_engine", "num_workers", "num_gpus", "expected"),
    [(1, 2, 0, 0), (1, 2, 2, 1), (1, 2, 1, 0.5), (2, 3, 0, 0), (2, 3, 3, 2), (2, 5, 8, 2), (4, 9, 9, 4)],
)
def test_an_engine_has_as_many_gpus_as_it_has_parts(
    gpus_per_engine: int, num_workers: int, num_gpus: float, expected: float
) -> None:
    fleet = Fleet(log_folder=Path("unused"), num_workers=num_workers, gpus_per_engine=gpus_per_engine)
    fleet.num_gpus = num_gpus
    fleet.check_ranks(1)
    assert fleet.gpus_per_engine == expected


def test_the_parts_of_an_engine_do_not_share_a_gpu() -> None:
    fleet = Fleet(log_folder=Path("unused"), num_workers=3, gpus_per_engine=2)
    fleet.num_gpus = 2.0
    with pytest.raises(ValueError, match="on 2 GPUs .*: with trainer and other engines that makes 3, and there are 2"):
        fleet.check_ranks(1)


@pytest.mark.parametrize("address", [None, ""])
def test_without_an_address_no_cluster_that_happens_to_run_here_is_joined(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options["address"]))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    async def start() -> None:
        async with Fleet(log_folder=tmp_path):
            pass

    asyncio.run(start())
    assert asked == ["local"]


def _wait_for_the_end_of(processes: list[int]) -> None:
    """Raises when one is still there after a while."""
    alive = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=30)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
