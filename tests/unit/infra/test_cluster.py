"""Objects in other processes, alone and as a group of ranks; a real Ray cluster, no model."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from infra import placement
from infra.cluster import Cluster, Hosted, HostedGroup, RaisedInWorker, WorkerDied
from settings.errors import InvalidInput
from tests.unit.infra.counting import USERS_CODE

Result = TypeVar("Result")
_COUNTING = "tests.unit.infra.counting:Counting"
_RAISING = "tests.unit.infra.counting:raise_in_users_code"
_SECONDS = 240.0
"""A call that has not ended by then hangs."""


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[Callable], object]]:
    """Runs a coroutine function with one cluster, the same one for all tests."""
    runner = asyncio.Runner()
    with runner:
        cluster = Cluster(log_folder=tmp_path_factory.mktemp("logs"), num_workers=4)
        runner.run(cluster.__aenter__())

        def run(script: Callable[[Cluster], Awaitable[Result]]) -> Result:
            async def limited() -> Result:
                async with asyncio.timeout(_SECONDS):
                    return await script(cluster)

            return runner.run(limited())

        yield run
        runner.run(cluster.__aexit__())


def _nodes(*num_gpus: float) -> list[dict[str, float]]:
    return [{"CPU": 64.0, **({"GPU": float(number)} if number else {})} for number in num_gpus]


async def _group(cluster: Cluster, num_ranks: int, name: str, **options: float) -> Hosted | HostedGroup:
    group = await cluster.host_group(name, _COUNTING, num_ranks=num_ranks, **options)
    await group.call("open", start=10)
    return group


def test_one_rank_is_an_ordinary_worker_without_rendezvous(inside) -> None:
    async def script(cluster: Cluster) -> tuple[object, ...]:
        hosted = await _group(cluster, 1, "single")
        return hosted, await hosted.call("add", 2, times=3), await hosted.call("environment")

    hosted, total, environment = inside(script)
    assert isinstance(hosted, Hosted) and total == 16 and environment == {}


def test_a_call_runs_on_every_rank_and_returns_the_first_ones_result(inside) -> None:
    async def script(cluster: Cluster) -> tuple[object, ...]:
        group = await _group(cluster, 3, "trio")
        first = await group.call("environment")
        return group, first, await group.call("meet"), await group.call("add", 1), await group.call("add", 1)

    group, environment, met, *sums = inside(script)
    assert environment["RANK"] == environment["LOCAL_RANK"] == "0" and environment["WORLD_SIZE"] == "3"
    assert met == (1 + 2 + 3, 3)
    assert sums == [11, 12]
    assert [rank.log_file.name for rank in group._ranks] == ["trio.log", "trio-rank-1.log", "trio-rank-2.log"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_compute_with_the_threads_they_are_told(inside, num_ranks: int) -> None:
    async def script(cluster: Cluster) -> list[int]:
        group = await _group(cluster, num_ranks, "told")
        await group.prepare({"OMP_NUM_THREADS": "3"})
        threads: list[int] = await group.call("threads")
        return threads

    assert inside(script) == [3] * num_ranks


def test_an_error_of_all_ranks_is_raised_once_and_the_group_goes_on(inside) -> None:
    async def script(cluster: Cluster) -> int:
        group = await _group(cluster, 2, "failing")
        with pytest.raises(ValueError, match="says 0") as caught:
            await group.call("fail")
        assert "rank 0 of 2 of failing" in caught.value.__notes__[-1]
        return await group.call("add", 1)

    assert inside(script) == 11


def test_an_error_that_others_follow_is_raised_as_it_was_where_it_began(inside) -> None:
    async def script(cluster: Cluster) -> int:
        group = await _group(cluster, 3, "following")
        with pytest.raises(ValueError, match="rank 2 cannot do this") as caught:
            await group.call("fail_together", 2)
        assert "rank 2 of 3 of following" in caught.value.__notes__[-1]
        return await group.call("add", 1)

    assert inside(script) == 11


def test_ranks_that_wait_for_one_that_failed_are_killed(inside) -> None:
    async def script(cluster: Cluster) -> list[int]:
        group = await _group(cluster, 2, "stuck", lag_seconds=0.5)
        processes = [await rank.call("process") for rank in group._ranks]
        with pytest.raises(ValueError, match="rank 1 cannot do this"):
            await group.call("fail_alone", 1)
        with pytest.raises(WorkerDied, match=r"stuck cannot do add\(\) any more: rank 1 failed in fail_alone"):
            await group.call("add", 1)
        return processes

    _wait_for_the_end_of(inside(script))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_group_and_is_named(inside, rank: int) -> None:
    async def script(cluster: Cluster) -> list[int]:
        group = await _group(cluster, 2, f"killed-{rank}", lag_seconds=0.5)
        processes = [await member.call("process") for member in group._ranks]
        with pytest.raises(WorkerDied, match=rf"rank {rank} of killed-{rank} died during die\(\); its log is"):
            await group.call("die", rank)
        with pytest.raises(WorkerDied, match="any more"):
            await group.call("count")
        return processes

    _wait_for_the_end_of(inside(script))


@pytest.mark.parametrize(
    ("which", "kind", "message", "line"),
    [
        ("number", ValueError, r"^invalid literal for int\(\) with base 10: 'x'$", 'int("x")'),
        ("own class", RaisedInWorker, "^Mine: two\nlines$", 'raise Mine("two\\nlines")'),
        ("own arguments", RaisedInWorker, "^Two: 1$", "raise Two(1, 2)"),
        ("unpicklable", RaisedInWorker, "^ValueError: locked$", "raise error"),
        ("two at once", ExceptionGroup, "unhandled errors in a TaskGroup", 'int("x")'),
        ("mendable", InvalidInput, "^write one of a, b$", "raise InvalidInput"),
    ],
)
def test_an_error_comes_with_the_users_frames_last(
    inside, tmp_path: Path, which: str, kind: type[Exception], message: str, line: str
) -> None:
    """Whether a method was called or a function ran in a process of its own."""
    file = tmp_path / "env.py"
    file.write_text(USERS_CODE)

    async def script(cluster: Cluster) -> list[BaseException]:
        raiser = await cluster.host(f"raiser {which}", _COUNTING)
        await raiser.call("open", start=0)
        calls = [
            raiser.call("raise_in_users_code", f"{file}:fail", which),
            cluster.run(f"function {which}", _RAISING, function=f"{file}:fail", which=which),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in inside(script):
        assert type(error) is kind and re.search(message, str(error)), repr(error)
        printed = "".join(traceback.format_exception(error))
        last = printed.rpartition("File ")[2]
        assert last.startswith(f'"{file}", line ') and line in last.splitlines()[1], printed
        assert "ray/" not in error.__notes__[0] and "worker_process.py" not in error.__notes__[0], printed


def _places() -> list[dict[str, Any]]:
    """What the cluster has reserved, or is to reserve."""
    from ray.util import placement_group_table

    return [place for place in placement_group_table().values() if place["state"] != "REMOVED"]


def _new(known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {place["placement_group_id"] for place in known}
    return [place for place in _places() if place["placement_group_id"] not in names]


async def _wait_until_free(known: list[dict[str, Any]]) -> None:
    """Returns once there is no place but the known ones; the script's own time limit ends it otherwise."""
    while _new(known):
        await asyncio.sleep(0.05)


