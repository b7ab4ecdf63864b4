"""The research agent trained as the program it is: `program.py` in a process of its own for every attempt.

In: `dataset` as for `agent.py`, with servers in `services.toml`, because the program is another process. Out: what
`agent.py` gives for the same words of the policy: the same tokens, the same score.

    worker ── python program.py … ──▶ program ──▶ agent endpoint ──▶ policy
                                         └──────▶ retrieval servers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from examples.search_agent.agent import SearchAgent
from examples.search_agent.services import read_settings
from examples.search_agent.world_agent import WorldAgent
from millrace import AgentFailed, CommandWorkflow, InvalidInput, Message, Score, Task, ToolUnavailable

_PROGRAM = Path(__file__).with_name("program.py")


class _Result(BaseModel):
    """The line that the program prints."""

    model_config = ConfigDict(extra="forbid")

    reply: str
    shown: list[str]
    searches: int
    fault: str
    unavailable: str
    unfinished: bool


class ProgramAgent(CommandWorkflow):
    """Plays as `agent` does, which has the tasks and the score."""

    preload: ClassVar[Sequence[str]] = ("openai.resources.chat", "httpx", "h11", "pydantic")
    agent: ClassVar[type[SearchAgent]] = SearchAgent
    tool_names: ClassVar[Sequence[str]] = ("search", "read")
    max_turns: ClassVar[int] = 48
    """Turns of calls; the program counts them itself; for `agent`, `rollout.max_tool_turns` is the limit."""

    def __init__(self, dataset: str | None = None) -> None:
        super().__init__(dataset)
        self._agent = self.agent(dataset)

    def tasks(self, split: str) -> Sequence[Task]:
        """Raises what `agent.tasks` raises, and `InvalidInput` without servers or with a refiner."""
        self._servers()
        return self._agent.tasks(split)

    def command(self, task: Task) -> Sequence[str]:
        agent = self._agent
        options: dict[str, Any] = {
            "--passages": agent.num_passages,
            "--shown": agent.shown,
            "--most-parallel": agent.most_parallel,
            "--max-turns": self.max_turns,
        }
        words = [str(word) for option in options.items() for word in option]
        words += [word for url in self._servers() for word in ("--search", url)]
        words += [word for name in self.tool_names for word in ("--tool", name)]
        return [sys.executable, str(_PROGRAM), *words, "--", agent.instructions + task.prompt]

    async def score(self, task: Task, output: str) -> Score:
        """The agent's score; reward None for an attempt that was not finished. Raises `ToolUnavailable`."""
        try:
            result = _Result.model_validate_json(output)
        except ValidationError as error:
            raise AgentFailed(f"the program did not print its result: {error}") from None
        if result.unavailable:
            raise ToolUnavailable(result.unavailable)
        if result.unfinished:
            return Score(reward=None)
        return await self._agent.scored(
            task, result.reply, shown=result.shown, num_searches=result.searches, fault=result.fault
        )

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        return self._agent.demonstrations(count, seed)

    def _servers(self) -> list[str]:
        folder = self._agent.folder()
        settings = read_settings(folder)
        if not settings.search:
            raise InvalidInput(
                f'{folder / "services.toml"} must name retrieval servers, search = ["http://…"]: the program is '
                "another process, and searches over HTTP"
            )
        if settings.refine is not None:
            raise InvalidInput(f"{folder / 'services.toml'}: leave [refine] out, the program does not refine")
        return settings.search

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        await self._agent.close()


class WorldProgram(ProgramAgent):
    """`WorldAgent`, as a program."""

    agent = WorldAgent
    tool_names = ("search",)
    max_turns = 4
