"""The agent as a program of its own: the same tokens, rewards and statuses as in the process, for the same replies."""

from __future__ import annotations

import asyncio
import json
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.search_agent import program
from examples.search_agent.agent import Episode, SearchAgent
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.passages import Passage
from examples.search_agent.program_agent import ProgramAgent, WorldProgram
from examples.search_agent.world import main as write_world
from examples.search_agent.world_agent import WorldAgent
from infra.user_code import load_object
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.agent_endpoint import close_agent_endpoint
from rollouts.production.attempts import Player
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Workflow
from settings.run_file import load_run_file
from storage.records import RolloutGroup, Sampling, Task
from tests.builders import a_config, provenance
from tests.shard_files import decode_shard, encode_shard
from tests.unit.examples.search_agent.scripted_server import Answer, ScriptedServer
from tests.unit.rollouts.scripted_text import Brackets, an_engine
from trainers.model.warmup import character_tokenizer

_PASSAGES = [
    Passage(id="1", title="Ada", text="Ada works for Bob."),
    Passage(id="2", title="Bob", text="Bob lives in Rome. " + "He likes it there. " * 40),
    Passage(id="3", title="Oslo", text="A town of the north."),
]
_PROBLEM = Problem(id="q", question="Where does Ada's boss live?", answer="Rome", supporting=("1", "2"))
_FOLDER = Path(__file__).parents[4] / "examples" / "search_agent"


class _Library(ScriptedServer):
    """Finds the passages that have a word of the query; `answer` is said instead, where there is one."""

    def __init__(self, answer: Answer | None = None) -> None:
        super().__init__()
        self._answer = answer

    @property
    def script(self) -> Sequence[Answer]:  # type: ignore[override]
        if self._answer is not None:
            return [self._answer]
        asked = self.bodies[-1]
        found = [p for p in _PASSAGES if set(asked["query"].split()) & set(f"{p.title} {p.text}".split())]
        rows = [{"id": p.id, "title": p.title, "text": p.text, "score": 1.0} for p in found[: asked["k"]]]
        return [(200, {}, json.dumps({"results": [rows]}).encode())]

    @script.setter
    def script(self, _: Sequence[Answer]) -> None: ...


def _search(*queries: Any) -> str:
    return " ".join(f"[search {json.dumps({'query': query})}]" for query in queries)


def _read(**arguments: Any) -> str:
    return f"[read {json.dumps(arguments)}]"


async def _played(workflow: Workflow, *replies: str, **limits: Any) -> RolloutGroup:
    tokens = ChatTokens(character_tokenizer(set(string.printable + "…")))
    async with RewardPool(num_processes=1, timeout=60) as pool:
        player = Player(
            workflow=workflow,
            engine=an_engine(tokens, *replies),
            tokens=tokens,
            rewards=pool,
            config=a_config(
                min_usable=1,
                attempt_timeout=60.0,
                max_tool_turns=48,
                max_model_len=limits.get("max_model_len", 20_000),
                tokens_per_microbatch=20_000,
            ),
            tool_parser=Brackets(),  # type: ignore[arg-type]
        )
        try:
            return await player.group(
                Task(id="q", prompt=_PROBLEM.question, answer="Rome", metadata={"supporting": '["1", "2"]'}),
                group_id="0.q",
                position=0,
                epoch=0,
                n_samples=1,
                sampling=Sampling(max_tokens=2000),
                is_eval=False,
            )
        finally:
            await close_agent_endpoint()


def _both(
    folder: Path, *replies: str, answer: Answer | None = None, **limits: Any
) -> tuple[RolloutGroup, RolloutGroup]:
    """The same replies to the agent in the process and to the program."""

    async def play() -> tuple[RolloutGroup, RolloutGroup]:
        write_dataset(folder, _PASSAGES, {"train": [_PROBLEM]})
        async with _Library(answer) as library:
            (folder / "services.toml").write_text(f'search = ["{library.url}"]')
            groups = []
            for workflow in (SearchAgent(str(folder)), ProgramAgent(str(folder))):
                assert [task.id for task in workflow.tasks("train")] == ["q"]
                groups.append(await _played(workflow, *replies, **limits))
                await workflow.close()
            return groups[0], groups[1]

    return asyncio.run(play())


