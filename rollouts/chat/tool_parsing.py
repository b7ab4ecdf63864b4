"""Finds the tool calls in a reply, with vLLM's parser for the model family.

In: the name of a parser (`engine.tool_parser`), a tokenizer, and reply texts. Out: the calls, and the text without
them. vLLM is imported when the first reply is parsed: the import takes seconds, and most runs have no tools.

vLLM's parsers read a reply as a whole, and many find no call in it if one is broken, or if an argument contains a mark
of calls. So such marks are hidden from them, and a reply of which they do not read every call is read call by call.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import itertools
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from settings.errors import InvalidInput
from settings.redaction import well_formed

_REGISTRIES = {
    "tool_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Setting → vLLM's file, and the table of parsers in it."""


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """A tool call that the policy asks for, as it wrote it: neither the tool nor the arguments need exist."""

    id: str
    """Unique name of this call, made by the parser."""
    name: str
    """Name of a function."""
    arguments: str
    """A JSON object, if the policy wrote one."""


@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """A reply, split into text and calls."""

    content: str
    """The text outside the calls."""
    tool_calls: list[CallRequest]
    """The calls, in the order they were written."""
    malformed_calls: list[tuple[int, str]] = field(default_factory=list)
    """Calls that begin and cannot be read: how many readable ones stand before it, and its text."""


