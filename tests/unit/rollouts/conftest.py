"""Tests that are coroutines, and the character tokenizer of the models Millrace makes itself."""

from __future__ import annotations

import asyncio
import inspect
import string
from pathlib import Path

import pytest

from rollouts.chat.chat_tokens import ChatTokens


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def test_…` in an event loop of its own, for at most a minute."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 60))
    return True


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
