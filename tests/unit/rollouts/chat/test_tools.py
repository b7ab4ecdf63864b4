"""A tool's schema comes from its signature; its execution cannot hold up the loop, other tools or the attempt."""

from __future__ import annotations

import asyncio
import enum
import functools
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest
from rollouts.chat.tools import Tool, ToolUnavailable, run_calls, tool, tools_of
from rollouts.workflow import Score, Workflow, workflow_context
from storage.records import RolloutGroup, Task, ToolCall
from tests.builders import Panic, Wordless
from tests.conftest import PROJECT
from tests.unit.rollouts.scripted_text import an_engine, play_group


class Place(BaseModel):
    """Where."""

    city: str
    zip: int = 0


@tool
def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    The result is exact.

    Args:
        a: the first one
    """
    return a + b


class Board:
    """An environment whose methods are tools."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.moves: list[str] = []

    @tool
    def move(self, where: Literal["left", "right"]) -> str:
        """Go one step."""
        self.moves.append(where)
        return f"{where} on {self.size}"

    @tool
    async def look(self) -> str:
        """See the board."""
        return "x" * self.size

    def plain(self, part: str) -> str:
        """No tool by itself."""
        return f"{part} of {self.size}"


class SmallBoard(Board):
    @tool
    def give_up(self) -> str:
        """End the game."""
        return "over"


def _calls(*requests: tuple[str, str], tools: Sequence[Tool], **limits: Any) -> list[ToolCall]:
    return _outcome(*requests, tools=tools, **limits)[0]


def _outcome(
    *requests: tuple[str, str], tools: Sequence[Tool], timeout: float = 10.0, output_chars: int = 1000
) -> tuple[list[ToolCall], ToolUnavailable | None]:
    asked = [CallRequest(id=str(i), name=name, arguments=arguments) for i, (name, arguments) in enumerate(requests)]
    return asyncio.run(run_calls(asked, tools, timeout=timeout, output_chars=output_chars))


def test_the_schema_is_the_signature_in_openais_format():
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nThe result is exact.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "the first one"}, "b": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert add(1, 2) == 3 and add(a=1) == 4, "it is still a function"


def test_types_and_names_of_every_kind_have_a_schema_and_are_checked_and_converted():
    @tool
    def book(
        place: Place, nights: Annotated[int, Field(ge=1)], kind: Literal["bed", "room"], tags: list[str] | None = None
    ) -> str:
        """Book something."""
        return f"{type(place).__name__} {place.city} {nights} {kind} {tags}"

    parameters = book.schema["function"]["parameters"]
    assert parameters["properties"]["nights"] == {"type": "integer", "minimum": 1}
    assert parameters["properties"]["kind"]["enum"] == ["bed", "room"]
    assert parameters["required"] == ["place", "nights", "kind"]
    assert "city" in parameters["$defs"]["Place"]["properties"]
    asked = '{"place": {"city": "Rome"}, "nights": "2", "kind": "bed", "tags": ["quiet"]}'
    [call] = _calls(("book", asked), tools=[book])
    assert (call.result, call.failed) == ("Place Rome 2 bed ['quiet']", False)

    @tool
    def odd(json: str, _private: int, schema: bool) -> str:
        """Names that mean something to libraries."""
        return f"{json} {_private} {schema}"

    [call] = _calls(("odd", '{"json": "a", "_private": 1, "schema": true}'), tools=[odd])
    assert call.result == "a 1 True"


