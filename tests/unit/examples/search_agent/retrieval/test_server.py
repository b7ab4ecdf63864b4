"""The server over HTTP: what is answered, what is refused, the commands that build and serve, and whole episodes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from examples.search_agent.agent import SearchAgent
from examples.search_agent.retrieval.embedding import HASHING
from examples.search_agent.retrieval.index import Mode, PassageIndex, build_index
from examples.search_agent.retrieval.passages import Passage
from examples.search_agent.retrieval.search_client import SearchClient
from examples.search_agent.retrieval.server import cli, create_app
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import RolloutGroup
from tests.unit.examples.search_agent.episodes import Agent, play_group, results, search, tokens, write_folder
from tests.unit.examples.search_agent.retrieval.corpora import random_passages, random_queries, write_corpus
from tests.unit.examples.search_agent.retrieval.scripted_server import RetrievalServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    build_index(write_corpus(folder / "corpus.jsonl", random_passages(500)), folder / "index")
    return folder / "index"


@contextlib.asynccontextmanager
async def _served(index: PassageIndex, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    server = uvicorn.Server(uvicorn.Config(create_app(index, **options), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits()) as client:
            while not server.started:
                await asyncio.sleep(0)
            yield client
        server.should_exit = True
        await serving


async def _post(client: httpx.AsyncClient, body: Any) -> httpx.Response:
    return await client.post("/search", json=body)


class _GatedIndex(PassageIndex):
    """An index whose searches wait for `gate`."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])
        self.gate = threading.Event()
        self.begun = threading.Event()

    def search(self, asked: Sequence[tuple[str, int]]) -> list[list[Passage]]:
        self.begun.set()
        assert self.gate.wait(20)
        return super().search(asked)


@pytest.mark.parametrize("mode", list(Mode))
async def test_answers_over_http_are_the_index_s_own_whether_batched_or_not(folder, mode: Mode):
    queries, index = random_queries(80), PassageIndex([folder], mode=mode)
    alone = [[vars(passage) for passage in index.search([(query, 7)])[0]] for query in queries]
    async with _served(index, batch_seconds=0.02, queue=90) as client:
        together = await asyncio.gather(*(_post(client, {"query": query, "k": 7}) for query in queries))
        assert [reply.json()["results"][0] for reply in together] == alone
        health = (await client.get("/health")).json()
        assert health["queries"] == 80 > health.pop("batches")
        served = {"status": "ok", "passages": 500, "mode": mode, "digest": index.digest, "embedding": HASHING}
        assert health == {**served, "queue": 0, "queue_limit": 90, "queries": 80}
        one_by_one = [await _post(client, {"query": query, "k": 7}) for query in queries[:10]]
        assert [reply.json()["results"][0] for reply in one_by_one] == alone[:10]
        reply = await _post(client, {"queries": queries, "k": 7})
        assert reply.json()["results"] == alone and reply.headers["content-type"] == "application/json"


async def test_a_request_that_is_wrong_is_refused_with_its_reason(folder):
    wrong: list[tuple[Any, str]] = [
        ({}, 'either "query" or "queries"'),
        ({"query": "a", "queries": ["b"]}, 'either "query" or "queries"'),
        ({"queries": []}, "queries"),
        ({"query": 5}, "query"),
        ({"query": "a", "k": 0}, "k Input should be greater"),
        ({"query": "a", "k": 101}, "k Input should be less"),
        ({"query": "a", "k": "5"}, "k Input"),
        ({"query": "a", "top_k": 5}, "top_k"),
        ({"query": "a" * 8193}, "at most 8192 characters"),
        ({"queries": ["a"] * 10}, "at most 9"),
        ([], "object"),
    ]
    async with _served(PassageIndex([folder], mode=Mode.bm25), queue=9) as client:
        for body, reason in wrong:
            reply = await _post(client, body)
            assert reply.status_code == 422 and reason in reply.json()["error"], (body, reply.text)
        assert (await client.post("/search", content=b"{oops")).status_code == 422
        assert (await client.post("/search", content=b" " * (2**20 + 1))).status_code == 413


async def test_a_full_queue_answers_429_and_the_client_waits_until_it_has_drained(folder):
    index = _GatedIndex(folder)
    async with _served(index, max_batch=1, queue=2) as client:
        accepted = [asyncio.create_task(_post(client, {"query": "w1"}))]
        await asyncio.to_thread(index.begun.wait)
        accepted += [asyncio.create_task(_post(client, {"query": f"w{number}"})) for number in (2, 3)]
        while (await client.get("/health")).json()["queue"] < 2:  # health answers while all is busy
            pass
        refused = await _post(client, {"query": "w4"})
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        searcher = SearchClient([str(client.base_url)], retries=0)
        waiting = asyncio.create_task(searcher.search("w4 w5", k=3))
        while not searcher.endpoints[0].pushed_back:
            await asyncio.sleep(0)
        index.gate.set()
        assert await waiting == index.search([("w4 w5", 3)])[0]
        assert [reply.status_code for reply in await asyncio.gather(*accepted)] == [200] * 3
        await searcher.close()


