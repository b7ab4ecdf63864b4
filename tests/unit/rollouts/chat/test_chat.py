"""Every token is recorded once, exactly as the engine gave it, whatever the workflow does with the conversation.

Ids here: 0 pad, 1 end, 2 user, 3 assistant, 4 `+`, 5 … 14 the digits 0 … 9, 15 `=`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.chat.chat import Chat, OutOfRoom
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import CallRequest, ParsedReply
from rollouts.chat.tools import Tool, ToolUnavailable, tool
from rollouts.engines.engine import EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from storage.records import Message, Sampling, ToolCall
from tests.builders import a_group, a_policy_folder, a_trajectory, provenance
from tests.shard_files import decode_shard, encode_shard


def _engine(*replies: Sequence[int]) -> ScriptedEngine:
    """Answers request `…/0` with the first reply, `…/1` with the second, and so on."""
    return ScriptedEngine(lambda _, request_id: list(replies[int(request_id.rsplit("/", 1)[1])]))


class PlusParser:
    """Reads `+12+3` as two calls of `double`, and `+` without a number as a call that cannot be read."""

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        content, *numbers = text.split("+")
        if numbers == [""]:
            return ParsedReply(content=text, tool_calls=[], malformed_call="+")
        calls = [
            CallRequest(id=f"call-{index}", name="double", arguments=f'{{"number": {number}}}')
            for index, number in enumerate(numbers)
        ]
        return ParsedReply(content=content, tool_calls=calls)


def _chat(
    tokens: ChatTokens, engine: ScriptedEngine, *, max_tokens: int = 16, max_model_len: int = 64, **settings: Any
) -> Chat:
    return Chat(
        engine=engine,
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens),
        max_model_len=max_model_len,
        request_id="0.task/0",
        tool_parser=PlusParser(),  # type: ignore[arg-type]
        **settings,
    )


def _play(chat: Chat, play: Callable[[Chat], Awaitable[Any]]) -> Any:
    return asyncio.run(play(chat))  # type: ignore[arg-type]


def _doubler(executed: list[int] | None = None) -> Tool:
    @tool
    def double(number: int) -> int:
        """Twice a number."""
        if executed is not None:
            executed.append(number)
        return 2 * number

    return double


def _result(text: str) -> Message:
    return Message(role="tool", content=text)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _said(text: str) -> Message:
    return Message(role="assistant", content=text, is_completion=True)


def test_three_turns_token_by_token(tokens: ChatTokens):
    asked = []

    def reply(prompt_ids: list[int], request_id: str) -> list[int]:
        asked.append(prompt_ids)
        return [[12, 1], [7, 5, 1], [13, 1]][len(asked) - 1]

    async def play(chat: Chat) -> list[str]:
        return [await chat.ask("3+4="), await chat.ask("20="), await chat.ask("8")]

    chat = _chat(tokens, ScriptedEngine(reply, num_choices=8))
    assert _play(chat, play) == ["7", "20", "8"]
    assert [turn.context_ids for turn in chat.turns] == [[2, 8, 4, 9, 15, 3], [2, 7, 5, 15, 3], [2, 13, 3]]
    assert [turn.sampled_ids for turn in chat.turns] == [[12, 1], [7, 5, 1], [13, 1]]
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0, 0]
    assert asked == [
        [2, 8, 4, 9, 15, 3],
        [2, 8, 4, 9, 15, 3, 12, 1, 2, 7, 5, 15, 3],
        [2, 8, 4, 9, 15, 3, 12, 1, 2, 7, 5, 15, 3, 7, 5, 1, 2, 13, 3],
    ]
    whole = [_user("3+4="), _said("7"), _user("20="), _said("20"), _user("8"), _said("8")]
    assert chat.messages == chat.recorded == whole
    for turn in chat.turns:
        assert len(turn.logprobs) == len(turn.weight_versions) == len(turn.sampled_ids)
        assert turn.logprobs == [-math.log(8)] * len(turn.sampled_ids)
        assert (turn.finish_reason, turn.weight_versions[0]) == ("stop", 0)
        assert turn.generate_seconds > 0
    assert not chat.cut_off


def test_what_is_recorded_is_what_the_template_would_render(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        await chat.ask("3+4=")
        await chat.ask("20=")

    chat = _chat(tokens, _engine([12, 1], [7, 5, 1]))
    _play(chat, play)
    recorded = [i for turn in chat.turns for i in (*turn.context_ids, *turn.sampled_ids)]
    assert recorded == tokens.prompt(chat.messages)[:-1]  # which opens the next turn of the assistant


def test_a_policy_swap_inside_a_reply_is_recorded_token_by_token(tokens: ChatTokens, tmp_path: Path):
    a_policy_folder(tmp_path / "policy")
    engine = _engine([5, 6, 7, 8, 1])

    async def play(chat: Chat) -> None:
        asking = asyncio.create_task(chat.ask("3"))
        while engine.running == 0:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.load_policy(tmp_path / "policy", 7)
        await asking

    chat = _chat(tokens, engine)
    _play(chat, play)
    versions = chat.turns[0].weight_versions
    assert sorted(versions) == versions and set(versions) == {0, 7} and len(versions) == 5


def test_a_cut_off_reply_is_closed_by_the_next_context(tokens: ChatTokens):
    async def play(chat: Chat) -> list[str]:
        first = await chat.ask("3")
        assert chat.cut_off
        return [first, await chat.ask("4")]

    chat = _chat(tokens, _engine([5, 6, 7, 1], [8, 1]), max_tokens=2)
    assert _play(chat, play) == ["01", "3"]
    assert chat.turns[0].sampled_ids == [5, 6] and chat.turns[0].finish_reason == "length"
    assert chat.turns[1].context_ids == [1, 2, 9, 3]  # the end token the policy did not sample, never trained
    assert not chat.cut_off


def test_an_edited_history_starts_a_second_sequence_and_trains_nothing_twice(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        await chat.ask("3")
        await chat.ask("4")
        # The second question is asked anew, in other words.
        await chat.complete([*chat.messages[:2], _user("5")])
        await chat.ask("6")

    chat = _chat(tokens, _engine([12, 1], [13, 1], [14, 1], [5, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0, 1, 1]
    assert chat.turns[2].context_ids == [2, 8, 3, 12, 1, 2, 10, 3]  # the first reply is context here
    assert chat.turns[3].context_ids == [2, 11, 3]
    assert [turn.sampled_ids for turn in chat.turns] == [[12, 1], [13, 1], [14, 1], [5, 1]]
    assert chat.messages == [_user("3"), _said("7"), _user("5"), _said("9"), _user("6"), _said("0")]
    assert chat.recorded == [
        *[_user("3"), _said("7"), _user("4"), _said("8")],
        *[_user("5"), _said("9"), _user("6"), _said("0")],
    ]


@pytest.mark.parametrize(
    "edited",
    [
        [],  # everything forgotten
        [_user("9"), _said("7"), _user("1")],  # the question rewritten
        [_user("3"), _said("8"), _user("1")],  # the policy's own reply rewritten
        [Message(role="system", content="3"), _user("3"), _said("7"), _user("1")],  # something put before it
        [_user("3")],  # the reply taken back
    ],
)
def test_any_change_of_history_is_a_fork(tokens: ChatTokens, edited: list[Message]):
    async def play(chat: Chat) -> None:
        await chat.ask("3")
        await chat.complete(edited or [_user("1")])

    chat = _chat(tokens, _engine([12, 1], [13, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1]
    assert chat.turns[1].context_ids == tokens.prompt(edited or [_user("1")])


def test_a_conversation_that_reaches_the_models_length_ends(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        assert await chat.ask("3") == "012"
        assert chat.cut_off
        with pytest.raises(OutOfRoom, match="6 tokens of 6 are used|10 tokens of 6 are used"):
            await chat.ask("4")

    chat = _chat(tokens, _engine([5, 6, 7, 8, 9, 1]), max_model_len=6)
    _play(chat, play)
    [turn] = chat.turns
    assert len(turn.context_ids) + len(turn.sampled_ids) == 6


def test_a_prompt_that_fills_the_model_is_out_of_room_at_once(tokens: ChatTokens):
    with pytest.raises(OutOfRoom, match="3 tokens of 3"):
        _play(_chat(tokens, _engine([1]), max_model_len=3), lambda chat: chat.ask("3"))


def test_after_a_failed_request_the_conversation_goes_on_where_it_was(tokens: ChatTokens):
    class Flaky(ScriptedEngine):
        failures = 0

        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            self.failures += 1
            if self.failures == 2:
                raise EngineError("overloaded")
            return await super().generate(*arguments, **keywords)

    async def play(chat: Chat) -> None:
        await chat.ask("3")
        with pytest.raises(EngineError):
            await chat.ask("4")
        await chat.ask("5")

    chat = _chat(tokens, Flaky(lambda *_: [12, 1]))
    _play(chat, play)
    assert [turn.context_ids for turn in chat.turns] == [[2, 8, 3], [2, 10, 3]]
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]
    assert chat.messages == [_user("3"), _said("7"), _user("5"), _said("7")]


def test_three_turns_with_tools_token_by_token(tokens: ChatTokens):
    """`<user>3=` → `+3` → 6 → `+1+2` → 2, 4 → `9`; a tool's result is to this template what a user says."""

    async def play(chat: Chat) -> str:
        return await chat.ask("3=", tools=[_doubler()])

    chat = _chat(tokens, _engine([4, 8, 1], [4, 6, 4, 7, 1], [14, 1]))
    assert _play(chat, play) == "9"
    assert [turn.context_ids for turn in chat.turns] == [[2, 8, 15, 3], [2, 11, 3], [2, 7, 2, 9, 3]]
    assert [turn.sampled_ids for turn in chat.turns] == [[4, 8, 1], [4, 6, 4, 7, 1], [14, 1]]
    assert {turn.sequence_idx for turn in chat.turns} == {0}
    whole = [_user("3="), _said("+3"), _result("6"), _said("+1+2"), _result("2"), _result("4"), _said("9")]
    assert chat.messages == chat.recorded == whole
    calls = [[(call.name, call.arguments, call.result, call.failed) for call in t.tool_calls] for t in chat.turns]
    assert calls == [
        [("double", '{"number": 3}', "6", False)],
        [("double", '{"number": 1}', "2", False), ("double", '{"number": 2}', "4", False)],
        [],
    ]
    assert all(call.seconds > 0 for turn in chat.turns for call in turn.tool_calls)
    assert not chat.max_turns_reached


