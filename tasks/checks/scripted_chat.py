"""The policy of a trial: it says what the workflow expects, a character is a token, and nothing heavy is loaded.

In: a task, and the replies to it. Out: a `Chat` as an attempt of a run has it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ParsedReply, ToolParser
from rollouts.engines.scripted_engine import ScriptedEngine
from settings.run_file import RunConfig
from storage.records import Message, Sampling, Task
from trainers.model.fetch import local_folder

Replies = Callable[[Task, Sequence[Message]], str | None]
"""The policy's next reply; None if it is not known."""

_CALL_MARKS = "<[{"
"""Each format of tool calls has one of these."""
_PLAIN_REPLY = "42"
"""What the policy says if nothing better is known."""


class Unknown(Exception):
    """A reply may call tools, and its parser, or the tokenizer that it needs, is not to be loaded."""

    def __init__(self) -> None:
        super().__init__("an attempt that is played before the run starts does without vLLM, so it can make no calls")


class ScriptedChat(Chat):
    """A conversation with a policy that says what the workflow expects, as far as it tells."""

    def __init__(self, task: Task, reply: Replies, parser: ToolParser, config: RunConfig) -> None:
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
            follows_grammars=config.engine.guided_decoding and config.engine.kind == "vllm",
        )

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        self.has_tools = self.has_tools or bool(options.get("tools"))
        reply = self._reply(self._task, messages)
        self.all_known = self.all_known and reply is not None
        self._next_reply = _PLAIN_REPLY if reply is None else reply
        try:
            return await super().complete(messages, **options)
        except Unknown:
            self.all_known = False
            raise


ScriptedChat.__name__ = Chat.__name__  # which a user knows: `'Chat' object has no attribute 'say'`


class _Characters(ChatTokens):
    """Stands in for the model's tokenizer: each character is a token."""

    def __init__(self) -> None:
        self.end_id = sys.maxunicode + 1
        self.tokenizer = _CharacterTokenizer()

    def prompt(self, messages: Sequence[Message], **_: Any) -> list[int]:
        return [ord(character) for message in messages for character in message.content]

    def continuation(self, messages: Sequence[Message], **_: Any) -> list[int]:
        return self.prompt(messages)

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != self.end_id)


class _CharacterTokenizer:
    """What the agents' endpoint asks of a tokenizer."""

    all_special_ids = (sys.maxunicode + 1,)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id)


class TrialParser(ToolParser):
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
            raise Unknown
        async with self._one_at_a_time:  # the first one imports vLLM
            return await super().parse(text, tools)

    async def _parser(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        if not self._loads_vllm:
            raise Unknown
        return await super()._parser(tools)

    def _load(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        if not self._model:
            from trainers.model.warmup import character_tokenizer

            self._tokenizer = character_tokenizer(set("".join(map(chr, range(128)))))
        elif (folder := local_folder(self._model)) is not None:
            self._tokenizer = ChatTokens.load(folder).tokenizer
        else:
            raise Unknown
        return super()._load(tools)
