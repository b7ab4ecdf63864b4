"""Each model family's template is trained with: what an attempt records is what vLLM's chat endpoint would send.

`golden_conversations.json` has, for each family, three turns as text with the control tokens in `⟦⟧`; bytes are tokens,
so it stands for ids. `test_the_golden_ids_are_what_vllm_sends` makes them with vLLM's own code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest, ParsedReply
from rollouts.engines.scripted_engine import ScriptedEngine
from settings.errors import InvalidInput
from storage.objects.digests import sha256_of
from tests.builders import a_config
from tests.unit.rollouts.chat.template_families import FAMILIES, tokenizer_of
from tests.unit.rollouts.scripted_text import a_chat, from_tool, said, user

LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
GOLDEN_FILE = Path(__file__).parent / "golden_conversations.json"
GOLDEN: dict[str, list[str]] = json.loads(GOLDEN_FILE.read_text())
ANSWER = "It is v < 3 & é."


def marked(tokenizer: Any, ids: list[int]) -> str:
    """Ids as text, with the control tokens in `⟦⟧`."""
    added, text = tokenizer.added_tokens_decoder, ""
    for is_added, group in itertools.groupby(ids, lambda index: index in added):
        run = list(group)
        text += "".join(f"⟦{added[i].content}⟧" for i in run) if is_added else tokenizer.decode(run)
    return text


class Calls:
    """Reads a family's call."""

    def __init__(self, call: str) -> None:
        self.call = call

    async def parse(self, text: str, tools: Any) -> ParsedReply:
        content, found, _ = text.partition(self.call)
        calls = [CallRequest(id="c", name="lookup", arguments='{"key": "k"}')] if found else []
        return ParsedReply(content=content, tool_calls=calls)


def three_turns(name: str) -> Chat:
    """`user call result answer user answer`, or without tools `user answer user answer user answer`."""
    family, tokens = FAMILIES[name], ChatTokens(tokenizer_of(name))
    answer = f"{family.before}{ANSWER}{family.behind}{family.end}"
    lead = family.before if "think" in family.before else ""
    replies = [f"{lead}{family.call}{family.call_end or family.end}" if family.call else answer, answer, answer]
    encode = functools.partial(tokens.tokenizer.encode, add_special_tokens=False)
    engine = ScriptedEngine(lambda _, request: encode(replies[int(request[-1])]))
    chat = a_chat(tokens, engine, max_tokens=400, max_model_len=10_000, tool_parser=Calls(family.call or "none"))

    async def converse() -> None:
        for new in (user("Find k."), from_tool("v") if family.call else user("and?"), user("why?")):
            await chat.complete([*chat.messages, new], tools=[LOOKUP] if family.call else [])

    asyncio.run(converse())
    return chat


@pytest.mark.parametrize("name", FAMILIES)
def test_three_turns_are_recorded_as_vllm_sends_them_and_so_is_a_history_rendered_anew(name: str):
    family, chat = FAMILIES[name], three_turns(name)
    tokens, ids = chat.tokens, list[int]()
    for number, (turn, golden) in enumerate(zip(chat.turns, GOLDEN[name], strict=True)):
        ids += turn.context_ids
        assert (marked(tokens.tokenizer, ids) == golden) == (number < family.rewritten_from)
        ids += turn.sampled_ids
        assert turn.sampled_ids[-1] in tokens.turn_ends and turn.finish_reason == "stop"
    ends = tokens.tokenizer.convert_ids_to_tokens(tokens.turn_ends)
    assert ends == [family.end, *filter(None, [family.call_end])]
    tokens.check_turns(with_call=bool(family.call))

    async def fork() -> None:
        """The same history on no branch of the chat, for its first message is another one."""
        chat.engine = ScriptedEngine(lambda *_: [tokens.end_id])
        history = [user("Find z."), *chat.messages[1:-1]]
        if family.before.isspace():
            history = [dataclasses.replace(each, content=each.content.removeprefix(family.before)) for each in history]
        await chat.complete(history, tools=[LOOKUP] if family.call else [])

    asyncio.run(fork())
    assert chat.turns[3].sequence_idx == 1
    assert marked(tokens.tokenizer, chat.turns[3].context_ids) == GOLDEN[name][2].replace("Find k.", "Find z.")


