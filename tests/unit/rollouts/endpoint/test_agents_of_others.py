"""Agents of other libraries train unchanged: what they send, sent by OpenAI's client.

smolagents is no dependency. Its two agents are written down here from its source (1.2x, `agents.py`, `models.py`): stop
sequences, roles, content in parts, neighbours of one role joined, the closing tag put back after a stop.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollouts.chat.chat_tokens import ChatTokens
from tests.unit.rollouts.scripted_text import ADD, Served, served

pytestmark = pytest.mark.server


def _parts(role: str, *texts: str) -> dict[str, Any]:
    """A message as smolagents sends it: parts, with neighbours of one role joined."""
    return {"role": role, "content": [{"type": "text", "text": "\n".join(texts)}]}


async def _code_agent(agent: Served, task: str) -> str:
    """smolagents' CodeAgent: code between tags, run, and its output told as a message of the user."""
    stop = ["Observation:", "Calling tools:", "</code>"]
    history: list[Any] = [_parts("system", "Write code."), _parts("user", f"New task:\n{task}")]
    while True:
        made = await agent.client.chat.completions.create(model="policy", messages=history, stop=stop)
        text = made.choices[0].message.content or ""
        text += "" if text.strip().endswith("</code>") else "</code>"
        [code] = re.findall(r"<code>(.*?)</code>", text, re.DOTALL)
        if code.startswith("final_answer("):
            return str(eval(code.removeprefix("final_answer")))
        calls = [{"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": code}}]
        history += [
            _parts("assistant", text, f"Calling tools:\n{calls}"),
            _parts("user", f"Observation:\n{eval(code)}"),
        ]


async def _tool_calling_agent(agent: Served, task: str) -> str:
    """smolagents' ToolCallingAgent: `tool_choice="required"`, and calls and results written down as text."""
    history: list[Any] = [_parts("system", "Call tools."), _parts("user", f"New task:\n{task}")]
    tools: Any = [ADD, {**ADD, "function": {**ADD["function"], "name": "final_answer"}}]
    options: Any = {"stop": ["Observation:", "Calling tools:"], "tools": tools, "tool_choice": "required"}
    while True:
        made = await agent.client.chat.completions.create(model="policy", messages=history, **options)
        message = made.choices[0].message
        [call] = message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        if call.function.name == "final_answer":
            return str(arguments["a"])
        written = f"Calling tools:\n{[call.model_dump()]}"
        history += [
            _parts("assistant", message.content or "", written),
            _parts("user", f"Observation:\n{sum(arguments.values())}"),
        ]


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
    replies = ["Thought: add.\n<code>2+3</code> and more", "<code>final_answer(5)</code>"]
    async with served(text_tokens, *replies) as agent:
        assert await _code_agent(agent, "2+3?") == "5"
    first, second = agent.chat.turns
    assert text_tokens.tokenizer.decode(first.sampled_ids) == "Thought: add.\n<code>2+3</code>"
    assert (first.stopped_by, second.stopped_by, agent.sequences) == ("</code>", "</code>", [0, 1])
    context = text_tokens.tokenizer.decode(second.context_ids)
    assert "2+3</code>\nCalling tools:" in context and "Observation:\n5" in context


async def test_smolagents_tool_calling_agent(text_tokens: ChatTokens):
    replies = ['[add {"a": 2, "b": 3}]', '[final_answer {"a": 5}]']
    async with served(text_tokens, *replies, follows_grammars=True) as agent:
        assert await _tool_calling_agent(agent, "2+3?") == "5"
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