def _of_two_parts(cluster: Cluster) -> Cluster:
    """The same cluster for engines of two parts."""
    return Cluster(log_folder=cluster._log_folder, gpus_per_engine=2)


@pytest.mark.parametrize("end", ["close", "die", "kill"])
def test_an_engine_of_two_parts_has_all_its_devices_in_one_place_until_it_ends(inside, end: str) -> None:
    async def script(cluster: Cluster) -> tuple[list[dict[str, Any]], int]:
        before = _places()
        engine = await _of_two_parts(cluster).host(f"engine-{end}", _COUNTING)
        await engine.call("open", start=10)
        reserved = _new(before)
        total = await engine.call("add", 1)
        match end:
            case "close":
                await engine.close()
            case "die":
                with pytest.raises(WorkerDied):
                    await engine.call("die", 0)
            case "kill":
                engine.kill()
        await _wait_until_free(before)
        return reserved, total

    [place], total = inside(script)
    assert total == 11
    assert place["bundles"] == {0: {"CPU": 2.0}} and place["strategy"] == "STRICT_PACK" and place["state"] == "CREATED"


def test_an_engine_of_one_part_needs_no_place(inside) -> None:
    from ray.util import placement_group_table

    async def script(cluster: Cluster) -> bool:
        before = len(placement_group_table())
        single = await cluster.host("single-engine", _COUNTING)
        await single.call("open", start=10)
        return len(placement_group_table()) == before

    assert inside(script)


@pytest.mark.parametrize("end", ["close", "die"])
def test_ranks_have_a_place_each_until_they_end(inside, end: str) -> None:
    async def script(cluster: Cluster) -> list[dict[str, Any]]:
        before = _places()
        group = await _group(cluster, 2, f"placed-{end}", lag_seconds=0.5)
        reserved = _new(before)
        await group.call("count")
        if end == "close":
            await group.close()
        else:
            with pytest.raises(WorkerDied):
                await group.call("die", 1)
        await _wait_until_free(before)
        return reserved

    [place] = inside(script)
    assert place["bundles"] == {0: {"CPU": 1.0}, 1: {"CPU": 1.0}} and place["strategy"] == "PACK"


