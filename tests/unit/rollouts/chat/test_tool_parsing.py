"""Vendors' formats of tool calls are read by vLLM's own parsers; what they cannot read is told apart, never raised."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from rollouts.chat.tool_parsing import ParsedReply, ToolParser, known_parsers
from rollouts.chat.tools import tool
from settings.errors import InvalidInput
from tests.unit.rollouts.chat.test_chat_tokens import family


@tool
def weather(city: str, days: int = 1) -> str:
    """The weather somewhere."""
    return city


@tool
def other(city: str) -> str:
    """Something else."""
    return city


def with_marks(tokenizer: Any) -> Any:
    """With the marks that Qwen3's tokenizer has."""
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return tokenizer


def _parsed(parser: str, model: str, text: str) -> ParsedReply:
    return asyncio.run(ToolParser(parser, with_marks(family(model).tokenizer)).parse(text, [weather.schema]))


BERLIN = '{"city": "Berlin"}'
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo", "days": 3}'
HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": %s}'
MISTRAL = '{"name": "weather", "arguments": %s}'
HARMONY = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s"
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("parser", "model", "text", "content", "arguments"),
    [
        ("hermes", "qwen2", HERMES % BERLIN, "", [BERLIN]),
        ("hermes", "qwen2", "Let me see." + HERMES.removesuffix("\n</tool_call>") % BERLIN, "Let me see.", [BERLIN]),
        ("hermes", "qwen2", f"{HERMES % ROME}\n{HERMES % OSLO}", "", [ROME, OSLO]),
        ("qwen3_json", "qwen3", HERMES % BERLIN, "", [BERLIN]),
        ("llama3_json", "llama3", f"<|python_tag|>{LLAMA % BERLIN}", "", [BERLIN]),
        ("llama3_json", "llama3", LLAMA % BERLIN, "", [BERLIN]),
        ("llama3_json", "llama3", f"{LLAMA % ROME}; {LLAMA % OSLO}", "", [ROME, OSLO]),
        ("mistral", "mistral", f"[TOOL_CALLS] [{MISTRAL % BERLIN}]", "", [BERLIN]),
        ("mistral", "mistral", f"Well.[TOOL_CALLS] [{MISTRAL % BERLIN}]", "Well.", [BERLIN]),
        ("mistral", "mistral", f"[TOOL_CALLS] [{MISTRAL % ROME}, {MISTRAL % OSLO}]", "", [ROME, OSLO]),
        ("pythonic", "llama3", "[weather(city='Berlin')]", "", [BERLIN]),
        ("openai", "qwen2", HARMONY % BERLIN, "", [BERLIN]),
        ("openai", "qwen2", f"I look.<|end|><|start|>assistant{HARMONY % BERLIN}", "I look.<|end|>", [BERLIN]),
        (
            "openai",
            "qwen2",
            HARMONY.replace(
                "<|channel|>commentary to=functions.weather ", " to=functions.weather<|channel|>commentary "
            )
            % OSLO,
            "",
            [OSLO],
        ),
        ("pythonic", "llama3", "[weather(city='Rome'), weather(city='Oslo', days=3)]", "", [ROME, OSLO]),
    ],
)
def test_calls_are_read_in_their_order_with_their_arguments(
    parser: str, model: str, text: str, content: str, arguments: list[str]
):
    reply = _parsed(parser, model, text)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == list(map(json.loads, arguments))
    assert {call.name for call in reply.tool_calls} == {"weather"} and all(call.id for call in reply.tool_calls)
    assert len({call.id for call in reply.tool_calls}) == len(arguments)
    assert (reply.content, reply.malformed_calls) == (content, [])


@pytest.mark.parametrize(
    ("parser", "model", "text", "rest"),
    [
        ("hermes", "qwen2", '<tool_call>{"name": "weather", "argum', '{"name": "weather", "argum'),
        ("hermes", "qwen2", 'So: <tool_call>{"arguments": {}}</tool_call>', '{"arguments": {}}</tool_call>'),
        ("llama3_json", "llama3", '<|python_tag|>{"name": "weather", ', '{"name": "weather", '),
    ],
)
def test_a_call_that_begins_and_cannot_be_read_is_malformed(parser: str, model: str, text: str, rest: str):
    assert _parsed(parser, model, text) == ParsedReply(content=text, tool_calls=[], malformed_calls=[(0, rest)])
    # A policy in training writes them by the thousand; they must not fill the log.
    assert not logging.getLogger("vllm.tool_parsers.hermes_tool_parser").isEnabledFor(logging.ERROR)


