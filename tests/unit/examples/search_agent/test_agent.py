"""The research agent: its rules, whose fault a failure is, what it is told, and that its world can be won."""

from __future__ import annotations

import asyncio
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.search_agent.agent import FAULTS, SearchAgent
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.local_search import LocalSearch
from examples.search_agent.passages import Passage
from examples.search_agent.refine_client import RefineUnavailable
from examples.search_agent.rewards import parse_answer
from examples.search_agent.search_client import BadQuery, SearchUnavailable
from examples.search_agent.services import Services, connect, read_settings
from examples.search_agent.world import main as write_world
from examples.search_agent.world_agent import MISTAKES, WorldAgent
from infra.user_code import load_object
from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import check_tool_parser
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.rewards.reward_shaping import weighted_sum
from rollouts.rewards.scoring import RewardFailed, RewardPool
from rollouts.workflow import Score
from settings.run_file import default_values, load_run_file
from storage.log.runs import create_run
from storage.records import Message, Sampling, Task, Trajectory
from tests.builders import MemoryStore, a_config
from tests.unit.rollouts.scripted_text import Brackets, an_engine
from trainers.model.warmup import character_tokenizer

_FOLDER = Path(__file__).parents[4] / "examples" / "search_agent"
_PASSAGES = [
    Passage(id="1", title="Ada", text="Ada works for Bob."),
    Passage(id="2", title="Bob", text="Bob lives in Rome."),
    Passage(id="3", title="", text="Carl lives in Oslo."),
]
_PROBLEM = Problem(id="q", question="Where does Ada's boss live?", answer="Rome", supporting=("1", "2"))
_SETTINGS: dict[str, Any] = {
    "min_usable": 1,
    "exclude_statuses": ["truncated", "max_turns"],
    "attempt_timeout": 60.0,
    "max_tool_turns": 48,
    "tokens_per_microbatch": 100_000,
}


class _Searcher:
    """Searches in memory, until the `dies_at`-th search."""

    def __init__(self, dies_at: int = 10**9, error: Exception | None = None) -> None:
        self.queries: list[str] = []
        self.closed = False
        self._search = LocalSearch(_PASSAGES)
        self._dies_at = dies_at
        self._error = error or SearchUnavailable("2 servers, none answered")

    async def search(self, query: str, k: int = 5) -> list[Passage]:
        self.queries.append(query)
        if len(self.queries) >= self._dies_at:
            raise self._error
        return await self._search.search(query, k)

    async def close(self) -> None:
        self.closed = True


class _Agent(SearchAgent):
    """With services of the test's own."""

    instructions = ""

    def __init__(self, services: Services, dataset: str | None = None) -> None:
        super().__init__(dataset)
        self._services = services


def _play(agent: SearchAgent, *replies: str, task: Task | None = None, **limits: Any) -> Trajectory:
    """One attempt of a policy that says these replies."""
    tokens = ChatTokens(character_tokenizer(set(string.printable + "…")))
    sampling = Sampling(max_tokens=limits.pop("max_tokens", 1000))
    max_model_len = limits.pop("max_model_len", 10_000)

    async def play() -> Trajectory:
        async with RewardPool(num_processes=1, timeout=60) as pool:
            player = Player(
                workflow=agent,
                engine=an_engine(tokens, *replies),
                tokens=tokens,
                rewards=pool,
                config=a_config(max_model_len=max_model_len, **{**_SETTINGS, **limits}),
                tool_parser=Brackets(),  # type: ignore[arg-type]
            )
            group = await player.group(
                task or _task(),
                group_id="0.q",
                position=0,
                epoch=0,
                n_samples=1,
                sampling=sampling,
                is_eval=False,
            )
            return group.trajectories[0]

    return asyncio.run(play())


def _task() -> Task:
    return Task(id="q", prompt=_PROBLEM.question, answer="Rome", metadata={"supporting": json.dumps(["1", "2"])})


def _search(*queries: str) -> str:
    return " ".join(f"[search {json.dumps({'query': query})}]" for query in queries)


def _read(**arguments: Any) -> str:
    return f"[read {json.dumps(arguments)}]"


