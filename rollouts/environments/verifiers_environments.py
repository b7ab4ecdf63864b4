"""Environments written for the `verifiers` package (its v1 API), played unchanged.

    workflow = "millrace:VerifiersWorkflow"
    dataset = "gsm8k-v1"           # the id of a taskset, or a TOML file with verifiers' `[env]` settings

    task ─▶ Env.run_episode ─▶ harness ─▶ verifiers' interception ─▶ Session ─▶ Chat ─▶ engine
                 └─▶ its rewards and metrics ─▶ Score

In: the name of a taskset. Out: a task per row, and an episode per attempt. The reward is verifiers' weighted sum, the
parts are its rewards and metrics (so set weights there, not in the run file's `[reward]`). The environment controls
tasks, rewards, tools, stops and the flow of an episode; this module records the tokens.

Two defaults differ from verifiers' own, which suit remote sandboxes. A seat runs on this machine (`runtime`). A seat
without a harness gets verifiers' chat loop inside the worker: the program of its `null` harness, without a process for
every attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import sys
import tomllib
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import DefaultAsyncHttpxClient
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.graph import PendingTurn
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception import Interception, Slot
from verifiers.v1.session import RolloutSession

from rollouts.chat.chat import Chat
from rollouts.endpoint.agent_endpoint import Session
from rollouts.endpoint.openai_wire import ChatRequest, Refused, chat_completion, read_request
from rollouts.workflow import Score, Workflow
from settings.errors import InvalidInput, failure_text_of_output
from storage.records import Task

__all__ = ["ChatLoop", "VerifiersWorkflow"]  # verifiers finds the harness of a module in this list

MOST_TASKS = 10_000
"""Number of tasks from an endless taskset."""
_HARNESS_ID = "millrace_chat_loop"
# With a client of this type, verifiers takes whole replies and does the streaming. The address is never used.
_POLICY = vf.TrainClientConfig(base_url="http://policy.invalid/v1", api_key_var="MILLRACE_NO_KEY")
_LIMITS = {"max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens"}


class EpisodeFailed(Exception):
    """An episode of the environment ended with an error; the message is verifiers' own."""


class VerifiersWorkflow(Workflow):
    """`dataset` names the taskset, or a TOML file with the keys of verifiers' `[env]` table."""

    def __init__(self, dataset: str | None = None) -> None:
        """Raises `InvalidInput` if `dataset` is missing, and verifiers' own errors for wrong settings."""
        super().__init__(dataset)
        if not dataset:
            raise InvalidInput("dataset must be set: the id of a verifiers taskset, or a TOML file with its [env] keys")
        path = Path(dataset)
        settings = tomllib.loads(path.read_text()) if path.suffix == ".toml" else {"taskset": {"id": dataset}}
        self._env = vf.load_environment(_env_config(settings))
        self._tasks: dict[str, vf.Task] = {}
        self._serving: _Serving | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """The taskset's rows. If it has no `split` setting, `test` is every tenth row and `train` the rest."""
        config = self._env.config.taskset
        has_splits = "split" in type(config).model_fields
        taskset = vf.load_taskset(config.model_copy(update={"split": split})) if has_splits else self._env.taskset
        rows = list(taskset if taskset.bounded else itertools.islice(taskset, MOST_TASKS))
        if not has_splits:
            rows = [row for row in rows if split == ("test" if row.data.idx % 10 == 9 else "train")]
        named = {f"{split}-{row.data.id or row.data.idx}": row for row in rows}
        if len(named) < len(rows):
            raise InvalidInput(f"taskset {config.id!r} has {len(rows) - len(named)} rows with the id of another one")
        self._tasks |= named
        return [Task(id=name, prompt=row.data.prompt_text) for name, row in named.items()]

    async def run(self, task: Task, chat: Chat) -> Score:
        if self._serving is None or self._serving.task.done():
            self._serving = _Serving(self._env)
        interception = await asyncio.shield(self._serving.ready)
        session = Session(chat)
        trace_ids: list[str] = []

        def watch(trace: vf.Trace) -> None:
            trace_ids.append(trace.id)
            interception.attempts[trace.id] = session

        try:
            episode = await self._env.run_episode(
                self._tasks[task.id], vf.ModelContext(model="policy", client=_POLICY), on_trace=watch
            )
        finally:
            for trace_id in trace_ids:
                del interception.attempts[trace_id]
            await session.close()
        keeps_score = episode.ok and chat.out_of_room and chat.scores_out_of_room and bool(chat.turns)
        if session.fault is not None and not keeps_score:  # the environment saw only an HTTP status
            raise session.fault
        trace = _trained(episode)
        chat.max_turns_reached = trace.stop_condition in _LIMITS
        rewards = {name: reward.score if reward else None for name, reward in trace.rewards.items()}
        has_reward = any(reward is not None for reward in rewards.values())
        if session.fault is not None and not has_reward:
            raise session.fault
        return Score(reward=trace.reward if has_reward else None, parts={**trace.metrics, **rewards})

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.close()


class ChatLoop(NullHarness):
    """verifiers' chat program with its tools over MCP, run in this process. Its model calls go over HTTP as usual."""

    async def setup(self, runtime: vf.Runtime) -> None:
        return None

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, *arguments: Any, **keywords: Any
    ) -> vf.ProgramResult:
        in_process: Any = _InProcess(runtime)
        return await super().launch(ctx, trace, in_process, *arguments, **keywords)


