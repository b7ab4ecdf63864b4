"""Attempts at a workflow's tasks on a scripted engine, in seconds and without a model.

    task, the replies that its workflow knows ─▶ `run` ─▶ turns, reward or error

In: a workflow, some of its tasks, and what the policy says. Out: how each went.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ParsedReply, ToolParser
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.rewards.scoring import RewardPool, set_reward_pool
from rollouts.workflow import CONTEXT, Workflow, WorkflowContext, WrongWorkflow, as_score, place_of
from settings.errors import InvalidInput, UserError, failure_text, has_users_frames, in_one_line
from settings.run_file import RunConfig
from storage.records import Message, Sampling, Task
from trainers.model.fetch import local_folder

Replies = Callable[[Task, Sequence[Message]], str | None]
"""What the policy says next; None if that is not known."""

_CALL_MARKS = "<[{"
"""Each format of tool calls has one of these."""
_PLAIN_REPLY = "42"
"""What the scripted policy says if nothing better is known."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one task went."""

    reward: float | None
    error: Exception | None
    is_known: bool
    """Every reply was the workflow's own: its reference, or one of its demonstrations."""
    turns: list[tuple[list[int], list[int]]]
    """What was asked and answered, as token ids."""
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


def first_tasks(tasks: Mapping[str, Sequence[Task]], count: int) -> list[tuple[str, Task]]:
    return [(split, task) for split, members in tasks.items() for task in members[:count]]


def known_replies(workflow: Workflow) -> Replies:
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
    """One attempt at each task, all at once, in an event loop of a thread: a flow calls this inside another loop."""
    attempts = _attempts(workflow, tasks, config, reply, seconds=seconds, loads_vllm=loads_vllm)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, attempts).result()


async def _attempts(
    workflow: Workflow,
    tasks: Sequence[tuple[str, Task]],
    config: RunConfig,
    reply: Replies,
    *,
    seconds: float,
    loads_vllm: bool,
) -> list[Outcome]:
    parser = _Parser(config.engine.tool_parser, model=config.model, loads_vllm=loads_vllm)
    settings = config.reward
    rewards = RewardPool(num_processes=settings.processes, timeout=settings.timeout, memory_gb=settings.memory_gb)

    async def play(split: str, task: Task) -> Outcome:
        CONTEXT.set(WorkflowContext(is_eval=split != "train", task_id=task.id, attempt=0))
        set_reward_pool(rewards)
        chat, error, reward = _ScriptedChat(task, reply, parser), None, None
        try:
            reward = as_score(await asyncio.wait_for(workflow.run(task, chat), seconds), workflow.run).reward
        except Exception as raised:  # noqa: BLE001 - user code may raise anything; it is the outcome
            error = raised
        turns = [(turn.context_ids, turn.sampled_ids) for turn in chat.turns]
        told = functools.partial(Outcome, is_known=chat.all_known, turns=turns, has_tools=chat.has_tools)
        return told(reward=reward, error=error)

    async with rewards:
        try:
            return await asyncio.gather(*(play(split, task) for split, task in tasks))
        finally:
            await workflow.close()
            if "rollouts.endpoint.agent_endpoint" in sys.modules:  # what was not imported was not started
                from rollouts.endpoint.agent_endpoint import close_agent_endpoint

                await close_agent_endpoint()


class UnknownReply(Exception):
    """A reply may call tools, and its parser, or the tokenizer that it needs, is not to be loaded."""


class _ScriptedChat(Chat):
    """A conversation with a policy that says what the workflow expects, as far as it tells."""

    def __init__(self, task: Task, reply: Replies, parser: ToolParser) -> None:
        self._task, self._reply, self._next_reply = task, reply, ""
        self.all_known, self.has_tools = True, False
        tokens = _Characters()
        super().__init__(
            engine=ScriptedEngine(lambda *_: [*map(ord, self._next_reply), tokens.end_id]),
            tokens=tokens,
            sampling=Sampling(max_tokens=2**20),
            max_model_len=2**30,
            request_id=task.id,
            tool_parser=parser,
        )

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        self.has_tools = self.has_tools or bool(options.get("tools"))
        known = self._reply(self._task, messages)
        self.all_known = self.all_known and known is not None
        self._next_reply = _PLAIN_REPLY if known is None else known
        try:
            return await super().complete(messages, **options)
        except UnknownReply:
            self.all_known = False
            raise


class _Characters(ChatTokens):
    """Stands in for the model's tokenizer: each character is a token."""

    def __init__(self) -> None:
        self.end_id = sys.maxunicode + 1

    def prompt(self, messages: Sequence[Message], **_: Any) -> list[int]:
        return [ord(character) for message in messages for character in message.content]

    def continuation(self, messages: Sequence[Message], **_: Any) -> list[int]:
        return self.prompt(messages)

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != self.end_id)


class _Parser(ToolParser):
    """Loads vLLM's parser, and the tokenizer that it asks for special tokens, when a reply may have a call."""

    def __init__(self, name: str, *, model: str, loads_vllm: bool) -> None:
        super().__init__(name, None)
        self._model = model
        self._loads_vllm = loads_vllm
        self._one_at_a_time = asyncio.Lock()

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        if not any(mark in text for mark in _CALL_MARKS):
            return ParsedReply(content=text, tool_calls=[])
        if not self._loads_vllm:
            raise UnknownReply
        async with self._one_at_a_time:  # the first one imports vLLM
            return await super().parse(text, tools)

    def _load(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        if not self._model:
            from trainers.model.warmup import character_tokenizer

            self._tokenizer = character_tokenizer(set("".join(map(chr, range(128)))))
        elif (folder := local_folder(self._model)) is not None:
            self._tokenizer = ChatTokens.load(folder).tokenizer
        else:
            raise UnknownReply
        return super()._load(tools)
