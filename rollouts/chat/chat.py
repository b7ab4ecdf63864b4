"""The conversation a workflow holds with the policy; every token is recorded where it is sampled.

In: messages. Out: replies as text, and `turns`: ids, logprobs and per-token versions exactly as the engine gave them.
History is never tokenised again: a later turn appends tokens to the branch of the conversation that it extends.

    u₁ a₁ u₂ a₂          sequence 0: one row, a₁ and a₂ trained
    u₁ a₁ u₂ a₂ u₃ a₃    the same branch goes on: sequence 0, only u₃ a₃ are added
    u₁ a₁ v₂ b₂          it extends no branch: sequence 1 starts, everything before b₂ is context

So no token is trained twice, whatever a workflow or an agent does with its history.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.stopping import Stopping
from rollouts.chat.thoughts import ThoughtParser
from rollouts.chat.tool_parsing import ParsedReply, ToolParser
from rollouts.chat.tools import Tool, run_calls
from rollouts.engines.draws import nth_seed, seed_of
from rollouts.engines.engine import Engine
from settings.errors import InvalidInput
from storage.records import Message, Sampling, ToolCall, Turn


class OutOfRoom(Exception):
    """The conversation has reached the model's length limit; the attempt ends as `truncated`, see
    `rollout.on_out_of_room`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply(ParsedReply):
    """The policy's reply in one turn, split into text and calls."""

    text: str
    """The whole reply, as recorded. To go on from here, send it or `answer` as an assistant message."""
    thoughts: str | None
    """What the policy thought before it answered; None if the reply has no thoughts."""
    answer: str
    """The reply without its thoughts and stop string, with its tool calls; empty if it was cut off inside thoughts."""
    stopped: bool
    """True if a stop string ended it, and not the policy's end token."""
    finish_reason: str
    """`stop` or `length`, from the engine."""
    turn_idx: int
    """Its index in `Chat.turns`."""
    num_prompt_tokens: int
    """Number of tokens before it."""

    @property
    def cut_off(self) -> bool:
        """True if a length limit ended it."""
        return self.finish_reason == "length"


