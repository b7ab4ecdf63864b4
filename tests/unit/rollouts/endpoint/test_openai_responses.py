"""The Responses API is another spelling of the same conversation: one branch, whichever way the agent keeps history."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from rollouts.chat.chat_tokens import ChatTokens
from tests.unit.rollouts.scripted_text import ADD, said, served, user

pytestmark = pytest.mark.server
TOOL: Any = {"type": "function", **ADD["function"]}


async def test_a_request_is_a_turn_and_its_reply_is_openais(text_tokens: ChatTokens):
    async with served(text_tokens, "4!") as agent:
        made: Any = await agent.client.responses.create(
            model="gpt-x", instructions="Be brief.", input="2+2", store=False
        )
    system, *rest = agent.chat.recorded
    assert (system.role, system.content, rest) == ("system", "Be brief.", [user("2+2"), said("4!")])
    assert (made.output_text, made.status, made.model, made.object) == ("4!", "completed", "gpt-x", "response")
    [turn] = agent.chat.turns
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(turn.context_ids), len(turn.sampled_ids))


@pytest.mark.parametrize("sent", ["results only", "whole history", "each call with its result", "results reversed"])
async def test_a_tool_call_comes_back_and_its_branch_goes_on(text_tokens: ChatTokens, sent: str):
    written = 'Well. [add {"a": 2, "b": 3}][add {"a": 4, "b": 5}]'
    async with served(text_tokens, written, "5 and 9") as agent:
        history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Add them."}]}]
        made: Any = await agent.client.responses.create(model="any", input=history, tools=[TOOL])
        message, *calls = made.output
        assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
        assert message.content[0].text == "Well. "
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(5 + 4 * number)}
            for number, call in enumerate(calls)
        ]
        pairs = [item for pair in zip(calls, results, strict=True) for item in pair]
        later: Any = {
            "results only": {"input": results, "previous_response_id": made.id},
            "whole history": {"input": [*history, *made.output, *results]},
            "each call with its result": {"input": [*history, message, *pairs]},
            "results reversed": {"input": [*history, *made.output, *reversed(results)]},
        }[sent]
        made = await agent.client.responses.create(model="any", tools=[TOOL], **later)
        assert made.output_text == "5 and 9"
    assert agent.sequences == [0, 0]
    assert [message.content for message in agent.chat.recorded] == ["Add them.", written, "5", "9", "5 and 9"]
    assert [call.result for call in agent.chat.turns[0].tool_calls] == ["5", "9"]


@pytest.mark.parametrize("written", ["just words", '[add {"a": 2}]', 'Both: [add {"a": 2}][add {"b": 3}]', ""])
async def test_a_stream_adds_up_to_the_same_response(text_tokens: ChatTokens, written: str):
    async with served(text_tokens, written, written) as agent:
        whole: Any = await agent.client.responses.create(model="any", input="1", tools=[TOOL])
        async with agent.client.responses.stream(model="any", input="1", tools=[TOOL]) as events:
            kinds = [event.type async for event in events]
            streamed: Any = await events.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    def words(response: Any) -> list[Any]:
        return [i.content[0].text if i.type == "message" else (i.name, i.arguments) for i in response.output]

    assert words(streamed) == words(whole) and streamed.usage == whole.usage


async def test_a_reply_that_was_cut_off_is_incomplete(text_tokens: ChatTokens):
    options: Any = {"model": "any", "input": "1", "max_output_tokens": 3}
    async with served(text_tokens, "one more", "one more") as agent:
        made = await agent.client.responses.create(**options)
        assert (made.status, made.output_text) == ("incomplete", "one")
        assert made.incomplete_details.reason == "max_output_tokens"
        async with agent.client.responses.stream(**options) as events:
            assert [event.type async for event in events][-1] == "response.incomplete"


REFUSED: list[dict[str, Any]] = [
    *({"temperature": 0.2}, {"reasoning": {"effort": "high"}}, {"text": {"format": {"type": "json_object"}}}),
    *({"truncation": "auto"}, {"conversation": "conv_1"}, {"tools": [{"type": "web_search"}]}, {"input": []}),
    *({"tool_choice": "required"}, {"previous_response_id": "resp_unknown"}),
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
]


async def test_what_the_policy_cannot_honour_is_refused_by_name(text_tokens: ChatTokens):
    async with served(text_tokens, "never") as agent:
        for option in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await agent.client.responses.create(model="any", **{"input": "1", **option})
            assert str(caught.value.param).startswith(*option), option
    assert not agent.chat.turns


async def test_thoughts_are_an_item_of_their_own_and_come_back_as_they_were(text_tokens: ChatTokens):
    async with served(text_tokens, '<think>[add {"a": 9}] no</think>[add {"a": 2}]', "<think>so</think>2") as agent:
        history: Any = [{"role": "user", "content": "Add."}]
        made: Any = await agent.client.responses.create(model="any", input=history, tools=[TOOL])
        thought, call = made.output
        assert (thought.type, thought.content[0].text) == ("reasoning", '[add {"a": 9}] no')
        assert (call.type, call.arguments) == ("function_call", '{"a": 2}')
        assert made.usage.output_tokens_details.reasoning_tokens == len('[add {"a": 9}] no')
        history += [*made.output, {"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        async with agent.client.responses.stream(model="any", tools=[TOOL], input=history) as events:
            [_ async for _ in events]
            assert (await events.get_final_response()).output_text == "2"
    assert agent.sequences == [0, 0]
