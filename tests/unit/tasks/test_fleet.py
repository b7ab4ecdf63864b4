"""A driver without rollout workers of its own still says what is to be served, and frees the prompts of the silent."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import pytest

from infra.environment import code_version
from infra.ray.hosted import WorkerDied
from rollouts.engines.engine import WeightUpdate
from settings.errors import InvalidInput
from settings.evaluation import EvaluationSettings
from settings.train import TrainSettings
from storage.log.entries import Evaluation, Join, Lease, Policy
from storage.log.producers import Lookout, give_sign
from storage.objects.object_store import StoredFile
from storage.policies.policies import DamagedDelta, PolicyReader
from tasks import rollout
from tasks.fleet import REPLACEMENTS, Fleet
from tasks.phases import SharedDevice
from tasks.rollout import evaluate_policy, publish_policy
from tasks.session import RunSession
from tasks.steps import all_sampled
from tasks.trainer import TrainerHandle
from tests.builders import a_config, a_log, a_shard, a_step, a_summary


def _serves(session: RunSession) -> tuple[int, str]:
    alias = session.log.state.aliases["rollout"]
    return alias.version, alias.checksum


_ALONE = SharedDevice(lambda: None, in_phases=False, seconds=1.0)


class _Party:
    """A trainer or a worker that notes what it is asked; it raises an answer that is an error."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"can_send": True, "can_receive": True, **answers}
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    async def rendezvous(self) -> tuple[str, int]:
        return "10.0.0.1", 4711

    async def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        self.asked.append((method, arguments))
        update = WeightUpdate(checksum="sum", mode="keep", cache_cleared=True, paused_seconds=0.1, transfer="gloo")
        answer = self.answers.get(method, update)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _trained(session: RunSession, **fields: Any) -> Policy:
    """The policy of one step more."""
    step = a_step(session.log.state, trained=[])
    session.log.append(dataclasses.replace(step, policy=dataclasses.replace(step.policy, **fields)))
    return session.log.state.steps[-1].policy


def _publish(session: RunSession, trainer: _Party | None = None, /, **workers: Any) -> Any:
    """Publish a new policy to these workers; returns the alias `rollout`."""
    session.trainer, session.fleet.workers = trainer or session.trainer, workers  # type: ignore[assignment]
    asyncio.run(publish_policy.fn(session, policy=_trained(session)))
    return session.log.state.aliases["rollout"]


@pytest.mark.parametrize("workers", [{}, {"rollout-0": _Party(publish=WorkerDied("died during publish()"))}])
def test_without_a_living_engine_the_alias_moves_when_the_policy_is_in_the_store(
    session: RunSession, workers: dict[str, _Party]
) -> None:
    """Producers elsewhere go by it, and workers that take the place of the dead."""
    session.fleet.mark_served([], version=0)
    assert _serves(session) == (0, "")
    _publish(session, **workers)
    assert _serves(session) == (1, "")


def test_in_a_fixed_schedule_no_policy_is_left_out_and_each_has_its_batch_before_the_next(session: RunSession) -> None:
    rules: dict[str, Any] = {"schedule": "fixed", "max_staleness": 1, "batch_size": 1, "min_usable": 1, "steps": 9}
    session.fleet.config = config = a_config(**rules)
    session.fleet.mark_served([], version=0)
    for _ in range(2):
        _trained(session)

    def unserved() -> list[int]:
        return [policy.version for policy in session.fleet.unserved()]

    assert unserved() == [1, 2] and session.fleet.due_version() == 1
    session.fleet.config = a_config()
    assert unserved() == [2] and session.fleet.due_version() == 2
    session.fleet.config = a_config(**rules | {"steps_per_update": 2, "steps": 3})
    assert unserved() == [2]
    _trained(session)
    assert unserved() == [2, 3], "the last one of a run is served, too"
    session.fleet.config = config

    async def wait(version: int) -> bool:
        """Whether it is over at once."""
        session.fleet.mark_served([], version=version)
        waiting = asyncio.ensure_future(all_sampled(session, config=config))
        await asyncio.sleep(0.01)
        is_over = waiting.done()
        waiting.cancel()
        return is_over

    assert [asyncio.run(wait(version)) for version in (0, 1, 2)] == [True, True, False]
    session.log.append(a_shard("s0", [a_summary(0, version=2)]))
    assert asyncio.run(wait(2))


