"""HTTP servers on real sockets: one that plays a script, and the retrieval server as it is started by hand.

A script has one answer a request, the last one again and again: `(status, headers, body)`, or a word for a way to
misbehave. In place of a script, a function may answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx

Misbehaviour = Literal["hang", "cut off", "close"]
Answer = tuple[int, dict[str, str], bytes] | Misbehaviour


def ok(body: Any) -> Answer:
    """Status 200 with JSON."""
    return 200, {}, json.dumps(body).encode()


class ScriptedServer:
    """Use as `async with`; hanging requests wait until it is left or `release` is set."""

    def __init__(self, *script: Answer, answer: Callable[[Any], Answer] | None = None) -> None:
        self._script = script
        self._answer = answer or (lambda body: script[min(len(self.bodies), len(script)) - 1])
        self.bodies: list[Any] = []
        self.headers: list[str] = []
        self.arrived = asyncio.Event()
        self.release = asyncio.Event()
        """Ends a hang, with the last answer of the script that is none."""

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line)
                self.headers.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                answer = self._answer(self.bodies[-1])
                self.arrived.set()
                if answer == "hang":
                    await self.release.wait()
                    answer = next((a for a in reversed(self._script) if isinstance(a, tuple)), "close")
                if answer == "close":
                    return
                status, headers, body = (200, {}, b'{"res') if answer == "cut off" else answer  # type: ignore[str-unpack]
                lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in headers.items())]
                lines.append(f"Content-Length: {len(body) + (answer == 'cut off') * 100}")
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
                if answer == "cut off":
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()


class RetrievalServer:
    """A process of its own, on a free port."""

    def __init__(self, index: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "examples.search_agent.retrieval.server", "serve", str(index)]
        self.process = subprocess.Popen([*command, "--port", str(port), *options], stdout=subprocess.DEVNULL)

    async def serves(self) -> dict[str, Any]:
        """What it says of its health, once it does."""
        async with httpx.AsyncClient() as probe:
            while True:
                assert self.process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    return dict((await probe.get(f"{self.url}/health")).json())
                await asyncio.sleep(0.05)

    def die(self) -> None:
        self.process.kill()
        self.process.wait()