BROKEN = '{"name": "weather", "argum: {}'
BAD, GOOD = HERMES.replace("arguments", "argum: {") % BERLIN, HERMES % BERLIN
MARKS = '{"city": "a </tool_call> b <tool_call> c"}'
NESTED = '{"city": {"name": "x", "arguments": {}}}'


@pytest.mark.parametrize(
    ("parser", "model", "text", "content", "arguments", "malformed"),
    [
        ("hermes", "qwen2", f"So: {BAD}\n{GOOD}", "So: ", [BERLIN], [0]),
        ("hermes", "qwen2", f"{GOOD}{BAD}{HERMES % ROME}{BAD}", "", [BERLIN, ROME], [1, 2]),
        ("hermes", "qwen2", "<tool_call>" + BROKEN + GOOD, "", [BERLIN], [0]),
        ("hermes", "qwen2", HERMES % MARKS, "", [MARKS], []),
        ("hermes", "qwen2", f"{HERMES % MARKS} or {HERMES % MARKS}{BAD}", "", [MARKS, MARKS], [2]),
        ("hermes", "qwen2", HERMES % NESTED, "", [NESTED], []),
        ("hermes", "qwen2", f"<tool_call>\n{MISTRAL % ROME}\n{MISTRAL % OSLO}\n</tool_call>", "", [ROME, OSLO], []),
        ("qwen3_json", "qwen3", f"{BAD}{GOOD}", "", [BERLIN], [0]),
        ("qwen3_xml", "qwen3", XML % "a </tool_call> b", "", ['{"city": "a </tool_call> b"}'], []),
        ("qwen3_xml", "qwen3", "<tool_call>\n</tool_call>" + XML % "Berlin", "", [BERLIN], [0]),
        ("qwen3_xml", "qwen3", XML % "a <tool_call> b", "", ['{"city": "a <tool_call> b"}'], []),
        ("qwen3_coder", "qwen3", XML % "a </tool_call> b", "", ['{"city": "a </tool_call> b"}'], []),
        ("qwen3_xml", "qwen3", XML % "Berlin" + XML[:55], "", [BERLIN], [1]),  # cut off
        ("glm45", "qwen3", GLM[:44] + GLM % "Berlin", "", [BERLIN], [0]),
        ("pythonic", "llama3", '[weather(city="a, weather(x)")]', "", ['{"city": "a, weather(x)"}'], []),
        ("pythonic", "llama3", "[weather(city='Rome'), other(city=foo)]", "", [ROME], [1]),
        ("openai", "qwen2", HARMONY % '{"city": "<|call|>"}', "", ['{"city": "<|call|>"}'], []),
        ("openai", "qwen2", HARMONY.replace("commentary", "analysis") % BERLIN, "", [BERLIN], []),
        ("hermes", "qwen2", f"Use <tool_call>. {GOOD}", "Use ", [BERLIN], [0]),
        ("glm45", "qwen3", GLM % "a </tool_call> b", "", ['{"city": "a </tool_call> b"}'], []),
        ("llama3_json", "llama3", f"<|python_tag|>{BROKEN}; {LLAMA % BERLIN}", "", [BERLIN], [0]),
        ("llama3_json", "llama3", f"{LLAMA % BERLIN}; {BROKEN}", "", [BERLIN], [1]),
        ("mistral", "mistral", f"Well.[TOOL_CALLS] [{BROKEN}, {MISTRAL % ROME}]", "Well.", [ROME], [0]),
        ("pythonic", "llama3", "[weather(city='Rome'), weather(city=]", "", [ROME], [1]),
        ("phi4_mini_json", "qwen3", f"functools[{BROKEN}, {MISTRAL % ROME}]", "", [ROME], [0]),
    ],
)
def test_a_broken_call_does_not_lose_the_good_one_and_an_argument_may_contain_marks(
    parser: str, model: str, text: str, content: str, arguments: list[str], malformed: list[int]
):
    reply = _parsed(parser, model, text)
    assert [json.loads(call.arguments) for call in reply.tool_calls] == list(map(json.loads, arguments))
    assert [place for place, _ in reply.malformed_calls] == malformed and reply.content == content
    assert all(broken and broken in text for _, broken in reply.malformed_calls)


