"""Objects in other processes, alone and as a group of ranks; a real Ray cluster, no model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from infra.ray import placement
from infra.ray.cluster import Cluster
from infra.ray.hosted import Hosted, HostedGroup, RaisedInWorker, StartFailed, WorkerDied, close
from settings.errors import InvalidInput
from tests.unit.infra.ray.counting import USERS_CODE

pytestmark = [pytest.mark.anyio, pytest.mark.server, pytest.mark.timeout(240)]
_COUNTING = "tests.unit.infra.ray.counting:Counting"
_RAISING = "tests.unit.infra.ray.counting:raise_in_users_code"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """The same one for all tests; its workers write JSON into their logs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLRACE_LOG_FORMAT", "json")
        async with Cluster(log_folder=tmp_path_factory.mktemp("logs") / "my-run", num_workers=4) as cluster:
            yield cluster


async def _group(cluster: Cluster, num_ranks: int, name: str) -> Hosted | HostedGroup:
    group = await cluster.host_group(name, _COUNTING, num_ranks=num_ranks)
    await group.call("open", start=10)
    return group


async def test_one_rank_is_an_ordinary_worker_without_rendezvous(cluster: Cluster) -> None:
    hosted = await _group(cluster, 1, "single")
    assert isinstance(hosted, Hosted)
    assert await hosted.call("add", 2, times=3) == 16 and "RANK" not in await hosted.call("environment")
    await hosted.prepare({"OMP_NUM_THREADS": "3"})
    assert (await hosted.call("environment"))["OMP_NUM_THREADS"] == "3"


async def test_a_worker_names_the_run_itself_and_the_step_it_works_on_in_its_log(cluster: Cluster) -> None:
    worker = await cluster.host("talker", _COUNTING)
    await worker.call("open", start=0)
    await worker.call("warn", SimpleNamespace(step=5))
    [line] = [json.loads(line) for line in worker.log_file.read_text().splitlines() if "in a thread" in line]
    assert line.items() >= {"run": "my-run", "worker": "talker", "call": "warn", "step": 5}.items()


async def test_a_task_that_leaves_python_ends_its_worker_with_its_place_in_the_log(cluster: Cluster) -> None:
    worker = await cluster.host("leaver", _COUNTING)
    await worker.call("open", start=0)
    with pytest.raises(WorkerDied, match=r"leaver died during leave_in_a_task\(\); its log is"):
        await worker.call("leave_in_a_task")
    assert "in _leave\n    raise SystemExit(3)\n" in worker.log_file.read_text()


async def test_a_call_runs_on_every_rank_and_returns_the_first_ones_result(cluster: Cluster) -> None:
    group = await _group(cluster, 3, "trio")
    await group.prepare({"OMP_NUM_THREADS": "3"})
    environments = [await rank.call("environment") for rank in group._ranks]
    assert [environment["RANK"] for environment in environments] == ["0", "1", "2"]
    same = {name: {environment[name] for environment in environments} for name in environments[0]}
    assert (same["LOCAL_RANK"], same["WORLD_SIZE"], same["OMP_NUM_THREADS"]) == ({"0"}, {"3"}, {"3"})
    assert await group.call("meet") == (1 + 2 + 3, 3)
    assert [await group.call("add", 1), await group.call("add", 1)] == [11, 12]
    assert [rank.log_file.name for rank in group._ranks] == ["trio.log", "trio-rank-1.log", "trio-rank-2.log"]


@pytest.mark.parametrize(
    ("num_ranks", "call", "message", "culprit"),
    [(2, ["fail"], "says 0", "rank 0 of 2"), (3, ["fail_together", 2], "rank 2 cannot do this", "rank 2 of 3")],
    ids=["all ranks fail alike", "others follow one"],
)
async def test_an_error_of_all_ranks_is_raised_as_it_was_where_it_began_and_the_group_goes_on(
    cluster: Cluster, num_ranks: int, call: list[Any], message: str, culprit: str
) -> None:
    group = await _group(cluster, num_ranks, "failing")
    with pytest.raises(ValueError, match=message) as caught:
        await group.call(*call)
    assert f"{culprit} of failing" in caught.value.__notes__[-1]
    assert await group.call("add", 1) == 11


