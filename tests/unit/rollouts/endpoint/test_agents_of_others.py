"""Agents of other libraries play unchanged on a scripted engine; `tests/engine/test_vllm.py` trains them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from rollouts.chat.chat_tokens import ChatTokens
from tests.unit.rollouts.scripted_text import Served, served

pytestmark = pytest.mark.server


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


async def _smolagents(kind: type[CodeAgent] | type[ToolCallingAgent], agent: Served) -> Any:
    model = OpenAIModel("policy", api_base=agent.endpoint.base_url, api_key=agent.session.key)
    return await asyncio.to_thread(kind(tools=[add], model=model, verbosity_level=0).run, "2+3?")


async def _search_r1(agent: Served, task: str) -> str:
    """In the style of Search-R1: a reply stops behind its query, and the passages found are the next message."""
    history: list[Any] = [{"role": "user", "content": task}]
    while True:
        made = await agent.client.chat.completions.create(
            model="policy", messages=history, stop=["</search>", "</answer>"]
        )
        text = made.choices[0].message.content or ""
        if "<answer>" in text:
            return text.partition("<answer>")[2]
        query = text.partition("<search>")[2]
        found = f"<information>{query} is 5</information>"
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": found}]


async def test_smolagents_code_agent(text_tokens: ChatTokens):
    replies = ["Thought: add.\n<code>\nprint(add(2, 3))\n</code> and more", "<code>\nfinal_answer(5)\n</code>"]
    async with served(text_tokens, *replies, max_model_len=32768) as agent:
        assert await _smolagents(CodeAgent, agent) == 5
    first, second = agent.chat.turns
    assert text_tokens.tokenizer.decode(first.sampled_ids) == "Thought: add.\n<code>\nprint(add(2, 3))\n</code>"
    assert (first.stopped_by, second.stopped_by, agent.sequences) == ("</code>", "</code>", [0, 1])
    context = text_tokens.tokenizer.decode(second.context_ids)
    assert "print(add(2, 3))\n</code>" in context and "Observation:\nExecution logs:\n5" in context


async def test_smolagents_tool_calling_agent(text_tokens: ChatTokens):
    replies = ['[add {"a": 2, "b": 3}]', '[final_answer {"answer": 5}]']
    async with served(text_tokens, *replies, follows_grammars=True, max_model_len=32768) as agent:
        assert await _smolagents(ToolCallingAgent, agent) == 5
    assert [json.loads(turn.constraint) for turn in agent.chat.turns] == [{"regex": "[any of 2]+"}] * 2
    assert "Observation:\n5" in text_tokens.tokenizer.decode(agent.chat.turns[1].context_ids)


async def test_a_search_r1_style_agent_keeps_one_sequence(text_tokens: ChatTokens):
    replies = ["<think>Who?</think><search>x</search>rest", "<think>So.</think><answer>5</answer>"]
    async with served(text_tokens, *replies) as agent:
        assert await _search_r1(agent, "x?") == "5"
    assert agent.sequences == [0, 0]
    spoken = [(m.content, m.answer) for m in agent.chat.recorded if m.is_completion]
    assert spoken == [
        ("<think>Who?</think><search>x</search>", "<search>x"),
        ("<think>So.</think><answer>5</answer>", "<answer>5"),
    ]
