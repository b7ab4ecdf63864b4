"""The conversation a workflow holds with the policy; every token is recorded where it is sampled.

In: messages. Out: replies as text, and `turns`: ids, logprobs and per-token versions exactly as the engine gave them.
History is never tokenised again: a later turn appends tokens. A history that was edited starts a second sequence,
in which everything before the next reply is context, so no token is trained twice.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rollouts.chat_tokens import ChatTokens
from rollouts.engine import Engine
from storage.records import Message, Sampling, Turn


class OutOfRoom(Exception):
    """The conversation has reached the model's length limit; the attempt ends as `truncated`."""


class Chat:
    """One attempt's conversation; single use."""

    def __init__(
        self, *, engine: Engine, tokens: ChatTokens, sampling: Sampling, max_model_len: int, request_id: str
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._request_id = request_id
        self._ids: list[int] = []
        self._sequence_idx = -1
        self.messages: list[Message] = []
        """The conversation as it stands, replies included."""
        self.recorded: list[Message] = []
        """Every message of the attempt once, messages of abandoned histories too."""
        self.turns: list[Turn] = []

    async def ask(self, text: str) -> str:
        """Say something as the user and return the policy's reply."""
        return await self.complete([*self.messages, Message(role="user", content=text)])

    async def complete(self, messages: Sequence[Message]) -> str:
        """Return the policy's reply to a whole conversation.

        Raises `rollouts.engine.EngineError` when the engine fails and `OutOfRoom` when no token more fits.
        """
        context_ids, new_messages = self._context_for(messages)
        room = self._max_model_len - len(self._ids) - len(context_ids)
        if room < 1:
            raise OutOfRoom(f"{len(self._ids) + len(context_ids)} tokens of {self._max_model_len} are used")
        sampling = _capped(self._sampling, room)
        started = time.perf_counter()
        generation = await self._engine.generate(
            [*self._ids, *context_ids], sampling=sampling, request_id=f"{self._request_id}/{len(self.turns)}"
        )
        self.turns.append(
            Turn(
                context_ids=context_ids,
                sampled_ids=generation.token_ids,
                logprobs=generation.logprobs,
                weight_versions=generation.weight_versions,
                finish_reason=generation.finish_reason,
                sequence_idx=self._sequence_idx,
                generate_seconds=time.perf_counter() - started,
            )
        )
        self._ids += [*context_ids, *generation.token_ids]
        reply = Message(role="assistant", content=self._tokens.text(generation.token_ids), is_completion=True)
        self.messages = [*messages, reply]
        self.recorded += [*new_messages, reply]
        return reply.content

    @property
    def cut_off(self) -> bool:
        """True when the last reply was ended by a length limit."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"

    def _context_for(self, messages: Sequence[Message]) -> tuple[list[int], list[Message]]:
        """Ids to append for `messages`, and which of them are new; starts a sequence where history was edited."""
        shared = 0
        while shared < min(len(self.messages), len(messages)) and _same(messages[shared], self.messages[shared]):
            shared += 1
        added = list(messages[shared:])
        if self._ids and shared == len(self.messages):
            return self._tokens.continuation(added, last_sampled=self._ids[-1]), added
        self._sequence_idx += 1
        self._ids = []
        return self._tokens.prompt(messages), added


def _same(one: Message, other: Message) -> bool:
    """What the model sees is the same; who is said to have written it does not matter."""
    return (one.role, one.content) == (other.role, other.content)


def _capped(sampling: Sampling, room: int) -> Sampling:
    if sampling.max_tokens <= room:
        return sampling
    return dataclasses.replace(sampling, max_tokens=room)
