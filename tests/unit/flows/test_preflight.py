"""What is refused before anything heavy starts, where it is not the command line's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.user_code import load_object
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.objects.object_store import LocalStore, StoreError
from tasks import preflight
from tests.builders import a_config


def _config(**values: Any) -> RunConfig:
    return a_config(workflow="examples.arithmetic:Arithmetic", **values)


class Forgetful(LocalStore):
    """A store that ignores the condition, as some S3 servers do: every writer wins."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "open_store", lambda uri: Forgetful(tmp_path))
    with pytest.raises(StoreError, match="conditional writes"):
        preflight.check_run(_config(store="", tool_parser="hermes"))


def test_what_cannot_work_is_refused_and_the_rest_passes(tmp_path: Path) -> None:
    preflight.check_run(_config(store=str(tmp_path), tool_parser="hermes"))
    with pytest.raises(ValueError, match="vLLM has no such parser; did you mean 'hermes'"):
        preflight.check_run(_config(store=str(tmp_path), tool_parser="hermess"))
    with pytest.raises(ValueError, match=r"no_such_module:loss' cannot be imported"):
        preflight.check_run(_config(store=str(tmp_path), loss={"kind": "custom", "path": "no_such_module:loss"}))


WORKFLOW = """
from rollouts.workflow import Score, Workflow
from storage.records import Task

class Echo(Workflow):
    reward = 1.0
    reference = "7"

    def tasks(self, split):
        return [Task(id=f"{split}-{number}", prompt="Say 7.", answer="7") for number in range(30)]

    async def run(self, task, chat):
        reply = await chat.ask(task.prompt)
        return Score(reward=self.reward if reply == task.answer else 0.0)

    def reference_reply(self, task, messages):
        return self.reference

class Silent(Echo):
    reference_reply = Workflow.reference_reply

class Unknowing(Echo):
    reference = None

class Wrong(Echo):
    reference = "8"

class Half(Echo):
    reward = 0.5

class Null(Echo):
    reward = None

class Broken(Echo):
    async def run(self, task, chat):
        await chat.ask(task.prompt)
        return Score(reward=float(task.id))

class Ranked(Null):
    async def score_group(self, task, attempts):
        return [Score(reward=1.0) for _ in attempts]

class TwoTurns(Echo):
    async def run(self, task, chat):
        replies = [await chat.ask(task.prompt), await chat.ask("Again.")]
        assert [message.content for message in chat.messages] == ["Say 7.", "7", "Again.", "sept: grün 🙂"]
        return Score(reward=1.0)

    def reference_reply(self, task, messages):
        return {"Say 7.": "7", "Again.": "sept: grün 🙂"}[messages[-1].content]

class Nothing(Workflow):
    pass
"""


@pytest.fixture
def workflows(tmp_path: Path) -> Path:
    file = tmp_path / "workflows.py"
    file.write_text(WORKFLOW)
    return file


def _won(file: Path, name: str, **values: Any) -> int:
    config = a_config(workflow=f"{file}:{name}", **values)
    return preflight.check_references(load_object(config.workflow)(None), config)


@pytest.mark.parametrize(
    ("name", "won"), [("Echo", 40), ("TwoTurns", 40), ("Ranked", 40), ("Silent", 0), ("Unknowing", 0)]
)
def test_twenty_tasks_of_each_split_are_won_by_their_reference(workflows: Path, name: str, won: int) -> None:
    assert _won(workflows, name) == won


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wrong", "its reward is 0.0, and an attempt that wins has 1"),
        ("Half", "its reward is 0.5"),
        ("Null", "its reward is None"),
        ("Broken", "ValueError: could not convert string to float: 'train-0'\n  at {file}:37 in run: return Score"),
    ],
)
def test_a_reference_that_does_not_win_is_refused_with_the_task(workflows: Path, name: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _won(workflows, name)
    message = str(caught.value)
    start = "reference_reply does not win 40 of 40 tasks. task 'train-0' of split 'train': "
    assert message.startswith(start + words.format(file=workflows)), message
    assert "Mend the task's answer, its reward or reference_reply" in message


def test_a_workflow_without_its_methods_is_refused_by_name(workflows: Path, tmp_path: Path) -> None:
    for name, missing in (("Nothing", "tasks"), ("Echo", "demonstrations")):
        with pytest.raises(InvalidInput, match=rf"{name} has no {missing}\(\); write it"):
            preflight.check_run(a_config(workflow=f"{workflows}:{name}", store=str(tmp_path)))