class _NumberedTokens:
    """A prompt is 1, 2; a tool's result is 20, 21; what the policy samples reads as a call while it is 10, 11."""

    end_id = 11

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return [1, 2]

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        assert [message.role for message in messages] == ["tool"]
        return [20, 21]

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "+1" if list(token_ids) == [10, 11] else "done"


def test_tokens_of_tools_are_masked_and_have_logprob_0():
    """[10, 11 | 20, 21 | 30, 31, 32] behind the prompt [1, 2]."""
    chat = _chat(_NumberedTokens(), _engine([10, 11], [30, 31, 32]))  # type: ignore[arg-type]
    _play(chat, lambda chat: chat.ask("", tools=[_doubler()]))
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=chat.turns, messages=chat.recorded)])
    [row] = decode_shard(encode_shard([group], provenance=provenance(), sampling=Sampling()), name="s0").to_pylist()
    assert row["input_ids"] == [1, 2, 10, 11, 20, 21, 30, 31, 32]
    assert row["loss_mask"] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 3
    assert [logprob == 0 for logprob in row["logprobs"]] == [not sampled for sampled in row["loss_mask"]]
    assert row["weight_versions"] == [-1, -1, 0, 0, -1, -1, 0, 0, 0]
    assert [call["result"] for turn in row["turns"] for call in turn["tool_calls"]] == ["2"]


