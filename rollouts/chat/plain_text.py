"""Text that spells control tokens stays text: `<|im_end|>` in a search result ends no turn.

In: a conversation for a chat template, and the text that the template made of it. Out: token ids, in which only the
template's own control tokens are tokens.

    contents ─▶ hide: each spelled control token ─▶ a mark of letters ─▶ the template ─▶ encode: marks ─▶ text

Text without control tokens is encoded as ever, so its ids are the template's own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BEFORE = "\0before\0"
"""Stands for the control token before a piece of text: some tokenizers encode the start of a text differently."""


class PlainText:
    """Encodes rendered conversations of one tokenizer."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Control tokens are the special ones, and others that `template` writes, such as `<tool_response>`. Gemma's
        token for two newlines, for example, is none."""
        self._tokenizer = tokenizer
        added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
        self.special = frozenset(
            [*map(int, tokenizer.all_special_ids), *(index for index, token in added.items() if token.special)]
        )
        """Ids that the tokenizer calls special."""
        self._control = {
            index: token.content
            for index, token in added.items()
            if token.content.strip() and (index in self.special or token.content in template)
        }
        """Id → how it is spelled."""
        self._finder_of = functools.cache(self._finder)

    def hiding(self, values: Sequence[Any]) -> Hiding:
        """Hides the control tokens that these messages and schemas spell."""
        written, mark = json.dumps(values, ensure_ascii=False), "SPELLED"
        while mark in written:
            mark += "X"
        return Hiding(plain=self, mark=mark)

    def spelled(self, text: str, only: frozenset[int] | None) -> list[tuple[int, int]]:
        """Where control tokens begin and end in a text, of `only` these if given."""
        return list(self._finder_of(only).encode(text, add_special_tokens=False).offsets)

    def encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Ids of a piece of rendered text that starts at the beginning or before a control token.

        `hidden` is that of the `Hiding` that the template was given.
        """
        if not any(mark in text for mark in hidden.values()):
            return self._ids(text)
        if not self._tokenizer.is_fast:
            return self._encode_in_parts(text, hidden)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        out: list[int] = []
        piece: list[int] = []
        begin = 0
        for index, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if index not in self._control:
                piece.append(int(index))
                continue
            out += [*self._encode_piece(text[begin:start], piece, hidden, is_first=not begin), int(index)]
            piece, begin = [], end
        return [*out, *self._encode_piece(text[begin:], piece, hidden, is_first=not begin)]

    def _finder(self, only: frozenset[int] | None) -> Any:
        """A tokenizer that knows nothing but the control tokens, of `only` these if given: one search for thousands."""
        from tokenizers import AddedToken, Tokenizer, models

        texts = [text for index, text in self._control.items() if only is None or index in only]
        finder = Tokenizer(models.BPE())
        finder.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        return finder

    def _ids(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _encode_piece(self, text: str, ids: list[int], hidden: Mapping[str, str], *, is_first: bool) -> list[int]:
        """Ids of the text between two control tokens of the template; `ids` are those of the text with its marks."""
        restored = text
        for spelled, mark in hidden.items():
            restored = restored.replace(mark, spelled)
        if restored == text:
            return ids
        before = "" if is_first else _BEFORE
        plain = self._without_control.encode(before + restored, add_special_tokens=False).ids[len(before) > 0 :]
        return plain if self._control.keys().isdisjoint(plain) else self._encode_in_parts(text, hidden)

    def _encode_in_parts(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Cuts each spelled token behind its first character, so that no tokenizer knows it."""
        for spelled, mark in hidden.items():
            text = text.replace(mark, f"{spelled[0]}{_BEFORE}{spelled[1:]}")
        return [index for part in text.split(_BEFORE) if part for index in self._ids(part)]

    @functools.cached_property
    def _without_control(self) -> Any:
        """The same tokenizer, to which control tokens are text."""
        from tokenizers import AddedToken, Tokenizer

        backend = self._tokenizer.backend_tokenizer
        document, vocab = json.loads(backend.to_str()), backend.get_vocab(with_added_tokens=False)
        # One that is in the vocabulary itself may go. Others are renamed: without them later ids would be lower.
        document["added_tokens"] = [
            {**each, "content": f"\0{each['id']}\0"} if each["id"] in self._control else each
            for each in document["added_tokens"]
            if each["id"] not in self._control or each["content"] not in vocab
        ]
        document |= {"post_processor": None, "truncation": None, "padding": None}
        encoder = Tokenizer.from_str(json.dumps(document))
        encoder.add_special_tokens([AddedToken(_BEFORE, normalized=False)])
        return encoder


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """Puts marks in place of the control tokens that the strings of one conversation spell."""

    plain: PlainText
    mark: str
    """What marks begin with."""
    hidden: dict[str, str] = field(default_factory=dict)
    """What was spelled → its mark."""

    def hide(self, value: Any, *, only: frozenset[int] | None = None) -> Any:
        """A message or schema with marks in place of control tokens, of `only` these if given."""
        match value:
            case str():
                for start, end in reversed(self.plain.spelled(value, only)):
                    mark = self.hidden.setdefault(value[start:end], f"{self.mark}{len(self.hidden)}END")
                    value = value[:start] + mark + value[end:]
                return value
            case dict():
                return {self.hide(key, only=only): self.hide(member, only=only) for key, member in value.items()}
            case list():
                return [self.hide(member, only=only) for member in value]
            case _:
                return value
