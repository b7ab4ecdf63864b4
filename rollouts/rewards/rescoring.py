"""Score recorded attempts again with another reward function: no engine, nothing recorded is touched.

    committed shard ─▶ reply + the task's answer ─ RewardPool ─▶ rewards/<name>/<shard id>.arrow ─▶ `Rescore` log entry

After a kill at any point, the same call goes on with the shards that have no file yet.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.user_code import load_object, source_file
from rollouts.reward_values import as_number
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout
from settings.errors import InvalidInput
from storage.log.entries import Rescore, Shard
from storage.log.run_log import RunLog
from storage.objects.digests import sha256_of_file
from storage.records import Task
from storage.shards.reward_sets import (
    SCORED_COLUMNS,
    Attempt,
    NewReward,
    RewardSet,
    attempts_of,
    check_name,
    find_rewards,
    put_rewards,
    read_rewards,
)
from storage.shards.shards import DamagedShard, read_shard

SHARDS_PER_ENTRY = 64
"""Number of files in one log entry. A kill before the entry loses none of them: the next call finds the files."""


@dataclass
class Comparison:
    """Recorded and new rewards of many attempts."""

    attempts: int = 0
    changed: int = 0
    """Attempts whose reward has changed, also from or to None."""
    nulls: int = 0
    """Attempts whose new reward is None."""
    sums: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Over attempts with both rewards: their number, Σ old, Σ new, Σ old², Σ new², Σ old · new."""

    def add(self, old: float | None, new: float | None) -> None:
        old = as_number(old)  # shards of earlier versions may have NaN
        self.attempts += 1
        self.changed += old != new
        self.nulls += new is None
        if old is not None and new is not None:
            terms = (1.0, old, new, old * old, new * new, old * new)
            self.sums = [total + term for total, term in zip(self.sums, terms, strict=True)]

    @property
    def means(self) -> tuple[float, float] | None:
        """Mean recorded and mean new reward, over attempts that have both."""
        count, old, new = self.sums[:3]
        return (old / count, new / count) if count else None

    @property
    def correlation(self) -> float | None:
        """Pearson's, over attempts that have both; None if one of them is constant."""
        count, old, new, old_squares, new_squares, products = self.sums
        variance = (count * old_squares - old**2) * (count * new_squares - new**2)
        return (count * products - old * new) / math.sqrt(variance) if variance > 0 else None


@dataclass
class Rescored:
    """The result of a rescore."""

    rewards: RewardSet
    new_shards: int = 0
    """Shards scored by this call."""
    known_shards: int = 0
    """Shards that had these rewards already."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Shards without new rewards, and why: damaged, quarantined or retired."""
    failures: Counter[str] = field(default_factory=Counter)
    """Attempts of this call without a reward, by reason."""
    first_error: str = ""
    """Message of the first failure."""
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    """Split → comparison over all shards that have these rewards."""


def load_reward(path: str, *, name: str = "") -> tuple[Callable[..., Any], RewardSet]:
    """A reward function by import path, and the name of its rewards, by default that of the function.

    Raises `InvalidInput` for anything but a module-level function of (reply, answer), and for an unusable name.
    """
    function = load_object(path)
    if not inspect.isfunction(function) or "." in function.__qualname__:
        raise InvalidInput(f"{path} is no function at the top level of a module, so no reward process could load it")
    try:
        inspect.signature(function).bind("reply", "answer")
    except TypeError as error:
        raise InvalidInput(f"{path} cannot be called as function(reply, answer): {error}") from None
    name = name or function.__name__
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name[0] in "-." or len(name) > 100:
        raise InvalidInput(f"rewards name {name!r}: use letters, digits, dot, dash and underscore, at most 100")
    digest = sha256_of_file(source_file(function))
    return function, RewardSet(name=name, reward=path, reward_sha256=digest)


