"""Agents written for OpenAI's client become attempts: in the worker, as programs, and through an agent framework."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ToolParser
from rollouts.endpoint.agent_endpoint import close_agent_endpoint
from rollouts.engines.engine import Engine, EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.environments import agents
from rollouts.environments.agents import AgentWorkflow, CommandWorkflow
from rollouts.workflow import Score, WrongWorkflow, workflow_context
from storage.records import RolloutGroup, Sampling, Task
from tests.builders import provenance
from tests.shard_files import decode_shard, encode_shard
from tests.unit.rollouts.scripted_text import an_engine, play_group

pytestmark = pytest.mark.server
TASK = Task(id="17*3", prompt="What is 17*3?", answer="51")


def play(
    workflow: AgentWorkflow,
    tokens: ChatTokens,
    engine: Engine,
    *,
    afterwards: Callable[[], Awaitable[None]] | None = None,
    **options: Any,
) -> RolloutGroup:
    """One group of attempts; `afterwards` runs while its server still listens."""
    parser = ToolParser("hermes", tokens.tokenizer)
    options = {"n_samples": 2, "attempt_timeout": 60.0, "tool_parser": parser, **options}

    async def inside() -> RolloutGroup:
        try:
            group = await play_group(workflow, tokens, engine, TASK, **options)
            if afterwards is not None:
                await afterwards()
            return group
        finally:
            await close_agent_endpoint()

    return asyncio.run(inside())


class Agent(AgentWorkflow):
    """Does with a client what the test says; its address and key can be read afterwards."""

    def __init__(self, use: Callable[[AsyncOpenAI], Awaitable[Any]]) -> None:
        super().__init__()
        self._use = use

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Any:
        self.address: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "max_retries": 0}
        async with AsyncOpenAI(**self.address) as client:
            return await self._use(client)


async def _ask(client: AsyncOpenAI, *history: Any) -> Any:
    messages: Any = [{"role": "user", "content": TASK.prompt}, *history]
    return (await client.chat.completions.create(model="any", messages=messages)).choices[0].message


async def _ask_once(client: AsyncOpenAI) -> int:
    await _ask(client)
    return workflow_context().attempt


async def _post(client: AsyncOpenAI) -> None:
    correct = (await _ask(client)).content == TASK.answer
    await client.post("/sessions/reward", body={"reward": correct, "parts": {"sum": 1.5}}, cast_to=object)


def test_an_unmodified_client_yields_trainable_rows(text_tokens: ChatTokens):
    group = play(Agent(_ask_once), text_tokens, an_engine(text_tokens, "51"), n_samples=3)
    assert group.accepted
    assert [(t.status, t.reward) for t in group.usable] == [("ok", 0.0), ("ok", 1.0), ("ok", 2.0)]
    shard = encode_shard([group], provenance=provenance(), sampling=Sampling())
    rows = decode_shard(shard, name="s0").to_pylist()
    prompt = text_tokens.prompt(group.trajectories[0].messages[:1])
    assert len(rows) == 3
    for row in rows:
        assert row["input_ids"] == [*prompt, *text_tokens.tokenizer("51")["input_ids"], text_tokens.end_id]
        assert row["loss_mask"] == [False] * len(prompt) + [True] * 3


def test_a_reward_may_be_posted_and_what_is_returned_must_be_one(text_tokens: ChatTokens):
    [one, _] = play(Agent(_post), text_tokens, an_engine(text_tokens, "51")).usable
    assert (one.reward, one.reward_parts) == (1.0, {"sum": 1.5})
    with pytest.raises(WrongWorkflow, match="Agent.run_agent returned str; one call plays one attempt"):
        play(Agent(_returns("very good")), text_tokens, an_engine(text_tokens, "51"))


def _returns(returned: Any) -> Callable[[AsyncOpenAI], Awaitable[Any]]:
    async def use(client: AsyncOpenAI) -> Any:
        await _ask(client)
        return returned

    return use


async def _broken(client: AsyncOpenAI) -> None:
    raise KeyError("settings")


async def _contradictory(client: AsyncOpenAI) -> float:
    await _post(client)
    return 0.5


async def _endless(client: AsyncOpenAI) -> None:
    history: list[Any] = []
    while True:
        history += [await _ask(client, *history), {"role": "user", "content": "And then?"}]


@pytest.mark.parametrize(
    ("agent", "status", "error"),
    [
        (_returns(None), "env_error", "ended without a reward: return one from run_agent, or post one to"),
        (_broken, "env_error", "KeyError: 'settings'"),
        (_returns(float("inf")), "ok", ""),
        (_contradictory, "env_error", "reward is 1.0 already"),
        (_returns(Score(reward=None)), "ok", ""),
    ],
)
def test_an_attempt_without_one_reward_enters_no_mean(text_tokens: ChatTokens, agent: Any, status: str, error: str):
    group = play(Agent(agent), text_tokens, an_engine(text_tokens, *["51"] * 9), max_model_len=64)
    assert not group.usable and not group.accepted
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == (status, None)
        assert error in trajectory.error


@pytest.mark.parametrize(("rule", "reward"), [("score", 0.0), ("zero", 0.0), ("exclude", None)])
def test_an_agent_that_gives_up_on_a_full_context_is_worth_what_the_run_file_says(
    text_tokens: ChatTokens, rule: str, reward: float | None
):
    async def scores_itself(client: AsyncOpenAI) -> float:
        with contextlib.suppress(openai.BadRequestError):
            await _endless(client)
        return -1.0

    for agent, worth in ((_endless, reward), (scores_itself, -1.0)):
        engine = an_engine(text_tokens, *["51"] * 9)
        for trajectory in play(Agent(agent), text_tokens, engine, max_model_len=64, on_out_of_room=rule).trajectories:
            assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("truncated", worth, 4)
            assert trajectory.out_of_room and ("of 64 are used" in trajectory.error) == (agent is _endless)


def test_an_agent_that_gives_up_on_a_dead_engine_is_not_to_blame(text_tokens: ChatTokens):
    class Failing(ScriptedEngine):
        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            raise EngineError("out of memory")

    for trajectory in play(Agent(_ask_once), text_tokens, an_engine(text_tokens, engine=Failing)).trajectories:
        assert (trajectory.status, trajectory.error) == ("engine_error", "out of memory")


async def _hang(client: AsyncOpenAI) -> None:
    await client.models.list()
    await asyncio.Event().wait()


def test_a_session_that_never_ends_times_out_and_its_key_with_it(text_tokens: ChatTokens):
    async def use_the_key() -> None:
        async with AsyncOpenAI(**agent.address) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    agent = Agent(_hang)
    options: dict[str, Any] = {"n_samples": 1, "attempt_timeout": 1.0, "afterwards": use_the_key}
    [hung] = play(agent, text_tokens, an_engine(text_tokens), **options).trajectories
    assert (hung.status, hung.reward) == ("timeout", None)
    assert hung.error.startswith("attempt took more than 1 s\n  at tests/unit/rollouts/environments/test_agents.py:")


ASKS_TWICE = """
import sys
from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    stream = client.chat.completions.create(model="any", messages=messages, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
"""
POSTS = 'client.post("/sessions/reward", body={"reward": float(said == sys.argv[2])}, cast_to=object)'


class Program(CommandWorkflow):
    """A Python program, given as text."""

    def __init__(self, source: str, *arguments: object) -> None:
        super().__init__()
        self._command = [sys.executable, "-c", source, *map(str, arguments)]

    def command(self, task: Task) -> Sequence[str]:
        return self._command


def test_a_program_trains_and_posts_its_own_reward(text_tokens: ChatTokens):
    program = Program(ASKS_TWICE + POSTS, TASK.prompt, TASK.answer)
    group = play(program, text_tokens, an_engine(text_tokens, "50", "51"))
    for trajectory in group.usable:
        assert [turn.sequence_idx for turn in trajectory.turns] == [0, 0]
        assert [message.content for message in trajectory.messages] == ["What is 17*3?", "50", "Sure?", "51"]
    assert [(t.status, t.reward) for t in group.usable] == [("ok", 1.0)] * 2


class Printing(Program):
    async def score(self, task: Task, output: str) -> Score:
        return Score(reward=float(output.strip() == task.answer))


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise SystemExit('no such page')", "ended with exit status 1: no such page"),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit status -9: no message"),
        ("def ask():\n  return {}['answr']\nask()", "exit status 1: KeyError: 'answr'\n  at <string>:2 in ask\n"),
        ("print('51')", "ended without a reward"),
        ("while True: print('x' * 10_000)", "wrote more than 100000 bytes"),
    ],
)
def test_a_program_that_fails_is_a_fault_of_the_environment(
    text_tokens: ChatTokens, monkeypatch: pytest.MonkeyPatch, source: str, error: str
):
    monkeypatch.setattr(agents, "_MOST_OUTPUT", 100_000)
    [one, _] = play(Program(source), text_tokens, an_engine(text_tokens)).trajectories
    assert (one.status, one.reward) == ("env_error", None)
    assert error in one.error


HOLDS_A_LOCK = """
import fcntl, subprocess, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
child = subprocess.Popen(["sleep", "1000"], pass_fds=[lock.fileno()])
lock.write("held")
lock.flush()
"""


@pytest.mark.parametrize(
    ("then", "status", "reward"), [("child.wait()", "timeout", None), ("print('51')", "ok", 1.0), ("", "ok", 0.0)]
)
def test_what_a_program_prints_is_scored_and_nothing_of_it_outlives_its_attempt(
    text_tokens: ChatTokens, tmp_path: Path, then: str, status: str, reward: float | None
):
    """The lock is held by the program and its child, and free when both are gone."""
    program = Printing(HOLDS_A_LOCK + then, tmp_path / "lock")
    [one] = play(program, text_tokens, an_engine(text_tokens), n_samples=1, attempt_timeout=5.0).trajectories
    assert (one.status, one.reward) == (status, reward)
    with open(tmp_path / "lock") as lock:
        assert lock.read() == "held"
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for them; the test's own timeout would end it


CALL = 'Let me see. <tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 3}}\n</tool_call>'


class WithAgentsSdk(AgentWorkflow):
    """OpenAI's agent framework, with a tool, as its documentation writes it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> float:
        sdk = pytest.importorskip("agents")
        sdk.set_tracing_disabled(True)

        @sdk.function_tool
        def multiply(a: int, b: int) -> int:
            """Multiply two numbers."""
            return a * b

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            model = getattr(sdk, self._model)(model="any", openai_client=client)
            agent = sdk.Agent(name="calculator", instructions="Use your tools.", tools=[multiply], model=model)
            result = sdk.Runner.run_streamed(agent, task.prompt)
            async for _ in result.stream_events():
                pass
        return float(result.final_output == task.answer)


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_of_a_framework_trains_unchanged(text_tokens: ChatTokens, model: str):
    pytest.importorskip("agents")
    group = play(WithAgentsSdk(model), text_tokens, an_engine(text_tokens, CALL, "51"))
    assert [(t.status, t.reward, t.error) for t in group.trajectories] == [("ok", 1.0, "")] * 2
    for trajectory in group.usable:
        assert [turn.sequence_idx for turn in trajectory.turns] == [0, 0]  # its history is ours, token by token
        assert [(message.role, message.content) for message in trajectory.messages] == [
            *(("system", "Use your tools."), ("user", "What is 17*3?"), ("assistant", CALL)),
            *(("tool", "51"), ("assistant", "51")),
        ]
        [call] = trajectory.turns[0].tool_calls
        assert (call.name, call.result) == ("multiply", "51")
