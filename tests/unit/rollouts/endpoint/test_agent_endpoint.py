"""OpenAI's own client talks to the endpoint; what it asks becomes turns of one attempt, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.agent_endpoint import Session, agent_endpoint, close_agent_endpoint
from rollouts.engines.engine import EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.workflow import Score
from storage.records import Message
from tests.unit.rollouts.scripted_text import ADD, a_chat, an_engine, play, served


async def ask(client: AsyncOpenAI, *contents: Any, **options: Any) -> Any:
    """One request; contents alternate between the user and the assistant."""
    messages = [{"role": "user", "content": content} for content in contents]
    for message in messages[1::2]:
        message["role"] = "assistant"
    return await client.chat.completions.create(model="any", messages=messages, **options)


def _rendered(text_tokens: ChatTokens, *messages: Message) -> list[int]:
    return text_tokens.prompt(list(messages))


def test_a_request_is_a_turn_and_its_reply_is_openais(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> Any:
        return await client.chat.completions.create(
            model="gpt-x",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]},
            ],
            logprobs=True,
            user="somebody",
        )

    chat = a_chat(text_tokens, an_engine(text_tokens, "4!"))
    completion = play(chat, agent)
    [turn] = chat.turns
    assert turn.context_ids == _rendered(
        text_tokens, Message(role="system", content="Be brief."), Message(role="user", content="2+2")
    )
    assert (completion.model, completion.object, completion.id[:9]) == ("gpt-x", "chat.completion", "chatcmpl-")
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "4!", "stop")
    assert choice.message.tool_calls is None
    assert [(entry.token, entry.logprob) for entry in choice.logprobs.content] == [
        (text, logprob) for text, logprob in zip(["4", "!", ""], turn.logprobs, strict=True)
    ]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.context_ids), 3)
    assert usage.total_tokens == len(turn.context_ids) + 3


def test_history_that_goes_on_is_one_sequence_and_counts_all_its_tokens(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> int:
        first = await ask(client, "1")
        second = await ask(client, "1", first.choices[0].message.content, "2")
        assert first.choices[0].logprobs is None
        return second.usage.total_tokens

    chat = a_chat(text_tokens, an_engine(text_tokens, "one", "two"))
    total = play(chat, agent)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]
    assert total == sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in chat.turns)


def test_an_edited_history_and_an_earlier_branch(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        await ask(client, "1")
        await ask(client, "1", "ONE", "2")  # the policy's words changed
        await ask(client, "1", "one", "3")  # and the first conversation goes on

    chat = a_chat(text_tokens, an_engine(text_tokens, "one", "two", "three"))
    play(chat, agent)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1, 0]


async def _call_add(client: AsyncOpenAI, **options: Any) -> tuple[list[Any], Any]:
    """The history up to the policy's call of `add`, and the policy's message."""
    history: list[Any] = [{"role": "user", "content": "What is 2+3?"}]
    completion = await client.chat.completions.create(model="any", messages=history, tools=[ADD], **options)
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    return history, choice.message


def _as_it_came(message: Any) -> Any:
    return message


def _as_a_full_dictionary(message: Any) -> Any:
    return message.model_dump()


def _arguments_written_again(message: Any) -> Any:
    said = message.model_dump(exclude_none=True)
    arguments = json.loads(said["tool_calls"][0]["function"]["arguments"])
    said["tool_calls"][0]["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
    return said


def _without_the_words(message: Any) -> Any:
    return {**message.model_dump(exclude_none=True), "content": None}


def _as_put_together_from_a_stream(message: Any) -> Any:
    said = message.model_dump(exclude_none=True)
    return {**said, "tool_calls": [{"index": index, **call} for index, call in enumerate(said["tool_calls"])]}


@pytest.mark.parametrize(
    "sent",
    [
        _as_it_came,
        _as_a_full_dictionary,
        _arguments_written_again,
        _without_the_words,
        _as_put_together_from_a_stream,
    ],
)
def test_a_tool_call_comes_back_and_its_branch_goes_on(text_tokens: ChatTokens, sent: Callable[[Any], Any]):
    written = 'Well. [add {"a": 2, "b": 3}]'

    async def agent(client: AsyncOpenAI, session: Session) -> str:
        history, message = await _call_add(client)
        [call] = message.tool_calls
        assert (message.content, call.type, call.function.name) == ("Well. ", "function", "add")
        result = str(sum(json.loads(call.function.arguments).values()))
        history += [sent(message), {"role": "tool", "tool_call_id": call.id, "content": result}]
        completion = await client.chat.completions.create(model="any", messages=history, tools=[ADD])
        return completion.choices[0].message.content

    chat = a_chat(text_tokens, an_engine(text_tokens, written, "5"))
    assert play(chat, agent) == "5"
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]
    assert [(message.role, message.content, message.is_completion) for message in chat.recorded] == [
        ("user", "What is 2+3?", False),
        ("assistant", written, True),
        ("tool", "5", False),
        ("assistant", "5", True),
    ]
    [executed] = chat.turns[0].tool_calls
    assert (executed.name, executed.arguments, executed.result) == ("add", '{"a": 2, "b": 3}', "5")
    assert executed.seconds > 0 and not chat.turns[1].tool_calls


def test_words_beside_a_call_that_were_edited_start_a_branch(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        history, message = await _call_add(client)
        edited = {**message.model_dump(exclude_none=True), "content": "Hm. "}
        history += [edited, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
        await client.chat.completions.create(model="any", messages=history, tools=[ADD])

    chat = a_chat(text_tokens, an_engine(text_tokens, 'Well. [add {"a": 2, "b": 3}]', "5"))
    play(chat, agent)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1]
    assert 'Hm. [add {"a": 2, "b": 3}]' in text_tokens.tokenizer.decode(chat.turns[1].context_ids)


def test_calls_the_policy_never_made_are_refused(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        history, message = await _call_add(client)
        forged = message.model_dump(exclude_none=True)
        forged["tool_calls"][0]["function"]["arguments"] = '{"a": 9}'
        with pytest.raises(openai.BadRequestError, match="did not make in this session"):
            await client.chat.completions.create(model="any", messages=[*history, forged], tools=[ADD])

    chat = a_chat(text_tokens, an_engine(text_tokens, '[add {"a": 2}]'))
    play(chat, agent)
    assert len(chat.turns) == 1


def test_tool_choice_none_gives_calls_as_text_and_keeps_the_tools_in_the_prompt(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        first = (await ask(client, "1", tools=[ADD], tool_choice="none")).choices[0]
        assert (first.message.content, first.message.tool_calls) == ('[add {"a": 2}]', None)
        assert first.finish_reason == "stop"
        await ask(client, "1", first.message.content, "2", tools=[ADD])

    chat = a_chat(text_tokens, an_engine(text_tokens, '[add {"a": 2}]', "ok"))
    play(chat, agent)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]


@pytest.mark.parametrize(
    "written", ["just words", '[add {"a": 2}]', 'Both: [add {"a": 2}][add {"b": 3}]', ""], ids=str.split
)
def test_a_stream_adds_up_to_the_same_reply(text_tokens: ChatTokens, written: str):
    add = {**ADD, "function": {**ADD["function"], "strict": True}}  # some versions of the client ask for it

    async def agent(client: AsyncOpenAI, session: Session) -> Any:
        whole = await ask(client, "1", tools=[add])
        stream = client.chat.completions.stream(
            model="any",
            messages=[{"role": "user", "content": "1"}],
            tools=[add],
            stream_options={"include_usage": True},
        )
        async with stream as events:
            async for _ in events:
                pass
            return whole, await events.get_final_completion()

    chat = a_chat(text_tokens, an_engine(text_tokens, written, written))
    whole, streamed = play(chat, agent)
    [one], [other] = whole.choices, streamed.choices
    assert (other.message.content or "") == (one.message.content or "")
    assert other.finish_reason == one.finish_reason
    calls = [
        [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        for choice in (one, other)
    ]
    assert calls[0] == calls[1] and len(calls[0]) == written.count("add")
    assert streamed.usage == whole.usage
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1]


def test_a_plain_stream_has_no_usage_and_carries_logprobs(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> list[Any]:
        return [chunk async for chunk in await ask(client, "1", stream=True, logprobs=True)]

    chat = a_chat(text_tokens, an_engine(text_tokens, "one"))
    chunks = play(chat, agent)
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    logprobs = [entry.logprob for chunk in chunks if (got := chunk.choices[0].logprobs) for entry in got.content]
    assert logprobs == chat.turns[0].logprobs
    assert chunks[-1].choices[0].finish_reason == "stop" and len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.2),
        ("top_p", 0.9),
        ("n", 2),
        ("stop", ["\n"]),
        ("seed", 7),
        ("logit_bias", {"5": -100}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("parallel_tool_calls", False),
        ("tool_choice", "required"),
        ("reasoning_effort", "high"),
        ("max_tokens", 0),
        ("extra_body", {"top_k": 5}),
        ("extra_body", {"guided_regex": "a*"}),
        ("tools", [{"type": "custom", "custom": {"name": "shell"}}]),
    ],
)
def test_what_would_change_the_distribution_is_refused_by_name(text_tokens: ChatTokens, option: str, value: Any):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, "1", **{option: value})
        name = next(iter(value)) if option == "extra_body" else option
        assert caught.value.param is not None and caught.value.param.startswith(name)
        assert f"`{name}" in str(caught.value)

    chat = a_chat(text_tokens, an_engine(text_tokens, "never"))
    play(chat, agent)
    assert not chat.turns


def test_options_at_the_runs_own_values_are_no_options(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        await ask(
            client,
            "1",
            temperature=0.7,
            top_p=1.0,
            n=1,
            presence_penalty=0.0,
            parallel_tool_calls=True,
            response_format={"type": "text"},
            store=False,
            metadata={"a": "b"},
        )

    chat = a_chat(text_tokens, an_engine(text_tokens, "one"), temperature=0.7)
    play(chat, agent)
    assert len(chat.turns) == 1


@pytest.mark.parametrize(
    ("options", "length"),
    [({"max_tokens": 3}, 3), ({"max_completion_tokens": 2, "max_tokens": 5}, 2), ({"max_tokens": 5000}, 8)],
)
def test_a_limit_may_shorten_a_reply_and_not_lengthen_it(text_tokens: ChatTokens, options: dict[str, int], length: int):
    async def agent(client: AsyncOpenAI, session: Session) -> Any:
        return (await ask(client, "1", **options)).choices[0]

    chat = a_chat(text_tokens, an_engine(text_tokens, "0123456789"), max_tokens=8)
    choice = play(chat, agent)
    assert (choice.message.content, choice.finish_reason) == ("0123456789"[:length], "length")
    assert chat.cut_off


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "text only, not image_url"),
        ({"role": "user", "content": ["2"]}, "text only"),
        ({"role": "critic", "content": "2"}, r"messages\.0\.role"),
        ({"role": "user", "content": "2", "weight": 1}, r"messages\.0\.weight"),
    ],
)
def test_messages_the_policy_cannot_read_are_refused(text_tokens: ChatTokens, message: Any, complaint: str):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.BadRequestError, match=complaint):
            await client.chat.completions.create(model="any", messages=[message])
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="any", messages=[])

    play(a_chat(text_tokens, an_engine(text_tokens)), agent)


def test_a_key_is_worth_something_only_while_its_attempt_runs(text_tokens: ChatTokens):
    async def inside() -> None:
        chat = a_chat(text_tokens, an_engine(text_tokens, "one"))
        async with served(chat) as (client, _, endpoint):
            [model] = (await client.models.list()).data
            assert model.id == "policy"
            async with endpoint.session(chat) as session:
                expired = session.key
            for key in ("wrong", expired):
                stranger = client.with_options(api_key=key)
                for request in (
                    ask(stranger, "1"),
                    stranger.models.list(),
                    stranger.post("/sessions/reward", body={"reward": 1}, cast_to=object),
                ):
                    with pytest.raises(openai.AuthenticationError, match="no attempt that is running") as caught:
                        await request
                    assert caught.value.code == "invalid_api_key"
            async with httpx.AsyncClient() as nobody:
                assert (await nobody.get(f"{endpoint.base_url}/models")).status_code == 401
            await ask(client, "1")
            assert len(chat.turns) == 1

    asyncio.run(inside())


async def _post_reward(client: AsyncOpenAI, content: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.post(
            f"{client.base_url}sessions/reward",
            content=content,
            headers={"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"},
        )


def test_a_session_has_one_reward(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        for wrong in ('{"reward": NaN}', '{"reward": Infinity}', '{"reward": "much"}', '{"score": 1}', "{", "[1]", "1"):
            response = await _post_reward(client, wrong)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
        assert session.reward is None
        for _ in range(2):  # the same again is a retry
            await client.post("/sessions/reward", body={"reward": 0.5, "parts": {"style": None}}, cast_to=object)
        assert session.reward == Score(reward=0.5, parts={"style": None})
        response = await _post_reward(client, '{"reward": 0.25}')
        assert response.status_code == 409 and response.headers["x-should-retry"] == "false"
        assert session.reward.reward == 0.5  # type: ignore[attr-defined]

    play(a_chat(text_tokens, an_engine(text_tokens)), agent)


def test_clients_retry_a_failing_engine_and_no_turn_is_recorded_twice(text_tokens: ChatTokens):
    class Flaky(ScriptedEngine):
        failures = 2

        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise EngineError("overloaded")
            return await super().generate(*arguments, **keywords)

    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.InternalServerError, match="overloaded"):
            await ask(client.with_options(max_retries=0), "1")
        assert isinstance(session.fault, EngineError) and not chat.turns
        await ask(client, "1")
        assert session.fault is None

    chat = a_chat(text_tokens, an_engine(text_tokens, "one", engine=Flaky))
    play(chat, agent, max_retries=1)
    assert len(chat.turns) == 1


def test_a_full_context_is_openais_error_and_a_shorter_history_goes_on(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, "x" * 40)
        assert caught.value.code == "context_length_exceeded"
        assert session.fault is not None
        await ask(client, "short")
        assert session.fault is None

    chat = a_chat(text_tokens, an_engine(text_tokens, "one"), max_model_len=32)
    play(chat, agent)
    assert len(chat.turns) == 1


def test_a_template_that_refuses_is_told_once_and_not_retried(text_tokens: ChatTokens):
    class Refusing(ChatTokens):
        def prompt(self, *arguments: Any, **keywords: Any) -> list[int]:
            calls.append(1)
            raise ValueError("roles must alternate")

    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.InternalServerError, match="roles must alternate"):
            await ask(client, "1")

    calls: list[int] = []
    play(a_chat(Refusing(text_tokens.tokenizer), an_engine(text_tokens)), agent, max_retries=2)
    assert calls == [1]


class Waiting(ScriptedEngine):
    """Its first request waits until `go`; `busy` says that it has come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.busy, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(self, *arguments: Any, **keywords: Any) -> Any:
        if not self.busy.is_set():
            self.busy.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return await super().generate(*arguments, **keywords)


