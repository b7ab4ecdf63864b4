"""Every token is recorded once, exactly as the engine gave it, whatever the workflow does with the conversation.

Ids here: 0 pad, 1 end, 2 user, 3 assistant, 4 `+`, 5 … 14 the digits 0 … 9, 15 `=`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.chat.chat import Chat, OutOfRoom
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest, ParsedReply
from rollouts.chat.tools import Tool, tool
from rollouts.engines.draws import nth_seed
from rollouts.engines.engine import EngineError, Generation
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import Message, Sampling, ToolCall, Turn
from tests.builders import a_group, a_trajectory, provenance
from tests.shard_files import decode_shard, encode_shard
from tests.unit.rollouts.scripted_text import a_chat, from_tool, said, user


class PlusParser:
    """Reads `+12+3` as two calls of `double`, and `+` without a number as a call that cannot be read."""

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        content, *numbers = text.split("+")
        if numbers == [""]:
            return ParsedReply(content=text, tool_calls=[], malformed_calls=[(0, "+")])
        calls = [
            CallRequest(id=f"call-{index}", name="double", arguments=f'{{"number": {number}}}')
            for index, number in enumerate(numbers)
        ]
        return ParsedReply(content=content, tool_calls=calls)


def _chat(tokens: Any, *replies: Sequence[int], engine: ScriptedEngine | None = None, **settings: Any) -> Chat:
    """Request `…/0` is answered with the first reply, `…/1` with the second, and so on; the last one stays."""

    def reply(_: list[int], request_id: str) -> list[int]:
        return list(replies[min(int(request_id.rsplit("/", 1)[1]), len(replies) - 1)])

    defaults = {"max_tokens": 16, "max_model_len": 64, "tool_parser": PlusParser()}
    return a_chat(tokens, engine or ScriptedEngine(reply), **{**defaults, **settings})


def _run(*steps: Awaitable[Any]) -> list[Any]:
    """What each step returns, one after the other."""

    async def play() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(play())


def _of(chat: Chat, name: str) -> list[Any]:
    return [getattr(turn, name) for turn in chat.turns]


def _ids(turns: Sequence[Turn]) -> list[int]:
    return [i for turn in turns for i in (*turn.context_ids, *turn.sampled_ids)]


def _rows(chat: Chat) -> list[dict[str, Any]]:
    """What a shard with this attempt holds."""
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=chat.turns, messages=chat.recorded)])
    return decode_shard(encode_shard([group], provenance=provenance(), sampling=Sampling()), name="s0").to_pylist()


def _doubler(executed: list[int] | None = None) -> Tool:
    @tool
    def double(number: int) -> int:
        """Twice a number."""
        if executed is not None:
            executed.append(number)
        return 2 * number

    return double


def test_three_turns_token_by_token(tokens: ChatTokens):
    asked = []

    def reply(prompt_ids: list[int], request_id: str) -> list[int]:
        asked.append(prompt_ids)
        engine.version = len(asked)  # a new policy for each turn
        return [[12, 1], [7, 5, 1], [13, 1]][len(asked) - 1]

    engine = ScriptedEngine(reply, num_choices=8)
    chat = _chat(tokens, engine=engine)
    assert _run(chat.ask("3+4="), chat.ask("20="), chat.ask("8")) == ["7", "20", "8"]
    assert _of(chat, "context_ids") == [[2, 8, 4, 9, 15, 3], [2, 7, 5, 15, 3], [2, 13, 3]]
    assert _of(chat, "sampled_ids") == [[12, 1], [7, 5, 1], [13, 1]]
    assert _of(chat, "sequence_idx") == [0, 0, 0]
    assert asked == [
        [2, 8, 4, 9, 15, 3],
        [2, 8, 4, 9, 15, 3, 12, 1, 2, 7, 5, 15, 3],
        [2, 8, 4, 9, 15, 3, 12, 1, 2, 7, 5, 15, 3, 7, 5, 1, 2, 13, 3],
    ]
    whole = [user("3+4="), said("7"), user("20="), said("20"), user("8"), said("8")]
    assert chat.messages == chat.recorded == whole
    assert _ids(chat.turns) == tokens.prompt(chat.messages)[:-1], "as rendered, but for the opening of the next turn"
    assert _of(chat, "weight_versions") == [[1, 1], [2, 2, 2], [3, 3]]
    for turn in chat.turns:
        assert turn.logprobs == [-math.log(8)] * len(turn.sampled_ids)
        assert turn.finish_reason == "stop" and turn.generate_seconds > 0
    assert not chat.cut_off


def test_draws_belong_to_sequence_and_turn_and_to_nothing_that_happens_beside_them(tokens: ChatTokens):
    asked: dict[str, int | None] = {}

    class Engine(ScriptedEngine):
        fails = False

        async def generate(self, prompt_ids: list[int], **given: Any) -> Generation:
            if self.fails:
                raise EngineError("gone")
            asked[str(len(asked))] = given["sampling"].seed
            return await super().generate(prompt_ids, **given)

    async def play(order: Sequence[str], *, fails: bool) -> dict[str, tuple[int, int | None]]:
        """Two sequences, which begin in either order, one of them with a second turn; and one that begins like "3"."""
        engine = Engine(lambda *_: [5, 1])
        chat = a_chat(tokens, engine, sampling=Sampling(max_tokens=16, seed=11))
        asked.clear()
        if fails:
            engine.fails = True
            with pytest.raises(EngineError):
                await chat.complete([user(order[0])])
            engine.fails = False
        await asyncio.gather(*(chat.complete([user(text)]) for text in order))
        await chat.complete([user("3"), said("0"), user("4")])
        await chat.complete([user("3")])
        assert _of(chat, "sequence_idx") == [0, 1, order.index("3"), 2]
        requests = list(asked.values())
        return dict(zip([*order, "3, then 4", "3 again"], zip(requests, _of(chat, "seed"), strict=True), strict=True))

    first, other = (asyncio.run(play(order, fails=fails)) for order, fails in ((["3", "8"], False), (["8", "3"], True)))
    assert first == other and len({request for request, _ in first.values()}) == 4
    (turn0, seed), (turn1, same) = first["3"], first["3, then 4"]
    assert seed == same and [turn0, turn1] == [nth_seed(seed or 0, 0), nth_seed(seed or 0, 1)]
    assert len({first[name][1] for name in ("3", "8", "3 again")}) == 3


def test_a_call_that_cannot_be_read_keeps_its_place_among_those_that_are_executed(tokens: ChatTokens):
    class Some(PlusParser):
        async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
            reply = await super().parse(text, tools)
            return dataclasses.replace(
                reply, malformed_calls=[(0, "x"), (1, "y"), (1, "z")] if reply.tool_calls else []
            )

    chat = _chat(tokens, [4, 6, 4, 7, 1], [8, 1], tool_parser=Some())
    assert _run(chat.ask("3", tools=[_doubler()])) == ["3"]
    results = [call.result for call in chat.turns[0].tool_calls]
    broken = "error: this is no tool call that can be read; check its format"
    assert results == [broken, "2", broken, broken, "4"] == [m.content for m in chat.recorded if m.role == "tool"]
    assert [call.arguments for call in chat.turns[0].tool_calls if not call.name] == ["x", "y", "z"]


def test_a_cut_off_reply_is_closed_by_the_next_context(tokens: ChatTokens):
    chat = _chat(tokens, [5, 6, 7, 1], [8, 1], max_tokens=2)
    assert _run(chat.ask("3")) == ["01"] and chat.cut_off
    assert chat.turns[0].sampled_ids == [5, 6] and chat.turns[0].finish_reason == "length"
    assert _run(chat.ask("4")) == ["3"] and not chat.cut_off
    assert chat.turns[1].context_ids == [1, 2, 9, 3]  # the end token the policy did not sample, never trained


def test_any_change_of_history_is_a_fork(tokens: ChatTokens):
    for edited in [
        [user("1")],  # everything forgotten
        [user("9"), said("7"), user("1")],  # the question rewritten
        [user("3"), said("8"), user("1")],  # the policy's own reply rewritten
        [Message(role="system", content="3"), user("3"), said("7"), user("1")],  # something put before it
        [user("3")],  # the reply taken back
    ]:
        chat = _chat(tokens, [12, 1], [13, 1])
        _run(chat.ask("3"), chat.complete(edited))
        assert _of(chat, "sequence_idx") == [0, 1]
        assert chat.turns[1].context_ids == tokens.prompt(edited)


def test_a_conversation_that_reaches_the_models_length_ends(tokens: ChatTokens):
    chat = _chat(tokens, [5, 6, 7, 8, 9, 1], max_model_len=6)
    assert _run(chat.ask("3")) == ["012"] and chat.cut_off
    with pytest.raises(OutOfRoom, match="10 tokens of 6 are used"):
        _run(chat.ask("4"))
    assert len(_ids(chat.turns)) == 6
    with pytest.raises(OutOfRoom, match="3 tokens of 3"):  # at once, when the prompt alone fills the model
        _run(_chat(tokens, [1], max_model_len=3).ask("3"))


def test_three_turns_with_tools_token_by_token(tokens: ChatTokens):
    """`<user>3=` → `+3` → 6 → `+1+2` → 2, 4 → `9`; a tool's result is to this template what a user says."""
    chat = _chat(tokens, [4, 8, 1], [4, 6, 4, 7, 1], [14, 1])
    assert _run(chat.ask("3=", tools=[_doubler()])) == ["9"]
    assert _of(chat, "context_ids") == [[2, 8, 15, 3], [2, 11, 3], [2, 7, 2, 9, 3]]
    assert _of(chat, "sampled_ids") == [[4, 8, 1], [4, 6, 4, 7, 1], [14, 1]]
    assert _of(chat, "sequence_idx") == [0, 0, 0]
    whole = [user("3="), said("+3"), from_tool("6"), said("+1+2"), from_tool("2"), from_tool("4"), said("9")]
    assert chat.messages == chat.recorded == whole
    calls = [[(call.name, call.arguments, call.result, call.failed) for call in t.tool_calls] for t in chat.turns]
    assert calls == [
        [("double", '{"number": 3}', "6", False)],
        [("double", '{"number": 1}', "2", False), ("double", '{"number": 2}', "4", False)],
        [],
    ]
    assert all(call.seconds > 0 for turn in chat.turns for call in turn.tool_calls)
    assert not chat.max_turns_reached
    [row] = _rows(chat)
    assert row["input_ids"] == [2, 8, 15, 3, 4, 8, 1, 2, 11, 3, 4, 6, 4, 7, 1, 2, 7, 2, 9, 3, 14, 1]
    trained = [*[False] * 4, *[True] * 3, *[False] * 3, *[True] * 5, *[False] * 5, *[True] * 2]
    assert row["loss_mask"] == trained
    assert [logprob != 0 for logprob in row["logprobs"]] == trained
    assert row["weight_versions"] == [0 if sampled else -1 for sampled in trained]
    assert [call["result"] for turn in row["turns"] for call in turn["tool_calls"]] == ["6", "2", "4"]


