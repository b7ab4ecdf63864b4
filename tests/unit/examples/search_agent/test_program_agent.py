"""The agent as a program of its own: the same tokens, rewards and statuses as in the process, for the same replies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from examples.search_agent import program
from examples.search_agent.agent import FAULTS, Episode, SearchAgent
from examples.search_agent.program_agent import ProgramAgent, WorldProgram
from examples.search_agent.world import main as write_world
from examples.search_agent.world_agent import WorldAgent
from infra.user_code import load_object
from rollouts.endpoint.agent_endpoint import close_agent_endpoint
from rollouts.workflow import Workflow
from settings.run_file import load_run_file
from storage.records import RolloutGroup, Sampling
from tests.builders import provenance
from tests.shard_files import decode_shard, encode_shard
from tests.unit.examples.search_agent.episodes import FOLDER, PASSAGES, play_group, read, results, search, write_folder
from tests.unit.examples.search_agent.retrieval.scripted_server import Answer, ScriptedServer, ok

pytestmark = pytest.mark.server
_LONG = replace(PASSAGES[1], text="Bob lives in Rome. " + "He likes it there. " * 40)


def _find(body: Any) -> Answer:
    """The passages that have a word of the query."""
    fitting = [
        passage
        for passage in (PASSAGES[0], _LONG, PASSAGES[2])
        if set(body["query"].split()) & set(f"{passage.title} {passage.text}".split())
    ]
    return ok({"results": [[asdict(passage) for passage in fitting[: body["k"]]]]})


async def _played(
    folder: Path,
    *replies: str,
    kinds: Sequence[type[Workflow]],
    answer: Callable[[Any], Answer] = _find,
    **settings: Any,
) -> tuple[list[RolloutGroup], int]:
    """The same replies to every kind of agent; returns the searches that were sent, too."""
    groups = []
    async with ScriptedServer(answer=answer) as library:
        dataset = write_folder(folder, services=f'search = ["{library.url}"]')
        for kind in kinds:
            workflow = kind(dataset)
            assert [task.id for task in workflow.tasks("train")] == ["q"]
            groups.append(await play_group(workflow, *replies, **settings))
            await workflow.close()
            await close_agent_endpoint()
    return groups, len(library.bodies)


_BOTH: Any = (SearchAgent, ProgramAgent)


def _rows(group: RolloutGroup) -> list[dict[str, Any]]:
    """What is trained: tokens, masks, logprobs, versions, reward."""
    shard = encode_shard([group], provenance=provenance(), sampling=Sampling())
    keys = ("input_ids", "loss_mask", "logprobs", "weight_versions", "reward", "reward_parts", "status", "usable")
    return [{key: row[key] for key in row if key in keys} for row in decode_shard(shard, name="s0").to_pylist()]


_PLAN = f"First the boss, then his home. {search('Ada works', 'Carl')}"
_WRONG = {
    search(5): "query",
    search("  "): "1 to 1000 characters",
    search("x" * 1001): "1 to 1000 characters",
    "[find {}]": "there is no tool 'find'",
    read(passage_id="9"): "no search has found",
    "[search {}]": "query",
}
_MANY = [search("Ada"), " ".join([search("Bob")] + [read(passage_id="1")] * 8)]


_CASES: dict[str, Any] = {
    "won": ([_PLAN, search("Bob lives"), read(passage_id="2", start=600), "Answer: Rome [1] [2]"], 1.0, "", 3),
    "lost": ([search("Ada works"), "Answer: Bob [1] [3]"], 0.0, "", 1),
    "told what is wrong": ([*_WRONG, "Answer: Rome"], 1.0, "", 0),
    "duplicate": ([search("Ada works"), search(" ada  WORKS")], 0.0, "duplicate_search", 1),
    "duplicate in a turn": ([search("Ada", "Bob", "Ada")], 0.0, "duplicate_search", 0),
    "too many searches": ([search(*(f"word {n}" for n in range(9)))], 0.0, "too_many_calls", 0),
    "too many calls": (_MANY, 0.0, "too_many_calls", 1),
}


@pytest.mark.parametrize(("replies", "reward", "fault", "num_sent"), _CASES.values(), ids=_CASES)
async def test_a_program_gives_the_rows_that_the_agent_gives(
    tmp_path: Path, replies: list[str], reward: float, fault: str, num_sent: int
):
    """Nothing of a turn that breaks a rule is sent, and the policy is to blame for it."""
    [agent, of_program], sent = await _played(tmp_path, *replies, kinds=_BOTH, max_tokens=3000)
    assert _rows(agent) == _rows(of_program)
    [one], [other] = agent.trajectories, of_program.trajectories
    assert (one.reward, one.status, one.usable) == (reward, "ok", True)
    assert one.reward_parts == other.reward_parts
    assert {name: one.reward_parts[name] for name in FAULTS} == {name: float(name == fault) for name in FAULTS}
    assert not fault or one.reward_parts["exact"] == one.reward_parts["format"] == one.reward_parts["cited"] == 0.0
    assert [m.content for m in one.messages] == [m.content for m in other.messages]
    assert sent == 2 * num_sent
    for reply, result in zip(replies, results(one), strict=False):
        assert _WRONG.get(reply, "") in result


@pytest.mark.parametrize("answer", [(500, {}, b"ill"), (200, {}, b"[garbage"), "close"], ids=["500", "garbage", "gone"])
async def test_a_server_that_fails_is_a_tool_error_in_both_and_never_reward_0(tmp_path: Path, answer: Answer):
    groups, _ = await _played(tmp_path, search("Ada"), kinds=_BOTH, answer=lambda body: answer)
    for group in groups:
        [played] = group.trajectories
        assert (played.status, played.reward, played.usable) == ("tool_error", None, False)
        assert "127.0.0.1" in played.error


async def test_a_conversation_without_room_is_truncated_in_both(tmp_path: Path):
    groups, _ = await _played(tmp_path, search("Bob lives"), "x" * 3000, kinds=_BOTH, max_model_len=2500)
    assert [t.status for group in groups for t in group.trajectories] == ["truncated"] * 2


async def test_a_program_that_is_not_finished_has_no_reward(tmp_path: Path):
    class _Short(ProgramAgent):
        max_turns = 2

    [group], _ = await _played(tmp_path, *(search(f"word {n}") for n in range(3)), kinds=[_Short])
    [played] = group.trajectories
    assert (len(played.turns), played.reward, played.usable) == (3, None, False)


def test_a_program_is_told_of_the_same_tools():
    schemas = [program.schema_of(each) for each in (program.Search, program.Read)]
    assert schemas == [Episode.search.schema, Episode.read.schema]


def test_a_program_needs_nothing_of_ours():
    source = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sys.modules, sep='\\n')"
    run = [sys.executable, "-c", source, str(FOLDER / "program.py")]
    loaded = {name.partition(".")[0] for name in subprocess.check_output(run, text=True, cwd="/").split()}
    assert not loaded & {"millrace", "rollouts", "storage", "examples", "flows", "trainers"} and "openai" in loaded


@pytest.mark.parametrize(
    ("services", "named"),
    [("", "must name retrieval servers"), ('search = ["http://a"]\n[refine]\nurls=["http://b"]\nmodel="m"', "refine")],
)
def test_what_a_program_cannot_do_is_said_before_anything_starts(tmp_path: Path, services: str, named: str):
    with pytest.raises(ValueError, match=named):
        ProgramAgent(write_folder(tmp_path, services=services)).tasks("train")


def test_the_world_s_program_is_the_world_s_agent(tmp_path: Path):
    write_world([str(tmp_path), "--entities", "100", "--questions", "60", "--held-out", "20", "--style", "notes"])
    (tmp_path / "services.toml").write_text('search = ["http://127.0.0.1:8765"]')
    agent, as_program = WorldAgent(str(tmp_path)), WorldProgram(str(tmp_path))
    task = agent.tasks("train")[0]
    assert as_program.tasks("train") == agent.tasks("train")
    assert as_program.demonstrations(20, 3) == agent.demonstrations(20, 3)
    command = as_program.command(task)
    assert command[-1] == task.prompt and command[command.index("--passages") + 1] == "1"
    assert command.count("--tool") == 1
    ours, other = (load_run_file(FOLDER / f"{name}.toml") for name in ("search_agent", "search_agent_program"))
    assert issubclass(load_object(other.workflow), WorldProgram)
    assert WorldProgram.max_turns == ours.rollout.max_tool_turns
    same = ["engine", "warmup", "train", "sampling", "max_staleness"]
    same += ["steps", "batch_size", "n_samples", "learning_rate"]
    assert [getattr(other, name) for name in same] == [getattr(ours, name) for name in same]