def test_a_client_that_goes_away_stops_its_generation_and_leaves_no_turn(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        asking = asyncio.create_task(ask(client, "1"))
        await engine.busy.wait()
        asking.cancel()
        await engine.cancelled.wait()
        assert (await ask(client, "1")).choices[0].message.content == "one"

    engine = an_engine(text_tokens, "one", engine=Waiting)
    chat = a_chat(text_tokens, engine)
    play(chat, agent)
    assert len(chat.turns) == 1


def test_parallel_requests_of_one_session_run_at_once_on_their_own_branches(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        first = asyncio.create_task(ask(client, "1"))
        await engine.busy.wait()
        second = await ask(client, "2")  # answered while the first is being generated
        engine.go.set()
        for question, answer in (("1", await first), ("2", second)):
            await ask(client, question, answer.choices[0].message.content, "more")

    engine = an_engine(text_tokens, "two", "one", "and one", "and two", engine=Waiting)
    chat = a_chat(text_tokens, engine)
    play(chat, agent)
    assert [turn.sequence_idx for turn in chat.turns] == [0, 1, 1, 0]
    assert [text_tokens.text(turn.sampled_ids) for turn in chat.turns] == ["two", "one", "and one", "and two"]


def test_a_session_that_ends_takes_its_running_requests_with_it(text_tokens: ChatTokens):
    async def inside() -> None:
        engine = an_engine(text_tokens, engine=Waiting)
        chat = a_chat(text_tokens, engine)
        async with served(chat) as (client, _, endpoint), endpoint.session(chat) as session:
            left_behind = asyncio.create_task(ask(client.with_options(api_key=session.key), "1"))
            await engine.busy.wait()
            await session.close()
            assert engine.cancelled.is_set()
            with pytest.raises(openai.AuthenticationError):
                await left_behind
        assert not chat.turns

    asyncio.run(inside())


def test_unknown_paths_are_told_what_there_is(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        with pytest.raises(openai.NotFoundError, match="no /v1/embeddings here, only chat/completions"):
            await client.embeddings.create(model="any", input="1")

    play(a_chat(text_tokens, an_engine(text_tokens)), agent)


def test_the_blocking_client_works_from_a_thread(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> str | None:
        def blocking() -> str | None:
            with openai.OpenAI(base_url=str(client.base_url), api_key=session.key) as plain:
                messages: Any = [{"role": "user", "content": "1"}]
                return plain.chat.completions.create(model="any", messages=messages).choices[0].message.content

        return await asyncio.to_thread(blocking)

    assert play(a_chat(text_tokens, an_engine(text_tokens, "one")), agent) == "one"


def test_an_event_loop_has_one_server_until_it_is_closed():
    async def inside() -> SimpleNamespace:
        first, again = agent_endpoint(), agent_endpoint()
        await close_agent_endpoint()
        await close_agent_endpoint()  # nothing is left to close
        third = agent_endpoint()
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as http:
                await http.get(first.base_url)
        return SimpleNamespace(first=first, again=again, third=third)

    one, other = asyncio.run(inside()), asyncio.run(inside())
    assert one.first is one.again
    assert len({id(each) for each in (one.first, one.third, other.first, other.third)}) == 4
