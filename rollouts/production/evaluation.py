"""Held-out evaluation of one policy version, in memory that does not grow with the split.

    tasks, one by one ─▶ at most `max_concurrent` groups at once ─▶ all of one version? ─▶ Tally ─▶ Evaluation
                                                                              └─▶ piece ─▶ commit ─▶ one more shard

In: problems, a player, and the version its engine serves. Out: an `Evaluation` for the log. Its shards are committed
before it, so one that was killed leaves shards of evaluation rows behind, and no score.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rollouts.engines.draws import seed_of
from rollouts.production.attempts import Player, token_bytes
from settings.errors import InvalidInput, UserError, in_one_line
from settings.evaluation import EvaluationSettings
from storage.log.entries import Evaluation, piece_id
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.codec import summarise

CORRECT = 1.0
"""An attempt with at least this reward is correct, for pass@k."""
GROUPS_PER_SHARD = 256
_MOST_VOTES = 500
LONGEST_ERROR = 500  # characters

Commit = Callable[[str, list[RolloutGroup], float], Awaitable[object]]
"""(shard id, groups, wall-clock seconds they took) → committed."""


class MixedVersions(UserError):
    """An evaluation has tokens of another policy version than the one it is about."""


def pass_at_k(num_correct: int, *, num_attempts: int, k: int) -> float:
    """Chance that at least one of `k` attempts, drawn without replacement from those made, is correct.

    1 − C(n − c, k) / C(n, k), unbiased: Chen et al. 2021, arXiv 2107.03374, equation 1. With 2 of 5 attempts correct
    and k = 2 it is 1 − 3/10 = 0.7. Raises `InvalidInput` unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= num_correct <= num_attempts and 1 <= k <= num_attempts):
        raise InvalidInput(f"pass@{k} of {num_correct} correct among {num_attempts} attempts is not defined")
    return 1.0 - math.comb(num_attempts - num_correct, k) / math.comb(num_attempts, k)


def pass_hat_k(num_correct: int, *, num_attempts: int, k: int) -> float:
    """Chance that all of `k` attempts, drawn as for `pass_at_k`, are correct: C(c, k) / C(n, k), unbiased.

    τ-bench's pass^k, arXiv 2406.12045. With 2 of 5 attempts correct and k = 2 it is 1/10.
    """
    return math.comb(num_correct, k) / math.comb(num_attempts, k)


