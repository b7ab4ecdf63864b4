"""Every example can be won: what its `reference_reply` says scores 1, on every kind of task it has."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import load_object
from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ToolParser
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.rewards.scoring import RewardPool, set_reward_pool
from rollouts.workflow import Score, Workflow
from settings.run_file import default_values, load_run_file
from storage.log.runs import create_run
from storage.records import Message, Sampling, Task
from tests.builders import MemoryStore
from trainers.model.warmup import character_tokenizer

_EXAMPLES = Path(__file__).parents[3] / "examples"
_RUN_FILES = sorted([*_EXAMPLES.glob("*.toml"), *_EXAMPLES.glob("search_agent/*.toml")])
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
"""Programs of their own, to which nobody can say a reference; `search_agent/test_program_agent.py` plays them."""


class _Reference(Chat):
    """A policy that says what the workflow's reference says."""

    def __init__(self, workflow: Workflow, task: Task, tokens: ChatTokens, parser: ToolParser) -> None:
        self._workflow, self._task, self._next = workflow, task, ""
        super().__init__(
            engine=ScriptedEngine(lambda *_: [*tokens.tokenizer(self._next)["input_ids"], tokens.end_id]),
            tokens=tokens,
            sampling=Sampling(max_tokens=10_000),
            max_model_len=100_000,
            request_id=task.id,
            tool_parser=parser,
        )

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        reply = self._workflow.reference_reply(self._task, messages)
        assert reply is not None, f"{type(self._workflow).__name__} has no reference_reply"
        self._next = reply
        return await super().complete(messages, **options)


@pytest.mark.parametrize("run_file", [f for f in _RUN_FILES if f.stem not in _PROGRAMS], ids=lambda file: file.stem)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_reference_reply_scores_one(run_file: Path, split: str, tmp_path: Path):
    config = load_run_file(run_file)
    dataset: str | None = None
    if config.dataset:
        dataset = str(tmp_path)
        rows = [json.dumps(row) for row in _DATA[run_file.stem]]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
        (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "Ada works for Bob."}\n')
    workflow: Workflow = load_object(config.workflow)(dataset)
    tokens = ChatTokens(character_tokenizer(set(string.printable)))
    parser = ToolParser(config.engine.tool_parser, tokens.tokenizer)

    async def play() -> list[tuple[str, float | None]]:
        async with RewardPool(num_processes=1, timeout=60) as rewards:
            set_reward_pool(rewards)
            scored = []
            for task in workflow.tasks(split)[:_SAMPLE]:
                score: Score = await workflow.run(task, _Reference(workflow, task, tokens, parser))
                scored.append((task.id, score.reward))
            return scored

    scored = asyncio.run(play())
    assert scored and [each for each in scored if each[1] != 1.0] == []


@pytest.mark.parametrize("run_file", _RUN_FILES, ids=lambda file: file.stem)
def test_a_run_of_it_is_continued_by_starting_it_again(run_file: Path):
    store, config = MemoryStore(), load_run_file(run_file).model_dump(mode="json")
    for _ in range(2):
        create_run(store, "run", config, defaults=default_values())


def test_every_example_has_a_run_file_of_its_own():
    modules = {file.stem for file in _EXAMPLES.glob("*.py")} - {"__init__"}
    workflows = {load_run_file(file).workflow.partition(":")[0] for file in _RUN_FILES}
    packages = {workflow for workflow in workflows if workflow.startswith("examples.search_agent.")}
    assert packages == {f"examples.search_agent.{name}" for name in ("agent", "world_agent", "program_agent")}
    assert workflows - packages == {f"examples.{module}" for module in modules}
    assert {file.stem for file in _RUN_FILES} >= modules