def _told(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


def test_an_agent_that_searches_twice_and_cites_both_gets_everything():
    searcher = _Searcher()
    played = _play(
        _Agent(Services(searcher)),
        f"First Ada's boss, then his home. {_search('Ada works')}",
        _search("Bob lives"),
        "It is in Rome.\nAnswer: Rome [1] [2]",
    )
    assert (played.status, played.reward) == ("ok", 1.0)
    assert played.reward_parts == {
        **dict.fromkeys(["exact", "f1", "cited", "found", "format"], 1.0),
        **dict.fromkeys(FAULTS, 0.0),
        "searches": 2.0,
    }
    assert searcher.queries == ["Ada works", "Bob lives"]
    assert _told(played)[0] == "[1] Ada works for Bob."


def test_calls_of_one_turn_run_at_the_same_time():
    class _Meeting(_Searcher):
        """Every search waits until as many others are under way."""

        def __init__(self) -> None:
            super().__init__()
            self.barrier = asyncio.Barrier(3)

        async def search(self, query: str, k: int = 5) -> list[Passage]:
            await self.barrier.wait()
            return await super().search(query, k)

    played = _play(_Agent(Services(_Meeting())), _search("Ada", "Bob", "Carl"), "Answer: Rome [2]", tool_timeout=20.0)
    assert len(_told(played)) == 3
    assert not any(call.failed for call in played.turns[0].tool_calls)


@pytest.mark.parametrize(
    ("replies", "fault"),
    [
        ([_search("Ada works"), _search("ada  WORKS ")], "duplicate_search"),
        ([_search("Ada", "Bob", "Ada")], "duplicate_search"),
        ([_search(*(f"word {n}" for n in range(9)))], "too_many_calls"),
        ([_search("Ada"), " ".join([_search("Bob")] + [_read(passage_id="1")] * 8)], "too_many_calls"),
    ],
)
def test_a_broken_rule_is_the_policys_fault(replies: list[str], fault: str):
    searcher = _Searcher()
    played = _play(_Agent(Services(searcher)), *replies)
    assert (played.status, played.reward, played.usable) == ("ok", 0.0, True)
    assert {name: played.reward_parts[name] for name in FAULTS} == {name: float(name == fault) for name in FAULTS}
    assert played.reward_parts["exact"] == played.reward_parts["format"] == played.reward_parts["cited"] == 0.0
    assert played.turns[-1].tool_calls and all(call.failed for call in played.turns[-1].tool_calls)
    assert len(searcher.queries) == len(replies) - 1  # nothing of the turn that broke it is sent


def test_eight_calls_in_a_turn_are_allowed():
    played = _play(_Agent(Services(_Searcher())), _search(*(f"word {n}" for n in range(8))), "Answer: Rome")
    assert (played.reward, played.reward_parts["searches"]) == (1.0, 8.0)


def test_a_broken_rule_beats_a_server_that_fails_in_the_same_turn():
    played = _play(_Agent(Services(_Searcher(dies_at=2))), _search("Ada"), _search("Bob", "Ada"))
    assert (played.status, played.reward, played.reward_parts["duplicate_search"]) == ("ok", 0.0, 1.0)


@pytest.mark.parametrize(
    "error",
    [
        SearchUnavailable("2 servers, none answered"),
        TimeoutError("10 s"),
        ValueError("garbage"),
        ConnectionError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("dies_at", [1, 2])
def test_a_server_that_fails_is_recorded_as_such_and_never_reward_0(error: Exception, dies_at: int):
    searcher = _Searcher(dies_at=dies_at, error=error)
    played = _play(_Agent(Services(searcher)), _search("Ada"), _search("Bob"), "Answer: Rome [1] [2]")
    assert (played.status, played.reward, played.usable) == ("tool_error", None, False)
    assert str(error) in played.error and type(error).__name__ in played.error
    assert len(played.turns) == dies_at and played.turns[-1].tool_calls[0].failed


def test_a_query_that_the_server_refuses_is_told_to_the_policy():
    searcher = _Searcher(dies_at=1, error=BadQuery("the query is too long"))
    played = _play(_Agent(Services(searcher)), _search("Ada"), "Answer: Rome")
    assert (played.status, played.reward) == ("ok", 1.0)
    assert "the query is too long" in _told(played)[0]


class _Refiner:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.closed = False
        self._error = error

    async def refine(self, question: str, passages: Sequence[Passage]) -> str:
        if self._error is not None:
            raise self._error
        self.asked.append((question, [passage.id for passage in passages]))
        return "[1] Ada's boss: Bob"

    async def close(self) -> None:
        self.closed = True


def test_a_refiner_condenses_what_is_shown_and_citations_still_count():
    refiner = _Refiner()
    played = _play(_Agent(Services(_Searcher(), refiner=refiner)), _search("Ada works"), "Answer: Rome [1]")
    assert refiner.asked == [(_PROBLEM.question, ["1"])]
    assert _told(played) == ["[1] Ada's boss: Bob"]
    assert played.reward_parts["found"] == 0.5


def test_a_refiner_that_fails_is_recorded_as_such():
    services = Services(_Searcher(), refiner=_Refiner(RefineUnavailable("no endpoint")))
    played = _play(_Agent(services), _search("Ada"), "Answer: Rome")
    assert (played.status, played.reward) == ("tool_error", None)
    assert played.error == "RefineUnavailable: no endpoint"


def test_what_the_policy_asks_wrongly_it_is_told():
    played = _play(
        _Agent(Services(_Searcher())),
        _search("  "),
        _search("x" * 2000),
        "[search {}]",
        _read(passage_id="1"),
        _search("nowhere"),
        "Answer: Rome",
        max_tokens=3000,
    )
    told = _told(played)
    assert (played.status, played.reward) == ("ok", 1.0)
    assert "1 to 1000 characters" in told[0] and "1 to 1000 characters" in told[1]
    assert "query" in told[2] and "no search has found" in told[3] and told[4] == "nothing found"


def test_a_long_passage_is_shown_in_part_and_read_on():
    agent = _Agent(Services(_Searcher()))
    agent.shown = 10  # type: ignore[misc]
    played = _play(agent, _search("Ada works"), _read(passage_id="1", start=10), "Answer: Rome")
    assert _told(played) == ["[1] Ada works  … [8 characters more]", "for Bob."]


def test_a_title_is_shown_where_the_text_does_not_say_it():
    searcher = LocalSearch([Passage(id="7", title="Rome", text="A town in Italy.")])
    assert _told(_play(_Agent(Services(searcher)), _search("Rome"), "Answer: Rome")) == ["[7] Rome: A town in Italy."]


def test_an_agent_that_never_answers_ends_at_the_turn_limit_and_is_not_trained():
    searches = [_search(f"word {n}") for n in range(4)]
    played = _play(_Agent(Services(_Searcher())), *searches, max_tool_turns=3)
    assert (played.status, played.excluded, played.usable, len(played.turns)) == ("max_turns", True, False, 4)


@pytest.mark.parametrize("limits", [{"max_tokens": 20}, {"max_model_len": 100}], ids=["reply", "context"])
def test_an_agent_that_is_too_long_is_not_trained(limits: dict[str, int]):
    played = _play(_Agent(Services(_Searcher())), _search("Ada works"), "x" * 200, **limits)
    assert (played.status, played.usable) == ("truncated", False)


def test_an_agent_that_takes_too_long_is_no_reward_0():
    class _Hanging(_Searcher):
        async def search(self, query: str, k: int = 5) -> list[Passage]:
            await asyncio.Event().wait()
            raise AssertionError

    played = _play(_Agent(Services(_Hanging())), _search("Ada"), "Answer: Rome", attempt_timeout=0.2)
    assert (played.status, played.reward) == ("timeout", None)


def test_a_judge_is_a_part_of_the_score_and_its_failure_no_reward_0():
    asked = []

    async def judge(question: str, reply: str, *, reference: str = "") -> Score:
        asked.append((question, reply, reference))
        return Score(reward=0.75)

    async def broken(question: str, reply: str, *, reference: str = "") -> Score:
        raise RewardFailed("no verdict")

    agent = _Agent(Services(_Searcher(), judge=judge))  # type: ignore[arg-type]
    played = _play(agent, "Answer: Rome")
    assert asked == [(_PROBLEM.question, "Answer: Rome", "Rome")]
    assert (played.reward, played.reward_parts["judge"]) == (1.0, 0.75)
    assert _play(agent, _search("a", "a")).reward_parts["judge"] == 0.0 and len(asked) == 1
    broken_agent = _Agent(Services(_Searcher(), judge=broken))  # type: ignore[arg-type]
    assert _play(broken_agent, "Answer: Rome").status == "reward_error"


def test_closing_the_agent_closes_its_services():
    services = Services(_Searcher(), refiner=(refiner := _Refiner()))
    asyncio.run(_Agent(services).close())
    assert services._searcher.closed and refiner.closed  # type: ignore[attr-defined]


def test_a_folder_is_searched_in_the_process_where_no_server_is_named(tmp_path: Path):
    write_dataset(tmp_path, _PASSAGES, {"train": [_PROBLEM], "test": [Problem(id="t", question="?", answer="x")]})
    agent = SearchAgent(str(tmp_path))
    (task,) = agent.tasks("train")
    assert (task.prompt, task.answer) == (_PROBLEM.question, "Rome")
    played = _play(agent, _search("Ada works"), "Answer: Rome [1]", task=task)
    assert played.reward == 1.0 and played.reward_parts["cited"] == pytest.approx(2 / 3)
    assert played.messages[0].content.endswith(f"Question: {_PROBLEM.question}")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"corpus.jsonl": None}, "nothing to search"),
        ({"corpus.jsonl": ""}, "corpus.jsonl"),
        ({"corpus.jsonl": '{"id": "1", "text": "a"}\n{"id": "2", "te\n'}, "line 2"),
        ({"train.jsonl": '{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": ""}\n'}, "line 2: 'answer'"),
        ({"train.jsonl": None}, "train"),
        ({"services.toml": "search = ["}, "not valid TOML"),
        ({"services.toml": 'serch = ["http://a"]'}, "serch"),
        ({"services.toml": 'search = ["ftp://a"]'}, "no http"),
        ({"services.toml": "[refine]\nmodel = 'a'\nurls = []"}, "refine.urls"),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_used_is_named_before_anything_starts(
    tmp_path: Path, files: dict[str, str | None], named: str
):
    write_dataset(tmp_path, _PASSAGES, {"train": [_PROBLEM], "test": [Problem(id="t", question="?", answer="x")]})
    for name, text in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        SearchAgent(str(tmp_path)).tasks("train")


@pytest.mark.parametrize("dataset", [None, "no/such/folder"])
def test_a_missing_folder_is_named(dataset: str | None):
    with pytest.raises(ValueError, match="dataset"):
        SearchAgent(dataset).tasks("train")


def test_a_judge_without_its_key_is_named(tmp_path: Path):
    write_dataset(tmp_path, _PASSAGES, {"train": [_PROBLEM]})
    (tmp_path / "services.toml").write_text("[judge]\nbase_url='http://a/v1'\nmodel='m'\napi_key_env='NO_SUCH_KEY'")
    with pytest.raises(ValueError, match="NO_SUCH_KEY"):
        connect(tmp_path, read_settings(tmp_path))


# --- the tiny world -------------------------------------------------------------------------------------------------


def _world_agent(tmp_path: Path) -> WorldAgent:
    arguments = ["--entities", "100", "--questions", "60", "--held-out", "20", "--style", "notes"]
    write_world([str(tmp_path), *arguments])
    return WorldAgent(str(tmp_path))


class _Pythonic(Brackets):
    """`[search(query='…')]`, as the run file's parser reads it."""

    async def parse(self, text: str, tools: Any) -> Any:
        found = re.fullmatch(r"\[search\(query='(.*)'\)\]", text)
        return await super().parse(_search(found[1]) if found else text, tools)


def _won(agent: WorldAgent, task: Task) -> Score:
    """What the reference makes of a task."""
    tokens = ChatTokens(character_tokenizer(set(string.printable)))
    said: list[str] = []
    engine = ScriptedEngine(lambda *_: [*tokens.tokenizer(said[-1])["input_ids"], tokens.end_id])

    class _Reference(Chat):
        async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
            said.append(agent.reference_reply(task, messages))
            return await super().complete(messages, **options)

    chat = _Reference(
        engine=engine,
        tokens=tokens,
        sampling=Sampling(max_tokens=100),
        max_model_len=2000,
        request_id=task.id,
        tool_parser=_Pythonic(),  # type: ignore[arg-type]
    )
    return asyncio.run(agent.run(task, chat))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_question_of_one_to_four_hops_can_be_won(tmp_path: Path, split: str):
    agent = _world_agent(tmp_path)
    for task in agent.tasks(split):
        score = _won(agent, task)
        assert (score.reward, score.parts["cited"], score.parts["found"]) == (1.0, 1.0, 1.0), task
        assert score.parts["searches"] == len(json.loads(task.metadata["supporting"]))


def test_the_made_world_can_be_won_and_its_episodes_fit_the_run_files_context():
    config = load_run_file(_FOLDER / "search_agent.toml")
    agent = WorldAgent()
    assert all(_won(agent, task).reward == 1.0 for task in agent.tasks("test")[:20])
    assert len(agent.tasks("test")) == 200
    longest = max(
        sum(len(message.content) + 2 for message in conversation) for conversation in agent.demonstrations(500, 0)
    )
    assert longest < config.engine.max_model_len
    replies = [m.content for c in agent.demonstrations(500, 0) for m in c if m.role == "assistant"]
    assert max(map(len, replies)) < config.sampling.max_tokens


def test_demonstrations_succeed_as_often_as_they_say_and_never_on_held_out_questions():
    agent = WorldAgent()
    answers = {task.prompt: task.answer for task in agent.tasks("train")}
    held_out = {task.prompt for task in agent.tasks("test")}
    conversations = agent.demonstrations(2000, 1)
    assert not held_out & {conversation[0].content for conversation in conversations}
    right = 0
    for question, *rest in conversations:
        found = parse_answer(rest[-1].content)
        searches = [message.content for message in rest if message.content.startswith("[search")]
        right += found is not None and found.text == answers[question.content] and len(searches) == 2
    assert right / len(conversations) == pytest.approx(1 - sum(MISTAKES.values()), abs=0.04)
    assert agent.demonstrations(2000, 1) == conversations


def test_a_question_that_is_no_chain_is_named():
    task = Task(id="0", prompt="Who wrote it?", answer="Ada")
    with pytest.raises(ValueError, match="like 'home of boss of kim.', not 'Who wrote it.': make a data set with"):
        WorldAgent().reference_reply(task, [])


# --- the run files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["search_agent.toml", "search_agent_7b.toml"])
def test_a_run_file_is_valid_and_a_run_of_it_is_continued_by_starting_it_again(name: str):
    config = load_run_file(_FOLDER / name)
    assert issubclass(load_object(config.workflow), SearchAgent)
    check_tool_parser(config.engine.tool_parser)
    assert config.max_staleness == 1 and config.engine.update_mode == "keep"
    store = MemoryStore()
    for _ in range(2):
        create_run(store, "run", config.model_dump(mode="json"), defaults=default_values())


def test_the_run_file_for_gpus_weighs_every_part_and_a_broken_rule_is_worth_nothing():
    config = load_run_file(_FOLDER / "search_agent_7b.toml")
    assert config.rollout.max_tool_turns == 48
    parts = _play(_Agent(Services(_Searcher())), _search("Ada", "Ada")).reward_parts
    assert config.reward.weights.keys() == parts.keys()
    assert weighted_sum(parts, config.reward.weights) == 0.0
    best = _play(_Agent(Services(_Searcher())), _search("Ada works", "Rome"), "Answer: Rome [1] [2]").reward_parts
    assert weighted_sum(best, config.reward.weights) == pytest.approx(1.2)
