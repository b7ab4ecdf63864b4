"""OpenAI's chat-completions format, as far as a policy in training supports it.

In: the JSON body of a request. Out: messages, tools and limits for `Chat`; from its reply a `ChatCompletion`, whole or
in chunks. The run decides how tokens are drawn, because the loss needs their exact probabilities. An option that would
change the distribution of a reply is refused with a message, never ignored.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from settings.errors import InvalidInput
from storage.records import Sampling, Turn

_Model = TypeVar("_Model", bound=BaseModel)
_Request = TypeVar("_Request", bound="Request")

_REASONS = {
    "seed": "the run's own seed decides, and each attempt of a group must differ",
    "verbosity": "how long the policy writes is what it learns",
    "reasoning_effort": "how long the policy thinks is what it learns",
    "reasoning": "how long the policy thinks is what it learns",
    "functions": "it was replaced by `tools`",
    "function_call": "it was replaced by `tool_choice`",
    "audio": "the policy writes text only",
    "prediction": "the policy's own tokens are what is trained",
    "web_search_options": "the endpoint searches nothing; offer a tool",
    "chat_template_kwargs": "engine.chat_template_kwargs in the run file holds for all prompts",
    "stop_token_ids": "use `stop`",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        "use `response_format` or `tool_choice`",
    ),
    "conversation": "the endpoint keeps no conversations; use `previous_response_id`",
}
"""Why an option is refused."""


class Refused(Exception):
    """A request that is answered with an error in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"x-should-retry": str(retry).lower()} | ({"connection": "close"} if close else {})
        """OpenAI's clients retry after 408, 409, 429 and 5xx unless a header forbids it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Strict(BaseModel):
    """Unknown keys are errors, except with the value `null`: clients send back the null fields of our replies."""

    model_config = ConfigDict(extra="forbid")
    unused: ClassVar[frozenset[str]] = frozenset()
    """Accepted, and without an effect."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None and k not in cls.unused}


class Request(Strict):
    """What the requests of both formats have in common."""

    unused = frozenset(
        {
            *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        }
    )
    only_at: ClassVar[dict[str, tuple[Any, str]]]
    """Options that are accepted only at the value that has no effect, and why."""


def _joined(content: Any) -> Any:
    """A list of text parts as one text; anything else as it is. Raises `InvalidInput` for a part that is no text."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise InvalidInput(f"the policy reads text only, not {kind}")
    return "".join(part["text"] for part in content)


Text = Annotated[str, BeforeValidator(_joined)]
"""The content of a message: a text, or a list of text parts."""


class Function(Strict):
    """A tool, as the policy sees it in the prompt."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = Field(default=False, exclude=True)
    """Accepted, and enforced only if `tool_choice` forces a call."""


class ToolSpecification(Strict):
    """One entry of `tools`."""

    unused = frozenset({"cache_control"})
    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """Name and arguments of a call, the arguments as the policy wrote them."""

    name: str
    arguments: str


class Call(Strict):
    """One tool call inside an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    unused = frozenset({"index", "cache_control", "provider_specific_fields"})
    """Clients that put a stream together send the index back."""


class WireMessage(Strict):
    """One message of the history an agent sends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: list[Call] = []
    tool_call_id: str = ""
    unused = frozenset(
        {
            *("name", "annotations", "cache_control", "provider_specific_fields"),
            *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),
        }
    )
    """The policy's own thoughts are recorded; chat templates show no names."""


class StreamOptions(Strict):
    """`stream_options`."""

    unused = frozenset({"include_obfuscation"})
    include_usage: bool = False


class _ChosenFunction(Strict):
    name: str


class ChosenTool(Strict):
    """`tool_choice` with a name."""

    type: Literal["function"]
    function: _ChosenFunction


class ResponseFormat(Strict):
    """`response_format`, with what is in its `json_schema` beside its type, as the Responses API writes it."""

    unused = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: Any = Field(default=True, alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        inner = value.get("json_schema") if isinstance(value, dict) else None
        return {**value, **inner, "json_schema": None} if isinstance(inner, dict) else value

    @property
    def constraint(self) -> str:
        """vLLM's structured-output parameters, as JSON; empty for text."""
        if self.type == "text":
            return ""
        return json.dumps({"json_object": True} if self.type == "json_object" else {"json": self.schema_})


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) and stop else stop or []


StopStrings = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed)]
"""A string, or several."""

_DISTRIBUTION = "it would change the distribution whose probabilities the loss needs"


