"""Splits a reply into the thoughts of the policy and its answer: only the answer is scored, and only it calls tools.

In: `engine.reasoning_parser`, reply texts, and whether the prompt opened the thoughts. Out: thoughts, answer.

    auto      the marks of `MARKS`; the first one in a reply counts
    none      no thoughts: the whole reply is the answer
    a name    the marks of vLLM's reasoning parser of that name, or what it extracts if it has no marks

vLLM's own split is not used where marks exist: some of its parsers take a call between the marks for a real one, and
take a reply without marks for a thought.
"""

from __future__ import annotations

import re
from typing import Any

from rollouts.chat.tool_parsing import check_parser
from settings.errors import InvalidInput

AUTO, NONE = "auto", "none"
MARKS = [
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, SmolLM, …
    ("[THINK]", "[/THINK]"),  # Mistral
    ("◁think▷", "◁/think▷"),  # Kimi
    ("<seed:think>", "</seed:think>"),
    ("<|channel>", "<channel|>"),  # Gemma
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<mm:think>", "</mm:think>"),  # MiniMax
    ("<ifm|think>", "</ifm|think>"),  # K2
    ("<unused94>", "<unused95>"),  # MedGemma
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
]
"""What opens thoughts and what closes them, by model family."""
_HARMONY_END = "<|end|>"
_FRAME = re.compile(
    r"(?:<\|end\|>)?(?:<\|start\|>assistant){0,3}<\|channel\|>(?:final|commentary)<\|message\|>|<\|start\|>assistant$"
    r"|<\|(?:START|END)_RESPONSE\|>|<\|(?:begin|end)_of_solution\|>"
)
"""What some families write around an answer."""


class ThoughtParser:
    """Finds the thoughts in one model's replies."""

    def __init__(self, name: str = AUTO, tokenizer: Any = None) -> None:
        """Imports vLLM for a parser of vLLM's.

        Raises `InvalidInput` for a name that the installed vLLM does not have, or that does not fit the tokenizer.
        """
        check_parser("reasoning_parser", name)
        self.marks = [] if name == NONE else MARKS
        self._extract: Any = None
        if name not in (AUTO, NONE):
            parser, request = _load(name, tokenizer)
            if parser.reasoning_start_str and parser.reasoning_end_str:
                self.marks = [(parser.reasoning_start_str, parser.reasoning_end_str)]
            elif name != "openai_gptoss":  # which extracts nothing
                self._extract = lambda text: parser.extract_reasoning(text, request)
        special = getattr(tokenizer, "all_special_tokens", ())
        self.needs_special = any(token in start for start, _ in self.marks for token in special)
        """True if the marks are special tokens, which must stay in the text."""

    def opened_by(self, prompt: str) -> bool:
        """True if a prompt with this end opens the thoughts, as templates of models that always think do."""
        return any(prompt.rstrip().endswith(start) for start, _ in self.marks)

    def split(self, text: str, *, opened: bool = False) -> tuple[str | None, str]:
        """The thoughts, None if there are none, and the answer. With `opened` the prompt has opened the thoughts.

        Thoughts that are never closed reach to the end: the answer is empty.

        >>> ThoughtParser().split("<think>4? No.</think> 5")
        ('4? No.', '5')
        """
        if self._extract is not None:
            thoughts, answer = self._extract(text)
            if thoughts is not None:
                return thoughts, answer or ""
        marks = [(mark, pair) for pair in self.marks for mark in pair if mark != _HARMONY_END]
        places = [(text.find(mark), pair) for mark, pair in marks if mark in text]
        if not places and not opened:
            return None, _FRAME.sub("", text) if self.marks else text
        start, end = min(places)[1] if places else self.marks[0]
        thoughts, answer = _between(text, start, end, opened=opened)
        return thoughts, _FRAME.sub("", answer).lstrip()


def _between(text: str, start: str, end: str, *, opened: bool) -> tuple[str, str]:
    """What stands between the marks, and the rest.

    An end without a start closes what the prompt opened; after closed thoughts it means nothing. A start inside
    thoughts opens deeper ones if there are enough ends.
    """
    pieces = re.split(f"({re.escape(start)}|{re.escape(end)})", text)
    thoughts, answer, depth, ends, seen = "", "", int(opened), pieces.count(end), opened
    for piece in pieces:
        if piece == start:
            depth, seen = depth + 1, True
        elif piece == end:
            ends -= 1
            if not seen and end != _HARMONY_END:
                thoughts, answer = answer, ""
            depth, seen = max(0, depth - 1) if ends else 0, True
        elif depth:
            thoughts += piece
        else:
            answer += piece
    return thoughts, answer


def _load(name: str, tokenizer: Any) -> tuple[Any, Any]:
    """vLLM's parser, and the request that it takes."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    except Exception as error:
        raise InvalidInput(
            f"engine.reasoning_parser = {name!r} does not fit this model's tokenizer: {type(error).__name__}: {error}"
        ) from error
    return parser, ChatCompletionRequest(messages=[])
