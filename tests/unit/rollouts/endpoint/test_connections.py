"""What clients of the endpoint may cost: each limit has its status, and bad clients do not reach the good ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint import connections
from tests.unit.rollouts.scripted_text import Served, served

pytestmark = pytest.mark.server

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"authorization: Bearer KEY\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def _raw(agent: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = httpx.URL(agent.endpoint.base_url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    yield reader, writer
    writer.close()


async def _status(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and message of an answer, after which the server has closed."""
    head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches at once."""
    small = {"HEADER_SECONDS": 0.2, "BODY_SECONDS": 0.3, "MOST_BODY": 1000, "MOST_PER_KEY": 3, "MOST_WAITING": 5}
    for name, value in small.items():
        monkeypatch.setattr(connections, name, value)


@pytest.mark.parametrize(
    ("sent", "status", "about"),
    [
        (b"", 408, "headers"),
        (CHAT, 408, "headers"),
        (CHAT + b"authorization: Bearer KEY\r\ncontent-length: 9\r\n\r\n{", 408, "body"),
        (CHAT + b"authorization: Bearer KEY\r\ncontent-length: 800000000\r\n\r\n", 413, "longer"),
        (CHAT + CHUNKED + b"7d0\r\n" + b"x" * 2000, 413, "longer"),
        (CHAT + b"authorization: Bearer sk-no\r\ncontent-length: 800000000\r\n\r\n" + b"x" * 2000, 401, "API key"),
        (CHAT + b"x: " + b"y" * connections.MOST_HEADERS, 431, "headers"),
        (CHAT + CHUNKED + b"1\r\n \r\n0\r\nx: " + b"y" * connections.MOST_HEADERS, 431, "headers"),
        (CHAT + CHUNKED + b"1;x=" + b"y" * connections.MOST_HEADERS, 431, "headers"),
        (b"what is this?\r\n\r\n", 400, "Invalid HTTP"),
    ],
)
@pytest.mark.usefixtures("impatient")
async def test_each_limit_has_its_status(text_tokens: ChatTokens, sent: bytes, status: int, about: str):
    async with served(text_tokens, "4") as agent:
        async with _raw(agent) as (reader, writer):
            writer.write(sent.replace(b"KEY", agent.session.key.encode()))
            answer = await _status(reader)
        assert answer[0] == status and about in answer[1]
        assert (await agent.ask("2+2=")).choices[0].message.content == "4"
    assert len(agent.chat.turns) == 1


@pytest.mark.parametrize("begun", [b"GET /v1/models HTTP/1.1\r\n", b"\r\n"])
@pytest.mark.usefixtures("impatient")
async def test_a_later_request_of_a_connection_has_the_same_time_for_its_headers(text_tokens: ChatTokens, begun: bytes):
    async with served(text_tokens) as agent, _raw(agent) as (reader, writer):
        models = b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer " + agent.session.key.encode() + b"\r\n\r\n"
        writer.write(models + models)
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        writer.write(begun)
        assert (await _status(reader))[0] == 408


@pytest.mark.usefixtures("impatient")
async def test_connections_and_bodies_are_counted_for_each_key(text_tokens: ChatTokens):
    async with served(text_tokens) as agent, contextlib.AsyncExitStack() as stack:
        models = b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer " + agent.session.key.encode() + b"\r\n\r\n"
        for _ in range(3):
            reader, writer = await stack.enter_async_context(_raw(agent))
            writer.write(models)
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        async with _raw(agent) as (reader, fourth):
            fourth.write(models)
            assert await _status(reader) == (429, "this key has more than 3 connections")
        writer.close()
        while len(agent.endpoint.connections.of_key[agent.session.key]) > 2:
            await asyncio.sleep(0)
        long = CHAT + b"authorization: Bearer " + agent.session.key.encode() + b"\r\ncontent-length: 1000\r\n\r\n"
        agent.session.bodies._held = 1500  # of two others that are on their way
        async with _raw(agent) as (reader, writer):
            writer.write(long + b" " * 600)
            assert await _status(reader) == (429, "this key's requests under way are longer than 2,000 bytes in all")
        assert agent.session.bodies._held == 1500
    assert not agent.endpoint.connections.of_key


async def test_half_open_connections_take_a_bounded_number_of_descriptors(text_tokens: ChatTokens):
    async with served(text_tokens, "4") as agent, contextlib.AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(_raw(agent)) for _ in range(1300)]
        for _, writer in pairs[::2]:
            writer.write(CHAT)
        assert (await agent.ask("2+2=")).choices[0].message.content == "4"
        assert len(agent.endpoint.connections.waiting) <= connections.MOST_WAITING
        theirs = sum(
            c.laddr.port == httpx.URL(agent.endpoint.base_url).port for c in psutil.Process().net_connections()
        )
        assert theirs <= connections.MOST_WAITING + 10
        assert (await _status(pairs[0][0]))[0] == 503, "the oldest one went"