def majority_at_k(answers: Sequence[tuple[int, int]], *, num_attempts: int, k: int) -> float:
    """Chance that the commonest answer of `k` attempts, drawn as for `pass_at_k`, is correct.

    `answers` has, for each answer, how many attempts gave it and how many of those are correct; attempts without one
    are drawn and do not vote. Of answers that are equally common each is as likely. Sums over how often the commonest
    is drawn; `ways[:, l, q]` is in how many ways `q` attempts are drawn of which `l` answers are the commonest, and
    that number times the correct shares of those.
    """
    chance, num_silent = 0.0, num_attempts - sum(size for size, _ in answers)
    for times in range(1, min(k, max((size for size, _ in answers), default=0)) + 1):
        ways = np.zeros((2, k // times + 1, k + 1))
        ways[0, 0, 0] = 1.0
        for size, correct in answers:
            before, ways = ways, np.zeros_like(ways)
            for drawn in range(min(size, times) + 1):
                level = int(drawn == times)
                added = math.comb(size, drawn) * before[:, : before.shape[1] - level, : k + 1 - drawn]
                ways[:, level:, drawn:] += added
                ways[1, level:, drawn:] += level * correct / size * added[0]
        won_Q = (ways[1, 1:] / np.arange(1, ways.shape[1])[:, None]).sum(0)
        chance += sum(float(won) * math.comb(num_silent, k - drawn) for drawn, won in enumerate(won_Q))
    return chance / math.comb(num_attempts, k)


class Tally:
    """The numbers of an evaluation, one group at a time. Sums are exact: the order of the groups changes no digit."""

    def __init__(self, n_samples: int) -> None:
        self._n_samples = n_samples
        self._sum = Fraction()
        self._sum_of_squares = Fraction()
        self._num_correct: Counter[int] = Counter()
        self._answers: Counter[tuple[tuple[int, int], ...]] = Counter()
        self.num_tasks = 0
        self.failures: Counter[str] = Counter()
        self.last_error = ""

    def add(self, group: RolloutGroup) -> None:
        """Count a group of `n_samples` attempts; one that is not usable has reward 0 and is incorrect."""
        rewards = [attempt.reward for attempt in group.usable if attempt.reward is not None]
        mean = sum(map(Fraction, rewards), Fraction()) / self._n_samples
        self._sum += mean
        self._sum_of_squares += mean * mean
        self._num_correct[sum(reward >= CORRECT for reward in rewards)] += 1
        self._answers[_answers(group)] += 1
        self.num_tasks += 1
        self.failures.update(summarise(group).failures)
        for attempt in group.trajectories:
            self.last_error = in_one_line(attempt.error)[:LONGEST_ERROR] or self.last_error

    @property
    def score(self) -> float:
        """avg@n: mean over problems of the mean reward of their attempts."""
        return float(self._sum / self.num_tasks)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the score: sample standard deviation of the problems' means, over √(number of problems)."""
        if self.num_tasks < 2:
            return None
        variance = (self._sum_of_squares - self._sum**2 / self.num_tasks) / (self.num_tasks - 1)
        return math.sqrt(variance / self.num_tasks)

    @property
    def pass_at(self) -> dict[str, float]:
        """Mean pass@k over problems for k = 1, 2, 4, … up to the attempts per problem."""
        return self._mean(pass_at_k, self._num_correct)

    @property
    def pass_all(self) -> dict[str, float]:
        """Mean pass^k, for the same k."""
        return self._mean(pass_hat_k, self._num_correct)

    @property
    def maj_at(self) -> dict[str, float]:
        """Mean maj@k, for the same k; empty without votes, and above 500 attempts, whose ways no float counts."""
        return self._mean(majority_at_k, self._answers) if self._n_samples <= _MOST_VOTES and any(self._answers) else {}

    def _mean(self, chance: Callable[..., float], outcomes: Counter[Any]) -> dict[str, float]:
        means = {}
        for k in [2**power for power in range(self._n_samples.bit_length())]:
            chances = [count * chance(each, num_attempts=self._n_samples, k=k) for each, count in outcomes.items()]
            means[str(k)] = math.fsum(chances) / self.num_tasks
        return means


def _answers(group: RolloutGroup) -> tuple[tuple[int, int], ...]:
    """For each answer with a vote: how many attempts gave it, and how many of them are correct; sorted."""
    votes: dict[str, list[bool]] = {}
    for attempt in group.usable:
        if attempt.vote is not None and attempt.reward is not None:
            votes.setdefault(attempt.vote, []).append(attempt.reward >= CORRECT)
    return tuple(sorted((len(correct), sum(correct)) for correct in votes.values()))


async def evaluate_tasks(
    tasks: Iterable[Task],
    *,
    player: Player,
    version: int,
    settings: EvaluationSettings,
    sampling: Sampling,
    shard_id: str,
    shard_bytes: int,
    commit: Commit,
) -> Evaluation:
    """Attempt every task `settings.n_samples` times on the engine's current weights, policy `version`.

    Fewer than `GROUPS_PER_SHARD` finished groups wait to be committed. Raises `MixedVersions`, `InvalidInput` without a
    task, and what is wrong with the workflow itself.
    """
    started = flushed_at = time.perf_counter()
    waiting = iter(tasks)
    tally = Tally(settings.n_samples)
    piece: list[RolloutGroup] = []
    piece_bytes = num_shards = 0
    recording = asyncio.Lock()

    async def flush() -> None:
        nonlocal piece, piece_bytes, num_shards, flushed_at
        groups, piece, piece_bytes = piece, [], 0
        seconds, flushed_at = time.perf_counter() - flushed_at, time.perf_counter()
        await commit(piece_id(shard_id, num_shards), groups, seconds)
        num_shards += 1

    async def play() -> None:
        nonlocal piece_bytes
        for task in waiting:  # all players share it: a free one takes the next task
            group = await player.group(
                task,
                group_id=f"eval{version}.{task.id}",
                position=-1,
                epoch=0,
                n_samples=settings.n_samples,
                sampling=dataclasses.replace(sampling, seed=seed_of(player.config.seed, settings.split, task.id)),
                is_eval=True,
            )
            _check_version(group, version)
            async with recording:  # a player that fills a piece commits it; the others play on until they have finished
                tally.add(group)
                piece.append(group)
                piece_bytes += token_bytes(group)
                if len(piece) >= GROUPS_PER_SHARD or piece_bytes >= shard_bytes:
                    await flush()

    try:
        async with asyncio.TaskGroup() as players:
            for _ in range(settings.max_concurrent):
                players.create_task(play())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one says it all
    if not tally.num_tasks:
        raise InvalidInput(f"the workflow's {settings.split!r} split is empty; name another in [evaluation] split")
    if piece:
        await flush()
    return Evaluation(
        version=version,
        split=settings.split,
        score=tally.score,
        num_tasks=tally.num_tasks,
        num_failed=tally.failures.total(),
        shard_id=shard_id,
        seconds=time.perf_counter() - started,
        n_samples=settings.n_samples,
        pass_at=tally.pass_at,
        failures=dict(sorted(tally.failures.items())),
        last_error=tally.last_error,
        standard_error=tally.standard_error,
        num_shards=num_shards,
        pass_all=tally.pass_all,
        maj_at=await asyncio.to_thread(lambda: tally.maj_at),  # seconds, for many answers to many problems
        temperature=sampling.temperature,
    )


def _check_version(group: RolloutGroup, version: int) -> None:
    sampled = [turn.weight_versions for attempt in group.trajectories for turn in attempt.turns]
    if any(versions.count(version) != len(versions) for versions in sampled):
        versions = sorted(set().union(*sampled))
        raise MixedVersions(
            f"the evaluation of policy {version} was given up: group {group.id!r} has tokens of policies {versions}: "
            "the engine changed its weights meanwhile; evaluate again"
        )
