"""What an agent sends back of an attempt: the policy's replies as it sampled them, and results beside their calls.

In: replies with calls, as they are made; later the messages of a request. Out: messages for `Chat`, or `Refused` with
what is wrong with them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from rollouts.chat.chat import Reply
from rollouts.endpoint.openai_wire import Call, CalledFunction, Refused, WireMessage
from settings.redaction import read_json
from storage.records import Message


class History:
    """The calls that the policy has made in one session."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Reply, list[Call]]] = {}
        """Id of a tool call → the reply that made it, and all calls of that reply."""

    def add(self, reply: Reply) -> list[Call]:
        """Remember a reply; returns its calls, each with an id of its own."""
        calls: list[Call] = []
        for call in reply.tool_calls:
            # Some parsers count a reply's calls from 0.
            unique = call.id if call.id not in self._made else f"call_{uuid.uuid4().hex}"
            calls.append(Call(id=unique, function=CalledFunction(name=call.name, arguments=call.arguments)))
            self._made[unique] = reply, calls
        return calls

    def messages(self, wires: Sequence[WireMessage]) -> list[Message]:
        """The messages as the policy saw them: its own replies as it sampled them, with the markup of tool calls, and
        the results of calls in the order of the calls. Raises `Refused`."""
        messages: list[Message] = []
        rest = list(wires)
        while rest:
            wire = rest.pop(0)
            if not wire.tool_calls:
                if wire.role == "tool" and wire.tool_call_id:
                    raise _wrong_history(f"the result of the tool call {wire.tool_call_id!r} is not behind its call")
                messages.append(Message(role="system" if wire.role == "developer" else wire.role, content=wire.content))
                continue
            reply, calls = self._made_by(wire)
            place_of = {call.id: place for place, call in enumerate(calls)}
            sent, results, text = list(wire.tool_calls), dict[int, Message](), wire.content
            # Some agents send each call with its result, one after the other.
            while rest and (rest[0].role == "tool" or any(call.id in place_of for call in rest[0].tool_calls)):
                wire = rest.pop(0)
                sent, text = [*sent, *wire.tool_calls], text or ("" if wire.role == "tool" else wire.content)
                if wire.role == "tool":
                    place = place_of.get(wire.tool_call_id, -1) if wire.tool_call_id else len(results)
                    if place in results or place < 0:
                        problem = "has two results" if place in results else "is not of the message before its result"
                        raise _wrong_history(f"the tool call {wire.tool_call_id!r} {problem}")
                    results[place] = Message(role="tool", content=wire.content)
            if sorted(map(_form, sent)) != sorted(map(_form, calls)):
                raise _wrong_history(
                    f"the policy's reply with {', '.join(place_of)} is not in the history as it was made: its "
                    f"{len(calls)} calls {[_form(call)[1:] for call in calls]} became {[_form(c)[1:] for c in sent]}"
                )
            if missing := [call.id for call in calls if results and place_of[call.id] not in results]:
                raise _wrong_history(f"the tool call {missing[0]!r} has no result, but others beside it have")
            # Some clients leave out the text beside the calls. Any other text is an edit, and the Chat forks.
            same = text in ("", reply.content, reply.answer)
            text = reply.text if same else text + reply.answer.removeprefix(reply.content)
            messages.append(Message(role="assistant", content=text))
            messages += [results[place] for place in sorted(results)]
        return messages

    def _made_by(self, wire: WireMessage) -> tuple[Reply, list[Call]]:
        """The reply with a message's calls, and all its calls."""
        made = self._made.get(wire.tool_calls[0].id)
        if made is None:
            raise _wrong_history(f"the policy did not make the tool call {wire.tool_calls[0].id!r} in this session")
        return made


def _wrong_history(problem: str) -> Refused:
    remedy = "send the policy's messages back as they came, or say what happened in words"
    return Refused(400, f"{problem}; {remedy}", param="messages")


def _form(call: Call) -> tuple[str, str, str]:
    """A form of a call that stays equal if an agent's client parses the arguments and writes them again."""
    return call.id, call.function.name, _normal(call.function.arguments)


def _normal(arguments: str) -> str:
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except ValueError:
        return arguments
