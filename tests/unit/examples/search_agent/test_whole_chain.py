"""Episodes over HTTP against retrieval servers in processes of their own, which share the load, hang, or die.

agent ─▶ search client ─▶ python -m examples.search_agent.retrieval_server serve …

`test_clients.py` has what else a server may do, and `test_agent.py` what any failed search makes of an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

from examples.search_agent.agent import SearchAgent
from examples.search_agent.index import build_index
from examples.search_agent.search_client import SearchClient
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import RolloutGroup
from tests.unit.examples.search_agent.episodes import Agent, play_group, results, search, tokens, write_folder
from tests.unit.examples.search_agent.scripted_server import RetrievalServer

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
