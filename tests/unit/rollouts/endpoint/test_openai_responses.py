"""The Responses API is another spelling of the same conversation: one branch, whichever way the agent keeps history."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.endpoint.agent_endpoint import Session
from tests.unit.rollouts.scripted_text import ADD, a_chat, an_engine, play

TOOL = {"type": "function", **ADD["function"]}


def test_a_request_is_a_turn_and_its_reply_is_openais(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> Any:
        return await client.responses.create(model="gpt-x", instructions="Be brief.", input="2+2", store=False)

    chat = a_chat(text_tokens, an_engine(text_tokens, "4!"))
    made = play(chat, agent)
    assert [(message.role, message.content) for message in chat.recorded] == [
        ("system", "Be brief."),
        ("user", "2+2"),
        ("assistant", "4!"),
    ]
    assert (made.output_text, made.status, made.model, made.object) == ("4!", "completed", "gpt-x", "response")
    [turn] = chat.turns
    assert (made.usage.input_tokens, made.usage.output_tokens) == (len(turn.context_ids), len(turn.sampled_ids))


@pytest.mark.parametrize("server_keeps_history", [True, False])
def test_a_tool_call_comes_back_and_its_branch_goes_on(text_tokens: ChatTokens, server_keeps_history: bool):
    written = 'Well. [add {"a": 2, "b": 3}][add {"a": 4, "b": 5}]'

    async def agent(client: AsyncOpenAI, session: Session) -> str:
        history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Add them."}]}]
        made = await client.responses.create(model="any", input=history, tools=[TOOL])
        message, *calls = made.output
        assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
        assert message.content[0].text == "Well. "
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(5 + 4 * number)}
            for number, call in enumerate(calls)
        ]
        if server_keeps_history:
            made = await client.responses.create(model="any", input=results, tools=[TOOL], previous_response_id=made.id)
        else:
            made = await client.responses.create(model="any", input=[*history, *made.output, *results], tools=[TOOL])
        return made.output_text

    chat = a_chat(text_tokens, an_engine(text_tokens, written, "5 and 9"))
    assert play(chat, agent) == "5 and 9"
    assert [turn.sequence_idx for turn in chat.turns] == [0, 0]
    assert [message.content for message in chat.recorded] == ["Add them.", written, "5", "9", "5 and 9"]
    assert [call.result for call in chat.turns[0].tool_calls] == ["5", "9"]


@pytest.mark.parametrize("written", ["just words", '[add {"a": 2}]', 'Both: [add {"a": 2}][add {"b": 3}]', ""])
def test_a_stream_adds_up_to_the_same_response(text_tokens: ChatTokens, written: str):
    async def agent(client: AsyncOpenAI, session: Session) -> Any:
        whole = await client.responses.create(model="any", input="1", tools=[TOOL])
        async with client.responses.stream(model="any", input="1", tools=[TOOL]) as events:
            kinds = [event.type async for event in events]
            return whole, await events.get_final_response(), kinds

    whole, streamed, kinds = play(a_chat(text_tokens, an_engine(text_tokens, written, written)), agent)
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    def kept(item: Any) -> dict[str, Any]:
        return {
            "text": item.content[0].text if item.type == "message" else None,
            "call": (item.name, item.arguments) if item.type == "function_call" else None,
        }

    assert [kept(item) for item in streamed.output] == [kept(item) for item in whole.output]
    assert streamed.usage == whole.usage


def test_a_reply_that_was_cut_off_is_incomplete(text_tokens: ChatTokens):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        made = await client.responses.create(model="any", input="1", max_output_tokens=3)
        assert (made.status, made.incomplete_details.reason, made.output_text) == (
            "incomplete",
            "max_output_tokens",
            "one",
        )
        async with client.responses.stream(model="any", input="1", max_output_tokens=3) as events:
            assert [event.type async for event in events][-1] == "response.incomplete"

    play(a_chat(text_tokens, an_engine(text_tokens, "one more", "one more")), agent)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.2),
        ("reasoning", {"effort": "high"}),
        ("text", {"format": {"type": "json_object"}}),
        ("truncation", "auto"),
        ("conversation", "conv_1"),
        ("tools", [{"type": "web_search"}]),
        ("tool_choice", "required"),
        ("previous_response_id", "resp_unknown"),
        ("input", [{"type": "reasoning", "id": "r", "summary": []}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", []),
    ],
)
def test_what_the_policy_cannot_honour_is_refused_by_name(text_tokens: ChatTokens, option: str, value: Any):
    async def agent(client: AsyncOpenAI, session: Session) -> None:
        options: Any = {"input": "1", option: value}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="any", **options)
        assert caught.value.param is not None and caught.value.param.startswith(option)

    chat = a_chat(text_tokens, an_engine(text_tokens, "never"))
    play(chat, agent)
    assert not chat.turns
