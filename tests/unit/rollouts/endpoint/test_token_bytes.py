"""The bytes of a reply's tokens are the reply in UTF-8, also where a token ends inside a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.token_bytes import token_bytes
from tests.unit.rollouts.chat.test_chat_tokens import family
from tests.unit.rollouts.scripted_text import served

TEXTS = ["plain", "naïve 😀 18。\n", " \u00a0\u2581", "\ufffd\x00\x7f", "日本"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level(text: str):
    tokenizer = family("qwen2", merges=[("Ã", "¯"), ("ð", "Ł")]).tokenizer  # ï is one token, and half of an emoji
    parts = [token_bytes(tokenizer, i) for i in tokenizer(text)["input_ids"]]
    assert b"".join(parts) == text.encode()
    assert token_bytes(tokenizer, tokenizer.eos_token_id) == b""
    if "😀" in text:
        assert b"\xf0\x9f" in parts and b"\x98" in parts and "ï".encode() in parts


def test_sentencepiece_with_bytes_for_what_has_no_token():
    vocabulary = {
        token: i for i, token in enumerate(["</s>", "▁the", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))])
    }
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    ids = [vocabulary[token] for token in ("▁the", "▁", "a", "<0xC3>", "<0xA9>", "</s>")]
    assert [token_bytes(tokenizer, i) for i in ids] == [b" the", b" ", b"a", b"\xc3", b"\xa9", b""]


@pytest.mark.server
async def test_the_endpoint_gives_the_bytes_of_parts_of_characters():
    tokens: ChatTokens = family("qwen2")
    async with served(tokens, "a😀") as agent:
        [choice] = (await agent.ask("1", logprobs=True)).choices
    entries = choice.logprobs.content
    assert [entry.bytes for entry in entries] == [[97], [0xF0], [0x9F], [0x98], [0x80], []]
    assert [entry.token for entry in entries] == ["a", *["\ufffd"] * 4, ""]
