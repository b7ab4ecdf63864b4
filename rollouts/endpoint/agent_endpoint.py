"""An OpenAI-compatible server in the rollout worker: an agent's requests become turns of its attempt.

    agent, in any process ── base_url, key ─┬▶ /v1/chat/completions ─┬▶ Session ─▶ Chat ─▶ engine
                                            ├▶ /v1/responses ────────┘
                                            └▶ /v1/sessions/reward ───▶ Session.reward

In: requests on the loopback interface. Out: turns in the `Chat` of the attempt that the key belongs to, and its reward.
One server in the worker's event loop serves all attempts; it starts with the first one. A key is valid only while its
attempt runs. A request that fails, or whose client disconnects, leaves no record, so a client may retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, FiniteFloat

from rollouts.chat.chat import Chat, OutOfRoom
from rollouts.endpoint.connections import BACKLOG, Bodies, Connections, key_of, unknown_key
from rollouts.endpoint.history import History
from rollouts.endpoint.openai_responses import ResponseRequest, response, response_events
from rollouts.endpoint.openai_wire import (
    ChatRequest,
    ChosenTool,
    PolicyReply,
    Refused,
    WireMessage,
    chat_completion,
    event_stream,
    read,
    read_request,
)
from rollouts.endpoint.token_bytes import token_bytes
from rollouts.engines.engine import EngineError
from rollouts.workflow import Score
from settings.errors import InvalidInput
from settings.redaction import read_json, well_formed_data

_MOST_DEPTH = 100
"""Most lists and objects inside each other in a body; pydantic writes none deeper than 255."""
_KEEP_ALIVE = 60
"""Seconds that an idle connection stays open, so that an agent may think without a new connection."""


class PostedReward(BaseModel):
    """Body of `POST /v1/sessions/reward`."""

    model_config = ConfigDict(extra="forbid")

    reward: FiniteFloat | None
    """None (`null` in the JSON) means not applicable, as in `Score`."""
    parts: dict[str, FiniteFloat | None] = {}


class Session:
    """One attempt as its agent sees it: a key, a conversation and a reward."""

    def __init__(self, chat: Chat) -> None:
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.reward: Score | None = None
        """What the agent posted; None until then."""
        self.fault: Exception | None = None
        """Why the last request failed; None if it succeeded. It explains an agent that then gave up."""
        self.responses: dict[str, list[WireMessage]] = {}
        """Response id (Responses API) → the conversation up to and with that response, without instructions."""
        self.chat = chat
        self.bodies = Bodies()
        self._history = History()
        self._running: set[asyncio.Task[Any]] = set()

    async def reply_to(self, request: ChatRequest, *, format_option: str = "response_format") -> PolicyReply:
        """Let the policy reply to a conversation. `format_option` is what the request calls `response_format`.

        Raises `Refused`.
        """
        messages = self._history.messages(request.messages)
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        try:
            reply = await self.chat.complete(
                messages,
                tools=tools,
                max_tokens=request.limit,
                stop=request.stop,
                one_call=not request.parallel_tool_calls and bool(tools) and request.tool_choice != "none",
                constraint=await self._constraint(request, tools, format_option),
            )
        except Refused:
            raise
        except InvalidInput as error:  # e.g. no grammar for this format of calls
            raise Refused(400, str(error)) from error
        except OutOfRoom as error:
            self.fault = error
            raise Refused(400, str(error), code="context_length_exceeded", param="messages") from error
        except EngineError as error:
            self.fault = error
            raise Refused(503, f"the inference engine failed: {error}", retry=True) from error
        except Exception as error:  # e.g. the chat template refuses these messages
            self.fault = error
            raise Refused(500, f"{type(error).__name__}: {error}") from error
        self.fault = None
        calls, content = [], reply.answer
        if request.tool_choice != "none":
            content = reply.content
            calls = self._history.add(reply)
        turn, tokenizer = self.chat.turns[reply.turn_idx], self.chat.tokens.tokenizer
        return PolicyReply(
            content=content,
            thoughts=reply.thoughts,
            thought_tokens=len(tokenizer(reply.thoughts)["input_ids"]) if reply.thoughts else 0,
            calls=calls,
            turn=turn,
            prompt_tokens=reply.num_prompt_tokens,
            token_bytes=[token_bytes(tokenizer, i) for i in turn.sampled_ids] if request.logprobs else None,
        )

    async def _constraint(self, request: ChatRequest, tools: list[dict[str, Any]], format_option: str) -> str:
        """vLLM's structured-output parameters for a request; empty if nothing is forced. Raises `Refused`."""
        choice, parser = request.tool_choice, self.chat.tool_parser
        forces_format = choice in ("auto", "none")
        if forces_format and not request.response_format.constraint:
            return ""
        option = format_option if forces_format else "tool_choice"
        if not self.chat.follows_grammars:
            why = "it forces the policy's tokens, which needs engine.guided_decoding = true in the run file (and vLLM)"
            raise Refused(400, f"`{option}`: {why}", param=option)
        if forces_format:
            return request.response_format.constraint
        name = choice.function.name if isinstance(choice, ChosenTool) else ""
        if not tools or (name and name not in [tool["function"]["name"] for tool in tools]):
            problem = f"no tool has the name {name!r}" if name else "there are no tools"
            raise Refused(400, f"`tool_choice`: {problem}", param=option)
        assert parser is not None, "every attempt has a tool parser"
        strict = [tool.function.strict for tool in request.tools]  # the prompt does not show it
        forced = [
            {**tool, "function": {**tool["function"], "strict": each}} for tool, each in zip(tools, strict, strict=True)
        ]
        return await parser.grammar(forced, name, one_call=not request.parallel_tool_calls)

    def post_reward(self, score: Score) -> None:
        """Keep the attempt's reward. The same one may be posted again; another raises `Refused` (409)."""
        if self.reward is not None and self.reward != score:
            raise Refused(409, f"this session's reward is {self.reward.reward} already; a session has one reward")
        self.reward = score

    def earlier(self, response_id: str) -> list[WireMessage]:
        """The conversation up to and with an earlier response; empty for an empty id. Raises `Refused`."""
        if response_id and response_id not in self.responses:
            raise Refused(400, f"this session has no response {response_id!r}", param="previous_response_id")
        return self.responses.get(response_id, [])

    async def run(self, work: Coroutine[Any, Any, Any], *, until: Coroutine[Any, Any, Any]) -> Any:
        """Do `work`; cancel it if `until` returns first (`Refused` 499) or if the session ends (`Refused` 401)."""
        working, waiting = asyncio.create_task(work), asyncio.create_task(until)
        self._running.add(working)
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.cancelled():
                raise unknown_key()
            if not working.done():
                raise Refused(499, "the client has disconnected")
            return working.result()
        finally:
            self._running.discard(working)
            await _cancel(working, waiting)

    async def close(self) -> None:
        """Cancel running requests. After this no turn is added to the attempt."""
        await _cancel(*self._running)