class _InProcess:
    """The part of a runtime with which the null harness launches a chat program."""

    def __init__(self, runtime: vf.Runtime) -> None:
        self._folder = Path(getattr(runtime.info, "id", None) or ".")

    async def write(self, path: str, data: bytes) -> None:
        (self._folder / path).write_bytes(data)

    async def prepare_uv_script(self, script: str, env: dict[str, str], *, activate: bool = True) -> list[str]:
        assert script is CHAT_PROGRAM_SOURCE
        return []

    async def run_program(self, argv: list[str], env: dict[str, str]) -> vf.ProgramResult:
        program: dict[str, Any] = {"__name__": _HARNESS_ID}
        exec(_CHAT_PROGRAM, program)  # the library's own source, written to run as a script
        # The interception listens on the loopback, without TLS. Reading certificates would cost 20 ms per attempt.
        program["DefaultAsyncHttpxClient"] = lambda **_: DefaultAsyncHttpxClient(verify=False, trust_env=False)
        original, sys.argv = sys.argv, ["chat", *argv]
        try:
            try:
                arguments = program["parse_args"]()
            finally:
                sys.argv = original
            if arguments.initial_messages_file:
                arguments.initial_messages_file = str(self._folder / arguments.initial_messages_file)
            program["parse_args"] = lambda: arguments
            await program["main"]()
        except SystemExit as end:
            return vf.ProgramResult(end.code if isinstance(end.code, int) else 1, "", str(end.code))
        except Exception:  # noqa: BLE001 - verifiers makes an error of the traceback
            return vf.ProgramResult(1, "", traceback.format_exc())
        return vf.ProgramResult(0, "", "")


_CHAT_PROGRAM = compile(CHAT_PROGRAM_SOURCE, "<verifiers chat program>", "exec")


class _Serving:
    """The environment's own servers, started and stopped in one task, as MCP clients require."""

    def __init__(self, env: vf.Env) -> None:
        self._env = env
        self.ready: asyncio.Future[_PolicyInterception] = asyncio.get_running_loop().create_future()
        """Has the error if the servers failed to start."""
        self._stop = asyncio.Event()
        # An empty context: this task outlives the attempt that starts it.
        self.task = asyncio.create_task(self._serve(), context=contextvars.Context())

    async def close(self) -> None:
        self._stop.set()
        await self.task

    async def _serve(self) -> None:
        try:
            async with self._env.serving():
                assert self._env._interception is not None
                served = _PolicyInterception(self._env._interception)
                self._env._interception = served  # its agents read this attribute; there is no public one
                self.ready.set_result(served)
                await self._stop.wait()
        except Exception as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)


class _PolicyInterception(Interception):
    """verifiers' interception; for a seat that the policy plays, the attempt takes the place of the model."""

    def __init__(self, inner: Interception) -> None:
        super().__init__()
        self._inner = inner
        self.attempts: dict[str, Session] = {}
        """Trace id → attempt."""

    async def start(self) -> None:
        return None

    @contextlib.asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncIterator[Slot]:
        async with self._inner.acquire(session) as slot:
            if session.ctx.client == _POLICY:
                agent = session.trace.agent
                if not agent.trainable:
                    raise InvalidInput(
                        f"seat {agent.name!r} is not trained but would be played by the policy: "
                        f"give it a model and a client of its own ({agent.name}.model, {agent.name}.client)"
                    )
                session.client = _PolicyClient(self.attempts[session.trace.id])
            yield slot


class _PolicyClient(vf.Client):
    """Sends a rollout's model calls to its attempt's conversation."""

    def __init__(self, attempt: Session) -> None:
        self._attempt = attempt

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        if not isinstance(dialect, ChatDialect):
            raise vf.ProviderError(f"the policy speaks chat completions, not {type(dialect).__name__}", status_code=400)
        prompt = dialect.parse_request(body).messages if turn is None else turn.prompt
        messages = [message_to_wire(message) for message in prompt]
        try:
            request = read_request(ChatRequest, {**body, "messages": messages}, self._attempt.chat.sampling)
            reply = await self._attempt.reply_to(request)
        except Refused as error:
            raise vf.ProviderError(str(error), status_code=error.status) from error
        raw = chat_completion(reply, model="policy").model_dump(mode="json", exclude_unset=True)
        response: vf.Response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def _env_config(settings: dict[str, Any]) -> vf.EnvConfig:
    """verifiers' settings, with this machine and the chat loop as the defaults of every seat."""
    sys.modules.setdefault(_HARNESS_ID, sys.modules[__name__])  # verifiers finds a harness as a top-level module
    taskset_id = settings.get("taskset", {}).get("id", "")
    declared = vf.env_config_type(taskset_id, settings.get("id", ""))
    own_harness = vf.default_harness_id(taskset_id) == taskset_id
    for name, field in declared.model_fields.items():
        seat = field.default
        if not isinstance(seat, vf.AgentConfig):
            continue
        seat_settings = settings.setdefault(name, {})
        if "runtime" not in seat.model_fields_set:
            seat_settings.setdefault("runtime", {"type": "subprocess"})
        if seat.harness is None and not own_harness:
            seat_settings.setdefault("harness", {"id": _HARNESS_ID})
    return vf.resolve_env_config(settings)


def _trained(episode: vf.Episode) -> vf.Trace:
    """The one trace of an episode that trains the policy. Raises `EpisodeFailed`."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
    if not episode.ok:
        message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"
        traceback_text = next((error.traceback for error in errors if error.traceback), "")
        raise EpisodeFailed(failure_text_of_output(traceback_text, message) or message)
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        raise EpisodeFailed(f"one trained seat per episode makes one attempt with one reward; here are: {names}")
    return trained[0]
