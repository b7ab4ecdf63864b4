"""The research agent as a plain program on OpenAI's client: it knows nothing of training, and imports nothing of it.

In: a question, retrieval servers, and the usual OPENAI_BASE_URL and OPENAI_API_KEY. Out: a line of JSON, see `Result`.

    python examples/search_agent/program.py --search http://127.0.0.1:8765 'home of boss of kim?'

It plays by the rules of `agent.py`, and the model is told the same, word for word. `program_agent.py` trains it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import openai
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_LONGEST_QUERY = 1000
_LONGEST_RESULT = 8192
_ROUNDS = 4
"""How often every server is asked before a search is given up."""


class Search(BaseModel):
    """Find the passages that fit a query best; each is shown as [id] title: text."""

    model_config = ConfigDict(extra="forbid")
    query: str = Field(description="a few words that the passages should contain")


class Read(BaseModel):
    """Read a passage that a search has shown only the beginning of."""

    model_config = ConfigDict(extra="forbid")
    passage_id: str = Field(description="the id that the search has shown, without brackets")
    start: int = Field(default=0, description="number of characters to skip, to read on")


def schema_of(arguments: type[BaseModel]) -> dict[str, Any]:
    """What the model is told of a tool, in OpenAI's format."""
    about = arguments.model_json_schema()
    properties = {
        name: {"description": value["description"], "type": value["type"]}
        for name, value in about["properties"].items()
    }
    parameters = {
        "additionalProperties": False,
        "properties": properties,
        "required": about["required"],
        "type": "object",
    }
    described = {"name": arguments.__name__.lower(), "description": arguments.__doc__, "parameters": parameters}
    return {"type": "function", "function": described}


class SearchUnavailable(Exception):
    """No server answered; the message says why, server by server."""


class RuleBroken(Exception):
    """The model made a search twice, or asked for too much at once."""


@dataclass(kw_only=True)
class Result:
    """What the program prints."""

    reply: str = ""
    """The model's last words; empty if it was stopped before."""
    shown: list[str] = field(default_factory=list)
    """Ids of the passages that the model was shown."""
    searches: int = 0
    """Searches asked for."""
    fault: str = ""
    """`duplicate_search` or `too_many_calls`: the model broke a rule."""
    unavailable: str = ""
    """Why no search was possible; the model is not to blame."""
    unfinished: bool = False
    """True when the model wanted to go on after the last turn."""


class Library:
    """Passages, from whichever server answers first."""

    def __init__(self, urls: Sequence[str], *, num_passages: int, shown: int, deadline: float) -> None:
        """`shown`: characters of a passage that a search shows; `deadline`: seconds that a search may take."""
        token = os.environ.get("MILLRACE_SEARCH_TOKEN", "")
        self._http = httpx.Client(timeout=deadline / 2, headers={"Authorization": f"Bearer {token}"} if token else {})
        self._urls, self._num_passages, self._shown, self._deadline = list(urls), num_passages, shown, deadline
        self.seen: dict[str, dict[str, str]] = {}

    def search(self, query: str) -> str:
        """A line per passage. Raises `SearchUnavailable`."""
        if not query.strip() or len(query) > _LONGEST_QUERY:
            raise ValueError(f"a query has 1 to {_LONGEST_QUERY} characters")
        passages = self._search(query)
        self.seen |= {passage["id"]: passage for passage in passages}
        return "\n".join(map(self._line, passages)) or "nothing found"

    def read(self, passage_id: str, start: int = 0) -> str:
        """The text of a passage, from a character on."""
        if passage_id not in self.seen:
            raise ValueError(f"no search has found a passage {passage_id!r}")
        return self.seen[passage_id]["text"][max(0, start) :]

    def _line(self, passage: dict[str, str]) -> str:
        text, most = passage["text"], self._shown
        title = "" if passage["title"] in text[:most] else f"{passage['title']}: "
        rest = f" … [{len(text) - most} characters more]" if len(text) > most else ""
        return f"[{passage['id']}] {title}{text[:most]}{rest}"

    def _search(self, query: str) -> list[dict[str, str]]:
        until, faults = time.monotonic() + self._deadline, {}
        for attempt in range(_ROUNDS):
            for url in random.sample(self._urls, len(self._urls)):
                try:
                    response = self._http.post(f"{url}/search", json={"query": query, "k": self._num_passages})
                    response.raise_for_status()
                    (rows,) = response.json()["results"]
                    return [{key: _text(passage[key]) for key in ("id", "title", "text")} for passage in rows]
                except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError) as error:
                    faults[url] = f"{url}: {type(error).__name__} {error}"
            pause = random.uniform(0, 0.2 * 2**attempt)
            if time.monotonic() + pause > until:
                break
            time.sleep(pause)
        raise SearchUnavailable("; ".join(faults.values()))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value