def test_past_the_limit_of_tool_turns_the_turn_is_recorded_and_nothing_is_executed(tokens: ChatTokens):
    executed: list[int] = []
    chat = _chat(tokens, ScriptedEngine(lambda *_: [4, 8, 1]), max_tool_turns=2)
    assert _play(chat, lambda chat: chat.ask("3", tools=[_doubler(executed)])) == "+3"
    assert (len(chat.turns), executed, chat.max_turns_reached) == (3, [3, 3], True)
    assert [len(turn.tool_calls) for turn in chat.turns] == [1, 1, 0]
    assert chat.messages[-1] == _said("+3")


def test_the_limit_of_tool_turns_is_one_for_the_whole_attempt(tokens: ChatTokens):
    executed: list[int] = []

    async def play(chat: Chat) -> None:
        await chat.ask("3", tools=[_doubler(executed)])
        await chat.ask("4", tools=[_doubler(executed)])

    chat = _chat(tokens, _engine([4, 8, 1], [9, 1], [4, 9, 1]), max_tool_turns=1)
    _play(chat, play)
    assert (executed, len(chat.turns), chat.max_turns_reached) == ([3], 3, True)


def test_without_tools_on_offer_nothing_is_a_call(tokens: ChatTokens):
    chat = _chat(tokens, _engine([4, 8, 1]))
    assert _play(chat, lambda chat: chat.ask("3")) == "+3"
    assert len(chat.turns) == 1 and not chat.turns[0].tool_calls


