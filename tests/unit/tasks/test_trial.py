"""Mistakes of a first environment: each is found before anything starts, with the user's file and line."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from settings.errors import InvalidInput
from tasks.preflight import check_run
from tests.builders import a_config

_WORKFLOW = """
from millrace import Message, Score, Task, Workflow

class Mine(Workflow):
    def tasks(self, split):
        return [Task(id=f"{split}-{n}", prompt="7?", answer="7") for n in range(3)]

    def demonstrations(self, count, seed):
        return [[Message(role="user", content="7?"), Message(role="assistant", content="7")]] * count

"""


def _check(folder: Path, methods: str, **settings: Any) -> None:
    file = folder / "mine.py"
    file.write_text(_WORKFLOW + "\n".join(f"    {line}" for line in methods.strip().splitlines()))
    check_run(a_config(workflow=f"{file}:Mine", store=str(folder / "store"), **settings))


def _last_line(error: BaseException) -> tuple[str, str]:
    """File and text of the last line of a traceback."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename).name, str(frame.line)


@pytest.mark.parametrize(
    "methods, kind, sentence",
    [
        ("x = 1", InvalidInput, r"has no run\(\); write it"),
        ("def run(self, task, chat):\n    return 1", InvalidInput, r"write `async def run`, at .*mine\.py:11"),
        ("async def run(self, task, chat):\n    return (1, 2)", Exception, r"Mine.run returned tuple.*mine\.py:11"),
        ("async def run(self, task, chat):\n    return None", Exception, r"Mine.run returned NoneType"),
        (
            "async def run(self, task, chat):\n    return float('nan')",
            Exception,
            r"returned nan; a reward is a finite number",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt='p'), Task(id='a', prompt='q')]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"1 task ids of split 'train' occur more than once, for example 'a'.*mine\.py:11",
        ),
        (
            "def tasks(self, split):\n    return [Task(id=3, prompt='p')]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"task 3 of split 'train': id is a int, not text: use str\(id\), at .*mine\.py:11",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt=[{'role': 'user'}])]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"prompt is a list, not text: build messages in `run`",
        ),
        (
            "def tasks(self, split):\n    return [Task(id='a', prompt='p', answer=7)]\n"
            "async def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"answer is a int, not text: use str\(answer\)",
        ),
        (
            "def tasks(self, split):\n    return ['p']\nasync def run(self, task, chat):\n    return 1",
            InvalidInput,
            r"tasks\('train'\) has a str, not a Task",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_its_place(
    tmp_path: Path, methods: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        _check(tmp_path, methods)


@pytest.mark.parametrize(
    "body, kind, line",
    [
        ("return task.answr", AttributeError, "return task.answr"),
        ("import my_missing_module", ModuleNotFoundError, "import my_missing_module"),
        ("return undefined_name", NameError, "return undefined_name"),
        # The demonstration's reply is one that the workflow knows: what fails at it fails for every policy.
        ("reply = await chat.ask(task.prompt)\n    return {'8': 1.0}[reply]", KeyError, "return {'8': 1.0}[reply]"),
    ],
)
def test_what_run_raises_is_raised_with_the_users_line(
    tmp_path: Path, body: str, kind: type[Exception], line: str
) -> None:
    with pytest.raises(kind) as caught:
        _check(tmp_path, f"async def run(self, task, chat):\n    {body}")
    assert _last_line(caught.value) == ("mine.py", line)
    assert "task 'train-0' of split 'train'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("body", ["return 1", "return True", "return await score(exact, '7', task.answer)"])
def test_a_number_and_a_score_are_both_fine(tmp_path: Path, body: str) -> None:
    _check(tmp_path, f"async def run(self, task, chat):\n    from millrace import exact, score\n    {body}")


def test_an_error_that_another_reply_might_not_cause_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "millrace.preflight"):
        _check(
            tmp_path,
            "def demonstrations(self, count, seed):\n    return []\n"
            "async def run(self, task, chat):\n    reply = await chat.ask(task.prompt)\n    return int(reply[:-2])",
        )
    assert "tried with a made-up reply: ValueError" in caplog.text


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"dataset": "data.jsonl"}, r"dataset = 'data.jsonl': .*Mine never reads it; use self.dataset in tasks\(\)"),
        (
            {"vllm": {"tensor_paralel_size": 2}},
            r"engine.vllm.tensor_paralel_size: .*did you mean 'tensor_parallel_size'",
        ),
    ],
)
def test_a_setting_that_nothing_takes_is_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        _check(tmp_path, "async def run(self, task, chat):\n    return 1", **settings)


def test_a_start_does_not_load_vllm_for_a_reply_that_calls_tools() -> None:
    code = """
import sys
from examples.calculator_agent import CalculatorAgent
from tasks.trial import play_tasks, tasks_by_split
from tests.builders import a_config
play_tasks(workflow := CalculatorAgent(), tasks_by_split(workflow, a_config()), a_config())
print("vllm" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
