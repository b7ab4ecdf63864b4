"""A research agent: it plans, searches a corpus, reads, and answers with its sources.

In: `dataset`, a folder with `train.jsonl` and `test.jsonl` (`question`, `answer`; `id` and `supporting` if known),
and with `services.toml`, which says where to search, or with `corpus.jsonl`, which is then searched in the process.
Out: reward 1 for the exact answer, and the parts of the score by name.

    question ─▶ plan ─▶ search, search, … at the same time ─▶ passages ─▶ [refine] ─▶ read ─▶ … ─▶ Answer: … [id] [id]
                             │                 └ a server that fails: `tool_error`, no reward
                             └ the same search twice, or more than 8 in one turn: reward 0, and the attempt ends

Turns, tokens and time are limited by the run file: `rollout.max_tool_turns`, `engine.max_model_len` with
`sampling.max_tokens`, and `rollout.attempt_timeout`. `rollout.exclude_statuses` says which of those are not trained.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar

from examples.search_agent.retrieval.passages import Passage
from examples.search_agent.rewards import answer_parts
from examples.search_agent.services import Services, connect, read_settings
from millrace import Chat, InvalidInput, Message, Score, Task, Tool, ToolUnavailable, Workflow, read_dataset, tool

INSTRUCTIONS = """Answer the question at the end by searching a collection of passages. First write a short plan: \
which facts are needed, and in which order. Then search for them, several at a time where they do not depend on each \
other, and read what was found. Never make the same search twice. When you know the answer, end with one line that \
gives it in as few words as possible, and the ids of all passages that support it:
Answer: Marie Curie [12] [40]

