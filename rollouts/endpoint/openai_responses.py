"""OpenAI's Responses API, translated to a chat: text, function tools, and `previous_response_id`.

In: the JSON body of a request. Out: the equivalent `ChatRequest`; from the policy's reply a `Response`, whole or as the
events of a stream. Options that `openai_wire` refuses are refused here too.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from openai.types.responses import Response
from pydantic import Field, field_validator

from rollouts.endpoint.openai_wire import (
    Call,
    CalledFunction,
    ChatRequest,
    ChosenTool,
    Function,
    PolicyReply,
    Request,
    ResponseFormat,
    Strict,
    Text,
    ToolSpecification,
    WireMessage,
)


class _Item(Strict):
    unused = frozenset({"id", "status", "phase"})


class MessageItem(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class CallItem(_Item):
    """A call that the policy made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(_Item):
    """Thoughts that the policy had: accepted and unused, because they are recorded."""

    unused = _Item.unused | {"summary", "content", "encrypted_content"}
    type: Literal["reasoning"]


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


class ResponseTool(Function):
    """One entry of `tools`."""

    type: Literal["function"]


class ChosenFunction(Strict):
    """`tool_choice` with a name."""

    type: Literal["function"]
    name: str


class TextOptions(Strict):
    """`text`."""

    format: ResponseFormat = ResponseFormat()
    verbosity: Literal["medium"] = "medium"
    """Accepted at the value that has no effect."""


class ResponseRequest(Request):
    """A Responses request."""

    only_at = {
        "include": ([], "there is nothing to include"),
        "background": (False, "an attempt waits for its replies"),
        "top_logprobs": (0, "the engine keeps the sampled token's logprob alone"),
        "truncation": ("disabled", "history is never cut; the attempt ends when the context is full"),
    }
    input: list[Item] = Field(min_length=1)
    instructions: str = ""
    previous_response_id: str = ""
    tools: list[ResponseTool] = []
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    unused = Request.unused | {"stream_options"}

    @field_validator("input", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not isinstance(items, list):
            return items
        return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]

    @property
    def messages(self) -> list[WireMessage]:
        """The input as chat messages. A call belongs to the assistant message before it."""
        messages: list[WireMessage] = []
        for item in self.input:
            match item:
                case MessageItem():
                    messages.append(WireMessage(role=item.role, content=item.content))
                case ResultItem():
                    messages.append(WireMessage(role="tool", content=item.output, tool_call_id=item.call_id))
                case CallItem():
                    if not messages or messages[-1].role != "assistant":
                        messages.append(WireMessage(role="assistant"))
                    call = Call(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                    messages[-1].tool_calls.append(call)
        return messages

    @property
    def chosen(self) -> Literal["auto", "none", "required"] | ChosenTool:
        """`tool_choice` as in a chat-completions request."""
        if isinstance(self.tool_choice, str):
            return self.tool_choice
        return ChosenTool.model_validate({"type": "function", "function": {"name": self.tool_choice.name}})

    def chat_request(self, conversation: Sequence[WireMessage]) -> ChatRequest:
        """The request in the other format, over a whole conversation, with the instructions in front."""
        instructions = [WireMessage(role="system", content=self.instructions)] if self.instructions else []
        return ChatRequest(
            messages=[*instructions, *conversation],
            tools=[ToolSpecification(type="function", function=tool) for tool in self.tools],
            tool_choice=self.chosen,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.format,
            max_tokens=self.max_output_tokens,
        )


def response(reply: PolicyReply, body: dict[str, Any]) -> Response:
    """A reply as OpenAI's client expects it. It repeats some fields of the request `body`."""
    status = "completed" if reply.turn.finish_reason == "stop" else "incomplete"
    output: list[dict[str, Any]] = []
    if reply.thoughts is not None:
        thought = {"type": "reasoning_text", "text": reply.thoughts}
        output.append({"type": "reasoning", "summary": [], "content": [thought]})
    if reply.content or not reply.calls:
        text = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        output.append({"type": "message", "role": "assistant", "content": [text]})
    for call in reply.calls:
        function = call.function
        output.append(
            {"type": "function_call", "call_id": call.id, "name": function.name, "arguments": function.arguments}
        )
    sampled = len(reply.turn.sampled_ids)
    return Response.model_validate(
        {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": time.time(),
            "model": str(body.get("model", "")),
            "status": status,
            "error": None,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "output": [{"id": f"item_{uuid.uuid4().hex}", "status": status, **item} for item in output],
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": reply.thought_tokens},
                "total_tokens": reply.prompt_tokens + sampled,
            },
        }
    )


def response_events(made: Response) -> Iterator[str]:
    """A finished response as the server-sent events of a streamed one."""
    for number, (kind, fields) in enumerate(_steps(made.model_dump(mode="json", exclude_unset=True))):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n"


def _steps(made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**made, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(made["output"]):
        empty: dict[str, Any] = {"function_call": {"arguments": ""}}.get(item["type"], {"content": []})
        yield "response.output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            [part] = item["content"]
            place["content_index"] = 0
            yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
        elif item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{made['status']}", {"response": made}