def test_a_call_that_cannot_be_read_is_told_to_the_policy(tokens: ChatTokens):
    chat = _chat(tokens, _engine([4, 1], [9, 1]))
    assert _play(chat, lambda chat: chat.ask("3", tools=[_doubler()])) == "4"
    [call] = chat.turns[0].tool_calls
    assert (call.name, call.arguments, call.failed, call.seconds) == ("", "+", True, 0.0)
    assert call.result.startswith("error: ") and chat.messages[2] == _result(call.result)


def test_a_tool_that_is_unavailable_ends_the_conversation_with_its_call_on_record(tokens: ChatTokens):
    @tool
    def double(number: int) -> int:
        """Twice a number."""
        raise ToolUnavailable("HTTP 500")

    async def play(chat: Chat) -> None:
        with pytest.raises(ToolUnavailable, match="HTTP 500"):
            await chat.ask("3", tools=[double])

    chat = _chat(tokens, _engine([4, 8, 1]))
    _play(chat, play)
    [call] = chat.turns[0].tool_calls
    assert call.failed and "HTTP 500" in call.result


def test_a_chat_without_a_parser_refuses_tools(tokens: ChatTokens):
    chat = Chat(
        engine=_engine([1]), tokens=tokens, sampling=Sampling(max_tokens=4), max_model_len=64, request_id="0.task/0"
    )
    with pytest.raises(ValueError, match="without a tool parser"):
        _play(chat, lambda chat: chat.ask("3", tools=[_doubler()]))


