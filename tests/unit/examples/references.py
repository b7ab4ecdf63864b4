"""A policy that says what a workflow's `reference_reply` says."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.workflow import Score, Workflow
from storage.records import Message, Sampling, Task
from trainers.model.warmup import character_tokenizer

TOKENS = ChatTokens(character_tokenizer(set(string.printable)))


class _Reference(Chat):
    def __init__(self, workflow: Workflow, task: Task, parser: Any) -> None:
        self._workflow, self._task, self._next = workflow, task, ""
        super().__init__(
            engine=ScriptedEngine(lambda *_: [*TOKENS.tokenizer(self._next)["input_ids"], TOKENS.end_id]),
            tokens=TOKENS,
            sampling=Sampling(max_tokens=10_000),
            max_model_len=100_000,
            request_id=task.id,
            tool_parser=parser,
        )

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        reply = self._workflow.reference_reply(self._task, messages)
        assert reply is not None, f"{type(self._workflow).__name__} has no reference_reply"
        self._next = reply
        return await super().complete(messages, **options)


async def play_reference(workflow: Workflow, task: Task, parser: Any) -> Score:
    """The score of an attempt in which every reply is the reference's."""
    return await workflow.run(task, _Reference(workflow, task, parser))
