"""Chat messages ⇄ token ids, without ever tokenising a sampled token again.

In: a tokenizer folder (HF). Out: ids of a first prompt, ids of what a later turn adds, text of sampled ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.digests import sha256_of, sha256_of_json
from storage.records import Message


class ChatTokens:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template; use an instruction-tuned model or add one")
        self._tokenizer = tokenizer
        self.end_id: int = tokenizer.eos_token_id
        self.tokenizer_sha256 = sha256_of_json(tokenizer.get_vocab())
        self.chat_template_sha256 = sha256_of(tokenizer.chat_template.encode())

    @classmethod
    def load(cls, folder: Path) -> ChatTokens:
        """Read the tokenizer of a model folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(folder)))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that ends where the policy is to speak."""
        return self._render(messages, add_generation_prompt=True)

    def continuation(self, messages: Sequence[Message], *, last_sampled: int) -> list[int]:
        """Ids to append after a sampled reply so that new messages follow it and the policy speaks next.

        They are what the template adds behind any assistant reply, found on a stand-in conversation; so the
        history is never rendered again. The end token is included when the reply was cut off before it.
        """
        stand_in = [Message(role="user", content="0"), Message(role="assistant", content="0")]
        before = self._render(stand_in, add_generation_prompt=False)
        after = self._render([*stand_in, *messages], add_generation_prompt=True)
        end = len(before) - 1 - before[::-1].index(self.end_id)  # the reply's own end token
        assert after[: end + 1] == before[: end + 1], "the chat template rewrites history; it cannot be continued"
        return after[end + 1 :] if last_sampled == self.end_id else after[end:]

    def text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as text, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def alphabet(self) -> list[int]:
        """Every id that is not special, sorted."""
        special = set(self._tokenizer.all_special_ids)
        return sorted(i for i in self._tokenizer.get_vocab().values() if i not in special)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        conversation = [{"role": m.role, "content": m.content} for m in messages]
        rendered = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        return [int(i) for i in rendered]
