"""Every example can be won: what its `reference_reply` says scores 1, on every kind of task it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import load_object
from rollouts.workflow import Workflow
from settings.run_file import default_values, load_run_file
from storage.log.runs import create_run
from tasks.checks.loading import load_tasks
from tasks.checks.trial import check_references
from tests.builders import MemoryStore

_EXAMPLES = Path(__file__).parents[3] / "examples"
_RUN_FILES = sorted([*_EXAMPLES.glob("*.toml"), *_EXAMPLES.glob("*/*.toml")])
_SAMPLE = 50

_DATA: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "Anna has 3 boxes of 6 eggs. How many eggs?", "answer": "3*6 = <<3*6=18>>18 eggs.\n#### 18"},
        {"question": "A coat costs $1,250 less 20%. What is its price?", "answer": "1250*0.8 = 1000\n#### 1,000"},
    ],
    "search_agent_7b": [
        {"question": "Where does Ada's boss live?", "answer": "The Hague", "supporting": ["1", "2"]},
        {"question": "Is it by the sea?", "answer": "yes"},
    ],
}
"""Rows for the examples that read a data set, by the name of their run file."""
_PROGRAMS = {"search_agent_program"}
"""Programs of their own, which take no reference; `search_agent/test_program_agent.py` plays them."""


@pytest.mark.parametrize("run_file", [f for f in _RUN_FILES if f.stem not in _PROGRAMS], ids=lambda file: file.stem)
def test_the_reference_reply_wins_every_task(run_file: Path, tmp_path: Path):
    config = load_run_file(run_file)
    dataset = str(tmp_path) if config.dataset else None
    if dataset:
        rows = "".join(f"{json.dumps(row)}\n" for row in _DATA[run_file.stem])
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text(rows)
        (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "Ada works for Bob."}\n')
    config = config.model_copy(update={"model": ""})  # whose tokenizer need not be on this machine
    workflow: Workflow = load_object(config.workflow)(dataset)
    num_tasks = sum(len(workflow.tasks(split)[:_SAMPLE]) for split in ("train", "test"))
    assert check_references(workflow, load_tasks(workflow, config), config, num_tasks=_SAMPLE) == num_tasks > 0


@pytest.mark.parametrize("run_file", _RUN_FILES, ids=lambda file: file.stem)
def test_a_run_of_it_is_continued_by_starting_it_again(run_file: Path):
    store, config = MemoryStore(), load_run_file(run_file).model_dump(mode="json")
    for _ in range(2):
        create_run(store, "run", config, defaults=default_values())


def test_every_example_has_a_run_file_of_its_own():
    modules = {file.stem for file in (*_EXAMPLES.glob("*.py"), _EXAMPLES / "smollm2" / "smollm2.py")} - {"__init__"}
    paths = [load_run_file(file).workflow.rpartition(":")[0].removesuffix(".py") for file in _RUN_FILES]
    workflows = {path.replace("/", ".").rpartition(".")[2] for path in paths}
    assert workflows == modules | {"agent", "world_agent", "program_agent"}  # those of the search agent
    assert {file.stem for file in _RUN_FILES} >= modules
