"""Environments written for `verifiers` train unchanged: its tasks, rewards, turns and tools; our tokens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="the verifiers package is not installed")

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.environments.verifiers_environments import VerifiersWorkflow
from storage.records import RolloutGroup, Task, Trajectory
from tests.unit.rollouts.scripted_text import an_engine, play_group, served

pytestmark = pytest.mark.server
_TASKSETS = Path(__file__).parent / "verifiers_tasksets"


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasksets can be imported by name here and in the processes of their tool servers."""
    monkeypatch.syspath_prepend(str(_TASKSETS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_TASKSETS), os.environ.get("PYTHONPATH", "")]))


def _group(workflow: VerifiersWorkflow, task: Task, tokens: ChatTokens, engine: Any, **options: Any) -> RolloutGroup:
    async def play() -> RolloutGroup:
        try:
            return await play_group(workflow, tokens, engine, task, **{"attempt_timeout": 60.0, **options})
        finally:
            await workflow.close()

    return asyncio.run(play())


def _attempt(workflow: VerifiersWorkflow, task: Task, *arguments: Any, **options: Any) -> Trajectory:
    [trajectory] = _group(workflow, task, *arguments, **options).trajectories
    return trajectory


def _said(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in trajectory.messages]


def test_a_taskset_becomes_tasks_and_a_single_turn_is_recorded_and_scored_by_verifiers(text_tokens: ChatTokens):
    workflow = VerifiersWorkflow("sums_taskset")
    assert [task.id for task in workflow.tasks("test")] == ["test-9", "test-19"], "every tenth is held out"
    train = workflow.tasks("train")
    assert len(train) == 18 and train[0] == Task(id="train-0", prompt="0+1=")
    task = train[5]
    engine = ScriptedEngine(lambda *_: [*text_tokens.tokenizer("6")["input_ids"], text_tokens.end_id])
    group = _group(workflow, task, text_tokens, engine, n_samples=4)
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.error) == ("ok", "")
        assert _said(trajectory) == [("system", "add"), ("user", "5+1="), ("assistant", "6")]
        assert trajectory.reward == 2.5  # weighted by verifiers
        assert trajectory.reward_parts == {"correct": 1.0, "brief": 1.0, "length": 1.0}
        [turn] = trajectory.turns
        assert turn.sampled_ids == [*text_tokens.tokenizer("6")["input_ids"], text_tokens.end_id]
        assert len(turn.logprobs) == len(turn.weight_versions) == 2


def test_an_exchange_of_several_turns_is_one_sequence(text_tokens: ChatTokens):
    workflow = VerifiersWorkflow("guessing_taskset")
    task = workflow.tasks("train")[6]
    trajectory = _attempt(workflow, task, text_tokens, an_engine(text_tokens, "4", "8", "6"))
    assert (trajectory.status, trajectory.error) == ("ok", "")
    assert _said(trajectory) == [
        *(("user", "0-9?"), ("assistant", "4"), ("user", "higher"), ("assistant", "8")),
        *(("user", "lower"), ("assistant", "6")),
    ]
    assert [turn.sequence_idx for turn in trajectory.turns] == [0, 0, 0]
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"found": 1.0, "guesses": 3.0})
    lost = _attempt(workflow, task, text_tokens, an_engine(text_tokens, "1", "1", "1", "1"))
    assert (lost.status, lost.error, len(lost.turns)) == ("max_turns", "", 4), "verifiers' own limit of turns"
    assert (lost.reward, lost.usable) == (0.0, True)


def test_its_tools_are_offered_to_the_policy_and_executed(text_tokens: ChatTokens):
    workflow = VerifiersWorkflow("lookup_taskset")
    engine = an_engine(text_tokens, '[lookup_price {"name": "tea"}]', "3")
    trajectory = _attempt(workflow, workflow.tasks("train")[0], text_tokens, engine)
    assert (trajectory.status, trajectory.error) == ("ok", "")
    assert _said(trajectory) == [
        *(("user", "price of tea?"), ("assistant", '[lookup_price {"name": "tea"}]'), ("tool", "3")),
        ("assistant", "3"),
    ]
    [call] = trajectory.turns[0].tool_calls
    assert (call.name, call.arguments, call.result) == ("lookup_price", '{"name": "tea"}', "3")
    assert [turn.sequence_idx for turn in trajectory.turns] == [0, 0]
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"correct": 1.0})


