"""The clients: which server is asked, what a fault leads to, and what the caller gets."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from examples.search_agent.refine_client import RefineClient, RefineUnavailable
from examples.search_agent.retrieval import endpoints
from examples.search_agent.retrieval.passages import Passage
from examples.search_agent.retrieval.search_client import BadQuery, SearchClient, SearchUnavailable
from tests.unit.examples.search_agent.retrieval.scripted_server import Answer, ScriptedServer, ok

_ROW = {"id": "p1", "title": "Oslo", "text": "Oslo is a city.", "score": 1.5}
_FOUND = ok({"results": [[_ROW]]})
_PASSAGE = Passage(**_ROW)
_BUSY: Answer = (429, {"Retry-After": "0"}, b"{}")
_FULL: Answer = (429, {"Retry-After": "3600"}, b"{}")
_BROKEN: Answer = (500, {}, b"boom")


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_DELAY", 0.01)


@asynccontextmanager
async def _served(*scripts: list[Answer], **options: Any) -> AsyncIterator[tuple[SearchClient, list[ScriptedServer]]]:
    """A client of servers that play these scripts."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(*script)) for script in scripts]
        client = SearchClient([server.url for server in servers], **options)
        yield client, servers
        await client.close()


async def _search(*scripts: list[Answer], **options: Any) -> list[Passage]:
    async with _served(*scripts, **options) as (client, _):
        return await client.search("capital of Norway", k=3)


async def test_the_passages_come_as_the_server_ranks_them_or_none_at_all():
    async with _served([_FOUND]) as (client, [server]):
        assert await client.search("capital of Norway", k=3) == [_PASSAGE]
        assert server.bodies == [{"query": "capital of Norway", "k": 3}]
    assert await _search([ok({"results": [[]]})]) == []


_FAULTS: list[Answer] = [
    *("cut off", "close", _BROKEN, (302, {"Location": "/elsewhere"}, b""), (401, {}, b"{}")),
    *((200, {}, b"<html>welcome</html>"), ok([]), ok({"results": []}), ok({"results": [[], []]})),
    *(ok({"results": [[{**_ROW, "text": None}]]}), ok({"results": [[{"id": "p1"}]]})),
    *(ok({"results": [[_ROW] * 4]}), ok({"results": "none"}), ok(None)),
]


@pytest.mark.parametrize("fault", _FAULTS)
async def test_each_fault_of_a_server_leads_to_another_try_and_is_named_if_there_is_no_other(fault: Answer):
    assert await _search([fault, _FOUND]) == [_PASSAGE]
    with pytest.raises(SearchUnavailable, match=r"http://127.0.0.1:\d+: \w"):
        await _search([fault], retries=1)


async def test_another_server_answers_while_one_is_broken_and_the_broken_one_is_left_alone(monkeypatch):
    monkeypatch.setattr(endpoints, "_FIRST_DELAY", 1000.0)
    monkeypatch.setattr(endpoints, "_LONGEST_DELAY", 1000.0)
    async with _served([_BROKEN], [_FOUND]) as (client, [broken, whole]):
        for _ in range(20):
            assert await client.search("q") == [_PASSAGE]
        assert len(broken.bodies) <= 1 and len(whole.bodies) == 20


async def test_a_server_that_has_rested_is_tried_with_one_request_and_then_gets_its_share():
    async with _served([_BROKEN, "hang", _FOUND], [_FOUND]) as (client, [ill, _]):
        while not ill.bodies:
            await client.search("q")
        first = client.endpoints[0]
        ill.arrived.clear()
        first.failed_until = time.monotonic()  # its rest is over
        trying = []
        while not ill.arrived.is_set():
            trying.append(asyncio.create_task(client.search("q")))
            await asyncio.wait([trying[-1], asyncio.create_task(ill.arrived.wait())], return_when="FIRST_COMPLETED")
        await asyncio.gather(*(client.search("q") for _ in range(10)))
        assert len(ill.bodies) == 2  # the fault, and one that tries it
        ill.release.set()
        assert (await asyncio.gather(*trying))[-1] == [_PASSAGE]
        assert first.failures_in_row == 0
        await asyncio.gather(*(client.search("q") for _ in range(40)))
        assert len(ill.bodies) > 10


async def test_a_server_that_hangs_leaves_time_for_the_next_and_a_search_ends_at_its_deadline():
    for _ in range(3):  # whichever is asked first
        assert await _search(["hang"], [_FOUND], deadline=3.0) == [_PASSAGE]
    with pytest.raises(SearchUnavailable, match=r"no answer within 0\.\d+ s"):
        await _search(["hang"], deadline=0.2)


async def test_a_full_queue_costs_no_retry_and_sends_the_search_to_another_server_at_once():
    async with _served([_BUSY] * 6 + [_FOUND], retries=0) as (client, [server]):
        assert await client.search("q") == [_PASSAGE] and len(server.bodies) == 7
    for _ in range(4):
        assert await _search([_FULL], [_FOUND], retries=0) == [_PASSAGE]
    with pytest.raises(SearchUnavailable, match="429"):
        await _search([_FULL])  # beyond the deadline


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7), ("0.5", 0.5), ("-3", 0), ("soon", 1), ("", 1), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)],
)
def test_retry_after_is_read_as_it_is_written(value: str, seconds: float):
    assert endpoints._retry_after(httpx.Response(429, headers={"Retry-After": value})) == seconds


async def test_a_query_the_server_will_not_search_for_is_no_fault_of_it():
    async with _served([(422, {}, b'{"error": "too long"}')]) as (client, [server]):
        with pytest.raises(BadQuery, match="too long"):
            await client.search("q" * 10_000)
        assert (len(server.bodies), client.endpoints[0].failures) == (1, 0)