@pytest.mark.parametrize(
    ("name", "settings", "opening", "reply", "anew"),
    [
        ("qwen3.8", {}, "<think>⟧\n", "hm\n</think>\n\n4", "⟦<think>⟧\nhm\n⟦</think>⟧\n\n4"),
        ("qwen3.8", {"reasoning_effort": "low"}, "<think>⟧\n", "\n</think>\n\n4", "⟦<think>⟧\n\n⟦</think>⟧\n\n4"),
        (
            "qwen3.8",
            {"enable_thinking": False},
            "<think>⟧\n\n⟦</think>⟧\n\n",
            "4",
            "⟦<think>⟧\n\n⟦</think>⟧\n\n4",
        ),
        ("qwen3.8", {"preserve_thinking": False}, "<think>⟧\n", "hm\n</think>\n\n4", "4"),
        ("qwen3.5", {}, "<think>⟧\n", "hm\n</think>\n\n4", "4"),  # drops the thoughts of the past, and says so itself
        ("deepseek r1", {}, "<think>⟧\n", "hm\n</think>4", "4"),
        ("qwen3", {"enable_thinking": False}, "<think>⟧\n\n⟦</think>⟧\n\n", "4", "4"),
    ],
)
def test_a_history_of_thoughts_that_the_prompt_opened_is_rendered_anew_whole(
    name: str, settings: dict[str, Any], opening: str, reply: str, anew: str
):
    tokenizer = tokenizer_of(name)
    tokens = ChatTokens(tokenizer, settings=settings)
    assert marked(tokenizer, tokens.prompt([user("2+2")])).endswith(f"⟦{opening}")
    history = marked(tokenizer, tokens.prompt([user("2+2"), said(reply), user("and?")]))
    role = "⟦<｜Assistant｜>⟧" if "deepseek" in name else "⟦<|im_start|>⟧assistant\n"
    assert history.split(role)[1].partition("⟦<｜end" if "deepseek" in name else "⟦<|im_end")[0] == anew
    assert ("effort is set to low" in history) == ("low" in settings.values())


def test_settings_of_the_template_are_part_of_its_digest_and_one_that_it_does_not_read_is_refused():
    tokenizer = tokenizer_of("qwen3")
    digests = [
        ChatTokens(tokenizer, settings=settings).chat_template_sha256
        for settings in (None, {}, {"enable_thinking": False}, {"enable_thinking": True})
    ]
    assert digests[0] == digests[1] == sha256_of(tokenizer.chat_template.encode()) and len(set(digests)) == 3
    with pytest.raises(InvalidInput, match=r"chat_template_kwargs.enable_thinkin: the model's chat template reads no"):
        ChatTokens(tokenizer, settings={"enable_thinkin": False})
    assert a_config(chat_template_kwargs={"enable_thinking": False}).engine.chat_template_kwargs == {
        "enable_thinking": False
    }
    with pytest.raises(InvalidInput, match="tools: these Millrace gives to the template itself"):
        a_config(chat_template_kwargs={"tools": []})


@pytest.mark.server
def test_the_golden_conversations_are_what_vllms_chat_endpoint_sends():
    """By its own functions, but for DeepSeek V3, whose template fails on calls in vLLM, which passes no text as their
    arguments; and gpt-oss, whose template vLLM replaces by code that needs a vocabulary from the network."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import parse_chat_messages
    from vllm.renderers.hf import _detect_content_format, safe_apply_chat_template

    def sent(name: str, count: int) -> str:
        family, tokenizer = FAMILIES[name], tokenizer_of(name)
        function = {"name": "lookup", "arguments": '{"key": "k"}'}
        answer = {"role": "assistant", "content": ANSWER}
        first: Any = answer
        second: Any = {"role": "user", "content": "and?"}
        if family.call:
            calls = [{"id": "000000002", "type": "function", "function": function}]
            first = {"role": "assistant", "content": None, "tool_calls": calls}
            second = {"role": "tool", "content": "v", "tool_call_id": "000000002"}
        messages = [user("Find k."), first, second, answer, user("why?")]
        turns = [each if isinstance(each, dict) else {"role": "user", "content": each.content} for each in messages]
        request = ChatCompletionRequest(messages=turns[:count], tools=[LOOKUP] if family.call else None)
        template = tokenizer.chat_template
        format = _detect_content_format(template, default="string")
        conversation, _, _ = parse_chat_messages(request.messages, _Config(), format)
        if name == "deepseek v3":
            for call in (call for each in conversation for call in each.get("tool_calls") or ()):
                call["function"]["arguments"] = function["arguments"]
        tools = [tool.model_dump() for tool in request.tools] if request.tools else None
        options = {"chat_template": template, "add_generation_prompt": True}
        return marked(tokenizer, safe_apply_chat_template(_Config(), tokenizer, conversation, tools=tools, **options))

    made = {name: [sent(name, count) for count in (1, 3, 5)] for name in FAMILIES}
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN_FILE.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
    assert made == GOLDEN


class _Config:
    """What vLLM asks of a model's configuration to read messages of text."""

    multimodal_config = None
    enable_prompt_embeds = False
