"""Agents of others as they are, to be trained on the real engine: smolagents' two, and one in the style of Search-R1.

In: a folder. Out: a base model that can spell what they read, which has learnt how the third one writes.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from examples.search_agent.retrieval.local_search import LocalSearch
from examples.search_agent.world import World, split_questions
from millrace import AgentWorkflow, Message, Task
from settings.warmup import WarmupSettings
from storage.objects.digests import seal_folder
from trainers.model.warmup import make_base_model

_WORLD = World(entities=40, distractors=0.3)
_QUESTIONS = split_questions(_WORLD, questions=40, held_out=8, hops=[1])
CONTEXT = 16384  # smolagents' instructions have ten thousand characters, each of them a token here


class _Sums(AgentWorkflow):
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=str(number), prompt=f"What is {number} + {number}?") for number in range(2, 8)]

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> float:
        answer = str(await asyncio.to_thread(self.play, task.prompt, base_url, api_key))
        return sum(character in string.ascii_lowercase for character in answer) / (1 + len(answer))

    def play(self, question: str, base_url: str, api_key: str) -> object:
        raise NotImplementedError


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The one.
        b: The other.
    """
    return a + b


class Coder(_Sums):
    """smolagents' CodeAgent, with its own instructions."""

    def play(self, question: str, base_url: str, api_key: str) -> object:
        from smolagents import CodeAgent, OpenAIModel, tool

        model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
        return CodeAgent(tools=[tool(add)], model=model, max_steps=1, verbosity_level=0).run(question)


class Caller(_Sums):
    """smolagents' ToolCallingAgent, with its own instructions; it forces its calls."""

    def play(self, question: str, base_url: str, api_key: str) -> object:
        from smolagents import OpenAIModel, ToolCallingAgent, tool

        model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
        return ToolCallingAgent(tools=[tool(add)], model=model, max_steps=1, verbosity_level=0).run(question)


class Searcher(AgentWorkflow):
    """Search-R1's loop: a reply ends behind its query, and the passages found are what comes next."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=each.id, prompt=each.text, answer=each.answer) for each in _QUESTIONS[split]]

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> float:
        query, index, history = "", LocalSearch(_WORLD.passages), [{"role": "user", "content": task.prompt}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                made = await client.chat.completions.create(
                    model="policy",
                    messages=history,  # type: ignore[arg-type]
                    stop=["</search>", "</answer>"],
                )
                text = made.choices[0].message.content or ""
                if "<answer>" in text or "<search>" not in text:
                    break
                query = text.rpartition("<search>")[2]
                passages = await index.search(query, 1)
                found = "".join(f"{passage.title}: {passage.text}" for passage in passages)
                history += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"<information>{found}</information>"},
                ]
        return (_alike(query, task.prompt) + _alike(text.rpartition("<answer>")[2], str(task.answer))) / 2


def _alike(text: str, other: str) -> float:
    """Share of the characters that are the same ones at the same places."""
    return sum(a == b for a, b in zip(text, other, strict=False)) / len(other)


def base_model(folder: Path, *, num_layers: int) -> Path:
    """With two layers it searches for what was asked; smolagents' instructions fit in its context."""
    draw, demonstrations = random.Random(0), []
    for question in draw.choices(_QUESTIONS["train"], k=400):
        found = f"{question.supporting[0]}: {question.answer}"
        texts = [question.text, f"<search>{question.text[:-1]}</search>", f"<information>{found}</information>"]
        texts.append(f"<answer>{question.answer}</answer>")
        roles = ["user", "assistant"] * 2
        demonstrations.append([Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)])
    demonstrations.append([Message(role="user", content=string.printable), Message(role="assistant", content="")])
    schedule: dict[str, Any] = {"target_loss": 0.25, "num_steps": 100, "batch_size": 16, "learning_rate": 3e-3}
    settings = WarmupSettings(hidden_size=32 * num_layers, num_layers=num_layers, **schedule)
    make_base_model(folder, demonstrations, settings, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    seal_folder(folder)
    return folder
