"""Chat messages ⇄ token ids, without ever tokenising a sampled token again.

In: a tokenizer folder (HF). Out: ids of a first prompt, ids of what a later turn adds, text of sampled ids.
Contents are encoded as text, see `plain_text.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.chat.plain_text import PlainText
from rollouts.chat.tool_parsing import ParsedReply
from settings.errors import InvalidInput
from settings.redaction import read_json
from storage.objects.digests import sha256_of, sha256_of_json
from storage.records import Message

_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_KNOWN = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next"), ("Qwen2Tokenizer",)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), ("GemmaTokenizer",)),
    **dict.fromkeys(
        ("gpt_oss", "lfm2", "smollm3", "falcon_h1", "olmo2", "olmo3", "granite", "glm4", "glm4_moe"), _GENERIC
    ),
    "llama": (*_GENERIC, "GPT2Tokenizer"),
}
"""Model type → tokenizers that AutoTokenizer makes by the name in their files, whatever else is there."""
_STAND_IN, _RESULT = "STANDIN", "RESULT"
"""A reply, or the end of its call, and a tool's result, to find in the rendered text."""
_USER = {"role": "user", "content": "0"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
_AUTHORS = ("system", "developer", "assistant")
"""Roles whose contents may have marks of calls and thoughts: the run's author or the policy wrote them."""
_NONE: Mapping[str, ParsedReply] = {}


class ChatTokens:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, settings: Mapping[str, Any] | None = None) -> None:
        """`settings` are arguments of the template, for example `{"enable_thinking": False}`.

        Raises `InvalidInput` without a template, or for a setting that it does not read.
        """
        if not tokenizer.chat_template:
            raise InvalidInput("the model's tokenizer has no chat template; use an instruction-tuned model or add one")
        self.tokenizer = tokenizer
        """The Hugging Face tokenizer."""
        self._settings = dict(settings or {})
        template = tokenizer.chat_template  # a dictionary if there are several, by name
        self._template: str = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
        for name in self._settings:
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise InvalidInput(f"engine.chat_template_kwargs.{name}: the model's chat template reads no {name!r}")
        self.tokenizer_sha256 = sha256_of_json(tokenizer.get_vocab())
        settled = json.dumps(self._settings, sort_keys=True) if self._settings else ""
        self.chat_template_sha256 = sha256_of((self._template + settled).encode())
        """Digest of the template's text, and of its settings if there are any."""
        self._plain = PlainText(tokenizer, self._template)
        # All attempts of a group begin with the same messages, and rendering a template is the slow part.
        self._prompt_ids = functools.lru_cache(maxsize=256)(self._render_prompt)

    @classmethod
    def load(cls, folder: Path, *, settings: Mapping[str, Any] | None = None) -> ChatTokens:
        """Read the tokenizer of a model folder."""
        return cls(_tokenizer_class(folder).from_pretrained(str(folder)), settings=settings)

    @functools.cached_property
    def end_id(self) -> int:
        """The token that ends a reply in this template."""
        return self.turn_ends[0] if self.turn_ends else int(self.tokenizer.eos_token_id)

    @functools.cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The tokens with which the template lets a policy end its reply: stop tokens.

        Usually one. GLM's replies end with the token that opens the next turn, another one after a call, and gpt-oss
        ends calls with a token of their own. Empty if the template ends replies with no token.
        """
        ends = self._closing or self._special_in(self._behind_text(_USER))[:1]
        before, called, _ = self._call_turn
        if not set(ends) & set(called):
            ends = [*ends, *[i for i in called if i not in before][:1]]
        return tuple(ends)

    def check_turns(self, *, with_call: bool) -> None:
        """Raise `InvalidInput` if no second turn can follow a reply or, `with_call`, none a tool's result."""
        self.continuation([Message(role="user", content="0")], after=self.end_id)
        if with_call:
            result = Message(role="tool", content=_RESULT)
            self.continuation([result], after=self.end_id, calls=["f"])
            text, _ = self._render(self._after_stand_in([result], ["f"]), find=_STAND_IN)
            if _RESULT not in text:
                raise InvalidInput(
                    "the model's chat template leaves out what tools return, so the policy would not see it; use one "
                    "that shows messages of the role 'tool'"
                )

    def check_day(self) -> None:
        """Raise `InvalidInput` if the template puts the day on which it is rendered into a prompt."""
        formats: list[str] = []

        def strftime_now(form: str) -> str:
            formats.append(form)
            return ""

        own = {**self._settings, "strftime_now": strftime_now}
        for before, tools in (([], None), ([{"role": "system", "content": "0"}], None), ([], [_TOOL])):
            with contextlib.suppress(Exception):  # a template need not know system messages or tools
                self.tokenizer.apply_chat_template([*before, _USER], tools=tools, tokenize=False, **own)
        if formats:
            raise InvalidInput(
                "reproducible = true: the model's chat template names the day on which it is rendered (strftime_now), "
                "so prompts are others tomorrow; give it a day, as in engine.chat_template_kwargs = "
                '{date_string = "26 Jul 2024"}, or, if it takes none, write one into the template'
            )

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        parsed: Mapping[str, ParsedReply] = _NONE,
    ) -> list[int]:
        """Ids of a conversation that the policy is to continue; `tools` in OpenAI's function format.

        A template without tools leaves them out. `parsed` has the calls in the assistant's contents, which a template
        that knows calls is given as such. Raises `InvalidInput` for messages that the template refuses.
        """
        if parsed and "tool_calls" in self._template:
            forms = [self._as_dicts(messages, parsed, as_text=as_text) for as_text in (False, True)]
            return self._plain.encode(*self._render([*forms, self._as_dicts(messages)], tools=tools))
        return list(self._prompt_ids(tuple(messages), json.dumps(tools) if tools else "[]"))

    def continuation(self, messages: Sequence[Message], *, after: int, calls: Sequence[str] = ()) -> list[int]:
        """Ids to append after a sampled reply: the new messages, and the opening of the policy's next reply.

        `after` is the reply's last token, `calls` are the names of the functions it called. The ids are what the
        template puts after any assistant reply, here after a stand-in. So the history is never rendered again, and a
        template that renders older replies differently does no harm. If `after` ends no turn, as in a reply that was
        cut off, the ids begin with the token that does.
        Raises `InvalidInput` for a template that ends a reply with no token, or refuses the messages.
        """
        text, hidden = self._render(self._after_stand_in(messages, calls), find=_STAND_IN)
        ids = self._plain.encode(text.partition(_STAND_IN)[2], hidden)
        ends = {*self.turn_ends, *self._closing_in_history}
        end = next((place for place, index in enumerate(ids) if index in ends), None)
        if end is None:
            raise InvalidInput(
                "the model's chat template does not end an assistant's reply with a special token, "
                "so no second turn can follow; use one that does"
            )
        is_closed = after == ids[end] or (after in self.turn_ends and ids[end] in self._closing_in_history)
        return ids[end + 1 :] if is_closed else ids[end:]

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Sampled ids as text. Tool calls may contain special tokens; `keep_special` removes only the end token."""
        ids = list(token_ids)
        if ids and (ids[-1] in self.turn_ends or (keep_special and ids[-1] in self._plain.special)):
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False))

    def alphabet(self) -> list[int]:
        """Every id that is not special, sorted."""
        return sorted(i for i in self.tokenizer.get_vocab().values() if i not in self._plain.special)

    @functools.cached_property
    def _closing(self) -> list[int]:
        """The token behind a last reply, if there is one: the tokenizer's own end token if there are several, unless
        the template puts that behind the last reply only, as Phi's does."""
        last, past = self._special_in(self._behind_text()), self._special_in(self._behind_text(_USER))
        end = self.tokenizer.eos_token_id
        return [end] if end in last and end in past else last[:1]

    @functools.cached_property
    def _closing_in_history(self) -> list[int]:
        """The tokens that close a reply and do not open the next turn; gpt-oss has another for one that is not last."""
        past = self._special_in(self._behind_text(_USER))
        return [*self._closing, *([] if set(self._closing) & set(past) else past[:1])] if self._closing else []

    @functools.cached_property
    def _call_turn(self) -> tuple[list[int], list[int], list[int]]:
        """Special ids before a call's last argument, from there to its result, and behind; none without calls."""
        result = {"role": "tool", "content": _RESULT}
        for count in (2, 1):  # what stands between two calls ends no turn, but some templates have only one call
            for reply in _calling(["f"] * count):
                with contextlib.suppress(InvalidInput):
                    text = self._apply([_USER, reply, *[result] * count], add_generation_prompt=False)
                    called, _, after = text.partition(_RESULT)
                    before, has_call, behind = called.rpartition(_STAND_IN)
                    if has_call:
                        return self._special_in(before), self._special_in(behind), self._special_in(after)
        return [], [], []

    @functools.cached_property
    def _framing(self) -> frozenset[int]:
        """The tokens that only a template may write: those that open and close turns. What a policy or the author of a
        system message writes may contain others, such as marks of calls and thoughts."""
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        frames = [*self.turn_ends, *(i for i in special if i is not None)]
        turns = [_USER, {"role": "assistant", "content": "0"}, _USER]
        for conversation in (turns, [{"role": "system", "content": "0"}, *turns]):
            with contextlib.suppress(InvalidInput):
                frames += self._special_in(self._apply(conversation))
        _, called, after = self._call_turn
        end = next((place for place, index in enumerate(called) if index in frames), len(called))
        return frozenset([*frames, *called[end:], *after])

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """True if the template shows no content that is a string, as of some models that see images too."""
        options = {"tokenize": False, "add_generation_prompt": True, **self._settings}
        shown = []
        for content in (_STAND_IN, [{"type": "text", "text": _STAND_IN}]):
            message = {"role": "user", "content": content}
            try:
                shown.append(_STAND_IN in self.tokenizer.apply_chat_template([message], **options))
            except Exception:  # noqa: BLE001 - a template may raise anything
                shown.append(False)
        return shown == [False, True]

    @functools.cached_property
    def _opened(self) -> str:
        """What the opening of a reply has of its thoughts, such as `<think>` and a newline; empty if it opens none."""
        _, mark, behind = self._apply([_USER]).rpartition("<think>")
        return mark + behind if mark and "</think>" not in behind else ""

    @functools.cached_property
    def _header(self) -> str:
        """What the template writes before an answer that the policy writes itself, if control tokens are in it: in
        gpt-oss the channel."""
        with contextlib.suppress(InvalidInput):
            opening, reply = self._apply([_USER]), {"role": "assistant", "content": _STAND_IN}
            written, has_reply, _ = self._apply([_USER, reply], add_generation_prompt=False).partition(_STAND_IN)
            header = written.removeprefix(opening)
            if has_reply and header != written and self._special_in(header):
                return header
        return ""

    def _special_in(self, text: str) -> list[int]:
        return [index for index in self._plain.encode(text, {}) if index in self._plain.special]

    def _behind_text(self, *messages: dict[str, Any]) -> str:
        """What follows a last reply, or one before these messages and the opening of the next."""
        try:
            conversation = [_USER, {"role": "assistant", "content": _STAND_IN}, *messages]
            return self._apply(conversation, add_generation_prompt=bool(messages)).partition(_STAND_IN)[2]
        except InvalidInput:
            return ""

    def _after_stand_in(self, messages: Sequence[Message], calls: Sequence[str]) -> list[list[dict[str, Any]]]:
        """Conversations in which these messages follow a reply, in the order to try them."""
        replies = [{"role": "assistant", "content": _STAND_IN}]
        num_results = next((n for n, message in enumerate(messages) if message.role != "tool"), len(messages))
        if num_results and "tool_calls" in self._template:  # some templates ask what the results are of
            last = calls[-1] if calls else "tool"
            callings = [*_calling([*calls, *[last] * num_results][:num_results]), *_calling([last])]
            replies = [*callings, *replies] if calls else [*replies, *callings]
        return [[_USER, reply, *self._as_dicts(messages)] for reply in replies]

    def _render_prompt(self, messages: tuple[Message, ...], tools: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(*self._render([self._as_dicts(messages)], tools=json.loads(tools))))

    def _as_dicts(
        self, messages: Sequence[Message], parsed: Mapping[str, ParsedReply] = _NONE, *, as_text: bool = False
    ) -> list[dict[str, Any]]:
        """Messages as templates take them, the assistant's with thoughts and calls apart if the template asks so."""
        dicts: list[dict[str, Any]] = []
        for message in messages:
            each: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                if reply := parsed.get(message.content):
                    calls = [(call.name, call.arguments) for call in reply.tool_calls]
                    each |= {"content": reply.content, "tool_calls": _calls(calls, as_text=as_text)}
                if self._header:
                    each["content"] = each["content"].rpartition(self._header)[2]
                thoughts, *answers = each["content"].split("</think>")
                if answers and "reasoning_content" in self._template:  # most such templates divide it so, not all
                    thoughts = thoughts.rstrip("\n").split("<think>")[-1].lstrip("\n")
                    each |= {"reasoning_content": thoughts, "content": answers[-1].lstrip("\n")}
                elif answers and "<think>" not in thoughts:
                    each["content"] = self._opened + each["content"]
            dicts.append(each)
        return dicts

    def _render(
        self, forms: Sequence[list[dict[str, Any]]], *, tools: Sequence[dict[str, Any]] = (), find: str = ""
    ) -> tuple[str, dict[str, str]]:
        """The first of several forms of a conversation that the template takes, and of which it shows `find`.

        Spelled control tokens are hidden, see `PlainText.hide`.
        """
        refusals = []
        for form in forms:
            plain = self._plain.hiding([*form, *tools])
            conversation = [plain.hide(each, only=self._framing if each["role"] in _AUTHORS else None) for each in form]
            try:
                text = self._apply(conversation, tools=plain.hide(list(tools)))
            except InvalidInput as error:
                refusals.append(error)
            else:
                if find in text:
                    return text, plain.hidden
        raise refusals[0] if refusals else InvalidInput("the model's chat template leaves out the assistant's replies")

    def _apply(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        options = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt, **self._settings}
        numbered = _numbered(conversation)
        if self._wants_parts:
            numbered = [each if each["role"] == "tool" else {**each, "content": _parts(each)} for each in numbered]
        try:
            return str(self.tokenizer.apply_chat_template(numbered, tokenize=False, **options))
        except Exception as error:  # a template may raise anything
            raise InvalidInput(f"the model's chat template refuses these messages: {error}") from error


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": message["content"]}]