class ToolParser:
    """Reads one model family's format of tool calls."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises `InvalidInput` for a name that the installed vLLM does not have."""
        check_parser("tool_parser", name)
        self._name = name
        self._tokenizer = tokenizer
        self._loaded: dict[str, tuple[Any, Any]] = {}

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        """Split a reply into text and calls. `tools` are the functions on offer, in OpenAI's format.

        Text that is no call in this format is content. No text raises an error.
        """
        return _read(text, *await self._parser(tools))

    async def end_of_call(self, tools: Sequence[dict[str, Any]]) -> tuple[str, Callable[[str], bool]]:
        """What ends a call in this format, and whether a text has a call that can be read.

        Raises `InvalidInput` for a format without such a mark.
        """
        parser, request = await self._parser(tools)
        mark = _mark(parser, ending=True)
        if not mark:
            raise InvalidInput(f"nothing ends a call in the format of engine.tool_parser = {self._name!r}")
        return mark, lambda text: bool(_read(text, parser, request).tool_calls)

    async def grammar(self, tools: Sequence[dict[str, Any]], choice: str, *, one_call: bool) -> str:
        """vLLM's structured-output parameters, as JSON, for a reply that calls one of the tools; `choice` is a tool's
        name, or empty for any.

        Raises `InvalidInput` if vLLM has no grammar for this format.
        """
        parser, request = await self._parser(tools)
        tool_choice = {"type": "function", "function": {"name": choice}} if choice else "required"
        forcing = type(request)(messages=[], tools=list(tools), tool_choice=tool_choice)
        tag = parser.get_structural_tag(forcing, reasoning=False) if parser.structural_tag_model else None
        if tag is None:
            raise InvalidInput(f"vLLM has no grammar for calls in the format of engine.tool_parser = {self._name!r}")
        if one_call:
            from vllm.tool_parsers.structural_tag_registry import limit_to_single_tool_call

            limit_to_single_tool_call(tag)
        return json.dumps({"structural_tag": json.dumps(tag.model_dump())})

    async def _parser(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        key = json.dumps(tools)
        if key not in self._loaded:  # the first import of vLLM takes seconds: not on the event loop
            self._loaded[key] = await asyncio.to_thread(self._load, tools)
        return self._loaded[key]

    def _load(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        """vLLM's parser for a set of tools, and the request that it takes."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        # A policy in training writes broken calls by the thousand; vLLM would log a traceback for each.
        for name in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        request = ChatCompletionRequest(messages=[], tools=list(tools), tool_choice="auto")
        try:
            parser = ToolParserManager.get_tool_parser(self._name)(self._tokenizer, request.tools)
        except RuntimeError as error:
            raise InvalidInput(
                f"engine.tool_parser = {self._name!r} does not fit this model's tokenizer: {error}"
            ) from error
        if self._name == "openai":  # vLLM reads gpt-oss' calls from tokens, elsewhere
            parser.extract_tool_calls = _harmony_calls
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True  # the thoughts have been taken out
        return parser, request


def _read(text: str, parser: Any, request: Any) -> ParsedReply:
    """Split a reply into text and calls; a reply of which vLLM does not read every call is read call by call."""
    mark = _mark(parser)
    hidden = _without_marks_in_values(text, mark)

    def shown(part: str) -> str:
        part = part.replace(_HIDDEN, mark[0]).replace(_ESCAPED, mark[0]) if hidden != text else part
        return well_formed(part)  # the policy may write "\\ud83d" in an argument

    def calls_in(part: str) -> tuple[str, list[CallRequest]]:
        try:
            extracted = parser.extract_tool_calls(part, request)
        except Exception:  # noqa: BLE001 - some parsers raise on text that only a policy in training writes
            return "", []
        calls = extracted.tool_calls if extracted.tools_called else []
        functions = [(call.id, call.function.name, call.function.arguments) for call in calls]
        read = [CallRequest(id=id, name=shown(name), arguments=shown(text)) for id, name, text in functions]
        return shown(extracted.content or ""), read

    content, calls = calls_in(hidden)
    head, pieces = _pieces(hidden, mark)
    malformed: list[tuple[int, str]] = []
    is_cut_off = [bool(_OPEN.search(piece)) and not _CLOSED.search(piece) for piece, _ in pieces]
    if len(calls) < len(pieces) or any(is_cut_off):
        alone: list[CallRequest] = []
        for (piece, as_reply), cut_off in zip(pieces, is_cut_off, strict=True):
            read = [] if cut_off else calls_in(as_reply)[1]
            alone += read
            if not read:
                malformed.append((len(alone), shown(piece.removeprefix(mark))))
        if len(alone) >= len(calls) - sum(is_cut_off):
            calls, content = alone, shown(head.partition(mark)[0] if mark else "")
        else:  # what looked like calls stands inside an argument
            malformed = []
    if calls:
        return ParsedReply(content=content, tool_calls=calls, malformed_calls=malformed)
    malformed = [(0, shown(hidden.partition(mark)[2]))] if mark and mark in hidden else []
    return ParsedReply(content=text, tool_calls=[], malformed_calls=malformed)


_HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? to=functions\.(?P<name>[\w.-]+)"
    r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\w*<\|message\|>(?P<arguments>"
    r'(?:"(?:[^"\\]|\\.)*"|[^"])*?|.*?)(?=<\|call\|>|<\|start\|>|$)',  # a mark in a string ends nothing
    re.DOTALL,
)


def _harmony_calls(text: str, request: Any) -> Any:
    """The calls of gpt-oss, as vLLM's parsers return calls."""
    from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall

    matches = list(_HARMONY_CALL.finditer(text))
    calls = [ToolCall(function=FunctionCall(name=each["name"], arguments=each["arguments"])) for each in matches]
    content = text[: matches[0].start()] if matches else text
    return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)


_HIDDEN = "\uf8fe"
"""Stands for the first character of a mark inside a value: a character for private use."""
_ESCAPED = json.dumps(_HIDDEN)[1:-1]
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_VALUE = re.compile(
    r"(<arg_value>|<parameter=[^>\n]*>)((?:(?!<arg_key>|<arg_value>|<parameter=|</?function).)*?)"
    r"(?=</arg_value>|</parameter>)",
    re.DOTALL,
)
_OPEN = re.compile(r"<function=|<arg_key>")
_CLOSED = re.compile(r"</function>|</tool_call>")
"""What opens and closes a call in formats of which vLLM reads one that was cut off as one without arguments."""
_JSON_CALL = re.compile(r'\{\s*"(?:name|arguments|parameters)"\s*:')
_OPTIONAL_MARKS = {"<|python_tag|>"}
_PYTHON_CALL = re.compile(r"""(?<![\w'"])[A-Za-z_][\w.]*\(""")


def _mark(parser: Any, *, ending: bool = False) -> str:
    """What opens a call in this format, or ends it; empty if nothing is known to."""
    engine = getattr(parser, "_parser_engine", None)
    terminals = engine.parser_engine_config.terminals if engine is not None else {}
    if ending:
        closing = ("tool_call_end_token", "tool_end_token", "tc_end")
        ends = [terminals.get("TOOL_END"), *(getattr(parser, name, None) for name in closing)]
        return str(next((end for end in ends if isinstance(end, str)), ""))
    names = ("tool_call_start_token", "bot_token", "tool_start_token", "tc_start", "bot_string")
    marks = [terminals.get(name) for name in ("TOOL_START", "TOOL_CALLS", "TOOL_TOKEN")]
    mark = next(filter(None, [*marks, *(getattr(parser, name, None) for name in names)]), "")
    return str(mark if isinstance(mark, str) else mark[0])


def _without_marks_in_values(text: str, mark: str) -> str:
    """The text, with marks inside arguments hidden."""
    if not mark:
        return text

    def hide(value: re.Match[str]) -> str:
        return value[0].replace(mark[0], _HIDDEN)

    for begin, end, is_whole in reversed(_json_calls(text)):
        if is_whole:
            text = text[:begin] + _STRING.sub(hide, text[begin:end]) + text[end:]
    return _VALUE.sub(lambda value: value[1] + value[2].replace("<", _HIDDEN), text) if mark[0] == "<" else text


def _json_calls(text: str) -> list[tuple[int, int, bool]]:
    """Where calls in JSON begin and end, and whether each can be read."""
    places, begin = [], 0
    while match := _JSON_CALL.search(text, begin):
        begin, is_whole = match.start(), True
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            following = _JSON_CALL.search(text, begin + 1)
            end, is_whole = following.start() if following else len(text), False
        if not is_whole or value.keys() & {"arguments", "parameters"}:
            places.append((begin, end, is_whole))
        begin = end
    return places


def _pieces(text: str, mark: str) -> tuple[str, list[tuple[str, str]]]:
    """What stands before the calls, and each call as it stands there and as a reply of its own.

    Calls are told apart by their marks, or in a list behind one mark, in JSON or in Python's syntax.
    """
    marks = [match.start() for match in re.finditer(re.escape(mark), text)] if mark else []
    if len(marks) > 1:
        pieces = [text[begin:end] for begin, end in itertools.pairwise([*marks, len(text)])]
        return text[: marks[0]], [(piece, piece) for piece in pieces]
    if mark and not marks and mark not in _OPTIONAL_MARKS:
        return text, []
    start = marks[0] if marks else 0
    places = [begin for begin, _, _ in _json_calls(text) if begin >= start]
    if not places and text.lstrip().startswith("["):
        places = [match.start() for match in _PYTHON_CALL.finditer(text)]
    head = text[: places[0]] if places else text
    close = "]" if head.rstrip().endswith("[") else ""
    pieces = [text[begin:end].rstrip(" \n,;]") for begin, end in itertools.pairwise([*places, len(text)])]
    return head, [(piece, head + piece + close) for piece in pieces]


def check_parser(setting: Literal["tool_parser", "reasoning_parser"], name: str) -> None:
    """Raise `InvalidInput`, with all names, for a parser that the installed vLLM does not have."""
    names = known_parsers(setting)
    own = ["auto", "none"] if setting == "reasoning_parser" else []
    if names and name not in [*own, *names]:
        nearest = difflib.get_close_matches(name, [*own, *names], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidInput(
            f"engine.{setting} = {name!r}: vLLM has no such parser{hint}; there are {', '.join([*own, *names])}"
        )


def known_parsers(setting: str) -> list[str]:
    """Names of the parsers in the installed vLLM; empty if it is not installed."""
    file, table = _REGISTRIES[setting]
    for statement in vllm_source(file):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == table:
                return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return []


def vllm_source(file: str) -> list[ast.stmt]:
    """The statements of a file of the installed vLLM, or of the package of its name; none if vLLM is not installed.
    Importing it takes ten seconds."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return []
    path = Path(package.submodule_search_locations[0]) / file
    return ast.parse((path if path.is_file() else path.with_suffix("") / "__init__.py").read_text()).body
