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

from rollouts.chat import Chat, OutOfRoom
from rollouts.chat_tokens import ChatTokens
from rollouts.engine import EngineError
from rollouts.scripted_engine import ScriptedEngine
from storage.records import Message, Sampling
from storage.shard_codec import decode_shard, encode_shard
from tests.builders import a_group, a_policy_folder, a_trajectory, provenance


def _engine(*replies: Sequence[int]) -> ScriptedEngine:
    """Answers request `…/0` with the first reply, `…/1` with the second, and so on."""
    return ScriptedEngine(lambda _, request_id: list(replies[int(request_id.rsplit("/", 1)[1])]))


def _chat(tokens: ChatTokens, engine: ScriptedEngine, *, max_tokens: int = 16, max_model_len: int = 64) -> Chat:
    return Chat(
        engine=engine,
        tokens=tokens,
        sampling=Sampling(max_tokens=max_tokens),
        max_model_len=max_model_len,
        request_id="0.task/0",
    )


def _play(chat: Chat, play: Callable[[Chat], Awaitable[Any]]) -> Any:
    return asyncio.run(play(chat))  # type: ignore[arg-type]


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


moves = st.lists(
    st.tuples(st.sampled_from(["ask", "forget", "rewrite"]), st.text("0123456789+=", min_size=1, max_size=3)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(moves=moves, replies=st.lists(st.lists(st.integers(4, 15), min_size=1, max_size=4), min_size=6, max_size=6))
def test_any_conversation_is_a_shard_that_trains_every_sampled_token_once(
    tokens: ChatTokens, moves: list[tuple[str, str]], replies: list[list[int]]
):
    """Replies of four tokens are cut off before their end token."""
    sampled = [[*reply, 1][:4] for reply in replies]

    async def play(chat: Chat) -> None:
        for move, text in moves:
            history = {"ask": chat.messages, "forget": [], "rewrite": chat.messages[:-2]}[move]
            await chat.complete([*history, _user(text)])

    chat = _chat(tokens, _engine(*[[*reply, 1] for reply in replies]), max_tokens=4, max_model_len=10_000)
    _play(chat, play)
    assert [turn.sampled_ids for turn in chat.turns] == sampled[: len(moves)]
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=chat.turns, messages=chat.recorded)])
    data = encode_shard([group], provenance=provenance(), sampling=Sampling())
    rows = decode_shard(data, name="s0").to_pylist()
    trained = [
        token
        for row in rows
        for token, is_sampled in zip(row["input_ids"], row["loss_mask"], strict=True)
        if is_sampled
    ]
    assert trained == [token for reply in sampled[: len(moves)] for token in reply]
    # Whatever was forked away, the last row is the conversation as it stands.
    assert rows[-1]["input_ids"] == _closed(tokens, chat)
    assert sum(message.is_completion for message in chat.recorded) == len(moves)


def _closed(tokens: ChatTokens, chat: Chat) -> list[int]:
    """The template's rendering up to where the last reply ends, its end token only if it was sampled."""
    rendered = tokens.prompt(chat.messages)[:-1]
    return rendered if chat.turns[-1].sampled_ids[-1] == tokens.end_id else rendered[:-1]


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
