"""Agents written for OpenAI's client become attempts: in the worker, as programs, and through an agent framework."""

from __future__ import annotations

import asyncio
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
from rollouts.production.attempts import Player
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, WrongWorkflow, workflow_context
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.codec import decode_shard, encode_shard
from tests.builders import a_config, provenance
from tests.unit.rollouts.scripted_text import an_engine

TASK = Task(id="17*3", prompt="What is 17*3?", answer="51")


def play(
    workflow: AgentWorkflow,
    tokens: ChatTokens,
    engine: Engine,
    *,
    n_samples: int = 2,
    attempt_timeout: float = 60.0,
    max_model_len: int = 4096,
    afterwards: Callable[[], Awaitable[None]] | None = None,
) -> RolloutGroup:
    """One group of attempts, played as the worker plays it; `afterwards` runs while its server still listens."""

    async def inside() -> RolloutGroup:
        async with RewardPool(num_processes=1, timeout=10.0) as rewards:
            player = Player(
                workflow=workflow,
                engine=engine,
                tokens=tokens,
                rewards=rewards,
                config=a_config(attempt_timeout=attempt_timeout, max_model_len=max_model_len),
                tool_parser=ToolParser("hermes", tokens.tokenizer),
            )
            try:
                group = await player.group(
                    TASK,
                    group_id="0.17*3",
                    position=0,
                    epoch=0,
                    n_samples=n_samples,
                    sampling=Sampling(max_tokens=128),
                    is_eval=False,
                )
                if afterwards is not None:
                    await afterwards()
                return group
            finally:
                await close_agent_endpoint()

    return asyncio.run(inside())


class Asking(AgentWorkflow):
    """Asks once; the reward is the attempt's number."""

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Any:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await self.use(client, task)

    async def use(self, client: AsyncOpenAI, task: Task) -> Any:
        await self.ask(client, task)
        return workflow_context().attempt

    async def ask(self, client: AsyncOpenAI, task: Task) -> str | None:
        messages: Any = [{"role": "user", "content": task.prompt}]
        return (await client.chat.completions.create(model="any", messages=messages)).choices[0].message.content


def test_an_unmodified_client_yields_trainable_rows(text_tokens: ChatTokens):
    group = play(Asking(), text_tokens, an_engine(text_tokens, "51"), n_samples=3)
    assert group.accepted
    assert [(t.status, t.reward) for t in group.usable] == [("ok", 0.0), ("ok", 1.0), ("ok", 2.0)]
    shard = encode_shard([group], provenance=provenance(), sampling=Sampling())
    rows = decode_shard(shard, name="s0").to_pylist()
    prompt = text_tokens.prompt(group.trajectories[0].messages[:1])
    assert len(rows) == 3
    for row in rows:
        assert row["input_ids"] == [*prompt, *text_tokens.tokenizer("51")["input_ids"], text_tokens.end_id]
        assert row["loss_mask"] == [False] * len(prompt) + [True] * 3


