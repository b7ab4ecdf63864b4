"""A held-out score: what it counts, how much it holds at once, and what is left of one that was stopped."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import statistics
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production import evaluation
from rollouts.production.attempts import Player
from rollouts.production.evaluation import (
    MixedVersions,
    Tally,
    evaluate_tasks,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
)
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, Workflow, WrongWorkflow, workflow_context
from settings.evaluation import EvaluationSettings
from storage.log.claims import next_claim
from storage.log.entries import Evaluation
from storage.log.history import from_json, to_json
from storage.log.run_log import RunLog
from storage.log.scores import failure_of
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.shards import commit_shard, read_shard
from tests.builders import SAMPLING, a_config, a_group, a_log, a_policy_folder, a_trajectory, provenance


def test_pass_at_k_of_many_attempts_does_not_overflow():
    no_overflow = 1 - math.prod((1000 - i) / (2000 - i) for i in range(20))
    assert pass_at_k(20, num_attempts=2000, k=1000) == pytest.approx(no_overflow, rel=1e-12)


@given(attempts=st.lists(st.booleans(), min_size=1, max_size=9), k=st.integers(1, 9))
def test_pass_at_k_is_the_share_of_the_subsets_with_a_correct_attempt(attempts: list[bool], k: int):
    if k > len(attempts):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(sum(attempts), num_attempts=len(attempts), k=k)
        return
    drawn = [any(subset) for subset in itertools.combinations(attempts, k)]
    found = pass_at_k(sum(attempts), num_attempts=len(attempts), k=k)
    assert found == pytest.approx(sum(drawn) / len(drawn), abs=1e-12)
    all_right = [all(subset) for subset in itertools.combinations(attempts, k)]
    found = pass_hat_k(sum(attempts), num_attempts=len(attempts), k=k)
    assert found == pytest.approx(sum(all_right) / len(drawn), abs=1e-12)


@given(
    votes=st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=9),
    right=st.sets(st.integers(0, 8)),
)
def test_majority_at_k_is_the_mean_over_the_subsets_of_the_vote_with_ties_shared(
    votes: list[str | None], right: set[int]
):
    """The value of an answer is the share of its attempts that are correct: as `calc_maj_val` of verl 0.9.1's
    metric_utils.py, which draws at random, takes the first of a tie, and the first value of an answer."""
    given = {
        vote: [number in right for number, each in enumerate(votes) if each == vote] for vote in set(votes) - {None}
    }
    value = {vote: sum(correct) / len(correct) for vote, correct in given.items()}
    for k in range(1, len(votes) + 1):
        chance = majority_at_k([(len(c), sum(c)) for c in given.values()], num_attempts=len(votes), k=k)
        values = []
        for subset in itertools.combinations(votes, k):
            counts = Counter(vote for vote in subset if vote is not None)
            most = [vote for vote, count in counts.items() if count == max(counts.values())]
            values.append(sum(value[vote] for vote in most) / len(most) if most else 0.0)
        assert chance == pytest.approx(statistics.mean(values), abs=1e-12)


def test_majority_at_k_of_many_attempts_is_soon_known_and_right():
    """500 attempts with 60 answers: drawing all, the commonest wins; of 1, each as often as it was given."""
    answers = [(size, 0) for size in range(1, 27)] + [(40, 40), (30, 30)]
    one, every = (majority_at_k(answers, num_attempts=500, k=k) for k in (1, 500))
    assert (one, every) == (pytest.approx(70 / 500, rel=1e-12), pytest.approx(1.0, rel=1e-9))


def test_votes_are_of_usable_attempts_and_a_problem_without_any_counts_as_wrong():
    def group(position: int, *attempts: tuple[str | None, float | None]) -> RolloutGroup:
        made = [
            a_trajectory(reward, attempt=number, vote=vote, status="ok" if reward is not None else "timeout")
            for number, (vote, reward) in enumerate(attempts)
        ]
        return a_group(position, trajectories=made)

    first = group(0, ("7", 1.0), ("7", 1.0), ("8", 0.0), ("8", None))
    tally = _tally([first, group(1, (None, 1.0), (None, 0.0), (None, 0.0), (None, 0.0))], 4)
    # Of the first's 6 pairs: 7 and 7; twice 7 with the silent one, and twice 7 or 8; 8 with the silent one.
    assert tally.maj_at == {
        "1": pytest.approx(0.25),
        "2": pytest.approx((1 + 2 + 2 * 0.5) / 6 / 2),
        "4": pytest.approx(0.5),
    }
    assert tally.pass_all == {"1": pytest.approx(3 / 8), "2": pytest.approx(1 / 6 / 2), "4": 0.0}
    assert _tally([a_group(0)], 2).maj_at == {}, "no attempt votes"


def _tally(groups: Sequence[RolloutGroup], n_samples: int) -> Tally:
    tally = Tally(n_samples)
    for group in groups:
        tally.add(group)
    return tally


def test_failed_attempts_stay_in_every_denominator():
    """Of four attempts at the first problem one fails; one that earned 0.5 is no correct one."""
    tally = _tally([a_group(0, rewards=[1.0, 0.5, None, 0.0]), a_group(1, rewards=[1.0, 1.0, 1.0, None])], 4)
    means = [1.5 / 4, 3 / 4]
    assert tally.score == statistics.mean(means)
    assert tally.standard_error == pytest.approx(statistics.stdev(means) / math.sqrt(2))
    # One correct of four, and three of four.
    assert tally.pass_at == {"1": (1 / 4 + 3 / 4) / 2, "2": (1 / 2 + 1) / 2, "4": 1.0}
    assert tally.failures == {"env_error": 2} and tally.num_tasks == 2


def test_pass_at_k_goes_in_powers_of_two_up_to_the_attempts_and_one_problem_has_no_standard_error():
    for n_samples, ks in [(1, "1"), (2, "12"), (3, "12"), (7, "124"), (8, "1248")]:
        tally = _tally([a_group(rewards=[1.0] * n_samples)], n_samples)
        assert list(tally.pass_at) == list(ks) and tally.standard_error is None


_REWARDS = st.none() | st.floats(-1e6, 1e6)


@given(problems=st.lists(st.lists(_REWARDS, min_size=3, max_size=3), min_size=2, max_size=8), order=st.randoms())
def test_the_order_in_which_groups_finish_changes_no_digit(problems: list[list[float | None]], order: Any):
    groups = [a_group(position, rewards=rewards) for position, rewards in enumerate(problems)]
    shuffled = order.sample(groups, len(groups))
    one, other = _tally(groups, 3), _tally(shuffled, 3)
    assert (one.score, one.standard_error, one.pass_at) == (other.score, other.standard_error, other.pass_at)
    assert (one.pass_all, one.maj_at) == (other.pass_all, other.maj_at)
    means = [sum(reward or 0.0 for reward in rewards) / 3 for rewards in problems]
    assert one.score == pytest.approx(statistics.mean(means), rel=1e-9, abs=1e-6)
    assert one.standard_error == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), rel=1e-6, abs=1e-6)


class _Held(Workflow):
    """Problem 3 fails, 4 is answered with half a reward."""

    vote: Any = "7"

    async def run(self, task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        if task.id == "3":
            raise KeyError("held out by mistake")
        return Score(reward={"4": 0.5}.get(task.id, float(workflow_context().attempt)), vote=self.vote)


class _CountedPlayer(Player):
    """Knows how many groups are being attempted or held."""

    running = peak_running = peak_held = 0
    held: set[int] = set()

    async def group(self, task: Task, **fields: Any) -> RolloutGroup:
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        group = await super().group(task, **fields)
        self.running -= 1
        self.held.add(id(group))
        weakref.finalize(group, self.held.discard, id(group))
        self.peak_held = max(self.peak_held, self.running + len(self.held))
        return group


class _Bench:
    """A log in memory, a player, and the evaluation between them."""

    def __init__(
        self, tokens: ChatTokens, workflow: Workflow | None = None, *, max_tokens: int = 8, **limits: Any
    ) -> None:
        self.engine = ScriptedEngine(lambda *_: [5, 6, 1])
        self.player = _CountedPlayer(
            workflow=workflow or _Held(),
            engine=self.engine,
            tokens=tokens,
            rewards=RewardPool(num_processes=1, timeout=5),
            config=a_config(max_model_len=64, **limits),
        )
        self.player.held = set()
        self.log: RunLog = a_log()
        self.drawn = 0
        self.sampling = Sampling(max_tokens=max_tokens)

    def tasks(self, count: int) -> Iterator[Task]:
        for number in range(count):
            self.drawn += 1
            yield Task(id=str(number), prompt="3")

    async def evaluate(self, count: int, **changes: Any) -> Evaluation:
        settings = EvaluationSettings(
            n_samples=changes.pop("n_samples", 2), max_concurrent=changes.pop("max_concurrent", 4)
        )

        async def commit(shard_id: str, groups: list[RolloutGroup], seconds: float) -> None:
            for _ in range(20):
                await asyncio.sleep(0)  # the others play on
            commit_shard(self.log, groups, provenance=provenance(shard_id), sampling=self.sampling, is_eval=True)

        given = {"shard_bytes": 2**20, "shard_id": "eval0", "commit": commit, "sampling": self.sampling, **changes}
        async with asyncio.timeout(100):
            return await evaluate_tasks(self.tasks(count), player=self.player, version=0, settings=settings, **given)


def test_an_evaluation_says_what_was_asked_and_what_failed_and_an_older_one_can_be_read(tokens: ChatTokens):
    bench = _Bench(tokens)
    found = asyncio.run(bench.evaluate(5))
    # Problems 0, 1, 2 earn 0 and 1; both attempts at 3 fail; 4 earns a half twice.
    assert (found.num_tasks, found.n_samples, found.num_failed, found.failures) == (5, 2, 2, {"env_error": 2})
    assert found.score == pytest.approx((3 * 0.5 + 0.0 + 0.5) / 5)
    assert found.standard_error == pytest.approx(statistics.stdev([0.5, 0.5, 0.5, 0.0, 0.5]) / math.sqrt(5))
    assert found.pass_at == {"1": pytest.approx(0.3), "2": pytest.approx(0.6)}
    assert found.pass_all == {"1": pytest.approx(0.3), "2": 0.0}
    assert found.maj_at == {"1": pytest.approx(0.3), "2": pytest.approx(0.3)}, "one answer, right in half its attempts"
    assert re.fullmatch(r"KeyError: 'held out by mistake' at tests/.*/test_evaluation.py:\d+", found.last_error)
    assert not found.failed and failure_of(found) == ""
    assert (found.version, found.split, found.shard_ids) == (0, "test", ["eval0"])
    bench.log.append(found)
    assert bench.log.refresh().evaluations == [found]
    old_fields = ("version", "split", "score", "num_tasks", "num_failed", "shard_id", "seconds")
    older = from_json(Evaluation, {key: value for key, value in to_json(found).items() if key in old_fields})
    assert (older.shard_ids, older.pass_at, older.standard_error, older.n_samples) == ([found.shard_id], {}, None, 0)
    assert older.pass_all == older.maj_at == {}


def test_thousands_of_problems_are_held_a_few_at_a_time_and_committed_in_pieces(tokens: ChatTokens):
    bench, limit, count = _Bench(tokens), 16, 1_000
    found = asyncio.run(bench.evaluate(count, n_samples=1, max_concurrent=limit))
    assert found.num_tasks == count and found.num_failed == 1
    assert bench.player.peak_running == limit
    assert evaluation.GROUPS_PER_SHARD < bench.player.peak_held <= limit + evaluation.GROUPS_PER_SHARD
    assert found.num_shards == math.ceil(count / evaluation.GROUPS_PER_SHARD) == len(bench.log.state.shards)
    assert list(bench.log.state.shards) == found.shard_ids and found.shard_ids[:2] == ["eval0", "eval0-1"]
    asked = [group.prompt_id for shard in bench.log.state.shards.values() for group in shard.groups]
    assert sorted(asked, key=int) == [str(number) for number in range(count)]


def test_draws_follow_from_seed_split_problem_and_attempt_so_scores_of_two_policies_compare(tokens: ChatTokens):
    def seeds(**options: Any) -> dict[tuple[str, int], int]:
        bench = _Bench(tokens, seed=options.pop("seed", 0))
        asyncio.run(bench.evaluate(3, **options))
        [shard] = bench.log.refresh().shards.values()
        rows = read_shard(bench.log, shard).to_pylist()
        return {(row["prompt_id"], row["attempt"]): row["sampling"]["seed"] for row in rows}

    first = seeds(max_concurrent=1)
    assert first == seeds(max_concurrent=4, shard_id="eval1") and len(set(first.values())) == 6
    assert not set(first.values()) & set(seeds(seed=1).values())


def test_long_replies_are_committed_by_their_size(tokens: ChatTokens):
    every = _Bench(tokens)
    found = asyncio.run(every.evaluate(10, shard_bytes=1, max_concurrent=3))
    assert found.num_shards == 10 and every.player.peak_held <= 3 + 1
    group_bytes = 2 * 13 * (3 + 3)  # two attempts, each of 3 tokens asked and 3 sampled
    pairs = asyncio.run(_Bench(tokens).evaluate(10, shard_bytes=2 * group_bytes))
    assert pairs.num_shards == 5


def test_what_takes_groups_and_attempts_out_of_training_leaves_an_evaluation_alone(tokens: ChatTokens):
    """Replies are cut off, rewards are uniform, and the workflow accepts nothing."""

    class Strict(_Held):
        async def run(self, task: Task, chat: Chat) -> Score:
            await super().run(task, chat)
            return Score(reward=float(workflow_context().is_eval))

        def accept(self, group: RolloutGroup) -> bool:
            return False

    bench = _Bench(tokens, Strict(), max_tokens=2, drop_uniform_groups=True, exclude_statuses=["truncated"])
    found = asyncio.run(bench.evaluate(3))
    assert found.score == 1.0 and found.num_failed == 0
    [shard] = bench.log.refresh().shards.values()
    assert all(group.accepted and group.usable == 2 for group in shard.groups)


def test_evaluation_rows_can_never_be_trained(tokens: ChatTokens):
    bench = _Bench(tokens)
    found = asyncio.run(bench.evaluate(4))
    state = bench.log.append(found)
    shard = state.shards[found.shard_id]
    rows = read_shard(bench.log, shard)
    assert set(rows["is_eval"].to_pylist()) == {True} and rows.num_rows == 6
    assert {group.position for group in shard.groups} == {-1}
    assert sorted(group.id for group in shard.groups) == [f"eval0.{number}" for number in range(4)]
    assert not state.pending and not state.positions and state.counters()["submitted"] == 0
    commit_shard(bench.log, [a_group(0)], provenance=provenance("s0"), sampling=SAMPLING)
    rules = a_config(batch_size=1, max_staleness=8, stale_policy="mask", min_usable=1)
    claim = next_claim(bench.log.refresh(), rules)
    assert claim is not None and [group.group_id for group in claim.trained] == ["0.task0"]


def test_tokens_of_another_version_give_the_evaluation_up_before_they_are_committed(tokens: ChatTokens, tmp_path: Path):
    """Somebody swaps the engine's weights although it was pinned, while the third problem is being answered."""
    a_policy_folder(tmp_path / "next")

    class Swapped(_Held):
        async def run(self, task: Task, chat: Chat) -> Score:
            if task.id == "2" and bench.engine.version == 0:
                await chat.ask(task.prompt)
                await bench.engine.load_policy(tmp_path / "next", 1)
            return await super().run(task, chat)

    bench = _Bench(tokens, Swapped())
    with pytest.raises(MixedVersions, match=r"policy 0 was given up: group 'eval0\.\d+' has tokens of policies .*1"):
        asyncio.run(bench.evaluate(100, shard_bytes=1, max_concurrent=1))
    committed = bench.log.refresh().shards.values()
    assert len(committed) == 2 and {shard.tail_version for shard in committed} == {0}
    assert not bench.log.state.evaluations and bench.drawn == 3


