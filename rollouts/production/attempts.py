"""Plays one attempt, and n of them as a group; whatever goes wrong becomes a status and a text, never a reward of 0.

    task ─▶ n × (Chat ─▶ workflow.run ─▶ Score) ─▶ score_group ─▶ shaping ─▶ Trajectory ─▶ filters ─▶ RolloutGroup

In: a task. Out: a `RolloutGroup`, rejected ones with the reason. When a group may start is the executor's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rollouts.chat.chat import Chat, OutOfRoom
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.thoughts import ThoughtParser
from rollouts.chat.tool_parsing import ToolParser
from rollouts.chat.tools import ToolUnavailable
from rollouts.engines.draws import seed_of
from rollouts.engines.engine import Engine, EngineError
from rollouts.rewards.reward_shaping import check_weights, shaped
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout, set_reward_pool
from rollouts.workflow import (
    CONTEXT,
    OWED,
    Score,
    Workflow,
    WorkflowContext,
    WrongWorkflow,
    as_accepted,
    as_score,
    as_scores,
    place_of,
)
from settings.errors import failure_text, kind_and_words
from settings.redaction import without_secrets
from settings.run_file import RunConfig
from storage.log.claims import BY_MOMENT
from storage.records import RolloutGroup, Sampling, Status, Task, Trajectory

_OWN_THREADS = 32


def give_threads(num_attempts: int) -> None:
    """Let each of so many attempts block a thread of the running loop, as agents that are not asynchronous do.

    The default, CPUs + 4, is taken by the first few such agents, and the others wait. It also stops them all if what
    they wait for needs a thread itself, for example the import of a tool parser. Threads start when they are needed.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(num_attempts + _OWN_THREADS))