class AgentEndpoint:
    """The server. It listens as soon as it exists, and serves until `close` or the end of its event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        """What an OpenAI client takes as `base_url`."""
        self.connections = Connections(self._sessions.__contains__)
        self._server = _Server(
            uvicorn.Config(
                _application(self._sessions.get, self.connections),
                http=self.connections.protocol,  # type: ignore[arg-type]
                ws="none",
                backlog=BACKLOG,
                proxy_headers=False,
                log_config=None,
                log_level="error",  # a client that speaks no HTTP is no news
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=1,
            )
        )
        # An empty context: this task outlives the attempt that starts it.
        self._serving = asyncio.create_task(self._serve(), context=contextvars.Context())

    @contextlib.asynccontextmanager
    async def session(self, chat: Chat) -> AsyncIterator[Session]:
        """A key for the attempt of `chat`, valid inside this context."""
        session = Session(chat)
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            del self._sessions[session.key]
            await session.close()

    async def close(self) -> None:
        """Stop listening; running requests get one second."""
        self._server.should_exit = True
        await self._serving

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            if _ENDPOINTS.get(loop) is self:
                del _ENDPOINTS[loop]


_ENDPOINTS: dict[asyncio.AbstractEventLoop, AgentEndpoint] = {}


def agent_endpoint() -> AgentEndpoint:
    """The server of the running event loop; the first call starts it."""
    loop = asyncio.get_running_loop()
    if loop not in _ENDPOINTS:
        _ENDPOINTS[loop] = AgentEndpoint()
    return _ENDPOINTS[loop]


async def close_agent_endpoint() -> None:
    """Stop the running event loop's server, if there is one."""
    endpoint = _ENDPOINTS.pop(asyncio.get_running_loop(), None)
    if endpoint is not None:
        await endpoint.close()


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """Leave signals to the worker."""
        return contextlib.nullcontext()


def _application(find: Callable[[str], Session | None], connections: Connections) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def session_of(request: Request) -> Session:
        key = key_of(request.headers.get("authorization", ""))
        session = find(key)
        if session is None:
            raise unknown_key()
        connections.check(key)
        return session

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        offered = "chat/completions, responses, models and sessions/reward"
        return await refused(request, Refused(404, f"no {request.url.path} here, only {offered} under /v1"))

    @app.get("/v1/models")
    async def models(request: Request) -> Any:
        session_of(request)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "millrace"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        session = session_of(request)
        body = await _json(request, session)
        parsed = read_request(ChatRequest, body, session.chat.sampling)
        reply = await session.run(session.reply_to(parsed), until=_disconnected(request))
        completion = chat_completion(reply, model=str(body.get("model", "")))
        if parsed.stream:
            return _events(event_stream(completion, include_usage=parsed.stream_options.include_usage))
        return JSONResponse(completion.model_dump(mode="json", exclude_unset=True))

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        session = session_of(request)
        body = await _json(request, session)
        parsed = read_request(ResponseRequest, body, session.chat.sampling)
        conversation = [*session.earlier(parsed.previous_response_id), *parsed.messages]
        replying = session.reply_to(parsed.chat_request(conversation), format_option="text")
        reply = await session.run(replying, until=_disconnected(request))
        made = response(reply, body)
        message = WireMessage(role="assistant", content=reply.content, tool_calls=reply.calls)
        session.responses[made.id] = [*conversation, message]
        if parsed.stream:
            return _events(response_events(made))
        return JSONResponse(made.model_dump(mode="json", exclude_unset=True))

    @app.post("/v1/sessions/reward")
    async def reward(request: Request) -> Any:
        session = session_of(request)
        posted = read(PostedReward, await _json(request, session))
        session.post_reward(Score(reward=posted.reward, parts=posted.parts))
        return posted.model_dump()

    return app


def _events(events: Iterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


async def _json(request: Request, session: Session) -> Any:
    try:
        body = await session.bodies.read(request.stream(), length=request.headers.get("content-length", ""))
        return well_formed_data(read_json(body, most_depth=_MOST_DEPTH))
    except ValueError as error:
        raise Refused(400, f"the body of the request is not JSON: {error}") from error


async def _disconnected(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