def test_a_partial_is_its_function_without_what_it_gives_and_an_object_is_its_call():
    def find(index: object, key: str, limit: int = 3) -> str:
        """Find something.

        Args:
            key: what to look for
        """
        return f"{index} {key} {limit}"

    class Finder:
        """Find something else."""

        async def __call__(self, key: str) -> str:
            return f"else {key}"

    first, second = tool(functools.partial(find, "index", limit=5)), tool(functools.partial(find, index="index"))
    parameters = first.schema["function"]["parameters"]
    assert parameters["properties"] == {"key": {"type": "string", "description": "what to look for"}}
    assert list(second.schema["function"]["parameters"]["properties"]) == ["key", "limit"]
    for each, result in ((first, "index a 5"), (second, "index a 3"), (tool(Finder()), "else a")):
        assert [call.result for call in _calls((each.name, '{"key": "a"}'), tools=[each])] == [result]
    assert [first.name, tool(Finder()).name] == ["find", "Finder"]


def test_methods_of_an_object_are_tools_of_that_object():
    small, large = SmallBoard(2), SmallBoard(9)
    assert [each.name for each in tools_of(small)] == ["move", "look", "give_up"]
    assert list(small.move.schema["function"]["parameters"]["properties"]) == ["where"]
    calls = _calls(("move", '{"where": "left"}'), ("look", "{}"), ("look", ""), tools=tools_of(large))
    assert [call.result for call in calls] == ["left on 9", "x" * 9, "x" * 9]
    assert (small.moves, large.moves) == ([], ["left"])
    assert small.move("right") == "right on 2"
    [call] = _calls(("plain", '{"part": "p"}'), tools=[tool(small.plain)])  # a bound method, made a tool later
    assert call.result == "p of 2"


