"""The refine client: what is asked, what is taken as an answer, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from examples.search_agent.passages import Passage
from examples.search_agent.refine_client import RefineClient, RefineUnavailable
from tests.unit.examples.search_agent.scripted_server import Answer, ScriptedServer, ok

pytestmark = pytest.mark.usefixtures("short_delays")
_PASSAGES = [
    Passage(id="a", title="Oslo", text="Oslo is the capital of Norway."),
    Passage(id="b", title="Bergen", text="Bergen has rain."),
]


def _says(text: Any, *, reason: str = "stop") -> Answer:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return ok({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 7}})


async def _refine(*script: Answer, retries: int = 2) -> tuple[Any, RefineClient, ScriptedServer]:
    async with ScriptedServer(*script) as server:
        client = RefineClient([f"{server.url}/v1"], model="reader", retries=retries)
        try:
            notes: Any = await client.refine("What is the capital of Norway?", _PASSAGES)
        except RefineUnavailable as error:
            notes = error
        await client.close()
        return notes, client, server


async def test_question_and_every_passage_with_its_id_are_asked_about():
    notes, client, server = await _refine(_says(" Oslo is the capital [a]. "))
    assert notes == "Oslo is the capital [a]."
    assert server.headers[0].startswith("POST /v1/chat/completions ")
    body = server.bodies[0]
    assert (body["model"], body["temperature"]) == ("reader", 0.0)
    for part in ("What is the capital of Norway?", "[a] Oslo\nOslo is the capital of Norway.", "[b] Bergen"):
        assert part in body["messages"][0]["content"]
    counts = {name: value for name, value in vars(client.statistics).items() if name != "seconds"}
    assert counts == {"requests": 1, "failures": 0, "truncated": 0, "prompt_tokens": 50, "completion_tokens": 7}
    assert client.statistics.seconds > 0


@pytest.mark.parametrize(
    "garbage", [ok({}), ok({"choices": []}), _says(None), _says(["x"]), _says(""), _says("<think>hm</think> "), ok("x")]
)
async def test_garbage_is_a_fault_of_the_server(garbage: Answer):
    notes, client, _ = await _refine(garbage, _says("fine"))
    assert (notes, client.endpoints[0].failures) == ("fine", 1)
    notes, client, _ = await _refine(garbage, retries=0)
    assert isinstance(notes, RefineUnavailable) and client.statistics.failures == 1


async def test_passages_the_model_cannot_take_are_unavailable_notes_without_another_try():
    notes, client, server = await _refine((400, {}, b"maximum context length is 4096 tokens"))
    assert isinstance(notes, RefineUnavailable) and "maximum context length" in str(notes)
    assert (len(server.bodies), client.statistics.failures) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "notes", "counts"),
    [
        (_says("<think>Well, Oslo?</think>\nOslo [a]."), "Oslo [a].", {"truncated": 0}),  # thoughts are no notes
        (_says("Oslo is", reason="length"), "Oslo is", {"truncated": 1}),
        (ok({"choices": [{"message": {"content": "Oslo"}}]}), "Oslo", {"prompt_tokens": 0}),  # a server without usage
    ],
)
async def test_notes_are_taken_as_they_come(answer: Answer, notes: str, counts: dict[str, int]):
    text, client, _ = await _refine(answer)
    assert text == notes and vars(client.statistics).items() >= counts.items()


async def test_without_passages_or_model_no_server_is_asked():
    client = RefineClient(["http://127.0.0.1:1/v1"], model="reader")
    assert await client.refine("q", []) == "" and client.statistics.requests == 0
    with pytest.raises(ValueError, match="model"):
        RefineClient(["http://host/v1"], model="")
