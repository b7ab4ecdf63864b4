"""Workflows for agents that speak to an OpenAI client instead of a `Chat`; the agent's own code does not change.

    AgentWorkflow:    run_agent(task, base_url=…, api_key=…)   async Python in the worker
    CommandWorkflow:  command(task)                            any program, OPENAI_BASE_URL and OPENAI_API_KEY set
                      preload = ["openai"]                     … in Python, forked with this imported

In: a task. Out: a `Score`: returned by `run_agent`, computed from the program's output, or posted by the agent itself
to `<base_url>/sessions/reward`. An agent that ends without one has failed, and its attempt enters no mean.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import ClassVar

from rollouts.chat.chat import Chat
from rollouts.endpoint.agent_endpoint import PostedReward, agent_endpoint
from rollouts.environments.programs import Launcher, Program, kill_group, start_program
from rollouts.workflow import Score, Workflow, WrongWorkflow
from settings.errors import failure_text_of_output
from storage.records import Task

_MOST_OUTPUT = 2**24
"""Bytes of standard output of one program; more is a fault of the program."""
_KEPT_ERRORS = 2**14
"""Bytes of standard error kept for the message, from its end: the traceback of a client's error is long."""


class AgentFailed(Exception):
    """The agent ended without a reward, or its program failed; the message carries the program's own words."""


class AgentWorkflow(Workflow):
    """An agent in Python: subclass this and write `run_agent` with `openai.AsyncOpenAI`, or anything built on it."""

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Score | float | None:
        """Solve the task with a client of this address and key; null where the reward is posted.

        Everything asked with the key becomes turns of this attempt. Leave temperature and the like to the run file.
        """
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Score:
        """Open a session for the attempt, let the agent play, and take its reward."""
        endpoint = agent_endpoint()
        async with endpoint.session(chat) as session:
            try:
                returned = await self.run_agent(task, base_url=endpoint.base_url, api_key=session.key)
            except Exception as error:
                if session.fault is not None:  # the agent gave up on it; it knows the reason by its HTTP status only
                    raise session.fault from error
                raise
            if returned is not None:
                session.post_reward(_as_score(returned, name=type(self).__name__))
            if session.reward is None:
                raise session.fault or AgentFailed(
                    "the agent ended without a reward: return one from run_agent, or post one to "
                    "<base_url>/sessions/reward"
                )
            return session.reward


class CommandWorkflow(AgentWorkflow):
    """An agent that is a program: write `command`, and `score` unless the program posts its reward itself."""

    preload: ClassVar[Sequence[str]] = ()
    """Modules that programs are forked with, where `command` is `[sys.executable, "script.py", …]`: what would take
    each attempt a second to import takes milliseconds. Only what starts no threads and draws no random numbers when it
    is imported; without any, each program is a process from scratch."""
    _launcher: Launcher | None = None

    def command(self, task: Task) -> Sequence[str]:
        """Program and arguments; nothing is expanded by a shell."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let what programs are forked from end."""
        if self._launcher is not None:
            self._launcher.close()

    async def score(self, task: Task, output: str) -> Score | None:
        """Judge what the program wrote to its standard output; null, the default, where it posts its reward."""
        return None

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Score | None:
        """Run the program in a process group of its own, which does not outlive the attempt."""
        unproxied = ",".join(filter(None, [os.environ.get("no_proxy", os.environ.get("NO_PROXY")), "127.0.0.1"]))
        address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "NO_PROXY": unproxied, "no_proxy": unproxied}
        environment = {**os.environ, **address}
        if self.preload:
            self._launcher = self._launcher or Launcher(self.preload)
            program = await self._launcher.start(self.command(task), environment)
        else:
            program = await start_program(self.command(task), environment)
        reading = asyncio.gather(_output(program), _last_errors(program))
        try:
            await _exit_of(program)
            kill_group(program)  # children that are left: they would hold the pipes open
            output, errors = await reading
            code = await program.wait()
        finally:
            kill_group(program)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if code != 0:
            reason = failure_text_of_output(errors) or errors.strip() or "no message"
            raise AgentFailed(f"the agent's program ended with exit status {code}: {reason}")
        return await self.score(task, output)


async def _exit_of(program: Program) -> None:
    """Wait for the program alone; `Program.wait` may wait for its children too where they hold its pipes."""
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(program.pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _output(program: Program) -> str:
    assert program.stdout is not None
    output = bytearray()
    while piece := await program.stdout.read(2**16):
        output += piece
        if len(output) > _MOST_OUTPUT:
            kill_group(program)
            raise AgentFailed(f"the agent's program wrote more than {_MOST_OUTPUT} bytes to its standard output")
    return output.decode(errors="replace")


async def _last_errors(program: Program) -> str:
    assert program.stderr is not None
    last = b""
    while piece := await program.stderr.read(2**16):
        last = (last + piece)[-_KEPT_ERRORS:]
    return last.decode(errors="replace")


def _as_score(returned: object, *, name: str) -> Score:
    if isinstance(returned, Score):
        return returned
    if not isinstance(returned, (int, float)):
        raise WrongWorkflow(
            f"{name}.run_agent returned {type(returned).__name__}; return a Score, a number, or None where the agent "
            "posts its reward"
        )
    return Score(reward=PostedReward(reward=float(returned)).reward)
