"""Tasks played in seconds on a scripted engine, before anything heavy starts.

    check_tasks        ids, prompts and answers are text, and ids differ
    play_tasks         two tasks per split ─▶ run ─▶ a score, or the user's error: every start does it;
                       turns as the workflow takes them ─▶ the model's chat template ─▶ a prompt
    check_references   reference_reply ─▶ reward 1: what `--dry-run` and `doctor` check too

In: a workflow and the run's configuration. Out: nothing, or the error with the task, or with the user's file and line.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import functools
import json
import logging
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tools import ToolUnavailable
from rollouts.production.attempts import give_threads
from rollouts.production.evaluation import CORRECT
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout, set_reward_pool
from rollouts.workflow import CONTEXT, Score, Workflow, WorkflowContext, WrongWorkflow, as_score, place_of
from settings.errors import InvalidInput, UserError, failure_text, has_users_frames, in_one_line
from settings.run_file import RunConfig
from storage.records import Message, RolloutGroup, Task, Trajectory
from tasks.checks.scripted_chat import Replies, ScriptedChat, TrialParser, Unknown
from trainers.model.fetch import local_folder

logger = logging.getLogger("millrace.preflight")

_PLAYED = 2
"""Tasks of each split that every start plays."""
_SECONDS = 10.0
"""A task that takes longer is passed over at a start."""
_NEVER = re.compile(r"\A[^ ]+: (?:\w+\.)*(?:InvalidInput|SandboxUnavailable)\b")
"""How errors of a reward process begin that are no reply's fault."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """How one task went."""

    reward: float | None
    error: Exception | None
    is_known: bool
    """Every reply was the workflow's own: its reference, or one of its demonstrations."""
    num_turns: int
    has_tools: bool


