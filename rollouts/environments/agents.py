"""Workflows for agents that use an OpenAI client instead of a `Chat`; the agent's own code does not change.

    AgentWorkflow:    run_agent(task, base_url=…, api_key=…)   async Python in the worker
    CommandWorkflow:  command(task)                            any program, OPENAI_BASE_URL and OPENAI_API_KEY set
                      preload = ["openai"]                     a Python program, forked after this import

In: a task. Out: a `Score`: returned by `run_agent`, computed from the program's output, or posted by the agent itself
to `<base_url>/sessions/reward`. An agent that ends without one has failed, and its attempt enters no mean.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import ClassVar

from rollouts.chat.chat import Chat
from rollouts.endpoint.agent_endpoint import agent_endpoint
from rollouts.environments.programs import Launcher, Program, kill_group, start_program
from rollouts.workflow import Score, Workflow, as_score
from settings.errors import failure_text_of_output
from storage.records import Task

_MOST_OUTPUT = 2**24
"""Bytes of standard output of one program; more is a fault of the program."""
_KEPT_ERRORS = 2**14
"""Bytes of standard error kept for the message, from its end: the traceback of a client's error is long."""


class AgentFailed(Exception):
    """The agent ended without a reward, or its program failed; the message has the program's own error output."""


class AgentWorkflow(Workflow):
    """An agent in Python: subclass this and write `run_agent` with `openai.AsyncOpenAI`, or anything built on it."""

    async def run_agent(self, task: Task, *, base_url: str, api_key: str) -> Score | float | None:
        """Solve the task with a client of this address and key; return None if the reward is posted.

        Every request with the key becomes a turn of this attempt. Leave sampling options to the run file.
        """
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Score:
        endpoint = agent_endpoint()
        async with endpoint.session(chat) as session:
            try:
                returned = await self.run_agent(task, base_url=endpoint.base_url, api_key=session.key)
            except Exception as error:
                if session.fault is not None:  # the agent gave up because of it, but saw only an HTTP status
                    raise session.fault from error
                raise
            if returned is not None:
                session.post_reward(as_score(returned, self.run_agent))
            if session.reward is None:
                raise session.fault or AgentFailed(
                    "the agent ended without a reward: return one from run_agent, or post one to "
                    "<base_url>/sessions/reward"
                )
            return session.reward


class CommandWorkflow(AgentWorkflow):
    """An agent that is a program: write `command`, and `score` unless the program posts its reward itself."""

    preload: ClassVar[Sequence[str]] = ()
    """Modules to import once, before programs are forked, if `command` is `[sys.executable, "script.py", …]`. It saves
    each attempt the seconds of the import. Name only modules that start no threads and draw no random numbers when they
    are imported. If it is empty, each program is a new process."""
    _launcher: Launcher | None = None

    def command(self, task: Task) -> Sequence[str]:
        """Program and arguments; no shell expands them."""
        raise NotImplementedError

    async def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()

    async def score(self, task: Task, output: str) -> Score | None:
        """Score the program's standard output. None, the default, means that the program posts its reward."""
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
            kill_group(program)  # remaining children would keep the pipes open
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
    """Wait for the program alone. `Program.wait` may also wait for its children, if they hold its pipes."""
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
