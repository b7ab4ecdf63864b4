"""A step whose shards must not be trained costs the shards, not the run; one that never can be trained stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prefect.states import Failed

from infra.ray.hosted import WorkerDied
from infra.ray.liveness import RayLost
from settings.errors import NotFound
from settings.train import SUSPICIOUS_GAPS
from storage.log.entries import Claim
from storage.log.run_log import RunLog
from storage.objects.object_store import StoreError, StoreFull
from tasks import steps
from tasks.clock import out_of_room
from tasks.prefect.task_runs import may_pass
from tasks.session import RunSession
from tasks.trainer import EveryClaimRefused
from tests.builders import a_claim, a_config, a_shard, a_step, a_summary
from trainers.health import GapTooLarge, NonFinite
from trainers.refusals import RefusedShards


class _Trainer:
    """Does to claim after claim what it is told: raises an error, or commits the step with some metrics."""

    def __init__(self, log: RunLog, outcomes: list[Any]) -> None:
        self._log = log
        self._outcomes = outcomes

    async def call(self, method: str, claim: Claim, **_: Any) -> Any:
        assert method == "train_step"
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        step = a_step(self._log.state, claim)
        step.metrics.update(outcome)
        self._log.append(step)
        return step


def _take(session: RunSession, *outcomes: Any) -> list[Any]:
    """One fresh shard and claim per outcome; returns what became of each step."""
    trainer: Any = _Trainer(session.log, list(outcomes))
    session.trainer._hosted = trainer
    results = []
    for _ in outcomes:
        number = len(session.log.state.shards)
        session.log.append(a_shard(f"s{number}", [a_summary(number)]))
        claim = a_claim(session.log.state, trained=[f"0.task{number}"])
        results.append(asyncio.run(steps.train_step.fn(session, claim=claim, config=a_config())))
    return results


def _gap(shard_id: str) -> GapTooLarge:
    return GapTooLarge({shard_id: 2.5}, 1.0)


def test_shards_that_are_named_are_quarantined_and_their_prompts_are_free_again(session: RunSession) -> None:
    session.log.append(a_shard("named", [a_summary(100)]))
    first, second, third = _take(session, _gap("s1"), {"engine_gap": 0.001}, RefusedShards({"named": "too long"}))
    state = session.log.state
    assert first is third is None and second.claim.step == state.step == 1
    assert "2.5 nats per token, above train.max_gap = 1" in state.quarantined["s1"]
    assert state.quarantined.keys() == {"s1", "named"} and state.quarantined["named"] == "too long"
    assert not {1, 100} & state.positions and 2 in state.positions and state.retries[1] == 1


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (_gap, r"3 claims in a row .* disagree by 2.5 nats .* policy 0.* --verify"),
        (lambda shard_id: RefusedShards({shard_id: "another tokenizer"}), "shard s2: another tokenizer"),
    ],
)
def test_shards_that_are_always_refused_stop_the_run_with_what_to_check(
    session: RunSession, refusal: Callable[[str], RefusedShards], words: str
) -> None:
    assert _take(session, refusal("s0"), refusal("s1")) == [None, None]
    with pytest.raises(EveryClaimRefused, match=words):
        _take(session, refusal("s2"))
    assert session.log.state.quarantined.keys() == {"s0", "s1", "s2"}


def test_a_step_in_between_starts_the_count_again_and_one_without_a_gap_is_not_suspicious(session: RunSession) -> None:
    results = _take(session, _gap("s0"), _gap("s1"), {"loss": 0.1}, _gap("s3"), _gap("s4"), {"engine_gap": 0.0})
    assert [result is None for result in results] == [True, True, False, True, True, False]
    assert not session.trainer._warned_of_gap
    session.trainer._suspicious_gap = SUSPICIOUS_GAPS["bfloat16"]
    _take(session, {"engine_gap": 0.06})  # as of SmolLM2-135M
    assert not session.trainer._warned_of_gap
    session.trainer._suspicious_gap = SUSPICIOUS_GAPS["float32"]
    _take(session, {"engine_gap": 0.06})
    assert session.trainer._warned_of_gap


def test_attempts_that_fill_the_context_are_a_metric_and_one_warning(
    session: RunSession, caplog: pytest.LogCaptureFixture
) -> None:
    shards = [a_shard("s", [a_summary(0, out_of_room=1), a_summary(1, expected=6)]), a_shard("t", [a_summary(2)])]
    assert out_of_room(shards, {"0.task0", "0.task1"}) == {"out_of_room_fraction": 1 / 8}
    assert out_of_room(shards, {}) == {}
    _take(session, *({"out_of_room_fraction": share} for share in (0.1, 0.25, 0.5)))
    assert [line for line in caplog.messages if "context" in line] == [
        "step 2: 25 % of the attempts filled the model's context (engine.max_model_len) before they ended; "
        "rollout.on_out_of_room says what they are worth"
    ]


def test_only_what_may_pass_is_tried_again() -> None:
    fatal: list[Exception] = [NonFinite("the loss", ["r"]), EveryClaimRefused("x"), ValueError("all rewards are None")]
    fatal += [StoreFull("full"), RayLost("raylet"), NotFound("no run")]
    assert not any(may_pass(None, None, Failed(data=error)) for error in fatal)
    passing = [OSError("cut"), StoreError("no reply"), WorkerDied("rollout-0")]
    assert all(may_pass(None, None, Failed(data=error)) for error in passing)


# The next step's first parts, while the others are sampled


class _Adding:
    """Adds parts up; with each, what is sampled meanwhile arrives, and with the last of `calls` all the rest. Fails at
    the parts it is told to."""

    def __init__(self, session: RunSession, *, calls: int, fails: frozenset[int]) -> None:
        self._session, self._calls, self._fails = session, calls, fails
        self._arriving = [[3], [1, 2], [0]]
        self.begun: list[list[int]] = []
        self.arrive()

    async def call(self, method: str, claim: Claim) -> None:
        assert method == "begin_step"
        self.begun.append(claim.parts)
        self.arrive()
        if len(self.begun) in self._fails:
            raise RefusedShards({"s0": "another tokenizer"})

    def arrive(self) -> None:
        for _ in range(1 if len(self.begun) < self._calls else len(self._arriving)):
            numbers = self._arriving.pop(0)
            self._session.log.append(a_shard(f"s{numbers[0]}", [a_summary(number) for number in numbers]))
        self._session.fleet.arrivals.set()


@pytest.mark.parametrize(
    ("settings", "fails", "begun", "parts"),
    [
        ({"stream": True}, frozenset(), [[1], [1, 2]], [1, 2, 1]),
        ({"stream": True}, frozenset({1}), [[1]], [1, 3]),  # what went wrong is told by the step, which tries again
        ({"stream": True, "num_minibatches": 2}, frozenset(), [], []),
        ({}, frozenset(), [], []),
    ],
)
def test_the_trainer_begins_with_what_has_finished(
    session: RunSession, settings: dict[str, Any], fails: frozenset[int], begun: list[list[int]], parts: list[int]
) -> None:
    config = a_config(batch_size=4, max_staleness=0, min_usable=1, **settings)
    adding = _Adding(session, calls=len(begun), fails=fails)
    session.trainer._hosted, session.trainer.is_open = adding, True  # type: ignore[assignment]
    session.fleet.workers = {}
    claim = asyncio.run(steps.next_batch(session, config=config))
    assert adding.begun == begun and claim.parts == parts and len(claim.trained) == 4


def test_the_trainer_begins_with_nothing_while_an_engine_has_its_gpu(session: RunSession) -> None:
    """Whether they take turns the session decides if the run file leaves it open."""
    session.device.in_phases = True
    config = a_config(batch_size=4, max_staleness=0, min_usable=1, stream=True)
    adding = _Adding(session, calls=1, fails=frozenset())  # one group has finished
    session.trainer._hosted, session.trainer.is_open = adding, True  # type: ignore[assignment]
    session.fleet.workers = {}

    async def wait() -> Claim:
        waiting = asyncio.create_task(steps.next_batch(session, config=config))
        for _ in range(50):  # it has had its first look
            await asyncio.sleep(0)
        adding._calls = 0
        adding.arrive()
        return await waiting

    assert config.engine.share == "auto"
    assert asyncio.run(wait()).parts == [] and adding.begun == []
