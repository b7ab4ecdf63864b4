"""Functions that a policy may call: the schema comes from the signature, and each call has a deadline.

In: typed functions with a docstring, sync or async, also methods of an environment. Out: `ToolCall` records.

    @tool
    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.\"\"\"
        return a + b

A wrong call, or an error that a tool raises, is shown to the policy as the result, and the attempt goes on.
`ToolUnavailable` ends the attempt without a reward.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NotRequired, get_type_hints

from docstring_parser import parse as parse_docstring
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from rollouts.chat.plain_data import as_text
from rollouts.chat.tool_parsing import CallRequest
from settings.errors import InvalidInput, kind_and_words
from storage.records import ToolCall

logger = logging.getLogger("millrace.tools")

MOST_HUNG_THREADS = 256
"""At most so many blocking tools may have passed their deadline and still run; then further ones are refused."""


class ToolUnavailable(Exception):
    """Raise it in a tool whose infrastructure failed, for example when a server answers 500. The attempt ends as
    `tool_error`, without a reward, because the policy is not to blame."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tool:
    """A function that a policy may call. Make one with `tool`; calling it calls the function."""

    function: Callable[..., Any]
    name: str
    schema: dict[str, Any]
    """OpenAI's function format: name, description, JSON schema of the parameters."""
    parameters: TypeAdapter[dict[str, Any]]
    """Validates the arguments that a policy wrote."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)

    def __get__(self, instance: Any, owner: type | None = None) -> Tool:
        """The tool of one object, if the decorated function is a method."""
        if instance is None:
            return self
        return Tool(functools.partial(self.function, instance), self.name, self.schema, self.parameters)


def tool(function: Callable[..., Any]) -> Tool:
    """Make a typed function, or a method inside a class, callable by a policy.

    A `functools.partial` is its function without the arguments that it gives, and an object is its `__call__`.
    Raises `InvalidInput` if the docstring or a type hint is missing, or a parameter cannot be given by name.
    """
    partial = function if isinstance(function, functools.partial) else functools.partial(function)
    name, written = getattr(partial.func, "__name__", ""), partial.func
    if not name:
        name, written = type(partial.func).__name__, type(partial.func).__call__
    described = inspect.getdoc(written) if written is partial.func else inspect.getdoc(type(partial.func))
    docstring = parse_docstring(described or "")
    if not docstring.description:
        raise InvalidInput(f"tool {name!r} has no docstring; the policy needs to be told what it does")
    descriptions = {parameter.arg_name: parameter.description for parameter in docstring.params}
    try:
        hints = get_type_hints(written, include_extras=True)
    except NameError as error:
        raise InvalidInput(f"tool {name!r}: {error}; types in its hints must be importable from its module") from error
    fields: dict[str, Any] = {}
    given = [each for each in inspect.signature(function).parameters.values() if each.name not in partial.keywords]
    if given and given[0].name in ("self", "cls"):  # of a method that is being defined
        given = given[1:]
    for parameter in given:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidInput(f"tool {name!r}: parameter {parameter} cannot be given by name; write each one out")
        if parameter.name not in hints:
            raise InvalidInput(
                f"tool {name!r}: parameter {parameter.name!r} has no type hint; the schema is made of them"
            )
        hint = hints[parameter.name]
        if description := descriptions.get(parameter.name):
            hint = Annotated[hint, Field(description=description)]
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    arguments = with_config(ConfigDict(extra="forbid"))(TypedDict(name, fields))  # type: ignore[operator]
    try:
        parameters: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        schema = _without_titles(parameters.json_schema())
    except PydanticUserError as error:
        raise InvalidInput(f"tool {name!r}: a parameter's type has no JSON schema: {error.message}") from error
    function_format = {"name": name, "description": docstring.description.strip(), "parameters": schema}
    return Tool(function, name, {"type": "function", "function": function_format}, parameters)


def tools_of(environment: object) -> list[Tool]:
    """The methods of an object that are tools, in the order of their definition."""
    kind = type(environment)
    names = dict.fromkeys(name for ancestor in reversed(kind.__mro__) for name in vars(ancestor))
    return [getattr(environment, name) for name in names if isinstance(getattr(kind, name, None), Tool)]


async def run_calls(
    requests: Sequence[CallRequest], tools: Sequence[Tool], *, timeout: float, output_chars: int
) -> tuple[list[ToolCall], ToolUnavailable | None]:
    """Execute the calls of one turn at the same time, each within `timeout` seconds.

    Returns their records in order, and the first `ToolUnavailable` that was raised.
    Raises `InvalidInput` for two tools with the same name.
    """
    by_name = {each.name: each for each in tools}
    if len(by_name) < len(tools):
        raise InvalidInput(f"two tools have the same name: {', '.join(each.name for each in tools)}")
    outcomes = await asyncio.gather(*(_run(request, by_name, timeout) for request in requests))
    calls = [dataclasses.replace(call, result=_cut(call.result, output_chars)) for call, _ in outcomes]
    return calls, next((unavailable for _, unavailable in outcomes if unavailable), None)


async def _run(request: CallRequest, tools: dict[str, Tool], timeout: float) -> tuple[ToolCall, ToolUnavailable | None]:
    record = functools.partial(ToolCall, name=request.name, arguments=request.arguments, failed=True)
    if request.name not in tools:
        return record(result=f"error: there is no tool {request.name!r}, only {', '.join(tools)}"), None
    chosen = tools[request.name]
    try:
        arguments = chosen.parameters.validate_json(request.arguments or "{}")
    except ValidationError as error:
        return record(result=f"error: {_what_is_wrong(error)}"), None
    started = time.perf_counter()
    execution = asyncio.create_task(_execute(chosen.function, arguments))
    try:
        # Does not wait for a task that ignores its cancellation.
        await asyncio.wait({execution}, timeout=timeout)
    finally:
        execution.cancel()
    seconds = time.perf_counter() - started
    if not execution.done():
        return record(result=f"error: timed out after {timeout:g} s", seconds=seconds, timed_out=True), None
    result = execution.result()
    if isinstance(result, str):
        return record(result=result, failed=False, seconds=seconds), None
    unavailable = result if isinstance(result, ToolUnavailable) else None
    return record(result=f"error: {kind_and_words(result)}", seconds=seconds), unavailable


async def _execute(function: Callable[..., Any], arguments: dict[str, Any]) -> str | BaseException:
    """What the tool returned, as text, or what it raised. Even `sys.exit` in a tool must not end the worker."""
    inner = function.func if isinstance(function, functools.partial) else function
    try:
        if inspect.iscoroutinefunction(inner):
            value = await function(**arguments)
        else:
            value = await _in_thread(functools.partial(function, **arguments))
            if inspect.isawaitable(value):  # an async function behind a decorator
                value = await value
        return as_text(value)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a tool may raise anything, a library in Rust its panic; the policy sees it
        return error


_hung_threads: set[threading.Thread] = set()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a blocking call in a thread of its own.

    Nothing can stop a thread, so one that passed the deadline runs on. It takes no place in a pool, and as a daemon
    it does not keep the process alive.
    """
    _hung_threads.difference_update([thread for thread in _hung_threads if not thread.is_alive()])
    if len(_hung_threads) >= MOST_HUNG_THREADS:
        raise ToolUnavailable(f"{len(_hung_threads)} earlier calls of blocking tools have not returned")
    context, returned = contextvars.copy_context(), concurrent.futures.Future[tuple[Any, BaseException | None]]()
    returned.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it

    def body() -> None:
        try:
            returned.set_result((context.run(call), None))
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            returned.set_result((None, error))

    thread = threading.Thread(target=body, name="millrace-tool", daemon=True)
    thread.start()
    try:
        value, error = await asyncio.wrap_future(returned)
    except asyncio.CancelledError:
        _hung_threads.add(thread)
        logger.warning("a blocking tool was given up; its thread runs on, with %d others", len(_hung_threads) - 1)
        raise
    if error is not None:
        raise error
    return value


def _without_titles(schema: Any) -> Any:
    """A schema without the titles that pydantic makes of the names; they tell a policy nothing."""
    match schema:
        case dict():
            kept = {key: value for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
            return {key: _without_titles(value) for key, value in kept.items()}
        case list():
            return [_without_titles(value) for value in schema]
        case _:
            return schema


def _what_is_wrong(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join(filter(None, [".".join(map(str, p["loc"])), p["msg"]])) for p in problems)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]} … [cut: {most} of {len(text)} characters]"