class Posting(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> None:
        correct = await self.ask(client, task) == task.answer
        await client.post("/sessions/reward", body={"reward": correct, "parts": {"sum": 1.5}}, cast_to=object)


def test_a_reward_may_be_posted(text_tokens: ChatTokens):
    [one, _] = play(Posting(), text_tokens, an_engine(text_tokens, "51")).usable
    assert (one.reward, one.reward_parts) == (1.0, {"sum": 1.5})


class Silent(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> None:
        await self.ask(client, task)


class Broken(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> None:
        raise KeyError("settings")


class Infinite(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> float:
        return float("inf")


class Contradictory(Posting):
    async def use(self, client: AsyncOpenAI, task: Task) -> Any:
        await super().use(client, task)
        return 0.5


class NotApplicable(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> Score:
        await self.ask(client, task)
        return Score(reward=None)


@pytest.mark.parametrize(
    ("agent", "status", "error"),
    [
        (Silent, "env_error", "ended without a reward: return one from run_agent, or post one to"),
        (Broken, "env_error", "KeyError: 'settings'"),
        (Infinite, "env_error", "finite"),
        (Contradictory, "env_error", "reward is 1.0 already"),
        (NotApplicable, "ok", ""),
    ],
)
def test_an_attempt_without_one_reward_enters_no_mean(
    text_tokens: ChatTokens, agent: type[AgentWorkflow], status: str, error: str
):
    group = play(agent(), text_tokens, an_engine(text_tokens, "51"))
    assert not group.usable and not group.accepted
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == (status, None)
        assert error in trajectory.error


class Wordy(Asking):
    async def use(self, client: AsyncOpenAI, task: Task) -> str:
        return "very good"


def test_a_return_value_that_is_no_reward_is_a_mistake_in_the_workflow(text_tokens: ChatTokens):
    with pytest.raises(WrongWorkflow, match="Wordy.run_agent returned str; return a Score, a number, or None"):
        play(Wordy(), text_tokens, an_engine(text_tokens))


class Conversing(Asking):
    """Goes on until something stops it."""

    async def use(self, client: AsyncOpenAI, task: Task) -> None:
        messages: Any = [{"role": "user", "content": task.prompt}]
        while True:
            completion = await client.chat.completions.create(model="any", messages=messages)
            messages += [completion.choices[0].message, {"role": "user", "content": "And then?"}]


def test_an_agent_that_gives_up_on_a_full_context_was_truncated(text_tokens: ChatTokens):
    group = play(Conversing(), text_tokens, an_engine(text_tokens, *["51"] * 9), max_model_len=64)
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward) == ("truncated", None)
        assert "of 64 are used" in trajectory.error and len(trajectory.turns) == 4


class Failing(ScriptedEngine):
    async def generate(self, *arguments: Any, **keywords: Any) -> Any:
        raise EngineError("out of memory")


def test_an_agent_that_gives_up_on_a_dead_engine_is_not_to_blame(text_tokens: ChatTokens):
    for trajectory in play(Asking(), text_tokens, an_engine(text_tokens, engine=Failing)).trajectories:
        assert (trajectory.status, trajectory.error) == ("engine_error", "out of memory")


class Hanging(Asking):
    """Never ends, and keeps where it was."""

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Any:
        self.base_url, self.api_key = base_url, api_key
        return await super().run_agent(task, base_url=base_url, api_key=api_key)

    async def use(self, client: AsyncOpenAI, task: Task) -> Any:
        await client.models.list()
        await asyncio.Event().wait()


def test_a_session_that_never_ends_times_out_and_its_key_with_it(text_tokens: ChatTokens):
    async def use_the_key() -> None:
        async with AsyncOpenAI(base_url=workflow.base_url, api_key=workflow.api_key, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()

    workflow = Hanging()
    group = play(
        workflow, text_tokens, an_engine(text_tokens), n_samples=1, attempt_timeout=1.0, afterwards=use_the_key
    )
    [hung] = group.trajectories
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


def test_what_a_program_prints_may_be_scored(text_tokens: ChatTokens):
    group = play(Printing(ASKS_TWICE + "print(said)", TASK.prompt), text_tokens, an_engine(text_tokens, "50", "51"))
    assert [(t.status, t.reward) for t in group.usable] == [("ok", 1.0)] * 2


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


@pytest.mark.parametrize(("then", "status"), [("child.wait()", "timeout"), ("print('51')", "ok")])
def test_nothing_of_a_program_outlives_its_attempt(text_tokens: ChatTokens, tmp_path: Path, then: str, status: str):
    """The lock is held by the program and its child, and free when both are gone."""
    program = Printing(HOLDS_A_LOCK + then, tmp_path / "lock")
    [one] = play(program, text_tokens, an_engine(text_tokens), n_samples=1, attempt_timeout=5.0).trajectories
    assert one.status == status
    with open(tmp_path / "lock") as lock:
        assert lock.read() == "held"
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for them; the test's own timeout would end it


CALL = 'Let me see. <tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 3}}\n</tool_call>'


class WithAgentsSdk(AgentWorkflow):
    """OpenAI's agent framework, with a tool, as its documentation writes it."""

    def __init__(self, model: str, *, streamed: bool) -> None:
        super().__init__()
        self._model = model
        self._streamed = streamed

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
            if self._streamed:
                result = sdk.Runner.run_streamed(agent, task.prompt)
                async for _ in result.stream_events():
                    pass
            else:
                result = await sdk.Runner.run(agent, task.prompt)
        return float(result.final_output == task.answer)


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_a_framework_trains_unchanged(text_tokens: ChatTokens, model: str, streamed: bool):
    pytest.importorskip("agents")
    group = play(WithAgentsSdk(model, streamed=streamed), text_tokens, an_engine(text_tokens, CALL, "51"))
    assert [(t.status, t.reward, t.error) for t in group.trajectories] == [("ok", 1.0, "")] * 2
    for trajectory in group.usable:
        assert [turn.sequence_idx for turn in trajectory.turns] == [0, 0]  # its history is ours, token by token
        assert [(message.role, message.content) for message in trajectory.messages] == [
            ("system", "Use your tools."),
            ("user", "What is 17*3?"),
            ("assistant", CALL),
            ("tool", "51"),
            ("assistant", "51"),
        ]
        [call] = trajectory.turns[0].tool_calls
        assert (call.name, call.result) == ("multiply", "51")