def test_a_fault_in_the_environment_is_never_reward_zero(text_tokens: ChatTokens):
    workflow = VerifiersWorkflow("sums_taskset")
    for task, words in zip(workflow.tasks("test"), ["in setup", "in reward"], strict=True):
        trajectory = _attempt(workflow, task, text_tokens, an_engine(text_tokens, "6"))
        assert (trajectory.status, trajectory.reward) == ("env_error", None)
        assert trajectory.error.startswith("EpisodeFailed: TaskError") and words in trajectory.error


class _Faulty(ScriptedEngine):
    """Out of memory at once, or stuck."""

    async def generate(self, *arguments: Any, **keywords: Any) -> Any:
        if self.is_stuck:  # type: ignore[attr-defined]
            await asyncio.Event().wait()
        raise EngineError("out of memory")


def test_faults_of_the_engine_the_length_limit_and_the_deadline_keep_their_names(text_tokens: ChatTokens):
    workflow = VerifiersWorkflow("sums_taskset")
    task = workflow.tasks("train")[5]
    engine = an_engine(text_tokens, engine=_Faulty)
    engine.is_stuck = False
    failed = _attempt(workflow, task, text_tokens, engine)
    assert (failed.status, failed.reward, failed.error) == ("engine_error", None, "out of memory")
    full = _attempt(workflow, task, text_tokens, an_engine(text_tokens, "6"), max_model_len=8)
    assert (full.status, full.reward) == ("truncated", None)
    engine.is_stuck = True
    stuck = _attempt(workflow, task, text_tokens, engine, attempt_timeout=2.0)
    assert (stuck.status, stuck.reward, stuck.turns) == ("timeout", None, [])


def _debate(tmp_path: Path, text: str) -> VerifiersWorkflow:
    settings = tmp_path / "debate.toml"
    settings.write_text(text + '[taskset]\nid = "debate_taskset"\n')
    return VerifiersWorkflow(str(settings))


async def test_a_seat_with_a_model_of_its_own_is_not_recorded(
    text_tokens: ChatTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with served(text_tokens, "yes") as judge:
        monkeypatch.setenv("JUDGE_KEY", judge.session.key)
        client = f'client = {{ type = "eval", base_url = "{judge.endpoint.base_url}", api_key_var = "JUDGE_KEY" }}'
        workflow = _debate(tmp_path, f'[judge]\nmodel = "big"\n{client}\n')
        engine = an_engine(text_tokens, "it is")
        [trajectory] = (await play_group(workflow, text_tokens, engine, workflow.tasks("train")[0])).trajectories
        await workflow.close()
    assert (trajectory.status, trajectory.error) == ("ok", "")
    assert _said(trajectory) == [("user", "1+1=2?"), ("assistant", "it is")]
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"convincing": 1.0})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("", "seat 'judge' is not trained but would be played by the policy"),
        ("judge_is_trained = true\n", "one reward; here are: speaker, judge\n"),
    ],
)
def test_a_second_seat_without_a_model_of_its_own_is_refused(
    text_tokens: ChatTokens, tmp_path: Path, setting: str, words: str
):
    workflow = _debate(tmp_path, setting)
    trajectory = _attempt(workflow, workflow.tasks("train")[0], text_tokens, an_engine(text_tokens, "it is", "yes"))
    assert (trajectory.status, trajectory.reward) == ("env_error", None)
    assert words in trajectory.error


def test_a_missing_taskset_is_named():
    with pytest.raises(ValueError, match="dataset must be set: the id of a verifiers taskset"):
        VerifiersWorkflow(None)
    with pytest.raises(ModuleNotFoundError, match="'no-such-thing' not found"):
        VerifiersWorkflow("no-such-thing")