@contextlib.contextmanager
def errors_of_users(what: str, function: Callable[..., object] | None = None) -> Iterator[None]:
    """Raise `InvalidInput`, beginning with `what`, for an error of code that the user wrote, with its file and line.

    Without a frame of the user's, as for wrong arguments, the place is that of `function`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = failure_text(error)
        innermost = traceback.extract_tb(error.__traceback__)[-1].name
        if isinstance(error, NotImplementedError) and not has_users_frames(error):
            text = f"there is no {innermost}(); write it"
        elif function is not None and not has_users_frames(error):
            text = f"{in_one_line(text).rpartition(' at ')[0]}; it is at {place_of(function)}"
        raise InvalidInput(f"{what}: {text}") from error


def check_tasks(tasks: Sequence[Task], split: str, *, where: str) -> None:
    """Raise `InvalidInput` for the first task of a split whose fields are not text or JSON, or whose id another has.

    `where` is the file and line that made them.
    """
    for task in tasks:
        if not isinstance(task, Task):
            raise InvalidInput(f"tasks({split!r}) has a {type(task).__name__}, not a Task, at {where}")
        for name in ("id", "prompt", "answer"):
            if not isinstance(value := getattr(task, name), str):
                fix = "build messages in `run`" if name == "prompt" else f"use str({name})"
                what = f"task {task.id!r} of split {split!r}: {name} is a {type(value).__name__}, not text"
                raise InvalidInput(f"{what}: {fix}, at {where}")
        try:
            json.dumps(task.metadata)
        except (TypeError, ValueError) as error:
            what = f"task {task.id!r} of split {split!r}: its metadata are no JSON ({error})"
            raise InvalidInput(f"{what}; use text, at {where}") from None
    if doubled := [name for name, count in Counter(task.id for task in tasks).items() if count > 1]:
        raise InvalidInput(
            f"{len(doubled)} task ids of split {split!r} occur more than once, for example {doubled[0]!r}: prompt "
            f"order and lineage know a task by its id; make them unique, at {where}"
        )


def play_tasks(workflow: Workflow, tasks: Mapping[str, Sequence[Task]], config: RunConfig) -> None:
    """Play the first tasks of each split with replies that the workflow knows, or plain text.

    Raises `InvalidInput` for what `run` raises, and for turns that the model's chat template cannot render if the model
    is on this machine; `WrongWorkflow` if it returns no score. With plain text only errors
    that no reply can cause are raised, the others are warnings: the policy may say anything, and such attempts are
    `env_error`.
    """
    first = _first(tasks, _PLAYED)
    played = _attempts(workflow, first, config, _known_replies(workflow), seconds=_SECONDS, loads_vllm=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # the error says it
        outcomes = _in_own_loop(played)
    for (split, task), outcome in zip(first, outcomes, strict=True):
        error = outcome.error
        if error is None or isinstance(error, Unknown):  # what calls tools is left to `check_references`
            continue
        is_bug = outcome.is_known and not _is_of_a_server(error)
        if isinstance(error, WrongWorkflow) or _is_certain(error) or is_bug:
            what = f"task {task.id!r} of split {split!r}, played before anything was started"
            with errors_of_users(what, _users_method(workflow)):
                raise error
        logger.warning("task %r of split %r, tried with a made-up reply: %s", task.id, split, failure_text(error))
    if outcomes and all(outcome.error is None and not outcome.num_turns for outcome in outcomes):
        method = _users_method(workflow)
        what = f"{method.__qualname__} asked the policy nothing in {len(outcomes)} attempts that were tried"
        raise InvalidInput(f"{what}, so nothing can be trained; `await chat.ask(…)` does. It is at {place_of(method)}")
    if outcomes and all(outcome.error is None and outcome.reward is None for outcome in outcomes):
        why = "None means not applicable, as NaN does: such attempts enter no mean and are not trained"
        logger.warning("the reward of all %d attempts that were tried is None; %s", len(outcomes), why)
    has_tools = any(outcome.has_tools for outcome in outcomes)
    check_template(config, several_turns=any(each.num_turns > 1 for each in outcomes), with_tools=has_tools)


def check_template(config: RunConfig, *, several_turns: bool, with_tools: bool) -> None:
    """Render the turns that a workflow takes with the chat template of the run's model, if it is on this machine.

    Raises `InvalidInput` for a template that has no first, second or third turn, or shows no results of tools.
    """
    if not config.model or (folder := local_folder(config.model)) is None:
        return
    try:
        tokens = ChatTokens.load(folder, settings=config.engine.chat_template_kwargs)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises; `InvalidInput` is a `ValueError`
        raise InvalidInput(f"model = {config.model!r}: its tokenizer cannot be used: {error}") from error
    tokens.prompt([Message(role="user", content="0")])
    if several_turns or with_tools:
        tokens.check_turns(with_call=with_tools)


def check_references(
    workflow: Workflow, tasks: Mapping[str, Sequence[Task]], config: RunConfig, *, num_tasks: int = 20
) -> int:
    """Play `reference_reply` on the first tasks of each split; returns how many tasks were won, each with reward 1.

    Passed over are tasks without a reference, without a tool's server, or whose reference calls tools while the model,
    whose tokenizer reads the calls, is not on this machine. Raises `InvalidInput` if any other task is not won.
    """
    if type(workflow).reference_reply is Workflow.reference_reply:
        return 0
    first, seconds = _first(tasks, num_tasks), config.rollout.attempt_timeout
    attempts = _attempts(workflow, first, config, workflow.reference_reply, seconds=seconds, loads_vllm=True)
    outcomes = _in_own_loop(attempts)
    told = [
        (task, outcome)
        for task, outcome in zip(first, outcomes, strict=True)
        if outcome.is_known and not isinstance(outcome.error, ToolUnavailable)
    ]
    compares = type(workflow).score_group is not Workflow.score_group  # then `run` has no say
    lost = [(split, task.id, why) for (split, task), outcome in told if (why := _lost(outcome, compares))]
    if lost:
        split, task_id, why = lost[0]
        raise InvalidInput(
            f"reference_reply does not win {len(lost)} of {len(first)} tasks. task {task_id!r} of split {split!r}: "
            f"{why}\nMend the task's answer, its reward or reference_reply, which may return None if it does not know"
        )
    return len(told)


def _first(tasks: Mapping[str, Sequence[Task]], count: int) -> list[tuple[str, Task]]:
    return [(split, task) for split, members in tasks.items() for task in members[:count]]


def _lost(outcome: _Outcome, compares: bool) -> str:
    if outcome.error is not None:
        return failure_text(outcome.error)
    won = compares or (outcome.reward or 0.0) >= CORRECT
    return "" if won else f"its reward is {outcome.reward}, and an attempt that wins has {CORRECT:g}"


def _known_replies(workflow: Workflow) -> Replies:
    """The reference where there is one, else the reply of the demonstration that asks the same."""
    demonstrated: dict[str, str] = {}
    if type(workflow).demonstrations is not Workflow.demonstrations:
        with errors_of_users("demonstrations(200, seed=0), which returns lists of Message", workflow.demonstrations):
            for chat in workflow.demonstrations(200, seed=0):
                asked = [message.content for message in chat if message.role == "user"]
                replies = [message.content for message in chat if message.role == "assistant"]
                if asked and replies:
                    demonstrated.setdefault(asked[0], replies[0])

    def reply(task: Task, messages: Sequence[Message]) -> str | None:
        reference = workflow.reference_reply(task, messages)
        if not isinstance(reference, str | None):
            what = f"reference_reply returned {type(reference).__name__}, not text"
            raise WrongWorkflow(f"{what}, at {place_of(workflow.reference_reply)}")
        return demonstrated.get(messages[-1].content) if reference is None else reference

    return reply


def _users_method(workflow: Workflow) -> Callable[..., object]:
    """The method that plays: `run`, or what a workflow of ours leaves to the user."""
    own = [getattr(workflow, name, None) for name in ("run_agent", "command", "run")]
    is_users = [method for method in own if method and not method.__module__.startswith("rollouts.")]
    return is_users[0] if is_users else workflow.run


def _is_certain(error: Exception) -> bool:
    """True if no other reply could have avoided it: a name that is nowhere, a field that our objects do not have, and
    what our rewards say of the task or the machine."""
    ours = isinstance(error, AttributeError) and type(error.obj).__module__.partition(".")[0] in ("rollouts", "storage")
    if isinstance(error, RewardFailed) and _NEVER.search(str(error)):
        return True
    return ours or issubclass(_kind(error), NameError | ImportError | InvalidInput)


def _kind(error: Exception) -> type[BaseException]:
    """The class of an error, or if a reward process only has its name, the one of that name."""
    if not isinstance(error, RewardFailed):
        return type(error)
    name = str(error).partition(": ")[2].partition("\n")[0].partition(":")[0]
    kind = InvalidInput if name == InvalidInput.__name__ else getattr(builtins, name, None)
    return kind if isinstance(kind, type) else OSError


def _is_of_a_server(error: Exception) -> bool:
    """True for what may be different when the run is under way: networks, servers, time."""
    of_a_network = type(error).__module__.partition(".")[0] in ("aiohttp", "httpx", "openai", "requests")
    return of_a_network or isinstance(error, RewardTimeout | ToolUnavailable) or issubclass(_kind(error), OSError)


def _in_own_loop(attempts: Coroutine[Any, Any, list[_Outcome]]) -> list[_Outcome]:
    """The outcomes, from an event loop in a thread: a flow calls this inside another loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, attempts).result()