@dataclasses.dataclass(kw_only=True)
class _Branch:
    """One line of the conversation: its messages and its tokens. It becomes one training sequence."""

    tools: list[dict[str, Any]]
    """Schemas in the first prompt."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    reply: Reply | None = None
    """The last reply; None before the first."""
    replied_at: float = 0.0
    """Time of the last reply, by `time.perf_counter`."""
    sequence_idx: int = -1
    """Given with the first request."""
    seed: int | None = None
    """Its tokens are drawn from it, by turn and position."""
    num_turns: int = 0
    num_routed: int = 0
    """Tokens whose experts are recorded."""
    busy: bool = False
    """True while the engine writes the next reply."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Chat:
    """One attempt's conversation; single use. Several calls of `complete` may run at once."""

    engine: Engine
    tokens: ChatTokens
    """The model's tokenizer and chat template."""
    sampling: Sampling
    """How replies are drawn; its seed is that of the attempt."""
    max_model_len: int
    request_id: str
    tool_parser: ToolParser | None = None
    thought_parser: ThoughtParser = dataclasses.field(default_factory=ThoughtParser)
    follows_grammars: bool = False
    """True if the engine follows a `constraint`."""
    max_tool_turns: int = 8
    tool_timeout: float = 30.0
    tool_output_chars: int = 8192
    scores_out_of_room: bool = False
    """True if `ask` returns an empty reply, once, where it would raise `OutOfRoom` after the first turn."""
    messages: list[Message] = dataclasses.field(default_factory=list, init=False)
    """The current conversation, with the last reply."""
    recorded: list[Message] = dataclasses.field(default_factory=list, init=False)
    """Every message of the attempt once, also those of abandoned histories."""
    turns: list[Turn] = dataclasses.field(default_factory=list, init=False)
    held_seconds: float = dataclasses.field(default=0.0, init=False)
    """Seconds that the engine waited for its next policy before it began a reply."""
    max_turns_reached: bool = dataclasses.field(default=False, init=False)
    """True if the policy asked for tools once more than `max_tool_turns` allows."""
    out_of_room: bool = dataclasses.field(default=False, init=False)
    """True if the last request found no room for a token."""
    _num_requests: int = dataclasses.field(default=0, init=False)
    _sequences: dict[int, int | None] = dataclasses.field(default_factory=dict, init=False)
    """Index → seed, of those that have begun."""
    _num_tool_turns: int = dataclasses.field(default=0, init=False)
    _branches: list[_Branch] = dataclasses.field(default_factory=list, init=False)

    async def ask(self, text: str, *, tools: Sequence[Tool] = (), with_thoughts: bool = False) -> str:
        """Send `text` as the user; returns the policy's reply, the one after its tool calls if it made any.

        The reply is the part that follows the policy's thoughts, or all of it with `with_thoughts`.
        Raises what `complete` raises (`OutOfRoom` under `rollout.on_out_of_room = "score"` only the second time:
        the first reply without room is empty), and `ToolUnavailable` when a tool's infrastructure failed.
        """
        if not isinstance(text, str):
            problem = f"chat.ask() takes the user's text, not a {type(text).__name__}"
            raise TypeError(f"{problem}; chat.complete() takes a list of Message")
        messages = [*self.messages, Message(role="user", content=text)]
        was_out_of_room = self.out_of_room
        while True:
            try:
                reply = await self.complete(messages, tools=tools)
            except OutOfRoom:
                if not (self.scores_out_of_room and self.turns) or was_out_of_room:
                    raise
                return ""
            called = bool(reply.tool_calls or reply.malformed_calls)
            self.max_turns_reached |= called and self._num_tool_turns >= self.max_tool_turns
            if not called or self.max_turns_reached:
                return reply.text if with_thoughts else reply.answer
            self._num_tool_turns += 1
            results = await self._run_tools(reply, tools)
            messages = [*self.messages, *results]

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool | dict[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        one_call: bool = False,
        constraint: str = "",
    ) -> Reply:
        """The policy's reply to a whole conversation. Tool calls in it are not executed.

        The reply ends at the first of the strings `stop`, and with `one_call` behind the first tool call that can be
        read. `constraint` are vLLM's structured-output parameters, as JSON: they restrict what is sampled.
        `tools` are `Tool`s or schemas in OpenAI's function format. `max_tokens` may shorten the reply, not lengthen it.
        Raises `EngineError` when the engine fails and `OutOfRoom` when no token more fits.
        """
        if not isinstance(tools, list | tuple):
            raise InvalidInput(f"tools is a list, not a {type(tools).__name__}: write `tools=[…]`, also for one tool")
        schemas = [each.schema if isinstance(each, Tool) else each for each in tools]
        if wrong := [each for each in schemas if not isinstance(each, dict)]:
            name = getattr(wrong[0], "__name__", type(wrong[0]).__name__)
            raise InvalidInput(f"tools: {name} is neither a function decorated with @tool nor a schema in a dictionary")
        if tools and self.tool_parser is None:
            raise InvalidInput("this Chat was made without a tool parser, so it cannot read tool calls")
        branch = self._branch_for(messages, schemas)
        if branch.reply is None:
            context_ids = self.tokens.prompt(messages, tools=schemas, parsed=await self._called(messages, schemas))
        else:
            new = messages[len(branch.messages) :]
            messages = [*branch.messages, *new]  # with the thoughts that the caller may have left out
            calls = [call.name for call in branch.reply.tool_calls]
            context_ids = self.tokens.continuation(new, after=branch.ids[-1], calls=calls)
            self._record_results(branch.reply, new, seconds=time.perf_counter() - branch.replied_at)
        prompt_ids = [*branch.ids, *context_ids]
        room = self.max_model_len - len(prompt_ids)
        self.out_of_room = room < 1
        if self.out_of_room:
            raise OutOfRoom(f"{len(prompt_ids)} tokens of {self.max_model_len} are used")
        limits = [limit for limit in (self.sampling.max_tokens, room, max_tokens) if limit is not None]
        if branch.reply is None:
            self._begin(branch, prompt_ids)
        seed = None if branch.seed is None else nth_seed(branch.seed, branch.num_turns)
        sampling = dataclasses.replace(self.sampling, max_tokens=min(limits), seed=seed)
        request_id = f"{self.request_id}/{self._num_requests}"
        self._num_requests += 1
        branch.busy = True
        try:
            started = time.perf_counter()
            opening = self.tokens.text([*context_ids[-8:], self.tokens.end_id], keep_special=True)
            opened = self.thought_parser.opened_by(opening)
            stopping = await self._stopping(stop, schemas if one_call else [], opened=opened)
            options: dict[str, Any] = {"until": stopping} if stopping else {}
            options |= {"constraint": constraint} if constraint else {}
            options |= {"routes_from": branch.num_routed} if branch.num_routed else {}
            generation = await self.engine.generate(prompt_ids, sampling=sampling, request_id=request_id, **options)
            generate_seconds = time.perf_counter() - started - generation.held_seconds
            self.held_seconds += generation.held_seconds
            keep_special = bool(schemas) or self.thought_parser.needs_special
            text = self.tokens.text(generation.token_ids, keep_special=keep_special)
            stopped = bool(stopping and stopping(generation.token_ids))
            shown, stopped_by = stopping.cut(text) if stopping and stopped else (text, "")
            thoughts, answer = self.thought_parser.split(shown, opened=opened)
            parsed = ParsedReply(content=answer, tool_calls=[])
            if schemas and self.tool_parser is not None:
                parsed = await self.tool_parser.parse(answer, schemas)
        except BaseException:
            if branch.reply is None:
                del self._sequences[branch.sequence_idx]
            raise
        finally:
            branch.busy = False
        # No await from here on: a request that runs at the same time sees the whole turn or nothing of it.
        if branch.reply is None:
            self._branches.append(branch)
        turn = Turn(
            context_ids=context_ids,
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            weight_versions=generation.weight_versions,
            finish_reason=generation.finish_reason,
            sequence_idx=branch.sequence_idx,
            generate_seconds=generate_seconds,
            stop=list(stop),
            stopped_by=stopped_by,
            constraint=constraint,
            adapters=generation.adapters,
            seed=branch.seed,
            routes=generation.routes,
        )
        reply = Reply(
            **vars(parsed),
            text=text,
            thoughts=thoughts,
            answer=answer,
            stopped=stopped,
            finish_reason=generation.finish_reason,
            turn_idx=len(self.turns),
            num_prompt_tokens=len(prompt_ids),
        )
        message = Message(role="assistant", content=text, is_completion=True, answer=None if answer == text else answer)
        self.turns.append(turn)
        num_recorded = max((_shared(each.messages, messages) for each in self._branches), default=0)
        new = messages[num_recorded:]
        self.recorded += [*(dataclasses.replace(each, is_completion=False, answer=None) for each in new), message]
        self.messages = [*messages, message]
        branch.messages, branch.ids = list(self.messages), [*prompt_ids, *generation.token_ids]
        branch.reply, branch.replied_at, branch.num_turns = reply, time.perf_counter(), branch.num_turns + 1
        branch.num_routed += generation.routes.num_tokens if generation.routes else 0
        return reply

    def _begin(self, branch: _Branch, prompt_ids: list[int]) -> None:
        """Give a sequence its index, in the order of their first requests, and its seed.

        The seed follows from the tokens that it begins with, and from nothing that happens at the same time. Of
        sequences that begin alike the second has another one, and so on; one whose first request failed does not count.
        """
        branch.sequence_idx = max(self._sequences, default=-1) + 1
        if self.sampling.seed is not None:
            seeds = (seed_of(self.sampling.seed, prompt_ids, number) for number in itertools.count())
            branch.seed = next(seed for seed in seeds if seed not in self._sequences.values())
        self._sequences[branch.sequence_idx] = branch.seed

    async def _stopping(
        self, strings: Sequence[str], schemas: list[dict[str, Any]], *, opened: bool
    ) -> Stopping | None:
        """What ends the reply at these strings, and behind the first call of these tools, if there are any."""
        if not (strings or schemas):
            return None

        def decode(ids: Sequence[int]) -> str:
            return self.tokens.text(ids, keep_special=True)

        if not schemas or self.tool_parser is None:
            return Stopping(strings, decode)
        mark, calls_in = await self.tool_parser.end_of_call(schemas)

        def has_called(text: str) -> bool:
            return calls_in(self.thought_parser.split(text, opened=opened)[1])

        return Stopping(strings, decode, mark=mark, also=has_called)

    @property
    def cut_off(self) -> bool:
        """True if a length limit ended the last reply."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"

    async def _called(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> dict[str, ParsedReply]:
        """The assistant's contents in these messages whose calls have results, with their calls.

        Without `tools` they are read with those of an earlier prompt.
        """
        tools = tools or next((branch.tools for branch in self._branches if branch.tools), [])
        if self.tool_parser is None or not tools:
            return {}
        pairs = itertools.pairwise(messages)
        contents = [one.content for one, other in pairs if (one.role, other.role) == ("assistant", "tool")]
        parsed = {content: await self.tool_parser.parse(content, tools) for content in contents}
        return {content: reply for content, reply in parsed.items() if reply.tool_calls}

    async def _run_tools(self, reply: Reply, tools: Sequence[Tool]) -> list[Message]:
        """Execute a reply's tool calls, record them in its turn, and return the results as messages."""
        calls, unavailable = await run_calls(
            reply.tool_calls, tools, timeout=self.tool_timeout, output_chars=self.tool_output_chars
        )
        for place, text in reversed(reply.malformed_calls):
            result = "error: this is no tool call that can be read; check its format"
            calls.insert(place, ToolCall(name="", arguments=text, result=result, failed=True))
        self._record_calls(reply, calls)
        if unavailable is not None:
            raise unavailable
        return [Message(role="tool", content=call.result) for call in calls]

    def _record_calls(self, reply: Reply, calls: list[ToolCall]) -> None:
        self.turns[reply.turn_idx] = dataclasses.replace(self.turns[reply.turn_idx], tool_calls=calls)

    def _record_results(self, reply: Reply, new: Sequence[Message], *, seconds: float) -> None:
        """Record calls that the caller of `complete` executed itself. Their seconds are all those since the reply."""
        results = [message.content for message in itertools.takewhile(lambda m: m.role == "tool", new)]
        if len(results) != len(reply.tool_calls) or self.turns[reply.turn_idx].tool_calls:
            return
        calls = [
            ToolCall(name=call.name, arguments=call.arguments, result=result, seconds=seconds)
            for call, result in zip(reply.tool_calls, results, strict=True)
        ]
        self._record_calls(reply, calls)

    def _branch_for(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> _Branch:
        """The branch that these messages extend, the longest one that they begin with, or a new one.

        A branch whose prompt showed other tools cannot go on: the policy would not know these.
        """
        fitting = [
            branch
            for branch in self._branches
            if not branch.busy
            and _shared(branch.messages, messages) == len(branch.messages)
            and (not tools or tools == branch.tools)
        ]
        return max(fitting, key=lambda branch: len(branch.messages), default=_Branch(tools=tools))


def _shared(ones: Sequence[Message], others: Sequence[Message]) -> int:
    """Length of the common beginning. Only role and content count; the thoughts of `ones` may be left out."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one.role != other.role or other.content not in (one.content, one.answer):
            break
        count += 1
    return count