async def test_with_a_token_only_clients_that_know_it_may_search(folder, monkeypatch):
    async with _served(PassageIndex([folder]), token="open sesame") as client:
        for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "open sesame"}):
            assert (await client.post("/search", json={"query": "w1"}, headers=headers)).status_code == 401
        assert (await client.get("/health")).status_code == 200
        monkeypatch.setenv("MILLRACE_SEARCH_TOKEN", "open sesame")
        searcher = SearchClient([str(client.base_url)])
        assert await searcher.search("w1")
        await searcher.close()


def _run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def test_build_says_what_it_made(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", random_passages(20))
    corpus.write_text(corpus.read_text() + "oops\n")
    code, output = _run("build", corpus, tmp_path / "index")
    assert code == 2 and "line 21" in output and "--skip-broken" in output and not (tmp_path / "index").exists()
    code, output = _run("build", corpus, tmp_path / "index", "--skip-broken", "--shard", "1/2")
    assert code == 0 and "10 passages, 1 broken lines left out, digest" in output
    assert _run("build", corpus, tmp_path / "other", "--shard", "two")[0] == 2


def test_serve_refuses_what_it_cannot_serve_before_it_listens_and_other_hosts_without_a_token(
    folder, tmp_path, monkeypatch
):
    hosts: list[str] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: hosts.append(options["host"]))
    monkeypatch.delenv("MILLRACE_SEARCH_TOKEN", raising=False)
    for arguments, reason in (
        ([folder, "--host", "0.0.0.0"], "MILLRACE_SEARCH_TOKEN"),
        ([tmp_path], "holds no index"),
        ([folder, "--embedding", "some.other:Model"], "was built with embedding"),
    ):
        code, output = _run("serve", *arguments)
        assert code == 2 and reason in output and not hosts
    monkeypatch.setenv("MILLRACE_SEARCH_TOKEN", "x")
    assert (_run("serve", folder, "--host", "0.0.0.0")[0], hosts) == (0, ["0.0.0.0"])


# --- Episodes: agent ─▶ search client ─▶ servers in processes of their own -------------------------------------------

_REPLIES = (search("Ada works"), search("Bob lives"), "Answer: Rome [1] [2]")
_ATTEMPTS = 3


async def _played(agent: SearchAgent, fault: Callable[[], None] = lambda: None) -> RolloutGroup:
    """A group of attempts of a policy that says `_REPLIES`; `fault` happens before each second one."""

    def reply(_: list[int], request_id: str) -> list[int]:
        turn = int(request_id.rpartition("/")[2])
        if turn == 1:
            fault()
        return [*tokens().tokenizer(_REPLIES[turn])["input_ids"], tokens().end_id]

    group = await play_group(agent, engine=ScriptedEngine(reply), n_samples=_ATTEMPTS)
    await agent.close()
    return group


def _check_won(group: RolloutGroup) -> None:
    assert [(t.status, t.reward, t.error) for t in group.trajectories] == [("ok", 1.0, "")] * _ATTEMPTS
    for trajectory in group.usable:
        first, second = results(trajectory)
        assert first.startswith("[1] Ada works for Bob.") and second.startswith("[2] Bob lives in Rome.")
        assert trajectory.reward_parts["cited"] == trajectory.reward_parts["found"] == 1.0


@pytest.mark.server
async def test_two_servers_share_the_load_until_one_hangs_and_the_attempt_fails_when_the_other_dies(tmp_path: Path):
    write_folder(tmp_path)
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    with contextlib.ExitStack() as stack:
        servers = [RetrievalServer(tmp_path / "index") for _ in range(2)]
        for server in servers:
            stack.callback(server.die)
        healths = await asyncio.gather(*(server.serves() for server in servers))
        assert [health["passages"] for health in healths] == [3, 3]
        urls = [server.url for server in servers]
        (tmp_path / "services.toml").write_text(f"search = {urls}")
        agent = SearchAgent(str(tmp_path))
        _check_won(await _played(agent))
        requests = [endpoint.requests for endpoint in agent.services()._searcher.endpoints]  # type: ignore[attr-defined]
        assert sum(requests) == 2 * _ATTEMPTS and all(requests)

        agent = Agent(SearchClient(urls, deadline=4.0))
        _check_won(await _played(agent, lambda: servers[0].process.send_signal(signal.SIGSTOP)))
        group = await _played(agent, servers[1].process.kill)
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward, trajectory.usable) == ("tool_error", None, False)
        assert "SearchUnavailable" in trajectory.error
    assert any(len(trajectory.turns) == 2 for trajectory in group.trajectories)
    assert not group.accepted and "0 usable" in group.reject_reason
