"""The bytes of one token, which may be a part of a character.

In: a tokenizer of Hugging Face and a token id. Out: bytes; those of all tokens of a reply are the reply in UTF-8.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece's mark of a space, which decoding one token alone leaves out."""


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token adds to a text; none for a special token."""
    if token_id in tokenizer.all_special_ids:
        return b""
    text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token and token.startswith(_SPACE):
        return str(token).replace(_SPACE, " ").encode()
    if "\ufffd" not in text or token is None:
        return text.encode()
    if match := _BYTE.fullmatch(token):  # SentencePiece, for what has no token
        return bytes.fromhex(match[1])
    byte_of = _byte_of_character()
    return bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else text.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """How byte-level tokenizers write bytes as characters: printable ones as they are, the rest from U+0100 on.

    Source: `bytes_to_unicode` of GPT-2's encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + n): byte for n, byte in enumerate(others)}}
