"""Chat messages ⇄ token ids, without ever tokenising a sampled token again.

In: a tokenizer folder (HF). Out: ids of a first prompt, ids of what a later turn adds, text of sampled ids.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings.errors import InvalidInput
from storage.objects.digests import sha256_of, sha256_of_json
from storage.records import Message

_QWEN = {("qwen2", "Qwen2Tokenizer"), ("qwen3", "Qwen2Tokenizer")}
"""Model types, with the tokenizer that AutoTokenizer makes for them."""
_STAND_IN = "STANDIN"
"""A reply to find in the rendered text."""


class ChatTokens:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise InvalidInput("the model's tokenizer has no chat template; use an instruction-tuned model or add one")
        self.tokenizer = tokenizer
        """The Hugging Face tokenizer."""
        self.end_id: int = tokenizer.eos_token_id
        self.tokenizer_sha256 = sha256_of_json(tokenizer.get_vocab())
        self.chat_template_sha256 = sha256_of(tokenizer.chat_template.encode())
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._can_continue = False
        # All attempts of a group begin with the same messages, and rendering a template is the slow part.
        self._prompt_ids = functools.lru_cache(maxsize=256)(self._render_prompt)

    @classmethod
    def load(cls, folder: Path) -> ChatTokens:
        """Read the tokenizer of a model folder."""
        return cls(_tokenizer_class(folder).from_pretrained(str(folder)))

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that the policy is to continue; `tools` in OpenAI's function format.

        A template without tools leaves them out.
        """
        return list(self._prompt_ids(tuple(messages), json.dumps(tools) if tools else "[]"))

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids to append after a sampled reply: the new messages, and the opening of the policy's next reply.

        They are what the template puts after any assistant reply, here after a stand-in. So the history is never
        rendered again, and a template that renders older replies differently does no harm. If the reply was cut off,
        `ended` is False and the ids begin with the end token.
        Raises `InvalidInput` for a template that does not close a reply with the end token.
        """
        if not self._can_continue:
            if self.end_id not in self._after_stand_in([], add_generation_prompt=False):
                raise InvalidInput(
                    "the model's chat template does not end an assistant's reply with the end token "
                    f"{self.tokenizer.eos_token!r}, so no second turn can follow; use one that does"
                )
            self._can_continue = True
        ids = self._after_stand_in(messages, add_generation_prompt=True)
        end = ids.index(self.end_id)
        return ids[end + 1 :] if ended else ids[end:]

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Sampled ids as text. Tool calls may contain special tokens; `keep_special` removes only the end token."""
        ids = list(token_ids)
        if keep_special and ids and ids[-1] in self._special_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False))

    def alphabet(self) -> list[int]:
        """Every id that is not special, sorted."""
        return sorted(i for i in self.tokenizer.get_vocab().values() if i not in self._special_ids)

    def _render_prompt(self, messages: tuple[Message, ...], tools: str) -> tuple[int, ...]:
        return tuple(self._ids(self._render(messages, tools=json.loads(tools))))

    def _after_stand_in(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        stand_in = [Message(role="user", content="0"), Message(role="assistant", content=_STAND_IN)]
        rendered = self._render([*stand_in, *messages], add_generation_prompt=add_generation_prompt)
        return self._ids(rendered.partition(_STAND_IN)[2])

    def _render(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = (), add_generation_prompt: bool = True
    ) -> str:
        conversation: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in messages]
        for number, message in enumerate(conversation):
            if message["role"] == "tool":
                message["tool_call_id"] = f"{number:09d}"  # Mistral's templates insist on nine characters
        return str(
            self.tokenizer.apply_chat_template(
                conversation, tools=list(tools) or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        )

    def _ids(self, text: str) -> list[int]:
        """Ids of a piece of rendered text that starts at the beginning or before a special token."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def _tokenizer_class(folder: Path) -> Any:
    """The class that AutoTokenizer would choose. Importing AutoTokenizer takes ten seconds on a slow CPU, because it
    imports transformers' generation code; for the models of `_QWEN` the class is known without it."""
    config, tokenizer_config = (_json(folder / name) for name in ("config.json", "tokenizer_config.json"))
    name = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast")
    if "auto_map" not in tokenizer_config and (config.get("model_type"), name) in _QWEN:
        from transformers import Qwen2Tokenizer

        return Qwen2Tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
