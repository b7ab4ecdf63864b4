"""Attempts at a workflow's tasks on a scripted engine, in seconds and without a model.

    task, the replies that its workflow knows ─▶ `run` ─▶ turns, reward or error

In: a workflow, some of its tasks, and what the policy says. Out: how each went.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NoReturn

from rollouts.chat.chat import Chat
from rollouts.production.attempts import give_threads, is_of_caller
from rollouts.rewards.scoring import RewardPool, set_reward_pool
from rollouts.workflow import (
    CONTEXT,
    Score,
    Workflow,
    WorkflowContext,
    WrongWorkflow,
    as_accepted,
    as_score,
    as_scores,
    place_of,
)
from settings.errors import (
    InvalidInput,
    UserError,
    counted,
    failure_text,
    has_users_frames,
    in_one_line,
    place_in_thread,
)
from settings.run_file import RunConfig
from storage.records import Message, RolloutGroup, Task, Trajectory
from tasks.checks.scripted_chat import Replies, ScriptedChat, TrialParser

logger = logging.getLogger("millrace.preflight")


_ROLES = frozenset({"system", "user", "assistant", "tool"})
_BLOCKED_SECONDS = 10.0
_CLOSE_SECONDS = 20.0
"""As long a run waits for a worker to close."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one task went."""

    reward: float | None
    error: BaseException | None
    is_known: bool
    """Every reply was the workflow's own: its reference, or one of its demonstrations."""
    turns: list[tuple[list[int], list[int]]]
    """What was asked and answered, as token ids."""
    has_tools: bool


