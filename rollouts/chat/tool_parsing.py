"""Finds the tool calls in a reply, with vLLM's parser for the model family.

In: the name of a parser (`engine.tool_parser`), a tokenizer, and reply texts. Out: the calls, and the text without
them. vLLM is imported when the first reply is parsed: the import takes seconds, and most runs have no tools.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from settings.errors import InvalidInput

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
    """In the order they were written."""
    malformed_call: str = ""
    """The text after the mark that opens a call, if no call could be read."""


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
        key = json.dumps(tools)
        if key not in self._loaded:  # the first import of vLLM takes seconds: not on the event loop
            self._loaded[key] = await asyncio.to_thread(self._load, tools)
        parser, request = self._loaded[key]
        try:
            extracted = parser.extract_tool_calls(text, request)
        except Exception:  # noqa: BLE001 - some parsers raise on text that only a policy in training writes
            return ParsedReply(content=text, tool_calls=[], malformed_call=text)
        if extracted.tools_called:
            calls = [
                CallRequest(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in extracted.tool_calls
            ]
            return ParsedReply(content=extracted.content or "", tool_calls=calls)
        mark = getattr(parser, "tool_call_start_token", None) or getattr(parser, "bot_token", None)
        malformed = text.partition(mark)[2] if mark else ""
        return ParsedReply(content=text, tool_calls=[], malformed_call=malformed)

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
        return parser, request


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
    """The statements of a file of the installed vLLM; none if it is not installed. Importing it takes ten seconds."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return []
    return ast.parse((Path(package.submodule_search_locations[0]) / file).read_text()).body