def test_an_engine_that_waits_for_devices_says_what_it_waits_for_and_leaves_nothing_behind(
    inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "_LOOK_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, "millrace.placement")

    async def script(cluster: Cluster) -> None:
        before = _places()
        engines = _of_two_parts(cluster)
        waiting = asyncio.create_task(engines.host("rollout-7", _COUNTING, num_gpus=2))
        while not caplog.messages:
            await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await _wait_until_free(before)

    inside(script)
    assert caplog.messages[0] == (
        "rollout-7 waits for 2 GPUs of one node; the nodes of the cluster have 0, and 0 are free in all"
    )


def test_an_object_that_cannot_be_opened_says_why(inside) -> None:
    async def script(cluster: Cluster) -> None:
        hosted = await cluster.host("unbuildable", _COUNTING)
        with pytest.raises(TypeError, match="begin"):
            await hosted.call("open", begin=10)

    inside(script)


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "num_gpus", "fits"),
    [(1, 2, 1, True), (2, 3, 0, True), (2, 3, 3, True), (2, 3, 4, True), (2, 3, 2, False), (2, 2, 1, False)],
)
def test_ranks_do_not_share_a_gpu(num_ranks: int, num_workers: int, num_gpus: float, fits: bool) -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=num_workers)
    cluster.nodes = _nodes(num_gpus)
    if fits:
        cluster.check_ranks(num_ranks)
    else:
        with pytest.raises(ValueError, match=f"train.num_ranks = {num_ranks}: {num_workers} processes"):
            cluster.check_ranks(num_ranks)


@pytest.mark.parametrize(
    ("gpus_per_engine", "num_workers", "num_gpus", "expected"),
    [(1, 2, 0, 0), (1, 2, 2, 1), (1, 2, 1, 0.5), (2, 3, 0, 0), (2, 3, 3, 2), (2, 5, 8, 2), (4, 9, 9, 4)],
)
def test_an_engine_has_as_many_gpus_as_it_has_parts(
    gpus_per_engine: int, num_workers: int, num_gpus: float, expected: float
) -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=num_workers, gpus_per_engine=gpus_per_engine)
    cluster.nodes = _nodes(num_gpus)
    cluster.check_ranks(1)
    assert cluster.gpus_per_engine == expected


def test_the_parts_of_an_engine_do_not_share_a_gpu() -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=3, gpus_per_engine=2)
    cluster.nodes = _nodes(2)
    with pytest.raises(ValueError, match="on 2 GPUs .*: with trainer and other engines that makes 3, and there are 2"):
        cluster.check_ranks(1)


@pytest.mark.parametrize(
    ("nodes", "parts", "refused"),
    [
        ([1, 1], 2, "on 2 GPUs .* × pipeline_parallel_size.*, all of one node, and no node has more than 1: lower one"),
        ([4, 0, 4], 8, "on 8 GPUs .* no node has more than 4"),
        ([0, 0], 65, "on 65 CPUs .* no node has more than 64"),
        ([0, 2], 2, ""),
        ([0, 0], 64, ""),
    ],
)
def test_an_engine_that_no_node_can_hold_is_refused(nodes: list[float], parts: int, refused: str) -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=parts, gpus_per_engine=parts)
    cluster.nodes = _nodes(*nodes)
    if not refused:
        cluster.check_ranks(0)
        return
    with pytest.raises(ValueError, match=refused):
        cluster.check_ranks(0)


def test_what_an_engine_needs_is_nothing_to_a_run_that_starts_none() -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=2, gpus_per_engine=8)
    cluster.nodes = _nodes(2)
    cluster.check_ranks(2)


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "refused"),
    [
        ([3, 3], 0, "on 2 GPUs .* the nodes have places for 2 of the 3 engines; lower rollout.num_workers to 2"),
        ([3, 5], 1, ""),
        ([4, 2], 0, ""),
        ([7], 1, ""),
    ],
)
def test_engines_that_the_nodes_cannot_hold_together_are_refused(
    nodes: list[float], num_ranks: int, refused: str
) -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=3 * 2 + num_ranks, gpus_per_engine=2)
    cluster.nodes = _nodes(*nodes)
    if not refused:
        cluster.check_ranks(num_ranks)
        return
    with pytest.raises(ValueError, match=refused):
        cluster.check_ranks(num_ranks)


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
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    async def start() -> None:
        async with Cluster(log_folder=tmp_path):
            pass

    asyncio.run(start())
    assert asked == ["local"]


def _wait_for_the_end_of(processes: list[int]) -> None:
    """Raises when one is still there after a while."""
    alive = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(alive, timeout=30)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