def _calling(names: Sequence[str]) -> list[dict[str, Any]]:
    """A reply that calls functions, the last one with the stand-in; in the forms that templates want."""
    arguments = [*["{}"] * (len(names) - 1), json.dumps({"x": _STAND_IN})]
    calls = list(zip(names, arguments, strict=True))
    return [
        {"role": "assistant", "content": "", "tool_calls": _calls(calls, as_text=as_text)} for as_text in (False, True)
    ]


def _calls(calls: Sequence[tuple[str, str]], *, as_text: bool) -> list[dict[str, Any]]:
    """Calls as templates take them, of names and arguments. DeepSeek's want arguments as text, others as an object; as
    in vLLM, what is no object is an empty one, and the name comes last."""
    made = []
    for name, written in calls:
        arguments: Any = written
        if not as_text:
            with contextlib.suppress(ValueError):
                arguments = read_json(written)
            arguments = arguments if isinstance(arguments, dict) else {}
        made.append({"type": "function", "function": {"arguments": arguments, "name": name}})
    return made


def _numbered(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with ids that say which result is which call's; Mistral's templates want nine digits."""
    numbered = []
    for number, message in enumerate(conversation):
        if "tool_calls" in message:
            calls = [{"id": f"{number + k:09d}", **call} for k, call in enumerate(message["tool_calls"], start=1)]
            numbered.append({**message, "tool_calls": calls})
        elif message["role"] == "tool":
            numbered.append({**message, "tool_call_id": f"{number:09d}"})
        else:
            numbered.append(message)
    return numbered


def _tokenizer_class(folder: Path) -> Any:
    """The class that AutoTokenizer would choose. Its import takes three times as long as the others', and half a
    gigabyte with torch and Triton, because it imports transformers' generation code; what is `_KNOWN` needs it not."""
    config, tokenizer_config = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    name = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast")
    is_known = "auto_map" not in tokenizer_config and name in _KNOWN.get(str(config.get("model_type")), ())
    import transformers

    return getattr(transformers, "AutoTokenizer" if not is_known else "TokenizersBackend" if name in _GENERIC else name)


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
