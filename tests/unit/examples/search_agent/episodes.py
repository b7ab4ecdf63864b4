"""Episodes of the research agent: three passages, a question about them, and a policy that says given replies."""

from __future__ import annotations

import functools
import json
import string
from pathlib import Path
from typing import Any

from examples.search_agent.agent import SearchAgent, task_of
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.retrieval.passages import Passage
from examples.search_agent.services import Services
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.production.attempts import Player
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Workflow
from storage.records import RolloutGroup, Sampling, Task, Trajectory
from tests.builders import a_config
from tests.unit.rollouts.scripted_text import Brackets, an_engine
from trainers.model.warmup import character_tokenizer

FOLDER = Path(__file__).parents[4] / "examples" / "search_agent"
PASSAGES = [
    Passage(id="1", title="Ada", text="Ada works for Bob."),
    Passage(id="2", title="Bob", text="Bob lives in Rome."),
    Passage(id="3", title="", text="Carl lives in Oslo."),
]
PROBLEM = Problem(id="q", question="Where does Ada's boss live?", answer="Rome", supporting=("1", "2"))
TASK = task_of(PROBLEM.id, PROBLEM.question, PROBLEM.answer, PROBLEM.supporting)


class Agent(SearchAgent):
    """With services of the test's own."""

    instructions = ""

    def __init__(self, searcher: Any, **others: Any) -> None:
        super().__init__()
        self._services = Services(searcher, **others)


def search(*queries: Any) -> str:
    return " ".join(f"[search {json.dumps({'query': query})}]" for query in queries)


def read(**arguments: Any) -> str:
    return f"[read {json.dumps(arguments)}]"


def results(trajectory: Trajectory) -> list[str]:
    """What tools have shown to the policy."""
    return [message.content for message in trajectory.messages if message.role == "tool"]


def write_folder(folder: Path, **files: str) -> str:
    """The agent's data set, with `services` as `services.toml` where it is given."""
    write_dataset(folder, PASSAGES, {"train": [PROBLEM], "test": [Problem(id="t", question="?", answer="x")]})
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return str(folder)


@functools.cache
def tokens() -> ChatTokens:
    return ChatTokens(character_tokenizer(set(string.printable + "…")))


async def play_group(
    workflow: Workflow,
    *replies: str,
    task: Task = TASK,
    engine: Any = None,
    n_samples: int = 1,
    max_tokens: int = 2000,
    **settings: Any,
) -> RolloutGroup:
    """Attempts of a policy that says these replies; `settings` as in `a_config`."""
    limits = {"min_usable": 1, "attempt_timeout": 60.0, "max_tool_turns": 48, "max_model_len": 20_000}
    async with RewardPool(num_processes=1, timeout=60) as pool:
        player = Player(
            workflow=workflow,
            engine=engine or an_engine(tokens(), *replies),
            tokens=tokens(),
            rewards=pool,
            config=a_config(**{**limits, "tokens_per_microbatch": 100_000, **settings}),
            tool_parser=Brackets(),  # type: ignore[arg-type]
        )
        place = {"group_id": f"0.{task.id}", "position": 0, "epoch": 0}
        sampling = Sampling(max_tokens=max_tokens)
        return await player.group(task, n_samples=n_samples, sampling=sampling, is_eval=False, **place)  # type: ignore[arg-type]


async def play(workflow: Workflow, *replies: str, **settings: Any) -> Trajectory:
    """One attempt."""
    return (await play_group(workflow, *replies, **settings)).trajectories[0]