def _rows(group: RolloutGroup) -> list[dict[str, Any]]:
    """What is trained: tokens, masks, logprobs, versions, reward."""
    shard = encode_shard([group], provenance=provenance(), sampling=Sampling())
    rows = decode_shard(shard, name="s0").to_pylist()
    keys = ("input_ids", "loss_mask", "logprobs", "weight_versions", "reward", "reward_parts", "status", "usable")
    return [{key: row[key] for key in row if key in keys} for row in rows]


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (
            [
                f"First the boss, then his home. {_search('Ada works', 'Carl')}",
                _search("Bob lives"),
                _read(passage_id="2", start=600),
                "Answer: Rome [1] [2]",
            ],
            1.0,
        ),
        ([_search("Ada works"), "Answer: Bob [1] [3]"], 0.0),
        ([_search("Ada works"), _search(" ada  WORKS")], 0.0),
        ([_search(*(f"word {n}" for n in range(9)))], 0.0),
        ([_search(5), _search("  "), "[find {}]", _read(passage_id="9"), "[search {}]", "Answer: Rome"], 1.0),
    ],
    ids=["won", "lost", "duplicate search", "too many calls", "told what is wrong"],
)
def test_a_program_gives_the_rows_that_the_agent_gives(tmp_path: Path, replies: list[str], reward: float):
    agent, of_program = _both(tmp_path, *replies)
    assert _rows(agent) == _rows(of_program)
    [row] = _rows(of_program)
    assert (row["reward"], row["status"]) == (reward, "ok") and any(row["loss_mask"])
    [one], [other] = agent.trajectories, of_program.trajectories
    assert one.reward_parts == other.reward_parts
    assert [m.content for m in one.messages] == [m.content for m in other.messages]


@pytest.mark.parametrize("answer", [(500, {}, b"ill"), (200, {}, b"[garbage"), "close"], ids=["500", "garbage", "gone"])
def test_a_server_that_fails_is_a_tool_error_in_both_and_never_reward_0(tmp_path: Path, answer: Answer):
    for group in _both(tmp_path, _search("Ada"), answer=answer):
        [played] = group.trajectories
        assert (played.status, played.reward, played.usable) == ("tool_error", None, False)
        assert "127.0.0.1" in played.error


def test_a_conversation_without_room_is_truncated_in_both(tmp_path: Path):
    for group in _both(tmp_path, _search("Bob lives"), "x" * 3000, max_model_len=2500):
        assert [t.status for t in group.trajectories] == ["truncated"]


def test_a_program_that_is_not_finished_has_no_reward(tmp_path: Path):
    class _Short(ProgramAgent):
        max_turns = 2

    async def play() -> RolloutGroup:
        write_dataset(tmp_path, _PASSAGES, {"train": [_PROBLEM]})
        async with _Library() as library:
            (tmp_path / "services.toml").write_text(f'search = ["{library.url}"]')
            return await _played(_Short(str(tmp_path)), *(_search(f"word {n}") for n in range(3)))

    [played] = asyncio.run(play()).trajectories
    assert (len(played.turns), played.reward, played.usable) == (3, None, False)


def test_a_program_is_told_of_the_same_tools():
    assert [program.schema_of(each) for each in (program.Search, program.Read)] == [
        Episode.search.schema,
        Episode.read.schema,
    ]


def test_a_program_needs_nothing_of_ours():
    source = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules, sep='\\n')"
    run = [sys.executable, "-c", source, str(_FOLDER / "program.py")]
    loaded = {name.partition(".")[0] for name in subprocess.check_output(run, text=True, cwd="/").split()}
    assert not loaded & {"rollouts", "storage", "examples", "flows", "trainers"} and "openai" in loaded


@pytest.mark.parametrize(
    ("services", "named"),
    [("", "must name retrieval servers"), ('search = ["http://a"]\n[refine]\nurls=["http://b"]\nmodel="m"', "refine")],
)
def test_what_a_program_cannot_do_is_said_before_anything_starts(tmp_path: Path, services: str, named: str):
    write_dataset(tmp_path, _PASSAGES, {"train": [_PROBLEM]})
    (tmp_path / "services.toml").write_text(services)
    with pytest.raises(ValueError, match=named):
        ProgramAgent(str(tmp_path)).tasks("train")


def test_the_world_s_program_is_the_world_s_agent(tmp_path: Path):
    write_world([str(tmp_path), "--entities", "100", "--questions", "60", "--held-out", "20", "--style", "notes"])
    (tmp_path / "services.toml").write_text('search = ["http://127.0.0.1:8765"]')
    agent, as_program = WorldAgent(str(tmp_path)), WorldProgram(str(tmp_path))
    task = agent.tasks("train")[0]
    assert as_program.tasks("train") == agent.tasks("train")
    assert as_program.demonstrations(20, 3) == agent.demonstrations(20, 3)
    said = as_program.command(task)
    assert said[-1] == task.prompt and said[said.index("--passages") + 1] == "1" and said.count("--tool") == 1
    ours, other = (load_run_file(_FOLDER / f"{name}.toml") for name in ("search_agent", "search_agent_program"))
    assert issubclass(load_object(other.workflow), WorldProgram)
    assert WorldProgram.max_turns == ours.rollout.max_tool_turns
    same = ["engine", "warmup", "train", "sampling", "max_staleness"]
    same += ["steps", "batch_size", "n_samples", "learning_rate"]
    assert [getattr(other, name) for name in same] == [getattr(ours, name) for name in same]