def test_a_caller_that_executes_tools_itself_gets_the_calls_and_their_results_are_noted(tokens: ChatTokens):
    schema = _doubler().schema

    async def play(chat: Chat) -> None:
        reply = await chat.complete([_user("3")], tools=[schema])
        assert (reply.text, reply.content, reply.finish_reason, reply.turn_idx) == ("5+3+4", "5", "stop", 0)
        assert [(call.id, call.name) for call in reply.tool_calls] == [("call-0", "double"), ("call-1", "double")]
        await chat.complete([*chat.messages, _result("6"), _result("8")], tools=[schema])

    chat = _chat(tokens, _engine([10, 4, 8, 4, 9, 1], [9, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]
    first, second = chat.turns[0].tool_calls
    assert (first.name, first.arguments, first.result, first.failed) == ("double", '{"number": 3}', "6", False)
    assert second == ToolCall(name="double", arguments='{"number": 4}', result="8", seconds=second.seconds)
    assert first.seconds > 0


def test_a_reply_may_be_shortened_and_never_lengthened(tokens: ChatTokens):
    async def play(chat: Chat) -> list[str]:
        short = await chat.complete([_user("3")], max_tokens=2)
        assert short.cut_off
        return [short.text, (await chat.complete([_user("4")], max_tokens=99)).text]

    chat = _chat(tokens, ScriptedEngine(lambda *_: [5, 6, 7, 8, 9, 10, 1]), max_tokens=4)
    assert _play(chat, play) == ["01", "0123"]


def test_an_earlier_branch_goes_on_where_it_ended(tokens: ChatTokens):
    """Two agents take turns in one chat: each has a sequence of its own, and no fork after the first."""

    async def play(chat: Chat) -> None:
        first = [_user("1"), _said((await chat.complete([_user("1")])).text)]
        second = [_user("2"), _said((await chat.complete([_user("2")])).text)]
        await chat.complete([*first, _user("3")])
        await chat.complete([*second, _user("4")])

    chat = _chat(tokens, _engine([11, 1], [12, 1], [13, 1], [14, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1, 0, 1]
    assert [turn.context_ids for turn in chat.turns] == [[2, 6, 3], [2, 7, 3], [2, 8, 3], [2, 9, 3]]
    assert chat.recorded == [
        *[_user("1"), _said("6"), _user("2"), _said("7")],
        *[_user("3"), _said("8"), _user("4"), _said("9")],
    ]


def test_a_reply_taken_back_to_an_earlier_turn_is_a_fork_whose_past_is_context(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        await chat.ask("1")
        early = list(chat.messages)
        await chat.ask("2")
        await chat.complete([*early, _user("3")])

    chat = _chat(tokens, _engine([11, 1], [12, 1], [13, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0, 1]
    assert chat.turns[2].context_ids == [2, 6, 3, 11, 1, 2, 8, 3]
    assert chat.recorded[-2:] == [_user("3"), _said("8")] and len(chat.recorded) == 6


def test_two_requests_at_once_for_one_branch_do_not_share_it(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        await chat.ask("1")
        past = list(chat.messages)
        await asyncio.gather(*(chat.complete([*past, _user(text)]) for text in "23"))

    chat = _chat(tokens, _engine([11, 1], [12, 1], [13, 1]))
    _play(chat, play)
    assert sorted(turn.sequence_idx for turn in chat.turns) == [0, 0, 1]
    assert sorted(turn.context_ids for turn in chat.turns[1:]) == [[2, 6, 3, 11, 1, 2, 8, 3], [2, 7, 3]]
    assert [message.content for message in chat.recorded].count("1") == 1


def test_tools_that_the_prompt_did_not_show_start_a_sequence_that_shows_them(tokens: ChatTokens):
    async def play(chat: Chat) -> None:
        await chat.ask("1")
        await chat.ask("2", tools=[_doubler()])
        await chat.ask("3", tools=[_doubler()])
        await chat.ask("4")  # the policy knows the tools still; they are not on offer

    chat = _chat(tokens, ScriptedEngine(lambda *_: [11, 1]))
    _play(chat, play)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1, 1, 1]


texts = st.text("0123456789=", min_size=1, max_size=3)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 9), texts),
        st.tuples(st.just("rewind"), st.integers(0, 9), texts),
        st.tuples(st.just("edit"), st.integers(0, 9), texts),
        st.tuples(st.just("at once"), st.integers(0, 9), texts),
    ),
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

    async def play(chat: Chat) -> list[list[Message]]:
        ends: list[list[Message]] = []  # what a caller may go on from
        for move, which, text in moves:
            past = ends[which % len(ends)] if ends else []
            if move == "rewind":
                past = past[: 2 * (which % (len(past) // 2 + 1))]
            elif move == "edit" and past:
                at = which % len(past)
                past = [*past[:at], Message(role=past[at].role, content=past[at].content + "9"), *past[at + 1 :]]
            new = [[*past, _user(text)]] * (2 if move == "at once" else 1)
            answers = await asyncio.gather(*(chat.complete(messages) for messages in new))
            ends += [[*messages, _said(answer.text)] for messages, answer in zip(new, answers, strict=True)]
        return ends

    chat = _chat(tokens, ScriptedEngine(reply), max_tokens=4, max_model_len=10_000)
    ends = _play(chat, play)
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=chat.turns, messages=chat.recorded)])
    rows = decode_shard(encode_shard([group], provenance=provenance(), sampling=Sampling()), name="s0").to_pylist()
    # Every reply of the engine is one turn, and every turn is trained in exactly one row.
    sampled = sorted([*reply_, 1][:4] for reply_ in replies[: len(asked)])
    assert sorted(turn.sampled_ids for turn in chat.turns) == sampled
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(map(len, sampled))
    # A row read up to a turn is what the engine was asked for it, then what it answered.
    seen = []
    for index in range(len(rows)):
        ids: list[int] = []
        for turn in (turn for turn in chat.turns if turn.sequence_idx == index):
            seen.append([*ids, *turn.context_ids])
            ids += [*turn.context_ids, *turn.sampled_ids]
        assert rows[index]["input_ids"] == ids
    assert sorted(seen) == sorted(asked.values())
    # No message of the attempt is lost, and no reply is there twice.
    assert sum(message.is_completion for message in chat.recorded) == len(asked)
    assert {(m.role, m.content) for end in ends for m in end} <= {(m.role, m.content) for m in chat.recorded}


def test_the_tokenizer_is_known_by_its_digests(tokens: ChatTokens, tokenizer_folder: Path):
    again = ChatTokens.load(tokenizer_folder)
    assert (again.tokenizer_sha256, again.chat_template_sha256) == (
        tokens.tokenizer_sha256,
        tokens.chat_template_sha256,
    )
    assert len(tokens.tokenizer_sha256) == len(tokens.chat_template_sha256) == 64
    assert tokens.alphabet() == list(range(4, 16)) and tokens.end_id == 1
    assert tokens.text([5, 6, 1]) == "01"


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_fix(tokenizer_folder: Path, tmp_path: Path):
    for file in tokenizer_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="no chat template; use an instruction-tuned model"):
        ChatTokens.load(tmp_path)