class ChatRequest(Request):
    """A chat-completions request."""

    only_at = {
        "n": (
            1,
            "a request is one turn of one attempt; the number of attempts is rollout.n_samples",
        ),
        "logit_bias": ({}, _DISTRIBUTION),
        "repetition_penalty": (1, _DISTRIBUTION),
        "min_tokens": (0, _DISTRIBUTION),
        "ignore_eos": (False, _DISTRIBUTION),
        "skip_special_tokens": (True, "the endpoint reads calls and thoughts from them"),
        "modalities": (["text"], "the policy writes text only"),
        "presence_penalty": (0, _DISTRIBUTION),
        "frequency_penalty": (0, _DISTRIBUTION),
        "top_logprobs": (0, "the engine keeps the sampled token's logprob alone"),
    }
    messages: list[WireMessage] = Field(min_length=1)
    tools: list[ToolSpecification] = []
    tool_choice: Literal["auto", "none", "required"] | ChosenTool = "auto"
    """`none` returns calls as text; `required` and a name force the policy's tokens."""
    parallel_tool_calls: bool = True
    """False ends the reply behind its first call."""
    stop: StopStrings = []
    response_format: ResponseFormat = ResponseFormat()
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def limit(self) -> int | None:
        """Longest reply of this request, in tokens. The run's own limit holds too."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)


def read_request(model: type[_Request], body: Any, sampling: Sampling) -> _Request:
    """Check a request against the run's sampling. Raises `Refused` (400) naming the parameter and the fix."""
    if not isinstance(body, dict):
        raise Refused(400, "the body of the request is not a JSON object")
    options = {name: value for name, value in body.items() if value is not None}
    drawn = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    by_run = "the run file's [sampling] decides how tokens are drawn (and evaluation has settings of its own)"
    for name, (allowed, why) in {**model.only_at, **{name: (value, by_run) for name, value in drawn.items()}}.items():
        off = {"top_k": -1}.get(name, allowed)  # another way to say that all tokens may be drawn
        if name in options and options.pop(name) not in ((allowed, off) if allowed == 0 else (allowed,)):
            raise Refused(400, f"`{name}` of this policy is {json.dumps(allowed)}: leave it out, {why}", param=name)
    return read(model, options)


def read(model: type[_Model], body: Any) -> _Model:
    """Validate a body. Raises `Refused` (400) with the first problem."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] != "literal_error")  # a wrong type explains the rest
        place = ".".join(map(str, first["loc"])) or "the body"
        problem = first["msg"]
        if first["type"] == "extra_forbidden":
            problem = _REASONS.get(place, "the endpoint knows no such option") + "; leave it out"
        raise Refused(400, f"`{place}`: {problem}", param=place) from None


@dataclass(frozen=True, kw_only=True)
class PolicyReply:
    """The policy's reply, before it is written in one of OpenAI's formats."""

    content: str
    """The reply without its thoughts and tool calls."""
    thoughts: str | None
    """What the policy thought before it; None if it did not."""
    thought_tokens: int
    """Number of tokens of the thoughts."""
    calls: list[Call]
    turn: Turn
    """The recorded turn."""
    prompt_tokens: int
    """Number of tokens before the reply."""
    token_bytes: list[bytes] | None
    """Bytes of the sampled tokens; None if the request asked for no logprobs."""


def chat_completion(reply: PolicyReply, *, model: str) -> ChatCompletion:
    """A reply as OpenAI's client expects it; `model` is that of the request."""
    turn, logprobs = reply.turn, None
    if reply.token_bytes is not None:
        entries = [
            {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob, "top_logprobs": []}
            for data, logprob in zip(reply.token_bytes, turn.logprobs, strict=True)
        ]
        logprobs = {"content": entries, "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.thoughts is not None:
        message["reasoning"] = reply.thoughts
    if reply.calls:
        calls = [call.model_dump() for call in reply.calls]
        message |= {"content": reply.content or None, "tool_calls": calls}
    finished = "tool_calls" if reply.calls and turn.finish_reason == "stop" else turn.finish_reason
    sampled = len(turn.sampled_ids)
    return ChatCompletion.model_validate(
        {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": finished, "logprobs": logprobs}],
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": reply.prompt_tokens + sampled,
                "completion_tokens_details": {"reasoning_tokens": reply.thought_tokens},
            },
        }
    )


def event_stream(completion: ChatCompletion, *, include_usage: bool) -> Iterator[str]:
    """A finished reply as the server-sent events of a streamed one: content, each call, finish reason, usage."""
    [choice] = completion.choices
    fields = choice.to_dict(exclude_unset=True)
    message: Any = fields["message"]
    thoughts = {name: message[name] for name in ("reasoning",) if name in message}
    first = {"role": "assistant", **thoughts, "content": message["content"]}
    steps: list[dict[str, Any]] = [{"delta": first, "logprobs": fields["logprobs"]}]
    for index, call in enumerate(message.get("tool_calls", [])):
        steps.append({"delta": {"tool_calls": [{"index": index, **call}]}})
    steps.append({"delta": {}, "finish_reason": choice.finish_reason})
    for step in steps:
        choices = [{"index": 0, "finish_reason": None, **step}]
        yield _event(completion, choices=choices, **({"usage": None} if include_usage else {}))
    if include_usage:
        yield _event(completion, choices=[], usage=completion.usage)
    yield "data: [DONE]\n\n"


def _event(completion: ChatCompletion, **fields: Any) -> str:
    head = {"id": completion.id, "created": completion.created, "model": completion.model}
    chunk = ChatCompletionChunk.model_validate({**head, "object": "chat.completion.chunk", **fields})
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