@dataclass(frozen=True)
class Work:
    """A call that can be made."""

    function: Callable[..., str]
    arguments: dict[str, Any]


class Agent:
    """Holds one conversation."""

    def __init__(self, library: Library, *, tools: Sequence[str], most_parallel: int) -> None:
        available: dict[str, tuple[type[BaseModel], Callable[..., str]]] = {
            "search": (Search, library.search),
            "read": (Read, library.read),
        }
        self._tools = {name: available[name] for name in tools}
        self._library = library
        self._most_parallel = most_parallel
        self._queries: list[str] = []
        self._client = openai.OpenAI()

    def answer(self, prompt: str, *, model: str, max_turns: int) -> Result:
        """Let the model search until it answers, for at most `max_turns` turns of calls."""
        result = Result()
        messages: list[Any] = [{"role": "user", "content": prompt}]
        tools: Any = [schema_of(arguments) for arguments, _ in self._tools.values()]
        try:
            for turn in range(max_turns + 1):
                completion = self._client.chat.completions.create(model=model, messages=messages, tools=tools)
                message = completion.choices[0].message
                result.reply = "" if message.tool_calls else message.content or ""
                result.unfinished = bool(message.tool_calls) and turn == max_turns
                if not message.tool_calls or result.unfinished:
                    break
                messages += [message, *self._results(message.tool_calls)]
        except RuleBroken as rule:
            result.fault = str(rule)
        except SearchUnavailable as error:
            result.unavailable = str(error)
        result.searches, result.shown = len(self._queries), list(self._library.seen)
        return result

    def _results(self, calls: Sequence[Any]) -> list[dict[str, str]]:
        """The results of one turn's calls, which run at the same time, after all were checked against the rules."""
        works = [self._read(call.function.name, call.function.arguments) for call in calls]
        self._check_rules([work for work in works if not isinstance(work, str)])
        with ThreadPoolExecutor(len(works)) as threads:
            texts = list(threads.map(_result, works))
        return [
            {"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(calls, texts, strict=True)
        ]

    def _read(self, name: str, arguments: str) -> Work | str:
        """A call as work to do, or the error that the model is shown for a call that cannot be read."""
        if name not in self._tools:
            return f"error: there is no tool {name!r}, only {', '.join(self._tools)}"
        schema, function = self._tools[name]
        try:
            return Work(function, schema.model_validate_json(arguments or "{}").model_dump())
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            return "error: " + "; ".join(
                ": ".join(filter(None, [".".join(map(str, p["loc"])), p["msg"]])) for p in problems
            )

    def _check_rules(self, works: Sequence[Work]) -> None:
        fault = ""
        for number, work in enumerate(works, 1):
            if "query" in work.arguments:
                wanted = " ".join(work.arguments["query"].lower().split())
                if wanted in self._queries:
                    fault = fault or "duplicate_search"
                self._queries.append(wanted)
            if number > self._most_parallel:
                fault = fault or "too_many_calls"
        if fault:
            raise RuleBroken(fault)


def _result(work: Work | str) -> str:
    """A call's result, cut to `_LONGEST_RESULT` characters. Raises `SearchUnavailable`."""
    if isinstance(work, str):
        return work
    try:
        text = work.function(**work.arguments)
    except ValueError as error:
        text = f"error: {type(error).__name__}: {error}"
    if len(text) > _LONGEST_RESULT:
        text = f"{text[:_LONGEST_RESULT]} … [cut: {_LONGEST_RESULT} of {len(text)} characters]"
    return text


def main() -> None:
    """The command line, see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", help="what the model is told first: the question, after instructions if it needs any")
    parser.add_argument("--search", action="append", required=True, help="URL of a server; may be given several times")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--tool", action="append", choices=["search", "read"], help="default: both")
    parser.add_argument("--passages", type=int, default=5, help="per search")
    parser.add_argument("--shown", type=int, default=600, help="characters of a passage that a search shows")
    parser.add_argument("--most-parallel", type=int, default=8, help="calls of one turn")
    parser.add_argument("--max-turns", type=int, default=48)
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds a search may take")
    given = parser.parse_args()
    library = Library(given.search, num_passages=given.passages, shown=given.shown, deadline=given.deadline)
    agent = Agent(library, tools=given.tool or ["search", "read"], most_parallel=given.most_parallel)
    print(json.dumps(asdict(agent.answer(given.prompt, model=given.model, max_turns=given.max_turns))))


if __name__ == "__main__":
    main()