def test_half_a_surrogate_pair_that_the_policy_writes_as_an_escape_is_replaced():
    [call] = _parsed("hermes", "qwen2", HERMES % '{"city": "\\ud83d"}').tool_calls
    assert call.arguments == '{"city": "\ufffd"}'


@pytest.mark.parametrize(
    ("parser", "model", "call"),
    [("hermes", "qwen2", HERMES), ("qwen3_xml", "qwen3", XML), ("llama3_json", "llama3", LLAMA)],
)
def test_a_grammar_lets_through_calls_alone(parser: str, model: str, call: str):
    """By xgrammar, which vLLM uses."""
    reader = ToolParser(parser, with_marks(family(model).tokenizer))
    strict = {**weather.schema, "function": {**weather.schema["function"], "strict": True}}
    given = "Rome" if parser == "qwen3_xml" else ROME

    def accepted(text: str, choice: str = "", *, one_call: bool = False) -> bool:
        grammar = asyncio.run(reader.grammar([strict, other.schema], choice, one_call=one_call))
        return _is_grammar_accept_string(Grammar.from_structural_tag(json.loads(grammar)["structural_tag"]), text)

    assert (
        accepted(call % given)
        and not accepted("It rains.")
        and not accepted(call.replace("weather", "sunshine") % given)
    )
    assert not accepted(call % given, "other") and accepted(call % given, "weather")
    assert not accepted(call % given + "\n" + call % given, one_call=True)
    if parser != "qwen3_xml":
        assert not accepted(call % '{"town": "Rome"}'), "strict"


def test_a_format_without_a_grammar_or_an_end_of_calls_is_refused():
    for parser, model in (("pythonic", "llama3"), ("mistral", "mistral")):
        with pytest.raises(
            InvalidInput, match=f"no grammar for calls in the format of engine.tool_parser = '{parser}'"
        ):
            asyncio.run(ToolParser(parser, family(model).tokenizer).grammar([weather.schema], "", one_call=False))
        with pytest.raises(InvalidInput, match=f"nothing ends a call in the format of engine.tool_parser = '{parser}'"):
            asyncio.run(ToolParser(parser, family(model).tokenizer).end_of_call([weather.schema]))


def test_the_end_of_a_call_is_not_one_inside_an_argument():
    mark, has_call = asyncio.run(ToolParser("hermes", family("qwen2").tokenizer).end_of_call([weather.schema]))
    text = HERMES % MARKS
    assert mark == "</tool_call>" and has_call(text)
    assert not has_call(text[: text.index(mark) + len(mark)])


def test_what_is_no_call_is_content_and_a_parser_keeps_nothing_of_the_replies_before():
    texts = ["", "It rains.", "a > b {sort of}", "[1, 2", "\x00\ud7ff", "weather('Rome')"]

    async def parse(parser: ToolParser, *texts: str) -> list[ParsedReply]:
        return [await parser.parse(text, [weather.schema]) for text in texts]

    for name, model in [("hermes", "qwen2"), ("llama3_json", "llama3"), ("mistral", "mistral"), ("pythonic", "llama3")]:
        parser = ToolParser(name, family(model).tokenizer)
        assert [(r.content, r.tool_calls) for r in asyncio.run(parse(parser, *texts))] == [(text, []) for text in texts]
    parser = ToolParser("mistral", family("mistral").tokenizer)
    replies = asyncio.run(parse(parser, *[f"[TOOL_CALLS] [{MISTRAL % BERLIN}]", "It rains."] * 2))
    assert [(reply.content, len(reply.tool_calls)) for reply in replies] == [("", 1), ("It rains.", 0)] * 2


def test_the_names_found_in_vllms_source_are_those_it_registers():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert known_parsers("tool_parser") == sorted(ToolParserManager.lazy_parsers)
    assert known_parsers("reasoning_parser") == sorted(ReasoningParserManager.lazy_parsers)


def test_an_unknown_parser_and_one_of_another_model_family_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"'herms': vLLM has no such parser; did you mean 'hermes'\?.*llama3_json"):
        ToolParser("herms", family("qwen2").tokenizer)
    with pytest.raises(ValueError, match="'llama3_json' does not fit this model's tokenizer: .*python_tag"):
        _parsed("llama3_json", "qwen2", "hi")