def test_the_newest_policy_is_served_when_the_alias_is_on_it_and_its_files_make_it(
    session: RunSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not session.fleet.newest_is_served()
    session.fleet.mark_served([], version=0)
    assert session.fleet.newest_is_served()
    delta = _trained(session, anchor=0)
    assert not session.fleet.newest_is_served()
    asyncio.run(publish_policy.fn(session, policy=delta))
    damages = iter([DamagedDelta("a value too few"), None])

    def fetch(reader: PolicyReader, policy: Policy) -> None:
        assert policy == delta
        if (error := next(damages)) is not None:
            raise error

    monkeypatch.setattr(PolicyReader, "fetch", fetch)
    assert not session.fleet.newest_is_served()
    assert session.fleet.newest_is_served()


def test_an_engine_that_is_there_again_is_compared_with_engines_only(
    session: RunSession, caplog: pytest.LogCaptureFixture
) -> None:
    session.fleet.mark_served([], version=0)
    with caplog.at_level(logging.WARNING):
        session.fleet.mark_served(["sum"], version=0)
        session.fleet.mark_served([], version=0)
        assert _serves(session) == (0, "sum") and not caplog.text
        session.fleet.mark_served(["tensors-1:sum"], version=0)
        assert _serves(session) == (0, "tensors-1:sum") and not caplog.text, "one of an earlier version says nothing"
        session.fleet.mark_served(["tensors-1:other"], version=0)
    assert "checksum of policy 0 differs" in caplog.text


def test_prompts_of_a_producer_that_is_silent_are_free_and_those_of_another_one_are_not(session: RunSession) -> None:
    log, times = session.log, iter([0.0, 20.0, 40.0, 61.0])
    session.fleet._lookout = Lookout(log, clock=lambda: next(times))
    for number, holder in enumerate(["gone", "here"]):
        log.append(Join(holder=holder, id=holder, outside=True))
        give_sign(log, holder)
        log.append(Lease(holder=holder, positions=[2 * number, 2 * number + 1], number=number))
    for _ in range(4):
        give_sign(log, "here")
        asyncio.run(session.fleet.release_silent())
    assert log.state.leased == {2: "here", 3: "here"} and log.state.producers.keys() == {"here"}
    assert log.entries[-1].body.reason == "no sign of life for 61 s"
    assert log.state.free_positions(2) == [0, 1]


@pytest.fixture
def broadcasting(session: RunSession) -> RunSession:
    """By gloo, to engines of two parts each."""
    session.fleet.config = a_config(engine={"weight_transfer": "gloo", "vllm": {"tensor_parallel_size": 2}})
    return session


def test_a_policy_is_broadcast_to_every_part_of_every_engine(broadcasting: RunSession) -> None:
    trainer, workers = _Party(), {name: _Party() for name in ("a", "b")}
    alias = _publish(broadcasting, trainer, **workers)
    assert (alias.version, alias.transfer) == (1, "gloo")
    (_, (sent,)) = trainer.asked[-1]
    assert (sent.host, sent.port, sent.num_receivers, sent.version) == ("10.0.0.1", 4711, 4, 1)
    received = [party.asked[-1][1][1] for party in workers.values()]
    assert [each.first_rank for each in received] == [1, 3]


@pytest.mark.parametrize(
    ("trainer", "worker"),
    [
        (_Party(can_send=False), _Party()),
        (_Party(can_send=WorkerDied("gone")), _Party()),
        (_Party(), _Party(can_receive=False)),
    ],
    ids=["it has other weights", "it is dead", "a worker evaluates"],
)
def test_if_a_worker_cannot_take_part_the_store_is_read(
    broadcasting: RunSession, trainer: _Party, worker: _Party
) -> None:
    other = _Party()
    _publish(broadcasting, trainer, other=other, worker=worker)
    assert [party.asked[-1][0] for party in (other, worker)] == ["publish", "publish"]
    assert "send_policy" not in [method for method, _ in trainer.asked]


def test_a_worker_that_dies_in_a_broadcast_leaves_the_others_to_it(broadcasting: RunSession) -> None:
    lost, other = _Party(receive=WorkerDied("gone")), _Party()
    assert _publish(broadcasting, _Party(), lost=lost, other=other).version == 1


class _Over(Exception):
    pass


@pytest.fixture
def started(session: RunSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the workers that are started from here on; the first `REPLACEMENTS` are lost with their node."""
    names: list[str] = []

    async def start(session: RunSession, *, name: str) -> None:
        names.append(name)
        if len(names) <= REPLACEMENTS:
            raise WorkerDied(f"{name} died during prepare()")
        worker: Any = _Party(wait_for_work=_Over())
        session.fleet.hosted[name] = worker

    monkeypatch.setattr(rollout, "start_rollout_worker", start)
    return names


def _produce(session: RunSession) -> None:
    asyncio.run(rollout.produce(session, "rollout-0"))


def test_a_worker_that_dies_while_it_takes_the_place_of_another_is_replaced_too(
    session: RunSession, started: list[str]
) -> None:
    with pytest.raises(_Over):
        _produce(session)
    assert len(started) == REPLACEMENTS + 1 and list(session.fleet.workers) == [started[-1]]


def test_too_many_deaths_in_a_row_end_the_run_only_if_no_other_worker_is_there(
    session: RunSession, started: list[str]
) -> None:
    session.fleet._replacements_left = REPLACEMENTS - 1
    other: Any = _Party()
    session.fleet.workers = {"other": other}
    _produce(session)
    assert list(session.fleet.workers) == ["other"]
    session.fleet.workers = {}
    started.clear()
    with pytest.raises(WorkerDied, match="during prepare"):
        _produce(session)


def test_an_evaluation_waits_for_the_worker_that_takes_the_place_of_the_last_one(session: RunSession) -> None:
    evaluation = Evaluation(version=0, split="test", score=0.5, num_tasks=2, num_failed=0, shard_id="e", seconds=1.0)

    async def script() -> None:
        worker: Any = _Party(evaluate=evaluation)
        session.fleet.hosted |= {"rollout-0": worker, "rollout-1": worker}
        await session.fleet.take_part(["rollout-0"])
        assert await session.fleet.leave("rollout-0", death=WorkerDied("rollout-0 died"))
        asked = asyncio.create_task(evaluate_policy.fn(session, version=0, settings=EvaluationSettings()))
        assert (await asyncio.wait({asked}, timeout=0.05))[0] == set(), "no worker is there to be asked"
        await session.fleet.take_part(["rollout-1"])
        assert await asked == evaluation

    asyncio.run(script())


class _Cluster:
    """Hosts nothing, and remembers what processes were told."""

    def __init__(self, num_gpus: float = 0) -> None:
        self.gpus_per_engine = self.gpus_per_worker = num_gpus
        self.environments: list[dict[str, str]] = []
        self.opened: list[dict[str, Any]] = []
        self.proofs: list[str] = []

    async def host(self, *_: Any, **__: Any) -> _Cluster:
        return self

    host_group = host

    async def prepare(self, environment: dict[str, str]) -> None:
        self.environments.append(environment)

    async def call(self, method: str, *_: Any, **arguments: Any) -> str:
        if method == "proof":
            return self.proofs.pop(0)
        assert method == "open"
        self.opened.append(arguments)
        return "sum"


@pytest.mark.parametrize(
    ("num_engines", "num_gpus", "staleness", "megabytes", "threads"),
    [
        *((1, 0, 1, 270, "7"), (2, 0, 1, 270, "3"), (16, 0, 1, 270, "1")),  # the trainer computes at the same time
        *((1, 0, 0, 270, "8"), (3, 0, 0, 270, "2"), (16, 0, 0, 270, "1")),  # it waits for the engines
        *((1, 0, 0, 10, "7"), (2, 1, 0, 270, "")),
    ],
)
def test_engines_on_cpus_divide_the_threads_and_name_the_code_of_their_own_machine(
    num_engines: int, num_gpus: float, staleness: int, megabytes: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    cluster: Any = _Cluster(num_gpus)
    config = a_config(max_staleness=staleness)
    fleet = Fleet(a_log(), cluster, config=config, device=_ALONE, num_engines=num_engines)
    size = StoredFile(key="models/base/model.safetensors", num_bytes=megabytes * 10**6, modified_at=0.0)
    monkeypatch.setattr(fleet.log.store, "walk", lambda prefix: [size] if prefix == "models/base" else [])
    assert asyncio.run(fleet.start("rollout-0")) == "sum"
    assert cluster.environments == ([{"OMP_NUM_THREADS": threads}] if threads else [])
    assert fleet.hosted == {"rollout-0": cluster}
    assert cluster.opened[0]["code_version"] == code_version() != fleet.log.state.sessions[-1].code_version


def test_engines_of_a_reproducible_run_must_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cluster: Any = _Cluster(1)
    cluster.proofs = ["one", "one", "two"]
    fleet = Fleet(a_log(), cluster, config=a_config(reproducible=True), device=_ALONE, num_engines=3)
    assert [asyncio.run(fleet.start(f"rollout-{number}")) for number in (0, 1)] == ["sum", "sum"]
    with pytest.raises(InvalidInput, match="the engine of rollout-2 computes other bits than the one before it"):
        asyncio.run(fleet.start("rollout-2"))


@pytest.mark.parametrize(("num_threads", "environments"), [(0, []), (1, [{"OMP_NUM_THREADS": "1"}])])
def test_the_trainer_has_the_threads_that_it_is_given(num_threads: int, environments: list[dict[str, str]]) -> None:
    cluster: Any = _Cluster()
    trainer = TrainerHandle(a_log(), cluster)
    settings = TrainSettings(num_threads=num_threads, dtype="bfloat16")
    asyncio.run(trainer.open("trainer-0", "module:Worker", settings=settings))
    assert trainer._suspicious_gap == 0.15
    assert cluster.environments == environments


class _Sleeper(_Cluster):
    """A process that takes turns, and remembers when it did what."""

    def __init__(self) -> None:
        super().__init__(num_gpus=0.5)
        self.did: list[str] = []

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> str:
        self.did.append(method)
        return await super().call(method, *arguments, **keywords) if method == "open" else ""


def test_an_engine_of_a_shared_gpu_sleeps_for_the_trainer_and_starts_when_it_has_left() -> None:
    cluster: Any = _Sleeper()
    trainer: Any = _Sleeper()

    async def script() -> None:
        device = SharedDevice(lambda: trainer, in_phases=True, seconds=5.0)
        fleet = Fleet(a_log(), cluster, config=a_config(), device=device)
        await fleet.start("rollout-0")
        async with device.training():
            assert cluster.did == ["open", "sleep"] and trainer.did == ["take_device"]
            starting = asyncio.create_task(fleet.start("rollout-1"))
            await asyncio.wait([starting], timeout=0.05)
            assert cluster.did == ["open", "sleep"], "the trainer has the GPU"
        await starting
        await device.generate()
        assert cluster.did == ["open", "sleep", "open", "wake", "wake"]
        assert trainer.did == ["take_device", "leave_device"]

    asyncio.run(script())
