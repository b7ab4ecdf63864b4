"""What any client may cost the endpoint: descriptors, memory and time.

In: connections. Out: those with a complete request and a valid key; the others are answered with a status that names
the limit, and closed.

| limit | over it |
|---|---|
| `HEADER_SECONDS` for a request's headers, `BODY_SECONDS` for its body | 408 |
| `MOST_BODY` bytes of a body | 413 |
| `MOST_PER_KEY` connections, and twice `MOST_BODY` bytes of bodies on their way, of one key | 429 |
| `MOST_HEADERS` bytes of headers, trailers and the sizes of chunks | 431 |
| `MOST_WAITING` connections that have shown no valid key, or a quarter of all descriptors | 503 to the oldest one |

A client that has shown no valid key therefore keeps at most one of `MOST_WAITING` descriptors, for `HEADER_SECONDS`.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollouts.endpoint.openai_wire import Refused

HEADER_SECONDS = 10.0
BODY_SECONDS = 60.0
MOST_HEADERS = 64 * 1024
MOST_BODY = 8 * 1024 * 1024
"""Two million tokens in English."""
MOST_PER_KEY = 64
MOST_WAITING = 1024
BACKLOG = 512
"""Connections that asyncio accepts at once, before one of them can be closed."""
_DESCRIPTORS = 65_536  # vLLM's own server asks for as many
_REASONS = {400: "Bad Request", 401: "Unauthorized", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Connections:
    """All connections of one endpoint. `knows` says whether a key is that of a running attempt."""

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self.knows = knows
        self.waiting: dict[Connection, None] = {}
        """Connections that have shown no valid key, the oldest first."""
        self.of_key: defaultdict[str, set[Connection]] = defaultdict(set)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        self.most_waiting = min(MOST_WAITING, most // 4)

    def protocol(self, **options: Any) -> Connection:
        """One connection, as uvicorn makes it."""
        return Connection(self, **options)

    def check(self, key: str) -> None:
        """Raises `Refused` (429) if a key has too many connections."""
        if len(self.of_key.get(key, ())) > MOST_PER_KEY:
            raise Refused(429, f"this key has more than {MOST_PER_KEY} connections", retry=True, close=True)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits for what comes before an answer."""

    def __init__(self, all_connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all = all_connections
        self._key = ""
        self._in_message = False
        self._header_bytes = 0
        """Bytes of headers, trailers and the framing of chunks: all that is no body."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._all.waiting[self] = None
        self._expect_headers()
        if len(self._all.waiting) > self._all.most_waiting:
            oldest = next(iter(self._all.waiting))
            oldest.refuse(503, f"more than {self._all.most_waiting} connections wait without a valid key")

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MOST_HEADERS:
            self.refuse(431, f"the headers are longer than {MOST_HEADERS:,} bytes")
        elif not self._in_message and (self.cycle is None or self.cycle.response_complete):
            self._expect_headers()  # after an empty line, say: what has come ended uvicorn's own wait

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._expect_headers()

    def on_headers_complete(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        key = key_of(dict(self.headers).get(b"authorization", b"").decode("latin-1"))
        if not self._all.knows(key):  # here, because the application would cost ten times as much
            self.refuse(401, unknown_key())
            return
        super().on_headers_complete()
        if key != self._key:
            self._forget()
            self._key = key
            self._all.of_key[key].add(self)

    def on_body(self, body: bytes) -> None:
        self._header_bytes -= len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._header_bytes = False, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, msg)

    def refuse(self, status: int, reason: Refused | str) -> None:
        """Answer without having read a request, and close."""
        self._all.waiting.pop(self, None)
        if self.transport.is_closing():
            return
        body = json.dumps((reason if isinstance(reason, Refused) else Refused(status, reason)).body).encode()
        head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Service Unavailable')}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _expect_headers(self) -> None:
        if self._deadline is None:
            too_slow = f"the headers of a request did not come within {HEADER_SECONDS:g} s"
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.refuse, 408, too_slow)

    def _forget(self) -> None:
        self._all.waiting.pop(self, None)
        if self._key:
            self._all.of_key[self._key].discard(self)
            if not self._all.of_key[self._key]:
                del self._all.of_key[self._key]


def unknown_key() -> Refused:
    return Refused(401, "no attempt that is running has this API key", code="invalid_api_key", close=True)


def key_of(authorization: str) -> str:
    """The key in an `Authorization` header; empty for another kind."""
    return authorization.removeprefix("Bearer ") if authorization.startswith("Bearer ") else ""


class Bodies:
    """The bodies of one key's requests that are being read."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, chunks: Any, *, length: str) -> bytes:
        """A whole body of `chunks`; `length` is what its header says, if it does. Raises `Refused`."""
        too_long = Refused(413, f"the body of the request is longer than {MOST_BODY:,} bytes", close=True)
        if length.isdecimal() and int(length) > MOST_BODY:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in chunks:
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > MOST_BODY:
                        raise too_long
                    if self._held > 2 * MOST_BODY:
                        about = f"this key's requests under way are longer than {2 * MOST_BODY:,} bytes in all"
                        raise Refused(429, about, retry=True, close=True)
        except TimeoutError:
            late = f"the body of the request did not come within {BODY_SECONDS:g} s"
            raise Refused(408, late, retry=True, close=True) from None
        finally:
            self._held -= len(body)
        return bytes(body)
