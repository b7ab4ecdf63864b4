"""What several test folders share: no telemetry, and the character tokenizer of the models made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.environment import TELEMETRY_OFF
from rollouts.chat_tokens import ChatTokens

os.environ.update(TELEMETRY_OFF)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer of digits, `+` and `=`; making it imports torch, so it is made once."""
    from trainers.warmup import character_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(set("0123456789+=")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokens(tokenizer_folder: Path) -> ChatTokens:
    """Ids: 0 pad, 1 end, 2 user, 3 assistant, 4 `+`, 5–14 the digits, 15 `=`."""
    return ChatTokens.load(tokenizer_folder)
