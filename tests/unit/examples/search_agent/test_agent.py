"""The research agent: its rules, whose fault a failure is, what it is told, and that its world can be won."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.search_agent.agent import FAULTS, SearchAgent, show
from examples.search_agent.refine_client import RefineUnavailable
from examples.search_agent.retrieval.local_search import LocalSearch
from examples.search_agent.retrieval.passages import Passage, read_passages
from examples.search_agent.retrieval.search_client import BadQuery, SearchUnavailable
from examples.search_agent.rewards import answer_parts, parse_answer
from examples.search_agent.world import main as write_world
from examples.search_agent.world_agent import MISTAKES, WorldAgent
from rollouts.rewards.reward_shaping import weighted_sum
from rollouts.rewards.scoring import RewardFailed
from rollouts.workflow import Score
from settings.run_file import load_run_file
from storage.records import Message, Task
from tests.unit.examples.search_agent.episodes import (
    FOLDER,
    PASSAGES,
    PROBLEM,
    Agent,
    play,
    read,
    results,
    search,
    write_folder,
)


class _Searcher(LocalSearch):
    """Searches in memory, until the `dies_at`-th search."""

    def __init__(self, dies_at: int = 10**9, error: Exception | None = None) -> None:
        super().__init__(PASSAGES)
        self.queries: list[str] = []
        self.closed = False
        self._dies_at = dies_at
        self._error = error or SearchUnavailable("2 servers, none answered")

    async def search(self, query: str, k: int = 5) -> list[Passage]:
        self.queries.append(query)
        if len(self.queries) >= self._dies_at:
            raise self._error
        return self.best(query, k)

    async def close(self) -> None:
        self.closed = True


class _Refiner:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.closed = False
        self._error = error

    async def refine(self, question: str, passages: Sequence[Passage]) -> str:
        if self._error is not None:
            raise self._error
        self.calls.append((question, [passage.id for passage in passages]))
        return "[1] Ada's boss: Bob"

    async def close(self) -> None:
        self.closed = True


async def test_an_agent_that_searches_twice_and_cites_both_gets_everything():
    replies = [f"First his boss. {search('Ada works')}", search("Bob lives"), "In Rome.\nAnswer: Rome [1] [2]"]
    played = await play(Agent(searcher := _Searcher()), *replies)
    assert (played.status, played.reward) == ("ok", 1.0)
    parts = dict.fromkeys(["exact", "f1", "cited", "found", "format"], 1.0) | dict.fromkeys(FAULTS, 0.0)
    assert played.reward_parts == {**parts, "searches": 2.0}
    assert searcher.queries == ["Ada works", "Bob lives"]
    assert results(played)[0] == "[1] Ada works for Bob."


async def test_eight_calls_of_one_turn_are_allowed_and_run_at_the_same_time():
    class _Meeting(_Searcher):
        """Every search waits until as many others are under way."""

        barrier = asyncio.Barrier(8)

        async def search(self, query: str, k: int = 5) -> list[Passage]:
            await self.barrier.wait()
            return await super().search(query, k)

    replies = [search(*(f"word {n}" for n in range(8))), "Answer: Rome [2]"]
    played = await play(Agent(_Meeting()), *replies, tool_timeout=20.0)
    assert (played.reward, played.reward_parts["searches"], len(results(played))) == (1.0, 8.0, 8)
    assert not any(call.failed for call in played.turns[0].tool_calls)


@pytest.mark.parametrize("error", [TimeoutError("10 s"), ValueError("garbage")], ids=lambda error: type(error).__name__)
async def test_any_error_of_a_search_is_the_servers_unless_a_rule_is_broken_in_the_same_turn(error: Exception):
    played = await play(Agent(_Searcher(dies_at=2, error=error)), search("Ada"), search("Bob"), "Answer: Rome [1] [2]")
    assert (played.status, played.reward, played.usable) == ("tool_error", None, False)
    assert str(error) in played.error and type(error).__name__ in played.error
    assert len(played.turns) == 2 and played.turns[-1].tool_calls[0].failed
    played = await play(Agent(_Searcher(dies_at=2, error=error)), search("Ada"), search("Bob", "Ada"))
    assert (played.status, played.reward, played.reward_parts["duplicate_search"]) == ("ok", 0.0, 1.0)


async def test_a_query_that_the_server_refuses_is_told_to_the_policy():
    searcher = _Searcher(dies_at=1, error=BadQuery("the query is too long"))
    played = await play(Agent(searcher), search("Ada"), "Answer: Rome")
    assert (played.status, played.reward) == ("ok", 1.0) and "the query is too long" in results(played)[0]


async def test_a_refiner_condenses_what_is_shown_and_its_failure_is_recorded_as_such():
    agent = Agent(searcher := _Searcher(), refiner=(refiner := _Refiner()))
    played = await play(agent, search("Ada works"), "Answer: Rome [1]")
    assert refiner.calls == [(PROBLEM.question, ["1"])]
    assert (results(played), played.reward_parts["found"]) == (["[1] Ada's boss: Bob"], 0.5)
    await agent.close()
    assert searcher.closed and refiner.closed
    agent = Agent(_Searcher(), refiner=_Refiner(RefineUnavailable("no endpoint")))
    failed = await play(agent, search("Ada"), "Answer: Rome")
    assert (failed.status, failed.reward) == ("tool_error", None)
    assert failed.error.startswith("RefineUnavailable: no endpoint")


async def test_a_long_passage_is_shown_in_part_and_read_on_with_its_title_if_the_text_does_not_have_it():
    agent = Agent(_Searcher())
    agent.shown = 10  # type: ignore[misc]
    played = await play(agent, search("Ada works"), read(passage_id="1", start=10), "Answer: Rome")
    assert results(played) == ["[1] Ada works  … [8 characters more]", "for Bob."]
    searcher = LocalSearch([Passage(id="7", title="Rome", text="A town in Italy.")])
    assert results(await play(Agent(searcher), search("Rome"), "Answer: Rome")) == ["[7] Rome: A town in Italy."]


async def test_a_judge_is_a_part_of_the_score_and_its_failure_no_reward_0():
    calls = []

    async def judge(question: str, reply: str, *, reference: str = "") -> Score:
        calls.append((question, reply, reference))
        return Score(reward=0.75)

    async def broken(question: str, reply: str, *, reference: str = "") -> Score:
        raise RewardFailed("no verdict")

    played = await play(Agent(_Searcher(), judge=judge), "Answer: Rome")
    assert calls == [(PROBLEM.question, "Answer: Rome", "Rome")]
    assert (played.reward, played.reward_parts["judge"]) == (1.0, 0.75)
    lost = await play(Agent(_Searcher(), judge=judge), search("a", "a"))
    assert lost.reward_parts["judge"] == 0.0 and len(calls) == 1
    assert (await play(Agent(_Searcher(), judge=broken), "Answer: Rome")).status == "reward_error"


async def test_a_folder_is_searched_in_the_process_if_no_server_is_named(tmp_path: Path):
    agent = SearchAgent(write_folder(tmp_path))
    (task,) = agent.tasks("train")
    assert (task.prompt, task.answer) == (PROBLEM.question, "Rome")
    played = await play(agent, search("Ada works"), "Answer: Rome [1]", task=task)
    assert played.reward == 1.0 and played.reward_parts["cited"] == pytest.approx(2 / 3)
    assert played.messages[0].content.endswith(f"Question: {PROBLEM.question}")


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("corpus.jsonl", None, "nothing to search"),
        ("corpus.jsonl", "", "corpus.jsonl"),
        ("corpus.jsonl", '{"id": "1", "text": "a"}\n{"id": "2", "te\n', "line 2"),
        ("train.jsonl", '{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": ""}\n', "line 2: 'answer'"),
        ("train.jsonl", None, "train"),
        ("services.toml", "search = [", "not valid TOML"),
        ("services.toml", 'serch = ["http://a"]', "serch"),
        ("services.toml", 'search = ["ftp://a"]', "not an http"),
        ("services.toml", "[refine]\nmodel = 'a'\nurls = []", "refine.urls"),
        ("services.toml", "[judge]\nbase_url='http://a/v1'\nmodel='m'\napi_key_env='NO_SUCH_KEY'", "NO_SUCH_KEY"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_before_anything_starts(
    tmp_path: Path, file: str, text: str | None, named: str
):
    write_folder(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        SearchAgent(str(tmp_path)).tasks("train")


def test_a_missing_folder_is_named():
    for dataset in (None, "no/such/folder"):
        with pytest.raises(ValueError, match="dataset"):
            SearchAgent(dataset).tasks("train")


# --- the tiny world -------------------------------------------------------------------------------------------------


def test_every_question_of_one_to_four_hops_can_be_won(tmp_path: Path):
    write_world([str(tmp_path), "--entities", "100", "--questions", "60", "--held-out", "20", "--style", "notes"])
    agent, notes = WorldAgent(str(tmp_path)), LocalSearch(list(read_passages(tmp_path / "corpus.jsonl")))
    for task in [*agent.tasks("train"), *agent.tasks("test")]:
        seen: list[Passage] = []
        messages: list[Message] = []
        while call := re.fullmatch(r"\[search\(query='(.*)'\)\]", reply := agent.reference_reply(task, messages)):
            seen += notes.best(call[1], 1)
            messages.append(Message(role="tool", content=show(seen[-1:], most=agent.shown)))
        supporting = json.loads(task.metadata["supporting"])
        parts = answer_parts(reply, task.answer, supporting=supporting, seen=[passage.id for passage in seen])
        assert set(parts.values()) == {1.0} and len(seen) == len(supporting), task


def test_the_made_worlds_episodes_fit_the_run_files_context():
    """`tests/unit/examples/test_examples.py` wins it."""
    config, agent = load_run_file(FOLDER / "search_agent.toml"), WorldAgent()
    assert len(agent.tasks("test")) == 200
    conversations = agent.demonstrations(500, 0)
    longest = max(sum(len(message.content) + 2 for message in conversation) for conversation in conversations)
    replies = [message.content for each in conversations for message in each if message.role == "assistant"]
    assert longest < config.engine.max_model_len and max(map(len, replies)) < config.sampling.max_tokens


def test_demonstrations_succeed_as_often_as_they_say_and_never_on_held_out_questions():
    agent = WorldAgent()
    answers = {task.prompt: task.answer for task in agent.tasks("train")}
    held_out = {task.prompt for task in agent.tasks("test")}
    conversations = agent.demonstrations(2000, 1)
    assert not held_out & {conversation[0].content for conversation in conversations}
    right = 0
    for question, *rest in conversations:
        answer = parse_answer(rest[-1].content)
        searches = [message.content for message in rest if message.content.startswith("[search")]
        right += answer is not None and answer.text == answers[question.content] and len(searches) == 2
    assert right / len(conversations) == pytest.approx(1 - sum(MISTAKES.values()), abs=0.04)
    assert agent.demonstrations(2000, 1) == conversations


def test_a_question_that_is_no_chain_is_named():
    task = Task(id="0", prompt="Who wrote it?", answer="Ada")
    with pytest.raises(ValueError, match="like 'home of boss of kim.', not 'Who wrote it.': make a data set with"):
        WorldAgent().reference_reply(task, [])


async def test_the_run_file_for_gpus_weighs_every_part_and_a_broken_rule_is_worth_nothing():
    config = load_run_file(FOLDER / "search_agent_7b.toml")
    assert config.rollout.max_tool_turns == 48
    parts = (await play(Agent(_Searcher()), search("Ada", "Ada"))).reward_parts
    assert config.reward.weights.keys() == parts.keys()
    assert weighted_sum(parts, config.reward.weights) == 0.0
    best = (await play(Agent(_Searcher()), search("Ada works", "Rome"), "Answer: Rome [1] [2]")).reward_parts
    assert weighted_sum(best, config.reward.weights) == pytest.approx(1.2)