def test_a_fault_of_the_workflow_and_an_empty_split_end_the_evaluation_with_their_own_words(tokens: ChatTokens):
    class Listing(_Held):
        async def run(self, task: Task, chat: Chat) -> Any:
            score = await super().run(task, chat)
            return [score] if task.id == "20" else score

    bench = _Bench(tokens, Listing())
    with pytest.raises(WrongWorkflow, match="returned list"):
        asyncio.run(bench.evaluate(1000))
    assert bench.drawn < 30 and not bench.log.state.evaluations
    number = _Held()
    number.vote = 7
    with pytest.raises(WrongWorkflow, match="returned a Score whose vote is 7, and not a text"):
        asyncio.run(_Bench(tokens, number).evaluate(1))
    empty = _Bench(tokens)
    with pytest.raises(ValueError, match="'test' split is empty"):
        asyncio.run(empty.evaluate(0))
    assert not empty.log.state.shards


class _Broken(_Held):
    """Attempts fail from the first or the second on; the first earns nothing."""

    def __init__(self, first_failing: int) -> None:
        super().__init__()
        self._first_failing = first_failing

    async def run(self, task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        if workflow_context().attempt >= self._first_failing:
            raise ConnectionError(f"no database {'!' * 1000}")
        return Score(reward=0.0)


def test_an_evaluation_in_which_every_attempt_failed_is_a_failed_one(tokens: ChatTokens):
    found = asyncio.run(_Bench(tokens, _Broken(0)).evaluate(7))
    assert found.score == 0 and found.num_failed == 14 and found.failed
    assert found.pass_at == {"1": 0.0, "2": 0.0} and len(found.last_error) < evaluation.LONGEST_ERROR
    sentence = failure_of(found)
    assert "evaluation of policy 0 on split 'test' failed: all 14 attempts did (env_error 14)" in sentence
    assert "says nothing about the policy" in sentence and "ConnectionError: no database" in sentence
    found = asyncio.run(_Bench(tokens, _Broken(1)).evaluate(3))  # one attempt came through
    assert found.score == 0 and found.num_failed == 3 and not found.failed and failure_of(found) == ""
