"""A failure is its error, and the places in the user's code that it came from, without secrets and not too long."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollouts.environments.environments import returns
from settings.errors import MOST_CHARACTERS, MOST_FRAMES, failure_text, failure_text_of_output, in_one_line, place_of
from tests.builders import Wordless
from tests.conftest import PROJECT

CODE = """
import asyncio
import json

def look_up():
    return {}["answr"]

def run():
    return look_up()

def deep(depth):
    return 1 / depth + deep(depth - 1)

def loads():
    return json.loads("{")

def because():
    try:
        return look_up()
    except KeyError as error:
        raise ValueError("no answer") from error

async def waits():
    async with asyncio.timeout(0.01):
        await asyncio.Event().wait()

async def together():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(waits())

def secret():
    raise OSError("postgres://me:hunter2hunter@host refused me")

def long_message():
    raise OSError("begin " + "x" * 10_000 + " end")
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A user's module in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(CODE)
    return SimpleNamespace(**runpy.run_path(str(tmp_path / "env.py")))


def _text(call: Callable[[], Any], message: str = "") -> str:
    with pytest.raises(Exception) as raised:
        asyncio.run(call()) if asyncio.iscoroutinefunction(call) else call()
    return failure_text(raised.value.with_traceback(raised.tb.tb_next), message)  # without this file


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run", ["KeyError: 'answr'", 'env.py:6 in look_up: return {}["answr"]', "env.py:9 in run: return look_up()"]),
        ("loads", ["JSONDecodeError: Expecting property", 'env.py:15 in loads: return json.loads("{")']),
        ("because", ["ValueError: no answer", "env.py:21 in because: r", "env.py:6 in look_up", "env.py:19 in bec"]),
        ("waits", ["TimeoutError", "env.py:25 in waits: await asyncio.Event().wait()", "env.py:24 in waits: async"]),
        ("together", ["TimeoutError", "env.py:25 in waits", "env.py:24 in waits"]),
    ],
)
def test_it_is_the_error_and_the_users_frames_innermost_first(user: Any, name: str, expected: list[str]):
    first, *frames = _text(getattr(user, name)).splitlines()
    assert first.startswith(expected[0]) and len(frames) == len(expected) - 1, frames
    assert all(frame.startswith(f"  at {want}") for frame, want in zip(frames, expected[1:], strict=True)), frames


def test_without_a_frame_of_the_user_the_others_are_shown():
    text = _text(partial(returns, ["a"], discount=1.0))  # type: ignore[list-item]
    assert re.match(r"TypeError: .*\n  at .*rollouts/environments/environments.py:\d+ in returns: ", text)


def test_it_is_short_and_says_no_secret(user: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", 'return {}["answr"]')
    assert _text(user.secret).startswith("OSError: postgres://***@host refused me\n")
    assert "in look_up: ***\n" in _text(user.run)
    deep = _text(lambda: user.deep(20))
    assert deep.startswith("ZeroDivisionError: division by zero\n") and deep.count("\n") == MOST_FRAMES
    long = _text(user.long_message)
    assert len(long) <= MOST_CHARACTERS and long.startswith("OSError: begin x") and "x end\n  at env.py" in long


def test_an_error_without_words_has_its_kind_and_one_of_a_million_words_costs_none():
    assert failure_text(Wordless()) == "Wordless"
    text = failure_text(ValueError(f"first {'password=' * 10**6} last"))
    assert text.startswith("ValueError: first ") and text.endswith(" last") and len(text) <= MOST_CHARACTERS


def test_frames_from_another_process_stand_before_those_of_this_one(user: Any):
    told = "my.rewards:score: ValueError: no number\n  at my/rewards.py:3 in score: int(reply)"
    assert _text(user.run, told).splitlines()[2:] == [
        '  at env.py:6 in look_up: return {}["answr"]',
        "  at env.py:9 in run: return look_up()",
    ]
    assert in_one_line(_text(user.run, told)) == "my.rewards:score: ValueError: no number at my/rewards.py:3"


def test_our_frames_from_another_process_are_left_out_if_there_are_the_users(user: Any):
    ours = f"{PROJECT}/rollouts/rewards/answers.py:3 in math_answer: int(answer)"
    told = f"math_answer: ValueError: no number\n  at {ours}"
    assert _text(user.run, told).splitlines()[1:] == [
        '  at env.py:6 in look_up: return {}["answr"]',
        "  at env.py:9 in run: return look_up()",
    ]
    assert _text(partial(returns, ["a"], discount=1.0), told) == told, "these are all there are"  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "line", "place"),
    [
        (
            "KeyError: 'x'\n  at my/env.py:3 in run: f()\n  at b.py:2 in g",
            "KeyError: 'x' at my/env.py:3",
            "my/env.py:3",
        ),
        ("one\ntwo\n  at <string>:1 in <module>", "one at <string>:1", "<string>:1"),
        ("out of memory", "out of memory", ""),
        ("", "", ""),
    ],
)
def test_one_line_has_the_innermost_place(text: str, line: str, place: str):
    assert (in_one_line(text), place_of(text)) == (line, place)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("run()", ["KeyError: 'answr'", "env.py:6 in look_up", "env.py:9 in run"]),
        ("loads()", ["json.decoder.JSONDecodeError: Expecting property", "env.py:15 in loads"]),
        ("because()", ["ValueError: no answer", "env.py:21 in because"]),
        ("print(json)", []),
    ],
)
def test_what_a_program_wrote_as_it_died_is_read_as_the_same(user: Any, call: str, expected: list[str]):
    Path("main.py").write_text(f"from env import *\n{call}\n")
    output = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True).stderr
    first, *frames = failure_text_of_output(f"a warning before it\n{output}").splitlines() or [""]
    if not expected:
        assert (first, frames) == ("", [])
        return
    assert first.startswith(expected[0]) and frames[-1] == f"  at main.py:2 in <module>: {call}"
    assert [frame.rpartition(":")[0] for frame in frames[:-1]] == [f"  at {place}" for place in expected[1:]]