def test_past_the_attempts_limit_of_tool_turns_the_turn_is_recorded_and_nothing_is_executed(tokens: ChatTokens):
    executed: list[int] = []
    chat = _chat(tokens, [4, 8, 1], [9, 1], [4, 9, 1], max_tool_turns=1)
    tools = [_doubler(executed)]
    assert _run(chat.ask("3", tools=tools), chat.ask("4", tools=tools)) == ["4", "+4"]
    assert (executed, chat.max_turns_reached) == ([3], True)
    assert [len(calls) for calls in _of(chat, "tool_calls")] == [1, 0, 0]
    assert chat.messages[-1] == said("+4")


def test_without_tools_on_offer_nothing_is_a_call_and_without_a_parser_none_can_be_offered(tokens: ChatTokens):
    chat = _chat(tokens, [4, 8, 1])
    assert _run(chat.ask("3")) == ["+3"] and _of(chat, "tool_calls") == [[]]
    with pytest.raises(ValueError, match="without a tool parser"):
        _run(_chat(tokens, [1], tool_parser=None).ask("3", tools=[_doubler()]))


def test_a_call_that_cannot_be_read_is_told_to_the_policy(tokens: ChatTokens):
    chat = _chat(tokens, [4, 1], [9, 1])
    assert _run(chat.ask("3", tools=[_doubler()])) == ["4"]
    [call] = chat.turns[0].tool_calls
    assert (call.name, call.arguments, call.failed, call.seconds) == ("", "+", True, 0.0)
    assert call.result.startswith("error: ") and chat.messages[2] == from_tool(call.result)