async def _group(workflow: Workflow, task: Task, chat: Chat, score: Score) -> None:
    """Give two attempts like this one to `score_group` and `accept`. Raises what these raise, and `WrongWorkflow`."""
    attempt = Trajectory(
        attempt=0, turns=chat.turns, messages=chat.recorded, status="ok", reward=score.reward, reward_parts=score.parts
    )
    if not attempt.usable:
        return
    attempts = [attempt, dataclasses.replace(attempt, attempt=1)]
    scores = await workflow.score_group(task, attempts)
    if scores is not None and len([as_score(each, workflow.score_group) for each in scores]) != len(attempts):
        what = f"score_group returned {len(scores)} scores for {len(attempts)} attempts; return one Score each"
        raise WrongWorkflow(f"{what}. It is at {place_of(workflow.score_group)}")
    group = RolloutGroup(id=task.id, task=task, position=0, epoch=0, expected=len(attempts), trajectories=attempts)
    if (accepted := workflow.accept(group)) is None:
        raise WrongWorkflow(f"accept returned None; return True or False. It is at {place_of(workflow.accept)}")
    bool(accepted)


async def _attempts(
    workflow: Workflow,
    tasks: Sequence[tuple[str, Task]],
    config: RunConfig,
    reply: Replies,
    *,
    seconds: float,
    loads_vllm: bool,
) -> list[_Outcome]:
    """One attempt at each task, all at once."""
    parser = TrialParser(config.engine.tool_parser, model=config.model, loads_vllm=loads_vllm)
    give_threads(len(tasks))
    settings = config.reward
    rewards = RewardPool(num_processes=settings.processes, timeout=settings.timeout, memory_gb=settings.memory_gb)

    async def play(split: str, task: Task) -> _Outcome:
        CONTEXT.set(WorkflowContext(is_eval=split != "train", task_id=task.id, attempt=0))
        set_reward_pool(rewards)
        chat, reward = ScriptedChat(task, reply, parser, config), None
        error: Exception | None = None
        try:
            async with asyncio.timeout(seconds):
                score = as_score(await workflow.run(task, chat), workflow.run)
            reward = score.reward
            await _group(workflow, task, chat, score)
        except SystemExit as raised:
            what = f"{workflow.run.__qualname__} ended with SystemExit({raised.code!r})"
            error = WrongWorkflow(f"{what}; raise another error, or return a score. It is at {place_of(workflow.run)}")
        except Exception as raised:  # noqa: BLE001 - user code may raise anything; it is the outcome
            error = raised
        told = functools.partial(_Outcome, is_known=chat.all_known, num_turns=len(chat.turns), has_tools=chat.has_tools)
        return told(reward=reward, error=error)

    async with rewards:
        try:
            return await asyncio.gather(*(play(split, task) for split, task in tasks))
        finally:
            await workflow.close()
            if "rollouts.endpoint.agent_endpoint" in sys.modules:  # what was not imported was not started
                from rollouts.endpoint.agent_endpoint import close_agent_endpoint

                await close_agent_endpoint()