async def test_requests_go_where_fewest_are_open_so_that_equal_servers_get_equal_shares():
    random.seed(1)
    async with _served(*[[_FOUND]] * 3) as (client, servers):
        await asyncio.gather(*(client.search("q") for _ in range(90)))
        assert Counter(len(server.bodies) for server in servers) == {30: 3}


async def test_the_token_is_sent_and_not_shown(monkeypatch):
    monkeypatch.setenv("SECRET", "hush-hush")
    async with _served([(401, {}, b"wrong key hush-hush")], retries=0, token_env="SECRET") as (client, [server]):
        with pytest.raises(SearchUnavailable) as failed:
            await client.search("q")
        assert "Bearer hush-hush" in server.headers[0] and "hush-hush" not in str(failed.value)


async def test_a_cancelled_search_leaves_nothing_open():
    async with _served(["hang"]) as (client, [server]):
        search = asyncio.create_task(client.search("q"))
        await server.arrived.wait()
        assert client.endpoints[0].outstanding == 1
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        assert (client.endpoints[0].outstanding, client.endpoints[0].failures) == (0, 0)


async def test_many_requests_that_fail_at_once_are_one_fall_of_the_server():
    async with _served(["hang"], retries=0) as (client, [server]):
        searches = [asyncio.create_task(client.search("q")) for _ in range(20)]
        while len(server.bodies) < 20:
            await asyncio.sleep(0)
        server.release.set()  # which closes them all
        outcomes = await asyncio.gather(*searches, return_exceptions=True)
        assert all(isinstance(outcome, SearchUnavailable) for outcome in outcomes)
        assert (client.endpoints[0].failures, client.endpoints[0].failures_in_row) == (20, 1)


def test_a_client_serves_one_event_loop_after_another():
    async def one(client: SearchClient) -> list[Passage]:
        async with ScriptedServer(_FOUND) as server:
            client.endpoints[0].url = server.url
            return await client.search("q")

    client = SearchClient(["http://127.0.0.1:1"])
    assert [asyncio.run(one(client)) for _ in range(2)] == [[_PASSAGE]] * 2


def test_malformed_urls_are_named_at_once():
    for urls in ([], ["localhost:8765"], ["ftp://host"], ["http://me:secret@host"], ["http://"]):
        with pytest.raises(ValueError, match="URL"):
            SearchClient(urls)


# --- The refine client ---------------------------------------------------------------------------------------------


_PAIR = [
    Passage(id="a", title="Oslo", text="Oslo is the capital of Norway."),
    Passage(id="b", title="Bergen", text="Bergen has rain."),
]


def _says(text: Any, *, reason: str = "stop") -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return ok({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 7}})


async def _refine(*script: Answer, retries: int = 2) -> tuple[Any, RefineClient, ScriptedServer]:
    async with ScriptedServer(*script) as server:
        client = RefineClient([f"{server.url}/v1"], model="reader", retries=retries)
        try:
            notes: Any = await client.refine("What is the capital of Norway?", _PAIR)
        except RefineUnavailable as error:
            notes = error
        await client.close()
        return notes, client, server


async def test_question_and_every_passage_with_its_id_are_asked_about():
    notes, client, server = await _refine(_says(" Oslo is the capital [a]. "))
    assert notes == "Oslo is the capital [a]."
    assert server.headers[0].startswith("POST /v1/chat/completions ")
    body = server.bodies[0]
    assert (body["model"], body["temperature"]) == ("reader", 0.0)
    for part in ("What is the capital of Norway?", "[a] Oslo\nOslo is the capital of Norway.", "[b] Bergen"):
        assert part in body["messages"][0]["content"]
    counts = {name: value for name, value in vars(client.statistics).items() if name != "seconds"}
    assert counts == {"requests": 1, "failures": 0, "truncated": 0, "prompt_tokens": 50, "completion_tokens": 7}
    assert client.statistics.seconds > 0


@pytest.mark.parametrize(
    "garbage", [ok({}), ok({"choices": []}), _says(None), _says(["x"]), _says(""), _says("<think>hm</think> "), ok("x")]
)
async def test_garbage_is_a_fault_of_the_server(garbage: Answer):
    notes, client, _ = await _refine(garbage, _says("fine"))
    assert (notes, client.endpoints[0].failures) == ("fine", 1)
    notes, client, _ = await _refine(garbage, retries=0)
    assert isinstance(notes, RefineUnavailable) and client.statistics.failures == 1


async def test_passages_the_model_cannot_take_are_unavailable_notes_without_another_try():
    notes, client, server = await _refine((400, {}, b"maximum context length is 4096 tokens"))
    assert isinstance(notes, RefineUnavailable) and "maximum context length" in str(notes)
    assert (len(server.bodies), client.statistics.failures) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "notes", "counts"),
    [
        (_says("<think>Well, Oslo?</think>\nOslo [a]."), "Oslo [a].", {"truncated": 0}),  # thoughts are no notes
        (_says("Oslo is", reason="length"), "Oslo is", {"truncated": 1}),
        (ok({"choices": [{"message": {"content": "Oslo"}}]}), "Oslo", {"prompt_tokens": 0}),  # a server without usage
    ],
)
async def test_notes_are_taken_as_they_come(answer: Answer, notes: str, counts: dict[str, int]):
    text, client, _ = await _refine(answer)
    assert text == notes and vars(client.statistics).items() >= counts.items()


async def test_without_passages_or_model_no_server_is_asked():
    client = RefineClient(["http://127.0.0.1:1/v1"], model="reader")
    assert await client.refine("q", []) == "" and client.statistics.requests == 0
    with pytest.raises(ValueError, match="model"):
        RefineClient(["http://host/v1"], model="")
