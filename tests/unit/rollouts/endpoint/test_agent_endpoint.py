"""OpenAI's own client talks to the endpoint; what it asks becomes turns of one attempt, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.agent_endpoint import agent_endpoint, close_agent_endpoint
from rollouts.engines.engine import EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.workflow import Score
from storage.records import Message, Sampling
from tests.unit.rollouts.scripted_text import ADD, Served, served, user

pytestmark = pytest.mark.server


async def test_a_request_is_a_turn_and_its_reply_is_openais(text_tokens: ChatTokens):
    async with served(text_tokens, "4!") as agent:
        parts: Any = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
        completion: Any = await agent.client.chat.completions.create(
            model="gpt-x",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
            logprobs=True,
            user="somebody",
        )
    [turn] = agent.chat.turns
    assert turn.context_ids == text_tokens.prompt([Message(role="system", content="Be brief."), user("2+2")])
    assert (completion.model, completion.object, completion.id[:9]) == ("gpt-x", "chat.completion", "chatcmpl-")
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "4!", "stop")
    assert choice.message.tool_calls is None
    assert [entry.token for entry in choice.logprobs.content] == ["4", "!", ""]
    assert [entry.logprob for entry in choice.logprobs.content] == turn.logprobs
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(turn.context_ids), 3)
    assert usage.total_tokens == len(turn.context_ids) + 3


async def _call_add(agent: Served) -> tuple[list[Any], Any]:
    """The history up to the policy's call of `add`, and the policy's message."""
    [choice] = (await agent.ask("What is 2+3?", tools=[ADD])).choices
    assert choice.finish_reason == "tool_calls"
    return [{"role": "user", "content": "What is 2+3?"}], choice.message


def _plain(message: Any, **changed: Any) -> Any:
    return {**message.model_dump(exclude_none=True), **changed}


def _arguments_written_again(message: Any) -> Any:
    again = _plain(message)
    function = again["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(dict(reversed(json.loads(function["arguments"]).items())), indent=1)
    return again


def _as_put_together_from_a_stream(message: Any) -> Any:
    return _plain(message, tool_calls=[{"index": i, **call} for i, call in enumerate(_plain(message)["tool_calls"])])


SENT: dict[str, Callable[[Any], Any]] = {
    "as it came": lambda message: message,
    "as a full dictionary": lambda message: message.model_dump(),
    "its arguments written again": _arguments_written_again,
    "without the words": lambda message: _plain(message, content=None),
    "with what gateways add": lambda message: _plain(
        message, annotations=[], provider_specific_fields={"a": 1}, name="b"
    ),
    "as put together from a stream": _as_put_together_from_a_stream,
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_a_tool_call_comes_back_and_its_branch_goes_on(text_tokens: ChatTokens, sent: Callable[[Any], Any]):
    written = 'Well. [add {"a": 2, "b": 3}]'
    async with served(text_tokens, written, "5") as agent:
        history, message = await _call_add(agent)
        [call] = message.tool_calls
        assert (message.content, call.type, call.function.name) == ("Well. ", "function", "add")
        result = str(sum(json.loads(call.function.arguments).values()))
        history += [sent(message), {"role": "tool", "tool_call_id": call.id, "content": result}]
        completion = await agent.client.chat.completions.create(model="any", messages=history, tools=[ADD])
        [choice] = completion.choices
        assert (choice.message.content, choice.logprobs) == ("5", None)
    assert agent.sequences == [0, 0]
    assert completion.usage.total_tokens == sum(len(t.context_ids) + len(t.sampled_ids) for t in agent.chat.turns)
    assert [(message.role, message.content, message.is_completion) for message in agent.chat.recorded] == [
        *(("user", "What is 2+3?", False), ("assistant", written, True)),
        *(("tool", "5", False), ("assistant", "5", True)),
    ]
    [executed] = agent.chat.turns[0].tool_calls
    assert (executed.name, executed.arguments, executed.result) == ("add", '{"a": 2, "b": 3}', "5")
    assert executed.seconds > 0 and not agent.chat.turns[1].tool_calls


TWO = 'Both: [add {"a": 2}][add {"b": 3}]'
ORDERS: dict[str, Callable[[Any, Any, Any], list[Any]]] = {
    "in order": lambda message, first, second: [message, first, second],
    "the other way round": lambda message, first, second: [message, second, first],
    "each call with its result": lambda message, first, second: [
        *({**message, "tool_calls": message["tool_calls"][:1]}, first),
        *({**message, "tool_calls": message["tool_calls"][1:]}, second),
    ],
    "calls in the other order": lambda message, first, second: [
        *({**message, "tool_calls": message["tool_calls"][::-1]}, second, first)
    ],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
async def test_results_go_to_their_calls_in_whatever_order_they_come(
    text_tokens: ChatTokens, order: Callable[[Any, Any, Any], list[Any]]
):
    async with served(text_tokens, TWO, "ok") as agent:
        history, message = await _call_add(agent)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"{name} result"}
            for call, name in zip(message.tool_calls, ("first", "second"), strict=True)
        ]
        history += order(_plain(message), *results)
        await agent.client.chat.completions.create(model="any", messages=history, tools=[ADD])
    assert agent.sequences == [0, 0]
    assert [message.content for message in agent.chat.recorded if message.role == "tool"] == [
        "first result",
        "second result",
    ]
    assert [call.result for call in agent.chat.turns[0].tool_calls] == ["first result", "second result"]


async def test_a_history_with_other_calls_or_results_is_refused_with_the_true_reason(text_tokens: ChatTokens):
    async with served(text_tokens, TWO) as agent:
        history, message = await _call_add(agent)
        plain, (first, second) = _plain(message), (call.id for call in message.tool_calls)
        result: Any = {"role": "tool", "content": "5"}
        one = {**plain, "tool_calls": plain["tool_calls"][:1]}
        stranger = {**plain, "tool_calls": [{**plain["tool_calls"][0], "id": "other"}]}
        cases: list[tuple[list[Any], str]] = [
            (
                [one, {**result, "tool_call_id": first}],
                f"reply with {first}, {second} is not in .*its 2 calls",
            ),
            ([plain, *[{**result, "tool_call_id": first}] * 2], f"tool call '{first}' has two results"),
            ([plain, {**result, "tool_call_id": "x"}], "the tool call 'x' is not of the message before its result"),
            (
                [plain, {**result, "tool_call_id": second}],
                f"tool call '{first}' has no result, but others beside it have",
            ),
            (
                [plain, {"role": "user", "content": "hm"}, {**result, "tool_call_id": first}],
                f"result of the tool call '{first}' is not behind its call",
            ),
            ([stranger], "did not make the tool call 'other' in this session"),
        ]
        for changed, reason in cases:
            with pytest.raises(openai.BadRequestError, match=reason):
                await agent.client.chat.completions.create(model="any", messages=[*history, *changed])
        assert len(agent.chat.turns) == 1


async def test_words_beside_a_call_that_were_edited_start_a_branch_and_other_calls_are_refused(text_tokens: ChatTokens):
    async with served(text_tokens, 'Well. [add {"a": 2, "b": 3}]', "5") as agent:
        history, message = await _call_add(agent)
        forged = _plain(message)
        forged["tool_calls"][0]["function"]["arguments"] = '{"a": 9}'
        create = agent.client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match=r"with call_1 is not in the history as .* became"):
            await create(model="any", messages=[*history, forged])
        assert len(agent.chat.turns) == 1
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
        await create(model="any", messages=[*history, _plain(message, content="Hm. "), result], tools=[ADD])
    assert agent.sequences == [0, 1]
    assert 'Hm. [add {"a": 2, "b": 3}]' in text_tokens.tokenizer.decode(agent.chat.turns[1].context_ids)


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
async def test_thoughts_stand_beside_the_answer_call_nothing_and_need_not_be_sent_back(
    text_tokens: ChatTokens, sent: Callable[[Any], Any]
):
    first, second = '<think>[add {"a": 9}]?</think>\nWell. [add {"a": 2, "b": 3}]', "<think>5</think>Five"
    async with served(text_tokens, first, second, "ok") as agent:
        history, message = await _call_add(agent)
        [call] = message.tool_calls
        assert (message.reasoning, message.content) == ('[add {"a": 9}]?', "Well. ")
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        history += [sent(message), {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        create = agent.client.chat.completions.create
        stream: Any = await create(model="any", messages=history, tools=[ADD], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert (deltas[0].reasoning, deltas[0].content) == ("5", "Five")
        history += [{"role": "assistant", "content": "Five"}, {"role": "user", "content": "Thanks."}]
        completion: Any = await create(model="any", messages=history, tools=[ADD])
    assert not hasattr(completion.choices[0].message, "reasoning")
    assert agent.sequences == [0, 0, 0]
    spoken = [(message.content, message.answer) for message in agent.chat.recorded if message.is_completion]
    assert spoken == [(first, 'Well. [add {"a": 2, "b": 3}]'), (second, "Five"), ("ok", None)]


async def test_tool_choice_none_gives_calls_as_text_and_keeps_the_tools_in_the_prompt(text_tokens: ChatTokens):
    async with served(text_tokens, '[add {"a": 2}]', "ok") as agent:
        [first] = (await agent.ask("1", tools=[ADD], tool_choice="none")).choices
        assert (first.message.content, first.message.tool_calls) == ('[add {"a": 2}]', None)
        assert first.finish_reason == "stop"
        await agent.ask("1", first.message.content, "2", tools=[ADD])
    assert agent.sequences == [0, 0]


@pytest.mark.parametrize(
    "written", ["just words", '[add {"a": 2}]', 'Both: [add {"a": 2}][add {"b": 3}]', ""], ids=str.split
)
async def test_a_stream_adds_up_to_the_same_reply(text_tokens: ChatTokens, written: str):
    add: Any = {**ADD, "function": {**ADD["function"], "strict": True}}  # some clients ask for it
    async with served(text_tokens, written, written) as agent:
        whole = await agent.ask("1", tools=[add])
        options: Any = {"messages": [{"role": "user", "content": "1"}], "stream_options": {"include_usage": True}}
        async with agent.client.chat.completions.stream(model="any", tools=[add], **options) as events:
            streamed: Any = await events.get_final_completion()

    def reply(completion: Any) -> tuple[str, list[tuple[str, str]], str]:
        [choice] = completion.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return choice.message.content or "", calls, choice.finish_reason

    assert reply(streamed) == reply(whole) and len(reply(whole)[1]) == written.count("add")
    assert streamed.usage == whole.usage
    assert agent.sequences == [0, 1]


async def test_a_plain_stream_has_no_usage_and_carries_logprobs(text_tokens: ChatTokens):
    async with served(text_tokens, "one") as agent:
        chunks = [chunk async for chunk in await agent.ask("1", stream=True, logprobs=True)]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    logprobs = [entry.logprob for chunk in chunks if (got := chunk.choices[0].logprobs) for entry in got.content]
    assert logprobs == agent.chat.turns[0].logprobs
    assert chunks[-1].choices[0].finish_reason == "stop" and len({chunk.id for chunk in chunks}) == 1


REFUSED: list[dict[str, Any]] = [
    *({"temperature": 0.2}, {"top_p": 0.9}, {"n": 2}, {"stop": [""]}, {"seed": 7}, {"logit_bias": {"5": -100}}),
    *({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"top_logprobs": 3}),
    *({"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"reasoning_effort": "high"}),
    *({"max_tokens": 0}, {"extra_body": {"top_k": 5}}, {"extra_body": {"guided_regex": "a*"}}),
    {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
]


async def test_what_would_change_the_distribution_is_refused_by_name_and_the_runs_own_values_are_no_options(
    text_tokens: ChatTokens,
):
    options = {"temperature": 0.7, "top_p": 1.0, "n": 1, "presence_penalty": 0.0, "parallel_tool_calls": True}
    options |= {"response_format": {"type": "text"}, "store": False, "metadata": {"a": "b"}, "modalities": ["text"]}
    options |= {"extra_body": {"top_k": -1, "repetition_penalty": 1.0, "ignore_eos": False}}
    async with served(text_tokens, "one", sampling=Sampling(temperature=0.7)) as agent:
        for option in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.ask("1", **option)
            [name] = option.get("extra_body", option)
            assert str(caught.value.param).startswith(name) and f"`{name}" in str(caught.value), name
        assert not agent.chat.turns
        assert (await agent.ask("1", **options)).choices[0].message.content == "one"


async def test_a_refusal_names_the_true_reason(text_tokens: ChatTokens):
    reasons = {
        "n": "the number of attempts is rollout.n_samples",
        "seed": "each attempt of a group must differ",
        "logit_bias": "the probabilities|whose probabilities the loss needs",
        "top_logprobs": "the sampled token's logprob alone",
        "temperature": r"the run file's \[sampling\]",
        "reasoning_effort": "is what it learns",
        "response_format": "engine.guided_decoding = true",
        "tool_choice": "engine.guided_decoding = true",
    }
    extra = {
        "repetition_penalty": (1.1, "whose probabilities the loss needs"),
        "guided_json": ({}, "use `response_format`"),
        "chat_template_kwargs": ({}, r"engine\.chat_template_kwargs in the run file"),
        "tools": ([{"type": "web_search"}], "`tools.0.type`: Input should be 'function'"),
    }
    async with served(text_tokens) as agent:
        for option in REFUSED:
            if (name := next(iter(option))) in reasons:
                with pytest.raises(openai.BadRequestError, match=reasons[name]):
                    await agent.ask("1", **option)
        for name, (value, reason) in extra.items():
            with pytest.raises(openai.BadRequestError, match=reason):
                await agent.ask("1", extra_body={name: value})


async def test_a_reply_ends_at_a_stop_string_which_the_agent_does_not_see_and_the_record_does(text_tokens: ChatTokens):
    async with served(text_tokens, "Thought. Observation: 5", "no stop", "12</code>34", "ok", max_tokens=40) as agent:
        first: Any = await agent.ask("1", stop=["Observation:", "</code>"], logprobs=True)
        [choice] = first.choices
        assert (choice.message.content, choice.finish_reason) == ("Thought. ", "stop")
        assert len(choice.logprobs.content) == first.usage.completion_tokens == len("Thought. Observation:")
        await agent.ask("1", "Thought. ", "2", stop="</code>")
        last: Any = await agent.ask("1", "Thought. ", "2", "no stop", "3", stop="</code>")
        assert last.choices[0].message.content == "12"
        await agent.ask("1", "Thought. ", "2", "no stop", "3", "12", "4")
    assert agent.sequences == [0] * 4
    decode = text_tokens.tokenizer.decode
    assert [decode(turn.sampled_ids) for turn in agent.chat.turns][::2] == ["Thought. Observation:", "12</code>"]
    assert agent.chat.turns[1].context_ids[0] == text_tokens.end_id, "which the policy did not sample"
    assert agent.chat.turns[2].context_ids[0] != text_tokens.end_id, "which it did"
    asked = [(turn.stop, turn.stopped_by) for turn in agent.chat.turns]
    assert asked == [
        (["Observation:", "</code>"], "Observation:"),
        *((["</code>"], ""), (["</code>"], "</code>"), ([], "")),
    ]


async def test_without_parallel_calls_a_reply_ends_behind_its_first_call(text_tokens: ChatTokens):
    async with served(text_tokens, f"{TWO} and more", "ok", TWO) as agent:
        options: Any = {"tools": [ADD], "parallel_tool_calls": False}
        [choice] = (await agent.ask("1", **options)).choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, call.function.arguments) == ("tool_calls", '{"a": 2}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        history: Any = [{"role": "user", "content": "1"}, _plain(choice.message), result]
        await agent.client.chat.completions.create(model="any", messages=history, **options)
        [choice] = (await agent.ask("2", tools=[ADD], parallel_tool_calls=False, tool_choice="none")).choices
        assert choice.message.content == TWO
    assert agent.sequences == [0, 0, 1]
    assert text_tokens.tokenizer.decode(agent.chat.turns[0].sampled_ids) == 'Both: [add {"a": 2}]'


async def test_a_draft_call_in_thoughts_ends_no_reply(text_tokens: ChatTokens):
    for reply, template in (
        ('<think>[add {}]?</think>[add {"a": 2}] more', None),
        ('[add {}]?</think>[add {"a": 2}] more', "<think>"),
    ):

        class Opens(ChatTokens):
            def prompt(self, messages: Any, **keywords: Any) -> list[int]:
                return [*super().prompt(messages, **keywords), *self.tokenizer(template or "")["input_ids"]]  # noqa: B023

        async with served(Opens(text_tokens.tokenizer), reply) as agent:
            [choice] = (await agent.ask("1", tools=[ADD], parallel_tool_calls=False)).choices
        [call] = choice.message.tool_calls
        assert (choice.message.reasoning, call.function.arguments) == ("[add {}]?", '{"a": 2}')
        assert text_tokens.tokenizer.decode(agent.chat.turns[0].sampled_ids) == reply.removesuffix(" more")


async def test_what_forces_tokens_goes_to_an_engine_that_follows_grammars_and_is_recorded(text_tokens: ChatTokens):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"name": "x", "schema": schema, "strict": True}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"response_format": {"type": "json_schema", "json_schema": json_schema}}, {"json": schema}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, None),
        ({"tools": [ADD], "tool_choice": "required"}, {"regex": "[any of 1]+"}),
        ({"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}, {"regex": "[any of 1]"}),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, {"regex": "[add of 1]+"}),
    ]
    call = '[add {"a": 2}]'
    async with served(text_tokens, *[call] * (len(cases) + 2), follows_grammars=True) as agent:
        for number, (options, constraint) in enumerate(cases):
            [choice] = (await agent.ask(str(number), **options)).choices
            assert (choice.finish_reason == "tool_calls") == ("tools" in options)
            recorded = agent.chat.turns[-1].constraint
            assert (json.loads(recorded) if recorded else None) == constraint
        for options, problem in (
            ({"tool_choice": "required"}, "there are no tools"),
            ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "no tool .*'sub'"),
        ):
            with pytest.raises(openai.BadRequestError, match=problem):
                await agent.ask("1", **options)
        text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        await agent.client.responses.create(model="any", input="1", text=text)
        assert json.loads(agent.chat.turns[-1].constraint) == {"json": schema}
        tool: Any = {"type": "function", **ADD["function"]}
        named: Any = {"type": "function", "name": "add"}
        await agent.client.responses.create(model="any", input="1", tools=[tool], tool_choice=named)
        assert json.loads(agent.chat.turns[-1].constraint) == {"regex": "[add of 1]+"}


async def test_a_limit_may_shorten_a_reply_and_not_lengthen_it(text_tokens: ChatTokens):
    async with served(text_tokens, *["0123456789"] * 3, max_tokens=8) as agent:
        for options, length in (
            ({"max_tokens": 3}, 3),
            ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
            ({"max_tokens": 5000}, 8),
        ):
            [choice] = (await agent.ask("1", **options)).choices
            assert (choice.message.content, choice.finish_reason) == ("0123456789"[:length], "length")
            assert agent.chat.cut_off


async def test_messages_the_policy_cannot_read_are_refused(text_tokens: ChatTokens):
    image = {"type": "image_url", "image_url": {"url": "x"}}
    cases: list[tuple[list[Any], str]] = [
        ([{"role": "user", "content": [image]}], "text only, not image_url"),
        ([{"role": "user", "content": ["2"]}], "text only"),
        ([{"role": "critic", "content": "2"}], r"messages\.0\.role"),
        ([{"role": "user", "content": "2", "weight": 1}], r"messages\.0\.weight"),
        ([], "messages"),
    ]
    async with served(text_tokens) as agent:
        for messages, complaint in cases:
            with pytest.raises(openai.BadRequestError, match=complaint):
                await agent.client.chat.completions.create(model="any", messages=messages)


async def test_half_a_surrogate_pair_is_replaced_wherever_a_request_has_it(text_tokens: ChatTokens):
    async with served(text_tokens, "ok", "ok") as agent:
        headers = {"Authorization": f"Bearer {agent.session.key}", "Content-Type": "application/json"}
        tools = [{**ADD, "function": {**ADD["function"], "description": "Add \ud83d."}}]
        content = json.dumps({"messages": [{"role": "user", "content": "a\ud83db"}], "tools": tools})
        async with httpx.AsyncClient() as http:
            for path, body in (("chat/completions", content), ("responses", '{"input": "a\\ud83d"}')):
                url = f"{agent.endpoint.base_url}/{path}"
                response = await http.post(url, content=body, headers=headers)
                assert response.status_code == 200, response.text
            reward = '{"reward": 1, "parts": {"\\ud83d": 1}}'
            await http.post(f"{agent.endpoint.base_url}/sessions/reward", content=reward, headers=headers)
    assert [m.content for m in agent.chat.recorded if m.role == "user"] == ["a\ufffdb", "a\ufffd"]
    assert agent.session.reward == Score(reward=1, parts={"\ufffd": 1})


async def test_a_key_is_worth_something_only_while_its_attempt_runs_and_at_the_paths_there_are(text_tokens: ChatTokens):
    async with served(text_tokens, "one") as agent:
        [model] = (await agent.client.models.list()).data
        assert model.id == "policy"
        async with agent.endpoint.session(agent.chat) as session:
            expired = session.key
        for key in ("wrong", expired):
            stranger = agent.client.with_options(api_key=key)
            for request in (
                stranger.chat.completions.create(model="any", messages=[{"role": "user", "content": "1"}]),
                stranger.models.list(),
                stranger.post("/sessions/reward", body={"reward": 1}, cast_to=object),
            ):
                with pytest.raises(openai.AuthenticationError, match="no attempt that is running") as caught:
                    await request
                assert caught.value.code == "invalid_api_key"
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.get(f"{agent.endpoint.base_url}/models")).status_code == 401
        await agent.ask("1")
        assert len(agent.chat.turns) == 1
        with pytest.raises(openai.NotFoundError, match="no /v1/embeddings here, only chat/completions"):
            await agent.client.embeddings.create(model="any", input="1")


async def test_a_session_has_one_reward(text_tokens: ChatTokens):
    async def post(content: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {agent.session.key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient() as http:
            return await http.post(f"{agent.endpoint.base_url}/sessions/reward", content=content, headers=headers)

    async with served(text_tokens) as agent:
        for wrong in ('{"reward": NaN}', '{"reward": Infinity}', '{"reward": "much"}', '{"score": 1}', "{", "[1]", "1"):
            response = await post(wrong)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
        assert agent.session.reward is None
        for _ in range(2):  # the same again is a retry
            await agent.client.post("/sessions/reward", body={"reward": 0.5, "parts": {"style": None}}, cast_to=object)
        response = await post('{"reward": 0.25}')
        assert response.status_code == 409 and response.headers["x-should-retry"] == "false"
        assert agent.session.reward == Score(reward=0.5, parts={"style": None})


async def test_clients_retry_a_failing_engine_and_the_conversation_goes_on_where_it_was(text_tokens: ChatTokens):
    class Flaky(ScriptedEngine):
        failures = 0

        async def generate(self, *arguments: Any, **keywords: Any) -> Any:
            if Flaky.failures:
                Flaky.failures -= 1
                raise EngineError("overloaded")
            return await super().generate(*arguments, **keywords)

    async with served(text_tokens, "one", "two", engine=Flaky, max_retries=1) as agent:
        await agent.ask("1")
        Flaky.failures = 3
        with pytest.raises(openai.InternalServerError, match="overloaded"):
            await agent.ask("1", "one", "2")
        assert isinstance(agent.session.fault, EngineError) and len(agent.chat.turns) == 1
        await agent.ask("1", "one", "2")
        assert agent.session.fault is None and agent.sequences == [0, 0]


async def test_a_full_context_and_a_template_that_refuses_are_told_once_and_a_shorter_history_goes_on(
    text_tokens: ChatTokens,
):
    class Picky(ChatTokens):
        def prompt(self, messages: Any, **keywords: Any) -> list[int]:
            if messages[0].content == "refuse":
                calls.append(1)
                raise ValueError("roles must alternate")
            return super().prompt(messages, **keywords)

    calls: list[int] = []
    async with served(Picky(text_tokens.tokenizer), "one", max_model_len=32, max_retries=2) as agent:
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.ask("x" * 40)
        assert caught.value.code == "context_length_exceeded" and agent.session.fault is not None
        with pytest.raises(openai.InternalServerError, match="roles must alternate"):
            await agent.ask("refuse")
        assert calls == [1]
        await agent.ask("short")
        assert agent.session.fault is None and len(agent.chat.turns) == 1


class Waiting(ScriptedEngine):
    """Its first request waits until `go`; `busy` is set when it has come."""

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


async def test_a_client_that_goes_away_and_a_session_that_ends_stop_what_is_generated(text_tokens: ChatTokens):
    async with served(text_tokens, "one", engine=Waiting) as agent:
        engine: Any = agent.chat.engine
        asking = asyncio.create_task(agent.ask("1"))
        await engine.busy.wait()
        asking.cancel()
        await engine.cancelled.wait()
        await agent.ask("1")
        assert len(agent.chat.turns) == 1
        engine.busy.clear()
        engine.cancelled.clear()
        left_behind = asyncio.create_task(agent.ask("1"))
        await engine.busy.wait()
        await agent.session.close()
        assert engine.cancelled.is_set()
        with pytest.raises(openai.AuthenticationError):
            await left_behind
        assert len(agent.chat.turns) == 1


def test_an_event_loop_has_one_server_until_it_is_closed():
    async def inside() -> list[Any]:
        first, again = agent_endpoint(), agent_endpoint()
        assert first is again
        await close_agent_endpoint()
        await close_agent_endpoint()  # nothing is left to close
        third = agent_endpoint()
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as http:
                await http.get(first.base_url)
        return [first, third]

    servers = [*asyncio.run(inside()), *asyncio.run(inside())]
    assert len(set(map(id, servers))) == 4
