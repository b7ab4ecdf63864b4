"""Only what follows the thoughts is an answer, whatever a model family writes around them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.thoughts import ThoughtParser
from rollouts.chat.tools import tool
from storage.records import Message
from tests.unit.rollouts.chat.test_chat_tokens import MISTRAL, byte_tokenizer, family
from tests.unit.rollouts.scripted_text import a_chat, an_engine, said, user

COMMENTARY = "<|channel|>commentary<|message|>"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "answer"),
    [
        ("42", False, None, "42"),
        ("a < b </b>", False, None, "a < b </b>"),
        ("<think>\\boxed{41}?</think>\n\n\\boxed{42}", False, "\\boxed{41}?", "\\boxed{42}"),
        ("<think>41 <tool_call>{}</tool_call>", False, "41 <tool_call>{}</tool_call>", ""),
        ("<think></think>42", False, "", "42"),
        ("41</think>42", False, "41", "42"),
        ("41</think>42", True, "41", "42"),
        ("41", True, "41", ""),
        ("<think>41</think>42", True, "41", "42"),
        ("First. <think>41</think> Then 42. <think>43", False, "4143", "First.  Then 42. "),
        ("<think>1<think>2</think>3</think>42", False, "123", "42"),
        ("<think>the mark <think> opens</think>42", False, "the mark  opens", "42"),
        ("<think>41</think>42</think>", False, "41", "42"),
        ("[THINK]41[/THINK]42", False, "41", "42"),
        ("◁think▷41◁/think▷42", False, "41", "42"),
        ("<seed:think>41</seed:think>42", False, "41", "42"),
        ("<|channel>thought\n41<channel|>42", False, "thought\n41", "42"),
        (f"{ANALYSIS}41<|end|>{FINAL}42", False, "41", "42"),
        (f"{FINAL}42", False, None, "42"),
        (f"{ANALYSIS}41", False, "41", ""),
        ("42<|end|>", False, None, "42<|end|>"),
        (f"{ANALYSIS}41<|end|><|start|>assistant{ANALYSIS}43<|end|>{FINAL}42", False, "4143", "42"),
        (f"{ANALYSIS}41<|end|><|start|>assistant{ANALYSIS}43", False, "4143", ""),
        (f"{COMMENTARY}I look. <|end|>{FINAL}42", False, None, "I look. 42"),
        ("<|START_THINKING|>41<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", False, "41", "42"),
        ("<mm:think>41</mm:think>42", False, "41", "42"),
        ("<unused94>thought\n41<unused95>42", False, "thought\n41", "42"),
        ("<thinking><tool_call>{}</tool_call></thinking>42", False, "<tool_call>{}</tool_call>", "42"),
        ("<|begin_of_thought|>41<|end_of_thought|><|begin_of_solution|>42", False, "41", "42"),
        ("<tool_call>{}</tool_call><think>x", False, "x", "<tool_call>{}</tool_call>"),
        ("<think>a [THINK] b</think>42", False, "a [THINK] b", "42"),
    ],
)
def test_thoughts_end_where_the_answer_begins(text: str, opened: bool, thoughts: str | None, answer: str):
    assert ThoughtParser().split(text, opened=opened) == (thoughts, answer)


def test_a_prompt_may_open_the_thoughts_and_none_finds_none():
    parser = ThoughtParser()
    prompts = ["assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n", "assistant\n", "[/INST][THINK]"]
    assert [parser.opened_by(prompt) for prompt in prompts] == [True, False, False, True]
    assert ThoughtParser("none").split("<think>41</think>42", opened=False) == (None, "<think>41</think>42")


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "glm45", "nemotron_v3", "kimi_k2", "deepseek_v3", "step3"])
def test_vllms_parser_names_the_marks_and_a_draft_between_them_calls_nothing(name: str):
    tokenizer = family("qwen3").tokenizer
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    parser = ThoughtParser(name, tokenizer)
    draft, real = "<tool_call>a</tool_call>", "<tool_call>b</tool_call>"
    assert parser.split(f"<think>{draft}</think>{real}") == (draft, real)
    assert parser.split(f"<think>{draft}") == (draft, "")
    assert parser.split("42") == (None, "42")


def test_a_parser_without_marks_extracts_and_an_unknown_or_unfit_one_is_refused():
    tokenizer = family("qwen2").tokenizer
    words = "Here is my thought process: 41? Here is my response: 42"
    thoughts, answer = ThoughtParser("granite", tokenizer).split(words)
    assert (str(thoughts).strip(), answer.strip()) == ("41?", "42")
    with pytest.raises(ValueError, match=r"engine.reasoning_parser = 'qwen': .*did you mean 'qwen3'\?.* auto, none, "):
        ThoughtParser("qwen")
    with pytest.raises(ValueError, match="'deepseek_r1' does not fit this model's tokenizer: .*think start/end tokens"):
        ThoughtParser("deepseek_r1", tokenizer)


def _said(tokens: ChatTokens, *replies: str, **options: Any) -> tuple[list[str], Any]:
    chat = a_chat(tokens, an_engine(tokens, *replies), **options)

    async def ask() -> list[str]:
        return [await chat.ask("?", tools=[doubled]), await chat.ask("?", with_thoughts=True)]

    return asyncio.run(ask()), chat


executed: list[int] = []


@tool
def doubled(number: int) -> int:
    """Twice a number."""
    executed.append(number)
    return 2 * number


def test_a_draft_is_not_executed_and_a_history_goes_on_with_or_without_thoughts(text_tokens: ChatTokens):
    executed.clear()
    call = '<think>[doubled {"number": 3}]</think>[doubled {"number": 4}]'
    replies, chat = _said(text_tokens, call, "<think>8?</think> 8", "<think>9", max_tokens=100)
    assert executed == [4] and [len(turn.tool_calls) for turn in chat.turns] == [1, 0, 0]
    assert replies == ["8", "<think>9"]
    assert [m.answer for m in chat.recorded if m.is_completion] == ['[doubled {"number": 4}]', "8", ""]

    async def go_on(*history: Message) -> Any:
        chat = a_chat(text_tokens, an_engine(text_tokens, "<think>a</think>b", "c"))
        await chat.complete([user("1")])
        await chat.complete([user("1"), *history, user("2")])
        return [turn.sequence_idx for turn in chat.turns], chat.messages[1].content

    for history in (said("b"), said("<think>a</think>b")):
        assert asyncio.run(go_on(history)) == ([0, 0], "<think>a</think>b")
    assert asyncio.run(go_on(said("x"))) == ([0, 1], "x")


def test_marks_that_are_special_tokens_are_seen_without_tools():
    special = ["<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]"]
    tokens = ChatTokens(byte_tokenizer(template=MISTRAL, special=special, end="</s>"))
    parser = ThoughtParser("auto", tokens.tokenizer)
    chat = a_chat(tokens, an_engine(tokens, "[THINK]41[/THINK]42"), thought_parser=parser)
    assert asyncio.run(chat.ask("?")) == "42"
    assert chat.messages[-1].content == "[THINK]41[/THINK]42"