def _no_docstring(a: int) -> None: ...
def _no_hint(a: int, b) -> None: ...  # type: ignore[no-untyped-def]
def _any_number(*numbers: int) -> None: ...
def _only_by_position(a: int, /) -> None: ...
def _no_schema(a: Callable[[int], int]) -> None: ...
def _unknown_type(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_a_function_that_cannot_be_a_tool_is_refused_where_it_is_written():
    for function, problem in [
        (_no_docstring, "'_no_docstring' has no docstring"),
        (_no_hint, "'_no_hint': parameter 'b' has no type hint"),
        (_any_number, r"parameter \*numbers: 'int' cannot be given by name"),
        (_only_by_position, "parameter a: 'int' cannot be given by name"),
        (_no_schema, "type has no JSON schema"),
        (_unknown_type, "name 'Nowhere' is not defined"),
    ]:
        function.__doc__ = None if function is _no_docstring else "Do it."
        with pytest.raises(ValueError, match=problem):
            tool(function)
    with pytest.raises(ValueError, match="same name"):
        _calls(("add", "{}"), tools=[add, add])


def test_what_the_policy_wrote_wrongly_is_told_to_it():
    for name, arguments, told in [
        ("ad", '{"a": 1}', "error: there is no tool 'ad', only add"),
        ("add", '{"a": 1', "error: Invalid JSON: EOF while parsing an object at line 1 column 7"),
        ("add", "[1, 2]", "error: Input should be an object"),
        ("add", '{"b": 2}', "error: a: Field required"),
        ("add", '{"a": "x", "c": 1}', "error: a: Input should be a valid integer, .*; c: Extra inputs are .*permitted"),
    ]:
        wrong, right = _calls((name, arguments), ("add", '{"a": 1}'), tools=[add])
        assert wrong.failed and (wrong.name, wrong.arguments, wrong.seconds) == (name, arguments, 0.0)
        assert re.fullmatch(told, wrong.result)
        assert (right.result, right.failed) == ("4", False)


def _no_parameters(function: Callable[[], Any], name: str = "act") -> Tool:
    function.__name__, function.__doc__ = name, "Do it."
    return tool(function)


def test_what_a_tool_raises_is_told_to_the_policy_even_an_exit():
    async def leave() -> None:
        sys.exit(3)

    circle: list[Any] = []
    circle.append(circle)

    def panic() -> None:
        raise Panic("index out of range")

    def fail() -> None:
        raise Wordless

    functions = [lambda: 1 / 0, leave, lambda: sys.exit(3), lambda: circle, lambda: next(iter(())), panic, fail]
    tools = [_no_parameters(function, f"tool{number}") for number, function in enumerate(functions)]
    calls = _calls(*[(each.name, "{}") for each in tools], tools=tools)
    assert all(call.failed for call in calls)
    assert [call.result for call in calls] == [
        "error: ZeroDivisionError: division by zero",
        "error: SystemExit: 3",
        "error: SystemExit: 3",
        "error: ValueError: Circular reference detected (id repeated)",
        "error: RuntimeError: coroutine raised StopIteration",
        "error: Panic: index out of range",
        "error: Wordless",
    ]


def test_a_result_is_text_or_json_and_a_long_one_is_cut_and_says_so():
    def result(returned: Any, **limits: Any) -> str:
        return _calls(("act", "{}"), tools=[_no_parameters(lambda: returned)], **limits)[0].result

    class Colour(enum.Enum):
        RED = "red"

    class Size(enum.StrEnum):
        BIG = "big"

    class Shirt(BaseModel):
        colour: Colour
        price: Decimal

    shirt = Shirt(colour=Colour.RED, price=Decimal("1.50"))
    for returned, text in [
        *(("é", "é"), (3, "3"), (None, "null"), ({"a": [1.5]}, '{"a": [1.5]}'), (Path("x"), '"x"')),
        *((Colour.RED, '"red"'), (Size.BIG, "big"), ({Colour.RED: [Size.BIG]}, '{"red": ["big"]}')),
        *((shirt, '{"colour": "red", "price": "1.50"}'), ([shirt], '[{"colour": "red", "price": "1.50"}]')),
        *((np.float32(1.5), "1.5"), (np.int64(3), "3"), (np.bool_(True), "true"), (np.str_("a"), "a")),
        *(({np.int64(1): np.array([[1, 2]])}, '{"1": [[1, 2]]}'), (date(2026, 1, 2), '"2026-01-02"')),
        *(
            (Place(city="Rome"), '{"city": "Rome", "zip": 0}'),
            ((1, {2}), "[1, [2]]"),
            (b"ab", '"ab"'),
            (b"\xff", '"_w=="'),
        ),
    ]:
        assert result(returned) == text
    assert [result("\udcff.txt"), result(["\ud83d"])] == ["\ufffd.txt", '["\ufffd"]']
    assert result("x" * 100, output_chars=100) == "x" * 100
    assert result("x" * 100, output_chars=20) == "x" * 20 + " … [cut: 20 of 100 characters]"


def test_tools_of_one_turn_run_at_the_same_time_and_blocking_ones_leave_the_loop_alone():
    together = threading.Barrier(9)

    def block() -> str:
        together.wait(timeout=10)
        return threading.current_thread().name

    async def join() -> str:
        while together.n_waiting < 8:
            await asyncio.sleep(0.01)
        together.wait(timeout=10)
        return "joined"

    tools = [_no_parameters(block, "block"), _no_parameters(join, "join")]
    calls = _calls(*[("block", "{}")] * 8, ("join", "{}"), tools=tools)
    assert [call.result for call in calls] == [*["millrace-tool"] * 8, "joined"]


def test_a_hung_tool_times_out_and_is_not_waited_for():
    released = threading.Event()

    async def hang_nicely() -> None:
        await asyncio.Event().wait()

    async def hang_on() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def play() -> list[ToolCall]:
        asked = [CallRequest(id=n, name=n, arguments="{}") for n in functions]
        asked.append(CallRequest(id="add", name="add", arguments='{"a": 1}'))
        calls, _ = await run_calls(asked, tools, timeout=0.2, output_chars=100)
        released.set()  # only now: nothing above waited for it
        return calls

    functions = {"hang": lambda: released.wait(), "hang_nicely": hang_nicely, "hang_on": hang_on}
    tools = [*(_no_parameters(function, name) for name, function in functions.items()), add]
    *hung, added = asyncio.run(play())
    assert [(call.result, call.failed) for call in hung] == [("error: timed out after 0.2 s", True)] * 3
    assert [call.timed_out for call in [*hung, added]] == [True, True, True, False]
    assert all(call.seconds >= 0.2 for call in hung)
    assert (added.result, added.failed) == ("4", False)


@pytest.mark.server
def test_a_hung_thread_does_not_keep_the_process_from_ending():
    program = """
import asyncio, time
from rollouts.chat.tool_parsing import CallRequest
from rollouts.chat.tools import run_calls, tool

@tool
def hang() -> None:
    "Never return."
    time.sleep(600)

asked = [CallRequest(id="0", name="hang", arguments="{}")]
calls, _ = asyncio.run(run_calls(asked, [hang], timeout=0.1, output_chars=100))
print(calls[0].result)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "error: timed out after 0.1 s", ended.stderr


def test_too_many_hung_threads_are_a_fault_of_the_infrastructure(monkeypatch: pytest.MonkeyPatch):
    released = threading.Event()
    hang = _no_parameters(lambda: released.wait())
    monkeypatch.setattr("rollouts.chat.tools.MOST_HUNG_THREADS", 2)
    try:
        _, fine = _outcome(("act", "{}"), ("act", "{}"), tools=[hang], timeout=0.05)
        _, unavailable = _outcome(("act", "{}"), tools=[hang], timeout=0.05)
    finally:
        released.set()
    assert fine is None
    assert isinstance(unavailable, ToolUnavailable) and "2 earlier calls" in str(unavailable)


class _Workflow(Workflow):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(None)
        self._tool = _no_parameters(function)

    async def run(self, task: Task, chat: Chat) -> Score:
        return Score(reward=float(len(await chat.ask(task.prompt, tools=[self._tool]))))


def _group(function: Callable[[], Any], tokens: ChatTokens, *replies: str, **limits: Any) -> RolloutGroup:
    """Three attempts with these replies; `[act {}]` calls the function."""
    engine, task = an_engine(tokens, *replies), Task(id="t", prompt="3")
    return asyncio.run(play_group(_Workflow(function), tokens, engine, task, n_samples=3, **limits))


def test_a_fault_of_a_tools_infrastructure_leaves_the_attempt_without_a_reward(text_tokens: ChatTokens):
    """One attempt's server answers 500; it enters no mean, and the others are trained, also one whose tool raises."""

    def ask_server() -> str:
        if workflow_context().attempt == 1:  # known in the tool's own thread too
            raise ToolUnavailable("HTTP 500")
        return ["7"][workflow_context().attempt]

    group = _group(ask_server, text_tokens, "[act {}]", "34")
    assert [t.status for t in group.trajectories] == ["ok", "tool_error", "ok"]
    assert [t.reward for t in group.trajectories] == [2.0, None, 2.0]
    error = r"HTTP 500\n  at tests/unit/rollouts/chat/test_tools.py:\d+ in ask_server: raise ToolUnavailable"
    assert re.match(error, group.trajectories[1].error)
    [call] = group.trajectories[1].turns[0].tool_calls
    assert call.failed and "HTTP 500" in call.result
    assert [t.attempt for t in group.usable] == [0, 2] and group.accepted
    assert [group.trajectories[n].turns[0].tool_calls[0].failed for n in (0, 2)] == [False, True]


def test_an_attempt_that_wants_ever_more_tools_ends_as_max_turns_and_is_trained(text_tokens: ChatTokens):
    executed: list[None] = []
    group = _group(lambda: executed.append(None), text_tokens, *["[act {}]"] * 3, max_tool_turns=2)
    assert [t.status for t in group.trajectories] == ["max_turns"] * 3
    assert [len(t.turns) for t in group.trajectories] == [3, 3, 3] and len(executed) == 6
    assert len(group.usable) == 3
    limits: dict[str, Any] = {"max_tool_turns": 2, "exclude_statuses": ["max_turns"]}
    assert _group(lambda: None, text_tokens, *["[act {}]"] * 3, **limits).usable == []
