"""A rollout worker turns prompts into committed shards, and after any restart goes on where the log stands."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.prompts import PromptOrder
from rollouts.production.worker import RolloutWorker
from rollouts.workflow import Score, Workflow, workflow_context
from settings.errors import InvalidInput
from settings.evaluation import EvaluationSettings
from storage.log.claims import NOTHING, next_claim, owed_by
from storage.log.entries import Claim, Join, Lease, Pause, Policy, Quarantine, Resume, Session, Shard, Step, TaskSet
from storage.log.producers import withdraw
from storage.log.run_state import Conflict
from storage.objects.digests import DIGEST_FILE, DigestMismatch, seal_folder
from storage.policies.adapters import ADAPTER_WEIGHTS, check_adapters
from storage.policies.policies import DELTA_FILE, DamagedDelta, PolicyWriter
from storage.records import Task
from storage.shards.shards import read_shard
from tests.builders import BASE, a_broadcast, a_config, a_log, a_policy_folder, a_step, local_store

BATCH, ATTEMPTS = 3, 2
SETTINGS: dict[str, Any] = {
    "run": "run",
    "workflow": f"{__name__}:Digits",
    "n_samples": ATTEMPTS,
    "batch_size": BATCH,
    "steps": 100,
    "max_concurrent": 8,
    "stale_policy": "strict",
    "retries": 0,
    "shard_bytes": 2**20,
    "shard_seconds": 10.0,
    "max_tokens": 8,
    "engine": {"kind": "scripted", "max_model_len": 64},
    "reward": {"timeout": 20.0},
    "attempt_timeout": 200.0,  # groups that begin ahead are called back after a tenth of it
}


class Digits(Workflow):
    """Ten tasks to train on, two held out; the reward is the attempt's number."""

    order: Sequence[int] = range(10)

    def tasks(self, split: str) -> Sequence[Task]:
        numbers = {"train": self.order, "test": [90, 91], "empty": []}[split]
        return [Task(id=f"task{number}", prompt=str(number)) for number in numbers]

    async def run(self, task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        if task.id == "task91":
            raise KeyError("held out by mistake")
        return Score(reward=float(workflow_context().attempt))


class Flaky(Digits):
    """Of every task the first two attempts fail, which are one group, and the next ones do not."""

    def __init__(self, dataset: str | None) -> None:
        super().__init__(dataset)
        self._attempts: Counter[str] = Counter()

    async def run(self, task: Task, chat: Chat) -> Score:
        self._attempts[task.id] += 1
        if self._attempts[task.id] <= ATTEMPTS:
            raise ConnectionError("no database")
        return await super().run(task, chat)


class Clinging(Digits):
    """Cannot let go of what it holds."""

    async def close(self) -> None:
        raise ConnectionError("no database")


class Blocking(Digits):
    """As many attempts as a worker plays at once wait for each other, each in a thread."""

    all_at_once = threading.Barrier(40)

    async def run(self, task: Task, chat: Chat) -> Score:
        await asyncio.to_thread(self.all_at_once.wait, 60.0)
        return await super().run(task, chat)


class Chancy(Digits):
    """Half of the replies earn a reward; attempts end in an order that is another one in every run."""

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        for _ in range(random.SystemRandom().randrange(20)):
            await asyncio.sleep(0)
        return Score(reward=float(len(reply) % 2))


class _Run:
    """A run with its base policy in a store, and workers on it."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.store = local_store(folder)
        digest = a_policy_folder(folder / "made" / "0", weights=b"base", tokenizer=tokenizer)
        self.store.put_folder(folder / "made" / "0", BASE.path, last=DIGEST_FILE)
        self.log = a_log(self.store, base=replace(BASE, weights_sha256=digest))

    def train(
        self, batch_size: int = BATCH, *, kind: str = "whole", claim: Claim | None = None, **metrics: float
    ) -> Policy:
        """Take a step on this claim, or on the first accepted groups; returns its policy: a `whole` one, an `adapter`,
        which has no tokenizer and no model's configuration, or a `delta` with one value changed; of those, the first is
        whole."""
        state = self.log.refresh()
        accepted = [group_id for group_id in state.pending if state.groups[group_id].accepted]
        step: Step = a_step(state, claim) if claim else a_step(state, trained=accepted[:batch_size])
        version, anchor = step.policy.version, None
        source = self.folder / "made" / str(version)
        if kind == "adapter":
            source.mkdir(parents=True)
            (source / "adapter_config.json").write_text("{}")
            (source / ADAPTER_WEIGHTS).write_bytes(f"adapter {version}".encode())
        else:
            a_policy_folder(source, weights=f"weights of {version}".encode(), tokenizer=self.tokenizer)
        if kind == "delta":
            save_file({"w": np.array([version, *[0] * 999], np.float32)}, source / "model.safetensors")
        digest = seal_folder(source)
        if kind == "delta":
            writer = PolicyWriter(self.log, self.folder / "cache", anchor_every=10)
            anchor, _ = writer.put(source, step.policy.path, version=version)
        else:
            self.store.put_folder(source, step.policy.path, last=DIGEST_FILE)
        policy = replace(step.policy, weights_sha256=digest, anchor=anchor)
        self.log.append(replace(step, policy=policy, metrics={**step.metrics, **metrics}))
        return policy

    @contextlib.asynccontextmanager
    async def workers(
        self, *names: str, outside: bool = False, version: int | None = None, produce: bool = True, **changes: Any
    ) -> AsyncIterator[list[RolloutWorker]]:
        """Workers that may begin at once if they are to produce; several have joined."""
        workers = [
            await RolloutWorker.open(
                a_config(**{**SETTINGS, **changes}),
                store_uri=self.store.uri,
                name=name,
                cache=str(self.folder / "cache"),
                code_version="c0de",
                outside=outside,
                version=version,
            )
            for name in names
        ]
        for worker in workers if len(names) > 1 else []:
            await worker.join()
        for worker in workers if produce else []:
            await worker.refresh()
        try:
            yield workers
        finally:
            for worker in workers:
                await worker.close()

    @contextlib.asynccontextmanager
    async def worker(self, name: str = "rollout-0", **options: Any) -> AsyncIterator[RolloutWorker]:
        async with self.workers(name, **options) as [worker]:
            yield worker

    async def collect(self, **options: Any) -> Any:
        """The first shard of a worker that then ends."""
        async with self.worker(**options) as worker:
            return await _collect(worker)

    def committed(self) -> list[int]:
        return sorted(self.log.refresh().positions)


@pytest.fixture
def run(tmp_path: Path, tokenizer_folder: Path) -> _Run:
    return _Run(tmp_path, tokenizer_folder)


async def _collect(worker: RolloutWorker) -> Any:
    await worker.wait_for_work()
    return await worker.collect()


async def test_a_workflow_that_cannot_close_costs_nothing_that_is_finished(
    run: _Run, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = f"{__name__}:Clinging"
    assert await run.collect(workflow=workflow) and run.committed()
    assert "close() failed: ConnectionError: no database\n  at " in caplog.text


async def test_collecting_commits_a_shard_of_a_batch(run: _Run, tokens: ChatTokens):
    shard = await run.collect()
    state = run.log.refresh()
    assert state.shards == {shard.id: shard}
    assert run.committed() == [0, 1, 2] and state.pending_accepted == 3
    assert shard.producer == "rollout-0" and shard.id.startswith("000000-rollout-0-")
    assert set(shard.seconds) == {"generate", "reward", "commit"}
    table = read_shard(run.log, shard)
    assert table.num_rows == shard.num_rows == 6
    assert set(table["head_version"].to_pylist()) == {0}
    assert sorted(table["reward"].to_pylist()) == [0.0] * 3 + [1.0] * 3
    assert set(table["is_eval"].to_pylist()) == {False}
    metadata = table.schema.metadata
    assert metadata[b"tokenizer_sha256"].decode() == tokens.tokenizer_sha256
    assert metadata[b"chat_template_sha256"].decode() == tokens.chat_template_sha256
    assert metadata[b"code_version"] == b"c0de" and metadata[b"run_id"] == b"run"


async def test_as_many_attempts_as_are_played_at_once_may_block_a_thread_each(run: _Run):
    shard = await run.collect(workflow=f"{__name__}:Blocking", n_samples=20, batch_size=2, max_concurrent=2)
    assert shard.num_rows == 40 and all(group.accepted for group in shard.groups)


@pytest.mark.parametrize(
    ("names", "is_stopped", "changes"),
    [
        (["rollout-0"], False, {"max_concurrent": 1}),
        (["rollout-0"], True, {"max_concurrent": 3}),
        (["left", "right"], False, {"max_concurrent": 2}),
    ],
)
async def test_batches_follow_from_the_run_file_with_any_workers_and_filters_and_after_a_stop(
    tmp_path: Path, tokenizer_folder: Path, names: list[str], is_stopped: bool, changes: dict[str, Any]
):
    """Claims, tokens and draws of three steps, in which uniform groups are replaced by the next."""
    asked: dict[str, Any] = {"workflow": f"{__name__}:Chancy", "drop_uniform_groups": True, "max_staleness": 0}

    async def play(folder: Path, names: list[str], *, is_stopped: bool = False, **changes: Any) -> list[Any]:
        run, steps = _Run(folder, tokenizer_folder), []
        config = a_config(**{**SETTINGS, **asked})
        while len(steps) < 3:
            async with run.workers(*names, **asked, **changes) as workers:
                while len(steps) < 3 and not (is_stopped and run.log.refresh().shards):
                    while (claim := next_claim(run.log.refresh(), config)) is None:
                        await asyncio.gather(*(worker.refresh() for worker in workers))
                        busy = [worker for worker in workers if worker._executor.has_work]
                        await asyncio.gather(*(worker.collect() for worker in busy))
                        if is_stopped:
                            break
                    if claim is None:
                        break
                    assert owed_by(run.log.state, claim, config) == NOTHING
                    taken = {group.group_id: [] for group in claim.trained}
                    for shard in run.log.state.shards.values():
                        for row in read_shard(run.log, shard).to_pylist():
                            row = (row["group_id"], row["input_ids"], row["reward"], row["sampling"]["seed"])
                            taken.get(row[0], []).append(row)
                    steps.append(taken)
                    policy = run.train(claim=claim)
                    for worker in workers:
                        await worker.publish(policy)
            is_stopped = False
        assert len(run.log.state.groups) > 3 * BATCH, "some were filtered"
        return steps

    first = await play(tmp_path / "first", ["rollout-0"])
    again = await play(tmp_path / "again", names, is_stopped=is_stopped, **changes)
    assert first == again and [len(taken) for taken in first] == [BATCH] * 3
    assert all(len({row[3] for rows in taken.values() for row in rows}) == BATCH * ATTEMPTS for taken in first)


async def test_the_engine_also_stops_at_the_turn_ends_of_the_template(
    run: _Run, tokens: ChatTokens, monkeypatch: pytest.MonkeyPatch
):
    started: list[Any] = []

    class Engine(ScriptedEngine):
        async def start(self, *arguments: Any, stop_ids: Any = ()) -> str:
            started.append(stop_ids)
            return await super().start(*arguments)

    monkeypatch.setattr("rollouts.engines.scripted_engine.ScriptedEngine", Engine)
    await run.collect()
    assert started == [tokens.turn_ends] == [(tokens.end_id,)]


async def test_a_shard_takes_from_the_beginning_of_its_attempts_and_no_moment_is_counted_twice(run: _Run):
    def worked(shard: Shard) -> float:
        return shard.seconds["generate"] + shard.seconds["reward"]

    began = time.time()
    async with run.worker() as worker:
        while worker.progress() < BATCH:  # attempts are played before they are collected
            await asyncio.sleep(0)
        asked, first = time.time(), await worker.collect()
        await worker.publish(run.train())
        second = await _collect(worker)
    ended = time.time()
    assert first is not None
    begun = min(read_shard(run.log, run.log.refresh().shards[first.id])["queued_at"].to_pylist())
    assert worked(first) >= asked - begun > 0
    assert worked(first) + worked(second) <= ended - began


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
async def test_the_machines_clock_may_be_set_while_a_shard_is_made(
    run: _Run, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    began, clock = time.perf_counter(), time.time
    async with run.worker() as worker:
        while worker.progress() < 1:
            await asyncio.sleep(0)
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
        shard = await worker.collect()
    assert shard is not None
    assert 0 < sum(shard.seconds.values()) <= time.perf_counter() - began
    times = read_shard(run.log, run.log.refresh().shards[shard.id]).select(["started_at", "finished_at"]).to_pylist()
    assert all(0 <= row["finished_at"] - row["started_at"] < 3600 for row in times)


async def test_adapters_are_served_with_the_base_models_tokenizer_and_stand_beside_their_rows(run: _Run):
    async with run.worker(lora={"rank": 4}) as worker:
        await _collect(worker)
        await worker.publish(run.train(kind="adapter"))
        assert await _collect(worker) is not None
    run.train(kind="adapter")
    await run.collect(lora={"rank": 4})  # a worker that starts on an adapter
    state = run.log.refresh()
    tables = {shard.id: read_shard(run.log, shard) for shard in state.shards.values()}
    served = [
        {v: d for row in t["adapters"].to_pylist() for v, d in row} if "adapters" in t.schema.names else {}
        for t in tables.values()
    ]
    assert served == [{}, {1: state.policies[1].weights_sha256}, {2: state.policies[2].weights_sha256}]
    for shard_id, table in tables.items():
        check_adapters(table, shard_id=shard_id, policies=state.policies)


async def test_a_published_policy_samples_the_next_tokens_and_no_older_one_is_loaded_after_it(run: _Run):
    async with run.worker() as worker:
        await _collect(worker)
        older = run.train()
        update = await worker.publish(older)
        assert update is not None and len(update.checksum) == 64
        first = await _collect(worker)
        await worker.publish(run.train())
        assert await worker.publish(older) is None
        second = await _collect(worker)
    assert run.committed() == list(range(9))
    assert (first.head_version, first.tail_version, second.head_version) == (1, 1, 2)
    assert set(read_shard(run.log, first)["weight_versions"].to_pylist()[0]) == {-1, 1}


async def test_a_broadcast_that_fails_is_replaced_by_the_store(run: _Run, caplog: pytest.LogCaptureFixture):
    async with run.worker() as worker:
        await _collect(worker)
        policy = run.train()
        assert worker.can_receive()
        update = await worker.receive(policy, a_broadcast(policy))
        assert update is not None and update.transfer == "store"
        assert (await _collect(worker)).head_version == 1
    assert "policy 1 is read from the store, its broadcast failed" in caplog.text


async def test_an_engine_that_sleeps_is_woken_by_the_driver_alone(run: _Run):
    async with run.worker() as worker:
        await _collect(worker)
        await worker.sleep()
        await worker.sleep()
        assert worker.served.pin.locked() and worker.can_receive()
        evaluating = asyncio.create_task(worker.evaluate(EvaluationSettings(num_tasks=2)))
        policy = run.train()
        by_another = asyncio.create_task(worker.publish(policy, wakes=False))
        await asyncio.wait([evaluating, by_another], timeout=0.2)
        assert not evaluating.done() and not by_another.done() and worker.served.is_asleep
        assert await worker.publish(policy) is not None
        assert (await evaluating).version == 1 and await by_another is not None
        assert not worker.served.pin.locked()
        await worker.wake()
        await worker.sleep()
        await worker.wake()
        assert (await _collect(worker)).head_version == 1 and not worker.served.pin.locked()


async def test_a_restarted_worker_asks_only_what_the_log_lacks(run: _Run):
    await run.collect(batch_size=1)
    assert run.committed() == [0]
    await run.collect()
    assert run.committed() == [0, 1, 2]  # the batch is completed, and no more
    state = run.log.refresh()
    async with run.worker() as worker:
        assert await worker.collect() is None  # nothing to do: the batch is there
    assert run.log.refresh() == state
    run.train()
    shard = await run.collect()
    assert sorted(group.position for group in shard.groups) == [3, 4, 5]
    assert shard.head_version == 1
    run.train()
    assert run.log.refresh().counters()["pending"] == 0


class Stubborn(Digits):
    """Of every prompt the second attempt goes on until it is cancelled, and then has a reward all the same."""

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().attempt and not GO_ON.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await GO_ON.wait()
        return await super().run(task, chat)


GO_ON = asyncio.Event()


@pytest.mark.parametrize("stop_at", ["nothing", "leased", "running", "one finished", "batch"])
async def test_a_stopped_worker_begins_and_commits_nothing_more_though_it_is_still_asked_to(
    run: _Run, stop_at: str, monkeypatch: pytest.MonkeyPatch
):
    """At `max_staleness = 0` the next start makes the batch that an undisturbed run makes, attempt for attempt."""
    undisturbed = _attempts(run, [await run.collect()])
    again = _Run(run.folder / "again", run.tokenizer)
    monkeypatch.setitem(globals(), "GO_ON", asyncio.Event())
    if stop_at in ("one finished", "batch"):
        GO_ON.set()
    is_reached = {
        "nothing": lambda worker: True,
        "leased": lambda worker: again.log.refresh().leased,
        "running": lambda worker: "3 running" in worker.report(),
        "one finished": lambda worker: worker.progress() >= 1,
        "batch": lambda worker: again.committed(),
    }[stop_at]
    async with again.worker(produce=False, workflow=f"{__name__}:Stubborn") as worker:
        asking = [asyncio.create_task(ask()) for ask in (worker.refresh, worker.collect, worker.wait_for_work)]
        while not is_reached(worker):
            await asyncio.sleep(0)
    await asyncio.gather(*asking)
    await worker.refresh()
    assert await worker.collect() is None
    state = again.log.refresh()
    assert not state.leased and state.positions <= set(range(BATCH)), "it began what comes after the next policy"
    GO_ON.set()
    async with again.worker() as worker:
        while len(again.committed()) < BATCH:
            await worker.collect()
    assert _attempts(again, again.log.refresh().shards.values()) == undisturbed


def _attempts(run: _Run, shards: Iterable[Shard]) -> list[tuple[Any, ...]]:
    rows = [row for shard in shards for row in read_shard(run.log, shard).to_pylist()]
    return sorted(
        (row["group_id"], row["attempt"], row["reward"], str(row["input_ids"]), row["weight_versions"]) for row in rows
    )


SHORT = {"load_seconds": 0.01, "train_seconds": 0.06, "save_seconds": 0.02}
"""A step that takes less than a hundredth of what an attempt may take."""


async def _collect_until(run: _Run, count: int, *workers: RolloutWorker) -> None:
    while len(run.committed()) < count:
        await asyncio.gather(*(worker.collect() for worker in workers))


async def _begin_third_batch(run: _Run, worker: RolloutWorker, **seconds: float) -> asyncio.Task[Any]:
    """Two batches are committed, one step is taken, and where that is short the engine holds the third batch; returns
    the call that collects it."""
    await _collect(worker)
    await worker.publish(run.train(**{**SHORT, **seconds}))
    await _collect(worker)
    collecting = asyncio.create_task(_collect(worker))
    while not seconds and "3 running" not in worker.report():
        await asyncio.sleep(0.001)
    for _ in range(100):  # they come as far as they may
        await asyncio.sleep(0)
    assert sorted(run.log.refresh().leased) == ([] if seconds else [6, 7, 8])
    assert worker.progress() == 6 and not collecting.done()
    return collecting


async def _collect_third_batch(run: _Run, worker: RolloutWorker, collecting: asyncio.Task[Any]) -> None:
    """With a shard or several; every token is of policy 2."""
    await collecting
    await _collect_until(run, 9, worker)
    third = [group for group in run.log.state.groups.values() if group.position >= 6]
    assert {(group.head_version, group.tail_version) for group in third} == {(2, 2)}


async def test_attempts_begin_while_a_short_step_is_taken_and_are_answered_by_its_policy(run: _Run):
    async with run.worker() as worker:
        collecting = await _begin_third_batch(run, worker)
        policy, released = run.train(), time.time()
        await worker.publish(policy)
        shard = await collecting
    took = time.time() - released
    assert sorted(group.position for group in shard.groups) == [6, 7, 8]
    assert (shard.head_version, shard.tail_version) == (2, 2)
    table = read_shard(run.log, shard)
    assert max(table["queued_at"].to_pylist()) < released, "they began before their policy was there"
    assert shard.seconds["generate"] + shard.seconds["reward"] <= took, "and no attempt went on until it was"
    turns = [turn for turns in table["turns"].to_pylist() for turn in turns]
    assert max(turn["generate_seconds"] for turn in turns) <= took


async def test_attempts_do_not_begin_ahead_of_a_step_that_takes_long(run: _Run):
    async with run.worker() as worker:
        collecting = await _begin_third_batch(run, worker, save_seconds=60.0)
        await worker.publish(run.train())
        await _collect_third_batch(run, worker, collecting)


async def test_attempts_that_began_ahead_of_a_policy_that_does_not_come_are_called_back(
    run: _Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollouts.production.head_start.PATIENCE", 0.001)

    async with run.worker() as worker:
        collecting = await _begin_third_batch(run, worker)
        while "0 running" not in worker.report():
            await asyncio.sleep(0)
        await worker.refresh()
        for _ in range(100):
            await asyncio.sleep(0)
        assert "0 running" in worker.report(), "once for a policy"
        await worker.publish(run.train())
        await _collect_third_batch(run, worker, collecting)
    assert not run.log.refresh().leased and run.log.state.counters()["submitted"] == 9


class SlowToCancel(Digits):
    """An attempt that is cancelled takes until policy 2 is served to end."""

    worker: RolloutWorker

    async def run(self, task: Task, chat: Chat) -> Score:
        try:
            return await super().run(task, chat)
        except asyncio.CancelledError:
            while self.worker.served.version < 2:
                await asyncio.sleep(0)
            raise


async def test_attempts_that_are_called_back_while_their_policy_comes_are_the_next_to_start(run: _Run):
    async with run.worker(workflow=f"{__name__}:SlowToCancel") as worker:
        SlowToCancel.worker = worker
        collecting = await _begin_third_batch(run, worker)
        policy = run.train()
        await worker.refresh()

        async def call_back() -> None:
            async with worker.lock:
                await worker._head_start.call_back()

        await asyncio.gather(call_back(), worker.publish(policy))
        await _collect_third_batch(run, worker, collecting)
    assert run.committed() == list(range(9)) and not run.log.refresh().leased


async def _lose_a_shard(run: _Run, worker: RolloutWorker) -> None:
    state = run.log.refresh()
    newest = max(state.shards.values(), key=lambda shard: shard.head_version)
    run.log.append(Quarantine(shard_id=newest.id, reason="cut off"))
    await worker.refresh()


async def _evaluate(run: _Run, worker: RolloutWorker) -> None:
    assert (await worker.evaluate(_HELD_OUT)).version == 1


async def _pause(run: _Run, worker: RolloutWorker) -> None:
    run.log.append(Pause(reason="lunch"))
    await worker.refresh()
    await worker.publish(run.train())
    assert worker.progress() == 6
    run.log.append(Resume(reason="back"))
    await worker.refresh()


async def _publish_damaged(run: _Run, worker: RolloutWorker) -> None:
    policy = run.train()
    run.store.put(f"{policy.path}/model.safetensors", b"other weights")
    with pytest.raises(DigestMismatch, match="model.safetensors"):
        await worker.publish(policy)
    run.store.put(f"{policy.path}/model.safetensors", b"weights of 2")
    assert worker.progress() == 6
    await worker.publish(policy)


@pytest.mark.parametrize("needs_the_engine", [_lose_a_shard, _evaluate, _pause, _publish_damaged])
async def test_what_began_ahead_makes_room_for_what_needs_the_engine_before(run: _Run, needs_the_engine: Any):
    async with run.worker() as worker:
        collecting = await _begin_third_batch(run, worker)
        await needs_the_engine(run, worker)
        if run.log.refresh().step < 2:
            while len(run.committed()) < 6:  # what was lost is made again first
                await collecting
                collecting = asyncio.create_task(_collect(worker))
            await worker.publish(run.train())
        await _collect_third_batch(run, worker, collecting)
    assert not run.log.refresh().leased and run.log.state.counters()["submitted"] == 9
    made_again = [group.position for group in run.log.state.groups.values() if group.id.endswith(".retry1")]
    assert sorted(made_again) == ([3, 4, 5] if needs_the_engine is _lose_a_shard else [])


async def test_of_several_workers_none_begins_ahead_before_all_have_committed(run: _Run):
    async def produce(worker: RolloutWorker, other: RolloutWorker) -> None:
        while True:
            await _collect(worker)
            await other.refresh()

    async def until(*, committed: int, leased: int) -> None:
        while len(run.committed()) < committed or len(run.log.state.leased) < leased:
            await asyncio.sleep(0.001)

    async with run.workers("rollout-0", "rollout-1", batch_size=4) as [first, second]:  # two prompts for each of two
        producing = [asyncio.create_task(produce(*pair)) for pair in ((first, second), (second, first))]
        for step in range(3):
            await until(committed=4 * step + 4, leased=4 if step else 0)
            assert not step or set(run.log.state.leased.values()) == {"rollout-0", "rollout-1"}
            policy = run.train(4, **SHORT)
            await asyncio.gather(first.publish(policy), second.publish(policy))
        for task in producing:
            task.cancel()
        await asyncio.gather(*producing, return_exceptions=True)
    assert run.log.refresh().counters()["submitted"] == len(run.committed())
    committed = 0
    for entry in run.log.entries:
        match entry.body:
            case Shard(groups=groups):
                committed += len(groups)
                assert len({group.head_version for group in groups}) == 1
            case Lease(positions=positions):
                assert committed >= 4 * (max(positions) // 4), "the batch before is committed"


@pytest.mark.parametrize("outside", [False, True])
async def test_a_producer_given_up_for_dead_commits_nothing_twice_and_joins_anew(run: _Run, outside: bool):
    """With `retries`: what came to nothing is known by its id."""
    changes = {"outside": outside, "workflow": f"{__name__}:Flaky", "retries": 1}
    async with run.worker("elsewhere-0", **changes) as late:
        while late.progress() < 3:  # each of its prompts came to nothing, which is not committed yet
            await asyncio.sleep(0.01)
        joined = run.log.refresh().producers["elsewhere-0"]
        withdraw(run.log, "elsewhere-0", reason="no sign of life for 60 s")
        async with run.worker("elsewhere-1", **changes) as other:
            while len(run.committed()) < 3:
                await _collect(other)
            before = run.log.refresh().counters()
            while late.progress() < 6:  # and is tried again
                assert await late.collect() is None
            assert await late.collect() is None
            assert run.log.refresh().counters() == before and before["submitted"] == 6
            assert "elsewhere-0" not in run.log.state.producers
            run.train()
            await late.publish(run.log.refresh().live)
            while len(run.committed()) < 6:
                await _collect(late)
            back = run.log.refresh().producers["elsewhere-0"]
            assert back.outside == outside and back.id != joined.id
    state = run.log.refresh()
    assert state.producers == state.leased == {} and state.counters()["submitted"] == 12
    assert not run.store.names("runs/run/producers")


@pytest.mark.parametrize(("others", "changes", "at_most"), [(0, {}, 12), (2, {}, 4), (1, {"max_staleness": 0.5}, 9)])
async def test_the_prompts_in_flight_are_divided_among_who_takes_part_now(
    run: _Run, others: int, changes: dict[str, Any], at_most: int
):
    for number in range(others):
        run.log.append(Join(holder=f"elsewhere-{number}", id=str(number), outside=True))

    async with run.worker(**{"batch_size": 12, "max_concurrent": 64, **changes}) as worker:
        await worker.join()
        await worker.refresh()
        while not run.log.refresh().leased and not run.log.state.positions:
            await asyncio.sleep(0.01)
        first = next(entry.body for entry in run.log.entries if isinstance(entry.body, Lease))
        assert len(first.positions) == at_most


async def test_a_producer_ends_where_the_newest_session_means_to(run: _Run):
    """It was told of a hundred steps; the driver that came later wants one, and the next one two."""
    run.log.append(Session(id="second", code_version="", steps=1))

    async with run.worker() as worker:
        await _collect(worker)
        await worker.publish(run.train())
        assert await worker.collect() is None
        run.log.append(Session(id="third", code_version="", steps=2))
        await worker.refresh()
        assert sorted(group.position for group in (await _collect(worker)).groups) == [3, 4, 5]
        await worker.publish(run.train())
        assert await worker.collect() is None


async def test_a_worker_that_leaves_gives_its_leases_back(run: _Run):
    async with run.worker() as worker:
        await _collect(worker)
        state = run.log.refresh()
        lease = Lease(holder="rollout-0", positions=state.free_positions(2), number=state.num_leases)
        assert set(run.log.append(lease).leased) == {3, 4}
    assert not run.log.refresh().leased


async def test_a_data_set_that_changed_under_the_run_is_an_error_and_no_endless_loop(
    run: _Run, monkeypatch: pytest.MonkeyPatch
):
    await run.collect()
    run.train()
    # The tasks in another order: one that was trained comes up again at a free position.
    first, _, _, fourth = (PromptOrder(Digits().tasks("train"), seed=0).at(place).task.id for place in range(4))
    swapped = {first: int(fourth[4:]), fourth: int(first[4:])}
    monkeypatch.setattr(Digits, "order", [swapped.get(f"task{number}", number) for number in range(10)])
    with pytest.raises(Conflict, match="data set has changed"):
        await run.collect()


class Gated(Digits):
    """Held-out attempts wait until they are let through."""

    started: asyncio.Event
    let_through: asyncio.Event
    made: list[str]

    def tasks(self, split: str) -> Sequence[Task]:
        self.made = [*getattr(self, "made", []), split]
        return super().tasks(split)

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().is_eval:
            type(self).started.set()
            await type(self).let_through.wait()
        return await super().run(task, chat)


_HELD_OUT = EvaluationSettings(split="test", num_tasks=2, n_samples=1, temperature=0.0, max_concurrent=8)


async def test_a_worker_that_only_evaluates_lets_policies_be_published_meanwhile(run: _Run):
    async with run.worker() as producer:
        Gated.started, Gated.let_through = asyncio.Event(), asyncio.Event()
        async with run.worker("evaluator-0", produce=False, workflow=f"{__name__}:Gated") as evaluator:
            await _collect(producer)
            evaluating = asyncio.create_task(evaluator.evaluate(_HELD_OUT, 0))
            next_one = asyncio.create_task(evaluator.evaluate(_HELD_OUT, 1))
            await Gated.started.wait()
            for version in (1, 2):
                await producer.publish(run.train())
                shard = await _collect(producer)
                assert (shard.head_version, shard.tail_version) == (version, version)
            assert not evaluating.done() and not run.log.refresh().evaluations
            Gated.let_through.set()
            evaluations = [await evaluating, await next_one, await evaluator.evaluate(_HELD_OUT, 0)]
            assert [evaluation.version for evaluation in evaluations] == [0, 1, 0]
            workflow = evaluator.player.workflow
            assert isinstance(workflow, Gated) and workflow.made == ["train", "test"], "each once in a process"
            with pytest.raises(ValueError, match="no policy version 9; it has 0 to 2"):
                await evaluator.evaluate(_HELD_OUT, 9)
    state = run.log.refresh()
    assert len(state.evaluations) == 3 and state.counters()["submitted"] == 9
    for evaluation in state.evaluations:
        shard = state.shards[evaluation.shard_id]
        assert shard.is_eval and (shard.head_version, shard.tail_version) == (evaluation.version,) * 2
        assert {group.id.split(".")[0] for group in shard.groups} == {f"eval{evaluation.version}"}


async def test_on_a_shared_engine_a_publication_waits_for_the_evaluation_and_production_does_not(run: _Run):
    async with run.worker(workflow=f"{__name__}:Gated") as worker:
        Gated.started, Gated.let_through = asyncio.Event(), asyncio.Event()
        evaluating = asyncio.create_task(worker.evaluate(_HELD_OUT))
        await Gated.started.wait()
        assert (await _collect(worker)).head_version == 0
        publishing = asyncio.create_task(worker.publish(run.train()))
        assert not worker.can_receive()
        while not worker.served.pin._waiters:  # it has come so far that it would publish
            await asyncio.sleep(0)
        assert not publishing.done()
        Gated.let_through.set()
        assert (await evaluating).version == 0
        await publishing
        assert (await _collect(worker)).head_version == 1


async def test_a_worker_on_an_older_version_evaluates_it_with_the_evaluations_own_sampling(run: _Run):
    await run.collect()
    run.train()
    async with run.worker(version=0) as worker:
        evaluation = await worker.evaluate(EvaluationSettings(split="test", num_tasks=10, n_samples=2, temperature=0.0))
        other = TaskSet(count=3, sha256="", ids_sha256="")
        worker.log.append(Session(id="other", code_version="", held_out={"test": other}))
        with pytest.raises(InvalidInput, match="there were 3, and now there are 2"):
            await worker.evaluate(_HELD_OUT)
        adopted = await worker.evaluate(_HELD_OUT, adopt_tasks=True)
    assert evaluation.tasks == adopted.tasks and evaluation.tasks is not None and evaluation.tasks.count == 2
    state = run.log.refresh()
    assert state.evaluations == [evaluation, adopted]
    # Of four attempts two fail and count as 0, the others earn 0 and 1.
    assert (evaluation.version, evaluation.score, evaluation.num_tasks, evaluation.num_failed) == (0, 0.25, 2, 2)
    table = read_shard(run.log, state.shards[evaluation.shard_id])
    assert {sampling["temperature"] for sampling in table["sampling"].to_pylist()} == {0.0}
    with pytest.raises(ValueError, match="no policy version 7; it has 0 to 1"):
        await run.collect(version=7)


def _break(run: _Run, policy: Policy) -> None:
    (run.folder / "store" / policy.path / DELTA_FILE).write_bytes(b"broken")


@pytest.mark.parametrize("max_staleness", [0, 3])
async def test_a_damaged_delta_leaves_the_engine_where_the_bound_lets_it_and_is_an_error_otherwise(
    run: _Run, caplog: pytest.LogCaptureFixture, max_staleness: int
):
    async with run.worker(max_staleness=max_staleness) as worker:
        await _collect(worker)
        await worker.publish(run.train(kind="delta"))
        await _collect(worker)
        broken = run.train(kind="delta")
        _break(run, broken)
        if not max_staleness:
            with pytest.raises(DamagedDelta, match="policy 2 .* anchor, policy 1"):
                await worker.publish(broken)
            assert worker.served.version == 1
            return
        assert await worker.publish(broken) is None
        assert worker.served.version == 1 and "policy 1 serves on instead of 2: policy 2 cannot be made" in caplog.text
        shard = await _collect(worker)
        assert shard.tail_version == 1, "never under the number of what was not loaded"
        run.store.put_folder(run.folder / "made" / "2", broken.path, last=DIGEST_FILE)
        await _collect(worker)  # tried again
        assert worker.served.version == 2
        await worker.publish(run.train(kind="delta"))  # one that is not damaged
        assert worker.served.version == 3 and run.log.refresh().policies[3].anchor == 1


async def test_a_worker_that_starts_on_a_damaged_delta_begins_with_its_anchor(
    run: _Run, caplog: pytest.LogCaptureFixture
):
    async with run.worker(max_staleness=3) as worker:
        for _ in range(2):
            await _collect(worker)
            run.train(kind="delta")
    live = run.log.refresh().policies[2]
    _break(run, live)

    async with run.worker() as worker:
        assert worker.opened == "", "no checksum of the live policy"
        assert worker.served.version == 1 and "starting with policy 1 instead of 2" in caplog.text
        with pytest.raises(DamagedDelta):
            await worker.wait_for_work()
        run.store.put_folder(run.folder / "made" / "2", live.path, last=DIGEST_FILE)
        shard = await _collect(worker)
        assert (shard.head_version, worker.served.version) == (2, 2)
