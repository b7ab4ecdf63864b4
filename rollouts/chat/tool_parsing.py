"""The tool calls in what a policy wrote, read by vLLM's parser for its model family.

In: the name of a parser (`engine.tool_parser`), a tokenizer, and reply texts. Out: the calls, and the text without
them. vLLM is imported when the first reply is parsed, because that takes seconds and most runs have no tools.
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
from typing import Any

from settings.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """A tool call the policy asks for."""

    id: str
    """Unique name of this call, made by the parser."""
    name: str
    """Function name, as the policy wrote it; there may be no such tool."""
    arguments: str
    """JSON object, as the policy wrote it; it may fit no tool."""


@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """A reply, taken apart."""

    content: str
    """What stands outside the calls."""
    tool_calls: list[CallRequest]
    """In the order they were written."""
    malformed_call: str = ""
    """What follows the format's opening mark where no call could be read; empty otherwise."""


class ToolParser:
    """Reads one model family's format of tool calls."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Raises `ValueError` for a name that the installed vLLM does not know."""
        check_tool_parser(name)
        self._name = name
        self._tokenizer = tokenizer
        self._loaded: dict[str, tuple[Any, Any]] = {}

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        """Take a reply apart. `tools` are the functions on offer, in OpenAI's format.

        Text that is no call in this format is content: what the policy writes never raises.
        """
        key = json.dumps(tools)
        if key not in self._loaded:  # the first import of vLLM takes seconds: not on the event loop
            self._loaded[key] = await asyncio.to_thread(self._load, tools)
        parser, request = self._loaded[key]
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception:  # noqa: BLE001 - some parsers raise on text that only a policy in training writes
            return ParsedReply(content=text, tool_calls=[], malformed_call=text)
        if found.tools_called:
            calls = [
                CallRequest(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in found.tool_calls
            ]
            return ParsedReply(content=found.content or "", tool_calls=calls)
        mark = getattr(parser, "tool_call_start_token", None) or getattr(parser, "bot_token", None)
        malformed = text.partition(mark)[2] if mark else ""
        return ParsedReply(content=text, tool_calls=[], malformed_call=malformed)

    def _load(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        """vLLM's parser for a set of tools, and the request it wants to see."""
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


def check_tool_parser(name: str) -> None:
    """Raise `ValueError`, with the known names, for a parser the installed vLLM does not have."""
    known = known_tool_parsers()
    if known and name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidInput(
            f"engine.tool_parser = {name!r}: vLLM has no such parser{hint}; there are {', '.join(known)}"
        )


def known_tool_parsers() -> list[str]:
    """Names of the parsers in the installed vLLM; empty where it is not installed.

    They are read from its source, because importing it takes ten seconds.
    """
    installed = importlib.util.find_spec("vllm")
    if installed is None or not installed.submodule_search_locations:
        return []
    source = Path(installed.submodule_search_locations[0]) / "tool_parsers" / "__init__.py"
    for statement in ast.parse(source.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="_TOOL_PARSERS_TO_REGISTER")], value=ast.Dict(keys=keys)):
                return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return []