class Rescoring:
    """One rescore of one run. The constructor checks everything that can be checked without reading a shard.

    Raises `storage.shards.reward_sets.RewardNameInUse` for a name that belongs to other code, and `InvalidInput` for
    a prompt that is not in the workflow's data set.
    """

    def __init__(
        self,
        log: RunLog,
        function: Callable[..., Any],
        rewards: RewardSet,
        *,
        tasks_of: Callable[[str], Sequence[Task]],
        eval_split: str | None,
    ) -> None:
        """`tasks_of` a split are the workflow's. `eval_split` is that of evaluation shards without an evaluation in the
        log; None leaves evaluation shards out."""
        check_name(log, rewards)
        self._log = log
        self._function = function
        self._result = Rescored(rewards=rewards)
        self._shards = self._choose(eval_split)
        splits = dict.fromkeys(split for split, _ in self._shards)
        self._answers = {split: {task.id: task.answer for task in tasks_of(split)} for split in splits}
        for split, shard in self._shards:
            for group in shard.groups:
                if group.usable and group.prompt_id not in self._answers[split]:
                    raise InvalidInput(
                        f"prompt {group.prompt_id!r} of shard {shard.id} is not in split {split!r}: the data set "
                        "has changed since this run, so its answer is unknown. Put the data set of the run back"
                    )

    @property
    def num_attempts(self) -> int:
        return sum(group.usable for _, shard in self._shards for group in shard.groups)

    async def run(self, *, num_processes: int, timeout: float, on_attempts: Callable[[int], None]) -> Rescored:
        """Score the shards without this reward; `on_attempts` is called with the number of further attempts done."""
        result = self._result
        files: dict[str, str] = {}
        async with RewardPool(num_processes=num_processes, timeout=timeout) as pool:
            for split, shard in self._shards:
                try:
                    attempts = attempts_of(read_shard(self._log, shard, columns=SCORED_COLUMNS))
                except DamagedShard as error:
                    result.skipped[shard.id] = error.reason
                    continue
                logged = self._log.state.rescored.get(result.rewards.name)
                if logged is not None and shard.id in logged.files:
                    table = read_rewards(self._log, shard, logged.name)
                    result.known_shards += 1
                    on_attempts(len(attempts))
                else:
                    written = find_rewards(self._log, shard, result.rewards)
                    if written is None:
                        answers = self._answers[split]
                        async with asyncio.TaskGroup() as scoring:
                            tasks = [
                                scoring.create_task(self._score(pool, attempt, answers[attempt.prompt_id], on_attempts))
                                for attempt in attempts
                            ]
                        scored = [task.result() for task in tasks]
                        written = put_rewards(self._log, shard, result.rewards, attempts, scored)
                    else:
                        on_attempts(len(attempts))
                    files[shard.id], table = written
                    result.new_shards += 1
                comparison = result.comparisons.setdefault(split, Comparison())
                for attempt, reward in zip(attempts, table["reward"].to_pylist(), strict=True):
                    comparison.add(attempt.recorded, reward)
                if len(files) == SHARDS_PER_ENTRY:
                    self._commit(files)
        self._commit(files)
        return result

    def _choose(self, eval_split: str | None) -> list[tuple[str, Shard]]:
        state = self._log.state
        split_of = {evaluation.shard_id: evaluation.split for evaluation in state.evaluations}
        chosen = []
        for shard in state.shards.values():
            if shard.is_eval and eval_split is None:
                continue
            if shard.id in state.quarantined:
                self._result.skipped[shard.id] = f"quarantined: {state.quarantined[shard.id]}"
            elif shard.id in state.retired_shards:
                self._result.skipped[shard.id] = "retention removed it"
            else:
                chosen.append((split_of.get(shard.id, eval_split or "") if shard.is_eval else "train", shard))
        return chosen

    async def _score(
        self, pool: RewardPool, attempt: Attempt, answer: str, on_attempts: Callable[[int], None]
    ) -> NewReward:
        reason, error = "no reply", f"attempt {attempt.attempt} of {attempt.group_id} has no reply"
        try:
            whole = getattr(self._function, "with_thoughts", False)
            reply = attempt.reply_with_thoughts if whole else attempt.reply
            if reply is not None:
                score = await pool.score(self._function, reply, answer)
                return NewReward(reward=score.reward, parts=score.parts)
        except (RewardTimeout, RewardFailed) as exception:
            reason, error = "timeout" if isinstance(exception, RewardTimeout) else "raised", str(exception)
        finally:
            on_attempts(1)
        self._result.failures[reason] += 1
        self._result.first_error = self._result.first_error or error
        return NewReward(reward=None, parts={})

    def _commit(self, files: dict[str, str]) -> None:
        if files:
            self._log.append(Rescore(**dataclasses.asdict(self._result.rewards), files=dict(files)))
            files.clear()
