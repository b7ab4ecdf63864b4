"""The character tokenizer of the models that Millrace makes itself."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from rollouts.chat.chat_tokens import ChatTokens


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of digits, `+` and `=`; making it imports torch, so it is made once."""
    from trainers.model.warmup import character_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(set("0123456789+=")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokens(tokenizer_folder: Path) -> ChatTokens:
    """Ids: 0 pad, 1 end, 2 user, 3 assistant, 4 `+`, 5 … 14 the digits, 15 `=`."""
    return ChatTokens.load(tokenizer_folder)


@pytest.fixture(scope="session")
def text_tokens() -> ChatTokens:
    """One token per printable character, and the same special ones."""
    from trainers.model.warmup import character_tokenizer

    return ChatTokens(character_tokenizer(set(string.printable)))