@contextlib.contextmanager
def errors_of_users(what: str, function: Callable[..., object] | None = None) -> Iterator[None]:
    """Raise `InvalidInput`, beginning with `what`, for an error of code that the user wrote, with its file and line.

    Without a frame of the user's, as for wrong arguments, the place is that of `function`. Code that takes long is
    named while it does: a start waits for it, and shows nothing else.
    """
    slow = threading.Timer(_BLOCKED_SECONDS, _say_where, args=[threading.get_ident()])
    slow.daemon = True
    slow.start()
    try:
        yield
    except UserError:
        raise
    except SystemExit as error:
        where = "" if function is None else f", at {place_of(function)}"
        raise InvalidInput(f"{what}: it ends with SystemExit({error.code!r}); raise another error{where}") from error
    except (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:
        text = failure_text(error)
        innermost = traceback.extract_tb(error.__traceback__)[-1].name
        if isinstance(error, NotImplementedError) and not has_users_frames(error):
            text = f"there is no {innermost}(); write it"
        elif function is not None and not has_users_frames(error):
            text = f"{in_one_line(text).rpartition(' at ')[0]}; it is at {place_of(function)}"
        raise InvalidInput(f"{what}: {text}") from error
    finally:
        slow.cancel()


@contextlib.contextmanager
def exits_named() -> Iterator[None]:
    """`os._exit` of this process raises `SystemExit`, which is named with its place: it would end the command, without
    a word and as if all were well. Forked children end as ever."""
    really, ours = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != ours:
            really(status)
        raise SystemExit(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = really


def _say_where(thread: int) -> None:
    if place := place_in_thread(thread):
        logger.warning("code of yours has taken %.0f s, and the start waits for it\n%s", _BLOCKED_SECONDS, place)


def first_tasks(tasks: Mapping[str, Sequence[Task]], count: int) -> list[tuple[str, Task]]:
    return [(split, task) for split, members in tasks.items() for task in members[:count]]


def demonstrated(workflow: Workflow, count: int) -> Sequence[Sequence[Message]]:
    """The workflow's demonstrations from seed 0. Raises `InvalidInput` for what are no lists of `Message`, and for what
    the user's code raises."""
    what, where = f"demonstrations({count}, seed=0)", place_of(workflow.demonstrations)
    with errors_of_users(what, workflow.demonstrations):
        chats = workflow.demonstrations(count, seed=0)
        if not hasattr(chats, "__len__") or not hasattr(chats, "__getitem__") or isinstance(chats, str | dict):
            raise InvalidInput(f"{what} returned {type(chats).__name__}; return a list of conversations, at {where}")
        for chat in chats:
            if isinstance(chat, str | dict | Message) or not all(isinstance(message, Message) for message in chat):
                members = {type(m).__name__ for m in chat} if isinstance(chat, list | tuple) else set()
                kind = f"{type(chat).__name__}{f' of {min(members)}' if members else ''}"
                raise InvalidInput(f"{what} has a {kind} as a conversation, not a list of Message, at {where}")
            if wrong := [message.content for message in chat if not isinstance(message.content, str)]:
                raise InvalidInput(f"{what} has a message whose content is {wrong[0]!r}, not text, at {where}")
    return chats


def known_replies(workflow: Workflow) -> Replies:
    """The reference if there is one, else the reply of the demonstration that asks the same."""
    reply_to: dict[str, str] = {}
    if type(workflow).demonstrations is not Workflow.demonstrations:
        for chat in demonstrated(workflow, 200):
            asked = [message.content for message in chat if message.role == "user"]
            replies = [message.content for message in chat if message.role == "assistant"]
            if wrong := {message.role for message in chat} - _ROLES:
                what = f"demonstrations(200, seed=0) has a message of role {min(wrong)!r}"
                place = place_of(workflow.demonstrations)
                raise WrongWorkflow(f"{what}; roles are {', '.join(sorted(_ROLES))}, at {place}")
            if asked and replies:
                reply_to.setdefault(asked[0], replies[0])

    def reply(task: Task, messages: Sequence[Message]) -> str | None:
        reference = workflow.reference_reply(task, messages)
        if not isinstance(reference, str | None):
            what = f"reference_reply returned {type(reference).__name__}, not text"
            raise WrongWorkflow(f"{what}, at {place_of(workflow.reference_reply)}")
        return reply_to.get(messages[-1].content) if reference is None else reference

    return reply


def users_method(workflow: Workflow) -> Callable[..., object]:
    """The method that plays: `run`, or what a workflow of ours leaves to the user."""
    own = [getattr(workflow, name, None) for name in ("run_agent", "command", "run")]
    is_users = [method for method in own if method and not method.__module__.startswith("rollouts.")]
    return is_users[0] if is_users else workflow.run


def attempts_at(
    tasks: Sequence[tuple[str, Task]],
    workflow: Workflow,
    config: RunConfig,
    reply: Replies,
    *,
    seconds: float,
    loads_vllm: bool = False,
) -> list[Outcome]:
    """One attempt at each task, all at once, in an event loop of a thread: a flow calls this inside another loop.

    Warns of code of the user's that holds up the loop, at its line: it may never end, and no deadline can end it.
    """
    attempts = _attempts(workflow, tasks, config, reply, seconds=seconds, loads_vllm=loads_vllm)
    ended: Future[list[Outcome]] = Future()

    def play() -> None:
        try:
            ended.set_result(asyncio.run(attempts))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            ended.set_exception(error)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)  # the error says it
        thread = threading.Thread(target=play, daemon=True)  # a daemon, so that Ctrl-C ends it
        thread.start()
        is_slow = False
        while not wait([ended], _BLOCKED_SECONDS).done:
            if place := place_in_thread(thread.ident):
                what = "code without `await` has held up every attempt for %.0f s; give it to asyncio.to_thread\n%s"
                logger.warning(what, _BLOCKED_SECONDS, place)
                break
            if seconds > _BLOCKED_SECONDS and not is_slow:
                is_slow = True
                logger.warning(
                    "the references of %s have taken %.0f s, and have at most %.0f s each (rollout.attempt_timeout)",
                    counted(len(tasks), "task"),
                    _BLOCKED_SECONDS,
                    seconds,
                )
        return ended.result()


async def _group(workflow: Workflow, task: Task, chat: Chat, score: Score) -> None:
    """Give two attempts like this one to `score_group` and `accept`. Raises what these raise, and `WrongWorkflow`."""
    attempt = Trajectory(
        attempt=0, turns=chat.turns, messages=chat.recorded, status="ok", reward=score.reward, reward_parts=score.parts
    )
    if not attempt.usable:
        return
    attempts = [attempt, dataclasses.replace(attempt, attempt=1)]
    as_scores(await workflow.score_group(task, attempts), workflow.score_group, num_attempts=len(attempts))
    group = RolloutGroup(id=task.id, task=task, position=0, epoch=0, expected=len(attempts), trajectories=attempts)
    if (accepted := workflow.accept(group)) is None:
        raise WrongWorkflow(f"accept returned None; return True or False. It is at {place_of(workflow.accept)}")
    as_accepted(accepted, workflow.accept)


async def _attempts(
    workflow: Workflow,
    tasks: Sequence[tuple[str, Task]],
    config: RunConfig,
    reply: Replies,
    *,
    seconds: float,
    loads_vllm: bool,
) -> list[Outcome]:
    """One attempt at each task, all at once."""
    parser = TrialParser(config.engine.tool_parser, model=config.model, loads_vllm=loads_vllm)
    give_threads(len(tasks))
    settings = config.reward
    rewards = RewardPool(num_processes=settings.processes, timeout=settings.timeout, memory_gb=settings.memory_gb)

    async def play(split: str, task: Task) -> Outcome:
        CONTEXT.set(WorkflowContext(is_eval=split != "train", task_id=task.id, attempt=0))
        set_reward_pool(rewards)
        chat, reward = ScriptedChat(task, reply, parser, config), None
        error: BaseException | None = None
        try:
            async with asyncio.timeout(seconds):
                score = as_score(await workflow.run(task, chat), workflow.run)
            reward = score.reward
            async with asyncio.timeout(seconds):
                await _group(workflow, task, chat, score)
        except SystemExit as raised:
            what = f"{workflow.run.__qualname__} ended with SystemExit({raised.code!r})"
            error = WrongWorkflow(f"{what}; raise another error, or return a score. It is at {place_of(workflow.run)}")
        except BaseException as raised:
            if is_of_caller(raised):
                raise
            if isinstance(raised, asyncio.CancelledError):
                what = f"{workflow.run.__qualname__} raised {failure_text(raised)}"
                raised = WrongWorkflow(f"{what}; raise another error. It is at {place_of(workflow.run)}")
            error = raised
            traceback.clear_frames(raised.__traceback__)  # coroutines that were not awaited warn while it is silent
        turns = [(turn.context_ids, turn.sampled_ids) for turn in chat.turns]
        outcome = functools.partial(Outcome, is_known=chat.all_known, turns=turns, has_tools=chat.has_tools)
        return outcome(reward=reward, error=error)

    async with rewards:
        try:
            return await asyncio.gather(*(play(split, task) for split, task in tasks))
        finally:
            with errors_of_users(f"{type(workflow).__name__}.close()", workflow.close):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await workflow.close()
            if "rollouts.endpoint.agent_endpoint" in sys.modules:  # what was not imported was not started
                from rollouts.endpoint.agent_endpoint import close_agent_endpoint

                await close_agent_endpoint()
