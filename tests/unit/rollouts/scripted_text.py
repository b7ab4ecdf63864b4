"""A policy that speaks, and agents that talk to it: replies in words, a format of tool calls, a served session."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest, ParsedReply
from rollouts.endpoint.agent_endpoint import AgentEndpoint, Session
from rollouts.engines.engine import Engine
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Workflow
from storage.records import Message, RolloutGroup, Sampling, Task
from tests.builders import a_config

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text, is_completion=True)


def from_tool(text: str) -> Message:
    return Message(role="tool", content=text)


class Brackets:
    """A parser of calls such as `[add {"a": 1}]`; vLLM's real ones take seconds to import."""

    def __init__(self) -> None:
        self.count = 0

    async def parse(self, text: str, tools: Any) -> ParsedReply:
        calls = []
        for name, arguments in re.findall(r"\[(\w+) (\{.*?\})\]", text):
            self.count += 1
            calls.append(CallRequest(id=f"call_{self.count}", name=name, arguments=arguments))
        return ParsedReply(content=text.partition("[")[0] if calls else text, tool_calls=calls)

    async def end_of_call(self, tools: Any) -> Any:
        return "]", lambda text: re.search(r"\[\w+ \{.*?\}\]", text) is not None

    async def grammar(self, tools: Any, choice: str, *, one_call: bool) -> str:
        return json.dumps({"regex": f"[{choice or 'any'} of {len(tools)}]{'' if one_call else '+'}"})


def an_engine(tokens: ChatTokens, *replies: str, engine: type[ScriptedEngine] = ScriptedEngine) -> Any:
    """Says its replies in order, to each attempt anew; after the last one it has nothing to say and fails the test."""
    left: dict[str, list[str]] = {}

    def reply(prompt_ids: list[int], request_id: str) -> list[int]:
        attempt = request_id.rsplit("/", 1)[0]
        return [*tokens.tokenizer(left.setdefault(attempt, list(replies)).pop(0))["input_ids"], tokens.end_id]

    return engine(reply)


def a_chat(tokens: Any, engine: Any, *, max_tokens: int = 64, **settings: Any) -> Chat:
    """A conversation; `settings` are fields of `Chat`."""
    fields = {"sampling": Sampling(max_tokens=max_tokens), "max_model_len": 4096, "tool_parser": Brackets(), **settings}
    return Chat(engine=engine, tokens=tokens, request_id="0.task/0", **fields)


async def play_group(
    workflow: Workflow,
    tokens: ChatTokens,
    engine: Engine,
    task: Task,
    *,
    n_samples: int = 1,
    tool_parser: Any = None,
    **values: Any,
) -> RolloutGroup:
    """A group of attempts, played as the worker plays it; `values` as in `a_config`."""
    async with RewardPool(num_processes=1, timeout=10.0) as rewards:
        player = Player(
            workflow=workflow,
            engine=engine,
            tokens=tokens,
            rewards=rewards,
            config=a_config(**{"min_usable": 1, "max_model_len": 4096, **values}),
            tool_parser=tool_parser or Brackets(),
        )
        place = {"group_id": f"0.{task.id}", "position": 0, "epoch": 0}
        sampling = Sampling(max_tokens=128)
        return await player.group(task, n_samples=n_samples, sampling=sampling, is_eval=False, **place)


@dataclasses.dataclass(kw_only=True)
class Served:
    """An attempt on an endpoint, and OpenAI's client with its key."""

    chat: Chat
    session: Session
    endpoint: AgentEndpoint
    client: AsyncOpenAI

    async def ask(self, *contents: Any, **options: Any) -> Any:
        """A completion of a history that alternates between the user and the assistant."""
        roles = ["user", "assistant"] * len(contents)
        messages: Any = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return await self.client.chat.completions.create(model="any", messages=messages, **options)

    @property
    def sequences(self) -> list[int]:
        """The sequence of each turn."""
        return [turn.sequence_idx for turn in self.chat.turns]


@contextlib.asynccontextmanager
async def served(
    tokens: ChatTokens,
    *replies: str,
    engine: type[ScriptedEngine] = ScriptedEngine,
    max_retries: int = 0,
    **settings: Any,
) -> AsyncIterator[Served]:
    """An attempt whose engine gives these replies; `max_retries` of the client, `settings` as in `a_chat`."""
    chat = a_chat(tokens, an_engine(tokens, *replies, engine=engine), **settings)
    endpoint = AgentEndpoint()
    try:
        async with (
            endpoint.session(chat) as session,
            AsyncOpenAI(base_url=endpoint.base_url, api_key=session.key, max_retries=max_retries) as client,
        ):
            yield Served(chat=chat, session=session, endpoint=endpoint, client=client)
    finally:
        await endpoint.close()