def test_a_caller_that_executes_tools_itself_gets_the_calls_and_their_results_are_noted(tokens: ChatTokens):
    schema = _doubler().schema
    chat = _chat(tokens, [10, 4, 8, 4, 9, 1], [9, 1])
    [reply] = _run(chat.complete([user("3")], tools=[schema]))
    assert (reply.text, reply.content, reply.finish_reason, reply.turn_idx) == ("5+3+4", "5", "stop", 0)
    assert [(call.id, call.name) for call in reply.tool_calls] == [("call-0", "double"), ("call-1", "double")]
    _run(chat.complete([*chat.messages, from_tool("6"), from_tool("8")], tools=[schema]))
    assert _of(chat, "sequence_idx") == [0, 0]
    first, second = chat.turns[0].tool_calls
    assert (first.name, first.arguments, first.result, first.failed) == ("double", '{"number": 3}', "6", False)
    assert second == ToolCall(name="double", arguments='{"number": 4}', result="8", seconds=second.seconds)
    assert first.seconds > 0


def test_an_earlier_branch_goes_on_where_it_ended(tokens: ChatTokens):
    """Two agents take turns in one chat: each has a sequence of its own, and no fork after the first."""
    chat = _chat(tokens, [11, 1], [12, 1], [13, 1], [14, 1])
    first, second = [user("1"), said("6")], [user("2"), said("7")]
    steps = [[user("1")], [user("2")], [*first, user("3")], [*second, user("4")]]
    _run(*map(chat.complete, steps))
    assert _of(chat, "sequence_idx") == [0, 1, 0, 1]
    assert _of(chat, "context_ids") == [[2, 6, 3], [2, 7, 3], [2, 8, 3], [2, 9, 3]]
    assert chat.recorded == [*first, *second, user("3"), said("8"), user("4"), said("9")]