@dataclass(kw_only=True, eq=False)
class Player:
    """Plays attempts of one workflow on one engine."""

    workflow: Workflow
    engine: Engine
    tokens: ChatTokens
    rewards: RewardPool
    config: RunConfig
    tool_parser: ToolParser | None = None
    thought_parser: ThoughtParser = dataclasses.field(default_factory=ThoughtParser)

    def __post_init__(self) -> None:
        self._unseen_weights = set(self.config.reward.weights)

    async def group(
        self,
        task: Task,
        *,
        group_id: str,
        position: int,
        epoch: int,
        n_samples: int,
        sampling: Sampling,
        is_eval: bool,
    ) -> RolloutGroup:
        """All attempts at a task; from `sampling.seed`, that of the task, each has a seed of its own.

        Raises what is wrong with the workflow itself, see `WrongWorkflow`; `InvalidInput` for a weight of a reward part
        that does not exist; and `RewardTimeout` if `reward.on_timeout = "fail"`.
        """
        queued_at = time.time()
        OWED.set(owed := [])
        try:
            async with asyncio.TaskGroup() as attempts:
                started = [
                    attempts.create_task(self._attempt(task, group_id, attempt, sampling, is_eval))
                    for attempt in range(n_samples)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # one says it all
        scored = await self._scored_together(task, [attempt.result() for attempt in started])
        self._unseen_weights = check_weights(self._unseen_weights, [each for each in scored if not each.error])
        trajectories = [
            shaped(each, self.config.reward, max_tokens=sampling.max_tokens, is_eval=is_eval) for each in scored
        ]
        group = RolloutGroup(
            id=group_id,
            task=task,
            position=position,
            epoch=epoch,
            expected=n_samples,
            trajectories=trajectories,
            queued_at=queued_at,
        )
        reason = "" if is_eval else self._reject_reason(group, scored)
        owed += [each.status for each in scored if each.status in BY_MOMENT]
        owed += [
            "a tool's time limit" for t in scored for turn in t.turns for call in turn.tool_calls if call.timed_out
        ]
        owes = ", ".join(sorted(set(owed)))
        return dataclasses.replace(group, accepted=not reason, reject_reason=reason, owes=owes)

    def _reject_reason(self, group: RolloutGroup, scored: list[Trajectory]) -> str:
        rewards = [trajectory.reward for trajectory in group.usable]
        if len(rewards) < self.config.rollout.min_usable:
            return f"{len(rewards)} usable of {group.expected}, {self.config.rollout.min_usable} needed"
        if self.config.rollout.drop_uniform_groups:
            # As DAPO's filter: replies alike in score are uniform even if their length penalties differ.
            unshaped = [shaped(each, self.config.reward, max_tokens=0, is_eval=True) for each in scored]
            scores = [each.reward for each in unshaped if each.usable and each.reward is not None]
            noise = 1e-6 * max(map(abs, scores), default=0.0) + 1e-9
            if scores and max(scores) - min(scores) <= noise:
                return f"uniform reward {scores[0]:g}"
        accept = self.workflow.accept
        try:
            is_accepted = as_accepted(accept(group), accept)
        except BaseException as error:
            if isinstance(error, Exception) or is_of_caller(error):
                raise
            raise WrongWorkflow(f"accept raised {kind_and_words(error)}; it is at {place_of(accept)}") from error
        return "" if is_accepted else f"{type(self.workflow).__name__}.accept said no"

    async def _scored_together(self, task: Task, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Rewards that depend on the other attempts, if the workflow has such."""
        usable = [each for each in trajectories if each.usable and not each.error]  # 0 by `on_out_of_room` stays 0
        if not usable:
            return trajectories
        set_reward_pool(self.rewards)
        changed: dict[int, Trajectory] = {}
        try:
            async with asyncio.timeout(self.config.rollout.attempt_timeout):
                returned = await self.workflow.score_group(task, usable)
                scores = as_scores(returned, self.workflow.score_group, num_attempts=len(usable))
        except WrongWorkflow:
            raise
        except BaseException as exception:
            if is_of_caller(exception):
                raise
            self._stop_if_told(exception, task)
            status: Status = "timeout" if isinstance(exception, (TimeoutError, RewardTimeout)) else "reward_error"
            error = failure_text(exception, f"score_group: {kind_and_words(exception)}")
            for trajectory in usable:
                changed[trajectory.attempt] = dataclasses.replace(trajectory, status=status, reward=None, error=error)
        else:
            if scores is None:
                return trajectories
            for trajectory, score in zip(usable, scores, strict=True):
                parts = {**trajectory.reward_parts, **score.parts}
                vote = trajectory.vote if score.vote is None else score.vote
                changed[trajectory.attempt] = dataclasses.replace(
                    trajectory, reward=score.reward, reward_parts=parts, vote=vote
                )
        return [changed.get(trajectory.attempt, trajectory) for trajectory in trajectories]

    async def _attempt(self, task: Task, group_id: str, attempt: int, sampling: Sampling, is_eval: bool) -> Trajectory:
        limits = self.config.rollout
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=seed_of(sampling.seed, attempt))
        CONTEXT.set(WorkflowContext(is_eval=is_eval, task_id=task.id, attempt=attempt))
        set_reward_pool(self.rewards)
        chat = Chat(
            engine=self.engine,
            tokens=self.tokens,
            sampling=sampling,
            max_model_len=self.config.engine.max_model_len,
            request_id=f"{group_id}/{attempt}",
            tool_parser=self.tool_parser,
            thought_parser=self.thought_parser,
            follows_grammars=self.config.engine.guided_decoding and self.config.engine.kind == "vllm",
            max_tool_turns=limits.max_tool_turns,
            tool_timeout=limits.tool_timeout,
            tool_output_chars=limits.tool_output_chars,
            scores_out_of_room=limits.on_out_of_room == "score",
        )
        started_at, started = time.time(), time.perf_counter()
        score, error = Score(reward=None), ""
        try:
            async with asyncio.timeout(limits.attempt_timeout):
                score = as_score(await self.workflow.run(task, chat), self.workflow.run)
            status = (
                "max_turns" if chat.max_turns_reached else "truncated" if chat.cut_off or chat.out_of_room else "ok"
            )
        except WrongWorkflow:
            raise
        except (TimeoutError, RewardTimeout) as exception:
            self._stop_if_told(exception, task)
            message = str(exception) or f"attempt took more than {limits.attempt_timeout:g} s"
            status, error = "timeout", failure_text(exception, message)
        except RewardFailed as exception:
            status, error = "reward_error", failure_text(exception, str(exception))
        except OutOfRoom as exception:
            status, error = "truncated", str(exception)
            if limits.on_out_of_room != "exclude" and chat.turns:  # a prompt that fills the model is not the policy's
                score = Score(reward=0.0)
        except EngineError as exception:
            status, error = "engine_error", without_secrets(str(exception))
        except ToolUnavailable as exception:
            status, error = "tool_error", failure_text(exception, str(exception))
        except BaseException as exception:
            if is_of_caller(exception):
                raise
            status, error = "env_error", failure_text(exception)
        generate_seconds = sum(turn.generate_seconds for turn in chat.turns)
        return Trajectory(
            attempt=attempt,
            turns=chat.turns,
            messages=chat.recorded,
            status=status,
            reward=score.reward,
            reward_parts=score.parts,
            reward_seconds=max(0.0, time.perf_counter() - started - generate_seconds - chat.held_seconds),
            started_at=started_at,
            finished_at=started_at + time.perf_counter() - started,
            error=error,
            out_of_room=chat.out_of_room,
            excluded=not is_eval and status in limits.exclude_statuses,
            vote=score.vote,
        )

    def _stop_if_told(self, exception: BaseException, task: Task) -> None:
        if isinstance(exception, RewardTimeout) and self.rewards.on_timeout == "fail":
            raise RewardTimeout(f"{exception}, at task {task.id!r}; reward.on_timeout is `fail`") from exception


def is_of_caller(error: BaseException) -> bool:
    """True for what ends the current task or process from outside. All else is an error of the user's code: also the
    panic of a library in Rust, which is no `Exception`, and a `CancelledError` that it raised itself or got from a task
    that was cancelled."""
    task = asyncio.current_task()
    cancelled = task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit) or (
        isinstance(error, asyncio.CancelledError) and cancelled
    )


def token_bytes(group: RolloutGroup) -> int:
    """About what its tokens take in a shard: int32 id, float32 logprob, int32 version and bool mask of each, and routes
    if there are any."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    routes = sum(len(turn.routes.ids) for turn in turns if turn.routes is not None)
    return 13 * sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in turns) + routes
