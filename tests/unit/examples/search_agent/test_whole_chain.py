"""Episodes over HTTP against retrieval servers in processes of their own, which work, lie, hang, die, or are full.

agent ─▶ search client ─▶ python -m examples.search_agent.retrieval_server serve …
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import string
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from examples.search_agent.agent import SearchAgent, task_of
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.index import build_index
from examples.search_agent.passages import Passage
from examples.search_agent.search_client import SearchClient
from examples.search_agent.services import Services
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.rewards.scoring import RewardPool
from storage.records import RolloutGroup, Sampling
from tests.builders import a_config
from tests.unit.examples.search_agent.scripted_server import Answer, ScriptedServer
from tests.unit.rollouts.scripted_text import Brackets
from trainers.model.warmup import character_tokenizer

_ROOT = Path(__file__).parents[4]
_PASSAGES = [
    Passage(id="1", title="Ada", text="Ada works for Bob."),
    Passage(id="2", title="Bob", text="Bob lives in Rome."),
    Passage(id="3", title="Carl", text="Carl works in Oslo."),
]
_PROBLEM = Problem(id="q", question="Where does Ada's boss live?", answer="Rome", supporting=("1", "2"))
_REPLIES = ('[search {"query": "Ada works"}]', '[search {"query": "Bob lives"}]', "Answer: Rome [1] [2]")
_ATTEMPTS = 3
_DEADLINE = 4.0


class _Server:
    """A retrieval server as it is started by hand."""

    def __init__(self, index: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "examples.search_agent.retrieval_server", "serve", str(index)]
        self.process = subprocess.Popen([*command, "--port", str(port), *options], cwd=_ROOT, stdout=subprocess.DEVNULL)

    async def serves(self) -> None:
        async with httpx.AsyncClient() as probe:
            while True:
                assert self.process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    assert (await probe.get(f"{self.url}/health")).json()["passages"] == len(_PASSAGES)
                    return
                await asyncio.sleep(0.05)

    def die(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    write_dataset(folder, _PASSAGES, {"train": [_PROBLEM]})
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Iterator[_Server]:
    server = _Server(folder / "index")
    yield server
    server.die()


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[_Server]:
    server = _Server(folder / "index")
    yield server
    server.die()


@pytest.fixture
def victim(folder: Path) -> Iterator[_Server]:
    server = _Server(folder / "index")
    yield server
    server.die()


class _Agent(SearchAgent):
    """With a client that does not wait as long as it would."""

    instructions = ""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__()
        self.client = SearchClient(urls, deadline=_DEADLINE)
        self._services = Services(self.client)


async def _played(agent: SearchAgent, *, before_turn: Callable[[int], None] = lambda turn: None) -> RolloutGroup:
    """A group of attempts of a policy that says `_REPLIES`; `before_turn` is called as each reply is asked for."""
    tokens = ChatTokens(character_tokenizer(set(string.printable)))

    def reply(_: list[int], request_id: str) -> list[int]:
        turn = int(request_id.rpartition("/")[2])
        before_turn(turn)
        return [*tokens.tokenizer(_REPLIES[turn])["input_ids"], tokens.end_id]

    async with RewardPool(num_processes=1, timeout=60) as pool:
        player = Player(
            workflow=agent,
            engine=ScriptedEngine(reply),
            tokens=tokens,
            rewards=pool,
            config=a_config(min_usable=1, attempt_timeout=60.0, max_model_len=10_000, tokens_per_microbatch=10_000),
            tool_parser=Brackets(),  # type: ignore[arg-type]
        )
        task = task_of(_PROBLEM.id, _PROBLEM.question, _PROBLEM.answer, _PROBLEM.supporting)
        options = {"group_id": "0.q", "position": 0, "epoch": 0, "n_samples": _ATTEMPTS, "is_eval": False}
        group = await player.group(task, sampling=Sampling(max_tokens=1000), **options)  # type: ignore[arg-type]
    await agent.close()
    return group


def _check_won(group: RolloutGroup) -> None:
    assert [(t.status, t.reward, t.error) for t in group.trajectories] == [("ok", 1.0, "")] * _ATTEMPTS
    for trajectory in group.usable:
        told = [message.content for message in trajectory.messages if message.role == "tool"]
        assert told[0].startswith("[1] Ada works for Bob.") and told[1].startswith("[2] Bob lives in Rome.")
        assert trajectory.reward_parts["cited"] == trajectory.reward_parts["found"] == 1.0


def _check_masked(group: RolloutGroup, reason: str, *, num_turns: int | None = None) -> None:
    for trajectory in group.trajectories:
        assert (trajectory.status, trajectory.reward, trajectory.usable) == ("tool_error", None, False)
        assert "SearchUnavailable" in trajectory.error and reason in trajectory.error
        if num_turns is not None:
            assert len(trajectory.turns) == num_turns
    assert not group.accepted and "0 usable" in group.reject_reason


def test_servers_named_by_the_data_set_are_searched_and_share_the_load(folder: Path, healthy: _Server, other: _Server):
    async def scenario() -> None:
        await asyncio.gather(healthy.serves(), other.serves())
        (folder / "services.toml").write_text(f'search = ["{healthy.url}", "{other.url}"]')
        agent = SearchAgent(str(folder))
        _check_won(await _played(agent))
        asked = [endpoint.requests for endpoint in agent.services()._searcher.endpoints]  # type: ignore[attr-defined]
        assert sum(asked) == 2 * _ATTEMPTS and all(asked)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [((200, {}, b"<html>Welcome</html>"), "garbage"), ((200, {}, b'{"results": [[{"id": 7}]]}'), "garbage")],
    ids=["not JSON", "other JSON"],
)
def test_a_server_that_lies(healthy: _Server, answer: Answer, reason: str):
    async def scenario() -> None:
        async with ScriptedServer(answer) as liar:
            _check_masked(await _played(_Agent([liar.url])), reason, num_turns=1)
            await healthy.serves()
            _check_won(await _played(_Agent([liar.url, healthy.url])))

    asyncio.run(scenario())


def test_a_server_that_hangs(healthy: _Server, other: _Server):
    async def scenario() -> None:
        await asyncio.gather(healthy.serves(), other.serves())
        os.kill(other.process.pid, signal.SIGSTOP)
        try:
            _check_masked(await _played(_Agent([other.url])), "no answer within", num_turns=1)
            _check_won(await _played(_Agent([other.url, healthy.url])))
        finally:
            os.kill(other.process.pid, signal.SIGCONT)

    asyncio.run(scenario())


@pytest.mark.parametrize("helped", [False, True], ids=["alone", "with another"])
def test_a_server_that_dies_in_the_middle_of_an_episode(healthy: _Server, victim: _Server, helped: bool):
    def before_turn(turn: int) -> None:
        if turn == 1:
            victim.die()

    async def scenario() -> None:
        await asyncio.gather(healthy.serves(), victim.serves())
        agent = _Agent([victim.url, healthy.url] if helped else [victim.url])
        group = await _played(agent, before_turn=before_turn)
        if helped:
            _check_won(group)
        else:
            _check_masked(group, "Error")
            assert any(len(trajectory.turns) == 2 for trajectory in group.trajectories)

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def _full(index: Path) -> AsyncIterator[_Server]:
    """A server whose queue holds one query, and whose only one waits for a second that will not be let in."""
    server = _Server(index, "--queue", "1", "--max-batch", "2", "--batch-ms", "600000")
    try:
        await server.serves()
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            waiting = asyncio.create_task(client.post("/search", json={"query": "Ada"}))
            while (await client.get("/health")).json()["queue"] < 1:
                await asyncio.sleep(0.01)
            yield server
            waiting.cancel()
    finally:
        server.die()


def test_a_server_that_is_full(folder: Path, healthy: _Server):
    async def scenario() -> None:
        async with _full(folder / "index") as full:
            alone = _Agent([full.url])
            _check_masked(await _played(alone), "status 429", num_turns=1)
            assert alone.client.endpoints[0].pushed_back > 0 == alone.client.endpoints[0].failures
            await healthy.serves()
            _check_won(await _played(_Agent([full.url, healthy.url])))

    asyncio.run(scenario())