@pytest.mark.parametrize(
    ("call", "rank", "error"),
    [
        ("fail_alone", 1, (ValueError, "rank 1 cannot do this")),
        ("die", 0, (WorkerDied, r"rank 0 of stuck died during die\(\); its log is")),
        ("die", 1, (WorkerDied, r"rank 1 of stuck died during die\(\); its log is")),
    ],
)
async def test_ranks_that_wait_for_one_that_failed_or_was_killed_are_killed(
    cluster: Cluster, call: str, rank: int, error: tuple[type[Exception], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.ray.hosted.LAG_SECONDS", 0.5)
    group = await _group(cluster, 2, "stuck")
    processes = [psutil.Process(await member.call("process")) for member in group._ranks]
    with pytest.raises(error[0], match=error[1]):
        await group.call(call, rank)
    with pytest.raises(WorkerDied, match=rf"stuck cannot do add\(\) any more: rank {rank}"):
        await group.call("add", 1)
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=30)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


async def test_an_object_that_cannot_be_opened_says_why_and_an_engine_of_one_part_needs_no_place(
    cluster: Cluster,
) -> None:
    before = _places()
    hosted = await cluster.host("unbuildable", _COUNTING)
    reason = f"TypeError: .* unexpected keyword argument 'begin'.*; its log is {hosted.log_file}"
    with pytest.raises(StartFailed, match=f"^unbuildable could not start: {reason}$") as caught:
        await hosted.call("open", begin=10)
    assert isinstance(caught.value.__cause__, TypeError)
    assert _places().keys() == before.keys()


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
async def test_an_error_comes_with_the_users_frames_last(
    cluster: Cluster, tmp_path: Path, which: str, kind: type[Exception], message: str, line: str
) -> None:
    """Whether a method was called or a function ran in a process of its own."""
    file = tmp_path / "env.py"
    file.write_text(USERS_CODE)

    raiser = await cluster.host(f"raiser {which}", _COUNTING)
    await raiser.call("open", start=0)
    calls = [
        raiser.call("raise_in_users_code", f"{file}:fail", which),
        cluster.run(f"function {which}", _RAISING, function=f"{file}:fail", which=which),
    ]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert type(error) is kind and re.search(message, str(error)), repr(error)
        printed = "".join(traceback.format_exception(error))
        last = printed.rpartition("File ")[2]
        assert last.startswith(f'"{file}", line ') and line in last.splitlines()[1], printed
        assert "site-packages/ray/" not in error.__notes__[0] and "worker_process.py" not in error.__notes__[0], printed


def _engines(cluster: Cluster) -> Cluster:
    """The same one, for engines of two parts."""
    engines = Cluster(log_folder=cluster._log_folder, gpus_per_engine=2)
    engines._watch = cluster._watch
    return engines


def _places() -> dict[str, dict[str, Any]]:
    """What the cluster has reserved, or is to reserve."""
    from ray.util import placement_group_table

    return {key: place for key, place in placement_group_table().items() if place["state"] != "REMOVED"}


async def test_the_process_of_a_function_ends_with_it(cluster: Cluster) -> None:
    """It would keep the libraries that it has imported."""
    pid = await cluster.run("function", "os:getpid")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not psutil.wait_procs([psutil.Process(pid)], timeout=60)[1]


@pytest.mark.parametrize("parts", ["an engine of two parts", "two ranks"])
@pytest.mark.parametrize("end", ["close", "die", "kill"])
async def test_devices_are_reserved_in_one_place_until_the_worker_ends(
    cluster: Cluster, parts: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.ray.hosted.LAG_SECONDS", 0.5)
    before = _places()
    if parts == "two ranks":
        expected: Any = ("PACK", {0: {"CPU": 1.0}, 1: {"CPU": 1.0}})
        worker = await _group(cluster, 2, f"placed-{end}")
    else:
        expected = ("STRICT_PACK", {0: {"CPU": 2.0}})
        worker = await _engines(cluster).host(f"engine-{end}", _COUNTING)
        await worker.call("open", start=10)
    [place] = [place for key, place in _places().items() if key not in before]
    assert (place["strategy"], place["bundles"]) == expected
    assert await worker.call("add", 1) == 11 and place["state"] == "CREATED"
    if end == "close":
        await close(worker)
    elif end == "kill" and isinstance(worker, Hosted):
        worker.kill()
    else:
        with pytest.raises(WorkerDied):
            await worker.call("die", 0)
    while _places().keys() - before:
        await asyncio.sleep(0.05)


async def test_an_engine_that_waits_for_devices_says_what_it_waits_for_and_leaves_nothing_behind(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "_LOOK_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, "millrace.placement")
    before = _places()
    waiting = asyncio.create_task(_engines(cluster).host("rollout-7", _COUNTING, num_gpus=2))
    while not caplog.messages:
        await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while _places().keys() - before:
        await asyncio.sleep(0.05)
    assert caplog.messages[0] == (
        "rollout-7 waits for 2 GPUs of one node; the nodes of the cluster have 0, and 0 are free in all"
    )


async def test_without_an_address_no_cluster_that_happens_to_run_here_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    asked: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(options["address"]))
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr("infra.ray.cluster.end_ray", lambda: None)
    for prepare in (lambda: monkeypatch.delenv("RAY_ADDRESS", False), lambda: monkeypatch.setenv("RAY_ADDRESS", "")):
        prepare()
        async with Cluster(log_folder=tmp_path):
            pass
    assert asked == ["local", "local"]