def test_tools_that_the_prompt_did_not_show_start_a_sequence_that_shows_them(tokens: ChatTokens):
    chat = _chat(tokens, [11, 1])
    tools = [_doubler()]
    # In the end the policy knows the tools still; they are not on offer.
    _run(chat.ask("1"), chat.ask("2", tools=tools), chat.ask("3", tools=tools), chat.ask("4"))
    assert _of(chat, "sequence_idx") == [0, 1, 1, 1]


texts = st.text("0123456789=", min_size=1, max_size=3)
moves = st.lists(
    st.tuples(st.sampled_from(["extend", "rewind", "edit", "at once"]), st.integers(0, 9), texts),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(moves=moves, replies=st.lists(st.lists(st.integers(5, 15), min_size=1, max_size=4), min_size=20, max_size=20))
def test_whatever_is_done_with_history_every_sampled_token_is_trained_once_as_the_engine_saw_it(
    tokens: ChatTokens, moves: list[tuple[str, int, str]], replies: list[list[int]]
):
    """Branches are extended, taken back, edited and extended twice at once; replies of four tokens are cut off."""
    asked: dict[str, list[int]] = {}

    def reply(prompt_ids: list[int], request_id: str) -> list[int]:
        asked[request_id] = prompt_ids
        return [*replies[len(asked) - 1], 1]

    chat = _chat(tokens, engine=ScriptedEngine(reply), max_tokens=4, max_model_len=10_000)
    ends: list[list[Message]] = []  # what a caller may go on from

    async def play() -> None:
        for move, which, text in moves:
            past = ends[which % len(ends)] if ends else []
            if move == "rewind":
                past = past[: 2 * (which % (len(past) // 2 + 1))]
            elif move == "edit" and past:
                at = which % len(past)
                past = [*past[:at], Message(role=past[at].role, content=past[at].content + "9"), *past[at + 1 :]]
            new = [[*past, user(text)]] * (2 if move == "at once" else 1)
            answers = await asyncio.gather(*(chat.complete(messages) for messages in new))
            ends.extend([*messages, said(answer.text)] for messages, answer in zip(new, answers, strict=True))

    _run(play())
    rows = _rows(chat)
    # Every reply of the engine is one turn, and every turn is trained in exactly one row.
    sampled = sorted([*reply_, 1][:4] for reply_ in replies[: len(asked)])
    assert sorted(_of(chat, "sampled_ids")) == sampled
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(map(len, sampled))
    # A row read up to a turn is what the engine was asked for it, then what it answered.
    seen = []
    for index, row in enumerate(rows):
        turns = [turn for turn in chat.turns if turn.sequence_idx == index]
        seen += [[*_ids(turns[:number]), *turn.context_ids] for number, turn in enumerate(turns)]
        assert row["input_ids"] == _ids(turns)
    assert sorted(seen) == sorted(asked.values())
    # No message of the attempt is lost, and no reply is there twice.
    assert sum(message.is_completion for message in chat.recorded) == len(asked)
    assert {(m.role, m.content) for end in ends for m in end} <= {(m.role, m.content) for m in chat.recorded}
