"""What bad clients of the agents' endpoint cost the good ones: 64 attempts alone, and beside ten thousand of them.

In: nothing. Out: a table, and JSON with `python -m benchmarks.bad_clients docs/bad_clients.json`. Endpoint, good agents
and bad clients are three processes. A good agent asks for one turn after another, which the scripted engine gives as
slowly as a real one would. A bad client connects and does one of `KINDS`; they arrive evenly over the time that the
attempts take alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import string
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI
from rich.table import Table

from cli.terminal.console import open_console
from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.agent_endpoint import AgentEndpoint
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import Sampling

ATTEMPTS = 64
TURNS = 30
TOKENS = 5
SECONDS_PER_TOKEN = 0.1
BAD_CLIENTS = 10_000
ROUNDS = 3
KINDS = ("silent", "slow headers", "wrong key", "wrong key, 800 MB", "no HTTP")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the rounds, which alternate between both."""

    attempt_seconds_alone: float
    """Mean time of an attempt."""
    attempt_seconds_beside: float
    speed_kept: float
    """Alone / beside."""
    bad_clients: int
    answered: dict[str, int]
    """Statuses that the bad clients of one round got; `closed` had none."""
    milliseconds_per_bad_client: float
    """CPU time of the endpoint's process."""
    descriptors: int
    """Most of the endpoint's process at any time."""
    grown_mib: float
    """Its memory, after all rounds against after the first, which was alone."""


async def measure(*, attempts: int, turns: int, bad_clients: int, rounds: int) -> Figures:
    """Serve the rounds from this process."""
    from trainers.model.warmup import character_tokenizer

    tokens = ChatTokens(character_tokenizer(set(string.printable)))
    reply = [*tokens.tokenizer("x" * (TOKENS - 1))["input_ids"], tokens.end_id]
    engine = ScriptedEngine(lambda prompt, request: reply, seconds_per_token=SECONDS_PER_TOKEN)
    endpoint, process = AgentEndpoint(), psutil.Process()
    alone: list[float] = []
    beside: list[float] = []
    most = memory = 0
    cpu = {False: 0.0, True: 0.0}
    answered: dict[str, int] = {}
    for is_beside in itertools.chain.from_iterable(itertools.repeat((False, True), rounds)):
        async with contextlib.AsyncExitStack() as stack:
            keys = []
            for number in range(attempts):
                limits: dict[str, Any] = {
                    "tool_parser": _NoTools(),
                    "sampling": Sampling(max_tokens=TOKENS),
                    "max_model_len": 100_000,
                }
                chat = Chat(engine=engine, tokens=tokens, request_id=f"0.{number}/0", **limits)
                keys.append((await stack.enter_async_context(endpoint.session(chat))).key)
            started = time.process_time()
            good = asyncio.create_task(_child("good", endpoint.base_url, turns, keys))
            bad = None
            if is_beside:
                over = statistics.median(alone)
                bad = asyncio.create_task(_child("bad", endpoint.base_url, bad_clients, over))
            while not good.done():
                most = max(most, process.num_fds())
                await asyncio.sleep(0.1)
            (beside if is_beside else alone).append(statistics.fmean(good.result()))
            if bad is not None:
                answered = await bad
            cpu[is_beside] += time.process_time() - started
            memory = memory or process.memory_info().rss
    grown = process.memory_info().rss - memory
    await endpoint.close()
    first, second = statistics.median(alone), statistics.median(beside)
    return Figures(
        attempt_seconds_alone=round(first, 2),
        attempt_seconds_beside=round(second, 2),
        speed_kept=round(first / second, 3),
        bad_clients=bad_clients,
        answered=answered,
        milliseconds_per_bad_client=round(1000 * (cpu[True] - cpu[False]) / (rounds * bad_clients), 3),
        descriptors=most,
        grown_mib=round(grown / 2**20, 1),
    )


class _NoTools:
    async def parse(self, text: str, tools: Any) -> Any:
        raise AssertionError("no request has tools")


async def _child(*arguments: Any) -> Any:
    """What another process prints that runs `good` or `bad`."""
    words = [json.dumps(argument) for argument in arguments]
    command = [sys.executable, "-m", "benchmarks.bad_clients", "--child", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


async def good(base_url: str, turns: int, keys: list[str]) -> list[float]:
    """Seconds of each attempt, all at once."""

    async def attempt(key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
            started = time.perf_counter()
            for _ in range(turns):
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go on"}])
            return time.perf_counter() - started

    return await asyncio.gather(*map(attempt, keys))


async def bad(base_url: str, count: int, over_seconds: float) -> dict[str, int]:
    """How many of the clients got which status."""
    address, statuses = httpx.URL(base_url), Counter[str]()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    no_key = head + b"authorization: Bearer sk-no\r\n"

    async def client(kind: str) -> None:
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError:
            statuses["refused"] += 1
            return
        with contextlib.suppress(OSError):
            if kind == "slow headers":
                writer.write(head)
            elif kind == "wrong key":
                writer.write(no_key + b"content-length: 2\r\n\r\n{}")
            elif kind == "wrong key, 800 MB":
                writer.write(no_key + b"content-length: 800000000\r\n\r\n" + b"x" * 65536)
            elif kind == "no HTTP":
                writer.write(b"\x16\x03\x01" + b"x" * 512)
            response = b""
            with contextlib.suppress(OSError):
                response = await reader.read(4096)
            statuses[response.split()[1].decode() if response else "closed"] += 1
        writer.close()

    async def later(number: int) -> None:
        await asyncio.sleep(over_seconds * number / count)
        await client(KINDS[number % len(KINDS)])

    await asyncio.gather(*(later(number) for number in range(count)))
    return dict(statuses)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        role, *arguments = map(json.loads, sys.argv[2:])
        print(json.dumps(asyncio.run(good(*arguments) if role == "good" else bad(*arguments))))
        return
    figures = asyncio.run(measure(attempts=ATTEMPTS, turns=TURNS, bad_clients=BAD_CLIENTS, rounds=ROUNDS))
    table = Table(box=None)
    table.add_column("")
    table.add_column(justify="right")
    for name, value in asdict(figures).items():
        table.add_row(name.replace("_", " "), str(value))
    open_console().print(table)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(asdict(figures), indent=1) + "\n")


if __name__ == "__main__":
    main()
