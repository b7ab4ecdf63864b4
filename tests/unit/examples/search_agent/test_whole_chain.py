"""Episodes over HTTP against retrieval servers in processes of their own, which share the load, hang, or die.

agent ─▶ search client ─▶ python -m examples.search_agent.retrieval_server serve …

`test_search_client.py` has what else a server may do, and `test_agent.py` what any failed search makes of an attempt.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.search_agent.agent import SearchAgent
from examples.search_agent.index import build_index
from examples.search_agent.search_client import SearchClient
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import RolloutGroup
from tests.unit.examples.search_agent.episodes import Agent, play_group, results, search, tokens, write_folder
from tests.unit.examples.search_agent.scripted_server import RetrievalServer

_REPLIES = (search("Ada works"), search("Bob lives"), "Answer: Rome [1] [2]")
_ATTEMPTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    write_folder(folder)
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RetrievalServer]]:
    servers = [RetrievalServer(folder / "index") for _ in range(2)]
    yield servers
    for server in servers:
        server.die()


async def _played(agent: SearchAgent, *, before_turn: Callable[[int], None] = lambda turn: None) -> RolloutGroup:
    """A group of attempts of a policy that says `_REPLIES`; `before_turn` is called as each reply is asked for."""

    def reply(_: list[int], request_id: str) -> list[int]:
        turn = int(request_id.rpartition("/")[2])
        before_turn(turn)
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


async def test_servers_named_by_the_data_set_are_searched_and_share_the_load(folder: Path, servers):
    assert [(await server.serves())["passages"] for server in servers] == [3, 3]
    (folder / "services.toml").write_text(f"search = {[server.url for server in servers]}")
    agent = SearchAgent(str(folder))
    _check_won(await _played(agent))
    requests = [endpoint.requests for endpoint in agent.services()._searcher.endpoints]  # type: ignore[attr-defined]
    assert sum(requests) == 2 * _ATTEMPTS and all(requests)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
@pytest.mark.parametrize("helped", [False, True], ids=["alone", "with another"])
async def test_a_server_that_fails_in_the_middle_of_an_episode(servers, fault: signal.Signals, helped: bool):
    await asyncio.gather(*(server.serves() for server in servers))
    urls = [server.url for server in (servers if helped else servers[:1])]
    agent, victim = Agent(SearchClient(urls, deadline=4.0)), servers[0].process.pid
    group = await _played(agent, before_turn=lambda turn: os.kill(victim, fault) if turn == 1 else None)
    if helped:
        return _check_won(group)
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward, trajectory.usable) == ("tool_error", None, False)
        assert "SearchUnavailable" in trajectory.error
    assert any(len(trajectory.turns) == 2 for trajectory in group.trajectories)
    assert not group.accepted and "0 usable" in group.reject_reason