Question: """
_LONGEST_QUERY = 1000
FAULTS = ("duplicate_search", "too_many_calls")
"""What a policy can do to lose an attempt at once; each is a part of the score, 1 if it happened."""


class AttemptLost(ToolUnavailable):
    """The policy broke a rule. It ends the conversation as a failed tool does, and `run` scores it 0."""


class Episode:
    """One attempt: its tools, and what they have shown."""

    def __init__(
        self, question: str, chat: Chat, services: Services, *, num_passages: int, most_parallel: int, shown: int
    ) -> None:
        self._question = question
        self._chat = chat
        self._services = services
        self._num_passages = num_passages
        self._most_parallel = most_parallel
        self._shown = shown
        self._queries: list[str] = []
        """The queries so far, in lower case with single spaces."""
        self._calls: Counter[int] = Counter()
        """Calls of each turn."""
        self.fault = ""
        """One of `FAULTS`; empty while no rule is broken."""
        self.passages: dict[str, Passage] = {}
        """What the policy has been shown, by id."""

    @property
    def num_searches(self) -> int:
        """Searches asked for, those of a broken rule included."""
        return len(self._queries)

    @tool
    async def search(self, query: str) -> str:
        """Find the passages that fit a query best; each is shown as [id] title: text.

        Args:
            query: a few words that the passages should contain
        """
        wanted = " ".join(query.lower().split())
        if wanted in self._queries:
            self._break("duplicate_search")
        self._queries.append(wanted)
        await self._check_rules()
        if not wanted or len(wanted) > _LONGEST_QUERY:
            raise ValueError(f"a query has 1 to {_LONGEST_QUERY} characters")
        passages = await self._services.search(query, self._num_passages)
        self.passages |= {passage.id: passage for passage in passages}
        if not passages:
            return "nothing found"
        if self._services.refines:
            return await self._services.refine(self._question, passages)
        return show(passages, most=self._shown)

    @tool
    async def read(self, passage_id: str, start: int = 0) -> str:
        """Read a passage that a search has shown only the beginning of.

        Args:
            passage_id: the id that the search has shown, without brackets
            start: number of characters to skip, to read on
        """
        await self._check_rules()
        if passage_id not in self.passages:
            raise ValueError(f"no search has found a passage {passage_id!r}")
        return self.passages[passage_id].text[max(0, start) :]

    async def _check_rules(self) -> None:
        """Every call awaits this once; no call goes on before all calls of its turn were counted."""
        turn = len(self._chat.turns)
        self._calls[turn] += 1
        if self._calls[turn] > self._most_parallel:
            self._break("too_many_calls")
        await asyncio.sleep(0)
        if self.fault:
            raise AttemptLost(self.fault)

    def _break(self, rule: str) -> None:
        self.fault = self.fault or rule


def show(passages: Sequence[Passage], *, most: int) -> str:
    """A line per passage, `[id] title: text`, of at most `most` characters of text each."""
    lines = []
    for passage in passages:
        text = passage.text
        if len(text) > most:
            text = f"{text[:most]} … [{len(text) - most} characters more]"
        title = "" if passage.title in passage.text[:most] else f"{passage.title}: "  # not shown twice
        lines.append(f"[{passage.id}] {title}{text}")
    return "\n".join(lines)


def task_of(identity: str, question: str, answer: str, supporting: Sequence[str]) -> Task:
    """A question as a task; `supporting` are the ids of the passages that prove the answer, empty if unknown."""
    return Task(id=identity, prompt=question, answer=answer, metadata={"supporting": json.dumps(list(supporting))})


class SearchAgent(Workflow):
    """Needs `dataset` in the run file; a subclass may change how it asks, and how much it shows."""

    instructions: ClassVar[str] = INSTRUCTIONS
    """Said before every question."""
    num_passages: ClassVar[int] = 5
    """Passages per search."""
    most_parallel: ClassVar[int] = 8
    """Searches of one turn; more lose the attempt."""
    shown: ClassVar[int] = 600
    """Characters of a passage that a search shows; the rest is for `read`."""

    def __init__(self, dataset: str | None = None) -> None:
        super().__init__(dataset)
        self._services: Services | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """Raises `InvalidInput` naming the line for a question without an answer, and for nothing to search."""
        folder = self.folder()
        if not read_settings(folder).search:
            self.services()  # reads the corpus, and so finds its broken lines before anything starts
        return [
            task_of(
                str(row.get("id") or f"{split}-{number}"),
                row["question"],
                str(row["answer"]),
                [str(identity) for identity in row.get("supporting") or []],
            )
            for number, row in enumerate(read_dataset(str(folder), split, required=["question", "answer"]))
        ]

    def tools(self, episode: Episode) -> list[Tool]:
        """What the policy may call."""
        return [episode.search, episode.read]

    async def run(self, task: Task, chat: Chat) -> Score:
        """Search and read until there is an answer. Raises `ToolUnavailable` if a service failed."""
        services = self.services()
        episode = Episode(
            task.prompt,
            chat,
            services,
            num_passages=self.num_passages,
            most_parallel=self.most_parallel,
            shown=self.shown,
        )
        reply = ""
        try:
            reply = await chat.ask(self.instructions + task.prompt, tools=self.tools(episode))
        except ToolUnavailable:
            if not episode.fault:
                raise
        return await self.scored(
            task, reply, shown=episode.passages, num_searches=episode.num_searches, fault=episode.fault
        )

    async def scored(self, task: Task, reply: str, *, shown: Collection[str], num_searches: int, fault: str) -> Score:
        """How good a last reply is, after passages `shown`. After a broken rule it is empty: nothing of it counts."""
        supporting = json.loads(task.metadata["supporting"])
        parts = answer_parts(reply, task.answer, supporting=supporting, seen=shown)
        parts |= {name: float(fault == name) for name in FAULTS}
        parts["searches"] = float(num_searches)
        judge = self.services().judge
        if judge is not None:
            verdict = await judge(task.prompt, reply, reference=task.answer) if reply else Score(reward=0.0)
            parts["judge"] = verdict.reward
        return Score(reward=parts["exact"], parts=parts)

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """The answer at once, because the searches that lead to it are unknown."""
        return f"Answer: {task.answer}"

    def services(self) -> Services:
        """Where to search, connected when first needed."""
        if self._services is None:
            folder = self.folder()
            self._services = connect(folder, read_settings(folder))
        return self._services

    def folder(self) -> Path:
        """The data set's folder. Raises `InvalidInput` if there is none."""
        if self.dataset is None:
            raise InvalidInput(
                "dataset must be set: a folder with train.jsonl, test.jsonl, and corpus.jsonl or services.toml; "
                "python -m examples.search_agent.world FOLDER makes one"
            )
        folder = Path(self.dataset).expanduser()
        if not folder.is_dir():
            raise InvalidInput(
                f"dataset = {self.dataset!r} is not a folder; it must hold train.jsonl, test.jsonl and the corpus"
            )
        return folder

    async def close(self) -> None:
        """Close the connections."""
        if self._services is not None:
            await self._services.close()
