"""The code under test and its tests, in two sandboxes: what crosses between them, and both ends of it.

    check (has the tests)  ── {"do": "call", "arguments": [add, 2, 3]} ─▶  serve (has the policy's code)
                           ◀──────────── {"value": 5} ────────────────

The code under test never sees the tests, and the tests see plain data instead of its objects. So nothing that the code
does in its own process, from `os._exit` to objects that equal everything, makes a test pass.
"""

from __future__ import annotations

import builtins
import datetime
import functools
import importlib
import json
import operator
import sys
import types
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO


def run_module(name: str, file: Path) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = [file.name]
    exec(compile(file.read_text(), file.name, "exec"), vars(module))
    return vars(module)


# --- plain data as JSON; a type that JSON lacks is an object with one key, any other object is a numbered reference


def _pairs(mapping: Any) -> list[list[Any]]:
    return [[key, mapping[key]] for key in mapping]


_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "Counter": (Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "dict": (dict, _pairs, dict),
    "deque": (deque, list, deque),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "complex": (complex, lambda number: [number.real, number.imag], lambda parts: complex(*parts)),
    "range": (range, lambda span: [span.start, span.stop, span.step], lambda parts: range(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "module": (types.ModuleType, lambda module: module.__name__, lambda name: _standard_module(name)),
}
"""Key → the type, its parts as JSON, and the value of such parts."""


def _encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(item, number_of) for item in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": [type(value).__name__, list(value._fields), _encode(list(value), number_of)]}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {"exception": _names(value)}
    for key, (kind, parts_of, _) in _PLAIN.items():
        if isinstance(value, kind):
            return {key: _encode(parts_of(value), number_of)}
    if type(value).__module__ == "numpy":
        return _encode(value.tolist(), number_of)
    return {"object": number_of(value)}


def _decode(data: Any, object_of: Callable[[int], Any]) -> Any:
    match data:
        case list():
            return [_decode(item, object_of) for item in data]
        case {"object": number}:
            return object_of(number)
        case {"exception": names}:
            return exception_class(tuple(names))
        case {"namedtuple": [name, fields, values]}:
            return namedtuple(name, fields)(*_decode(values, object_of))
        case dict():
            [(key, parts)] = data.items()
            return _PLAIN[key][2](_decode(parts, object_of))
    return data


def _standard_module(name: str) -> types.ModuleType | None:
    return importlib.import_module(name) if name in sys.stdlib_module_names else None


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one line of JSON. A tool may return what JSON lacks; it is written as its text."""
    stream.write(json.dumps(message, default=str) + "\n")
    stream.flush()


# --- serve: the side of the code under test

_DOES: dict[str, Callable[..., Any]] = {
    **{"call": operator.call, "getattr": getattr, "setattr": setattr, "iter": iter, "next": next},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "len": len, "str": str, "repr": repr},
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul},
    **{"truediv": operator.truediv, "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow},
    **{"neg": operator.neg, "abs": abs, "int": int, "float": float, "index": operator.index},
    **{"contains": operator.contains, "delitem": operator.delitem},
    **{"enter": lambda manager: manager.__enter__(), "exit": lambda manager, *_: manager.__exit__(None, None, None)},
    **{"eq": operator.eq, "lt": operator.lt, "le": operator.le},
    "isinstance": lambda kind, value: isinstance(value, kind),
}


def serve(file: Path, requests: TextIO, answers: TextIO) -> None:
    objects: list[Any] = []

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def do(order: dict[str, Any]) -> dict[str, Any]:
        arguments = _decode(order["arguments"], objects.__getitem__)
        value = _DOES[order["do"]](*arguments, **_decode(order["keywords"], objects.__getitem__))
        # A function may change a list of the caller in place; the tests' list must change too.
        after = [a if isinstance(a, list | dict | set) else None for a in arguments]
        return {"value": _encode(value, number_of), "after": _encode(after, number_of)}

    def define(order: dict[str, Any]) -> dict[str, Any]:
        if _decode(order["keywords"], objects.__getitem__).get("as_leetcode"):
            _give_leetcode_names()
        names = run_module("solution", file).items()
        return {"value": _encode({name: value for name, value in names if not name.startswith("__")}, number_of)}

    for step, line in enumerate(requests):
        try:
            answer = (do if step else define)(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - the tests judge what the code raises
            answer = {"error": [_names(type(error)), str(error)]}
        send(answers, answer)


_LEETCODE = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator typing"
)


def _give_leetcode_names() -> None:
    """Define what solutions for LeetCode need not import, as LiveCodeBench does; built-in names stay what they are."""
    space: dict[str, Any] = {}
    for name in _LEETCODE.split():
        exec(f"from {name} import *", space)
    space |= {name: sys.modules[name] for name in _LEETCODE.split()}
    for name, value in space.items():
        vars(builtins).setdefault(name, value)
    sys.setrecursionlimit(50_000)


# --- check: the side of the tests


class NotPlain(BaseException):
    """The tests pass an object that is no plain data. The code is not to blame, and tests cannot catch it."""


class Gone(BaseException):
    """The process of the code under test has ended."""


class Solution:
    """The code under test, as its tests see it."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers

    def names(self, **options: bool) -> dict[str, Any]:
        """What the code defines."""
        return {name: value for name, value in self.ask("define", **options).items() if value is not None}

    def ask(self, does: str, *arguments: Any, **keywords: Any) -> Any:
        self.num_asked += 1
        order = {
            "do": does,
            "arguments": _encode(list(arguments), self._number_of),
            "keywords": _encode(keywords, self._number_of),
        }
        try:
            send(self._requests, order)
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Gone
        answer = json.loads(line)
        if "error" in answer:
            names, message = answer["error"]
            raise exception_class(tuple(names))(message)
        for argument, after in zip(arguments, _decode(answer.get("after", []), self._object), strict=False):
            _become(argument, after)
        return _decode(answer["value"], self._object)

    def _object(self, number: int) -> Remote:
        return Remote(self, number)

    num_asked = 0
    """Requests so far."""

    @staticmethod
    def _number_of(value: Any) -> int:
        if isinstance(value, Remote):
            return value.__dict__["_number"]
        raise NotPlain(f"the tests pass a {type(value).__name__} to the code; only plain data can be passed")


class Remote:
    """An object of the code under test. It is compared only with such objects, because it could equal everything."""

    def __init__(self, solution: Solution, number: int) -> None:
        self.__dict__.update(_solution=solution, _number=number)

    def _ask(self, does: str, *arguments: Any, **keywords: Any) -> Any:
        return self._solution.ask(does, self, *arguments, **keywords)

    def _compare(self, does: str, other: Any) -> Any:
        return self._ask(does, other) if isinstance(other, Remote) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._ask("isinstance", instance) is True

    def __mro_entries__(self, bases: Any) -> Any:
        raise NotPlain("the tests derive a class from one of the code; only plain data crosses between the two")

    def __eq__(self, other: Any) -> bool:
        return self._compare("eq", other) is True

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
    __lt__ = partialmethod(_compare, "lt")
    __le__ = partialmethod(_compare, "le")


for _name in _DOES.keys() - {"getattr", "eq", "lt", "le", "isinstance"}:
    setattr(Remote, f"__{_name}__", partialmethod(Remote._ask, _name))


class _CodeExit(SystemExit):
    """The code under test wanted to end its process."""


def _names(kind: type[BaseException]) -> list[str]:
    return [each.__name__ for each in kind.__mro__[:-1]]


@functools.cache
def exception_class(names: tuple[str, ...]) -> type[BaseException]:
    """The class of an exception from a sandbox, whose bases have these names too. Other classes than built-in ones are
    made here: the code's own is in its process."""
    if not names or names[0] == "SystemExit":
        return _CodeExit if names else Exception
    kind = getattr(builtins, names[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind
    return type(names[0], (exception_class(names[1:]),), {})


def exception_of(name: str, message: str) -> Exception:
    """An exception from a sandbox: built-in types as they are, others as `RuntimeError` with their name."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


def _become(argument: Any, after: Any) -> None:
    match argument, after:
        case list(), list():
            argument[:] = after
        case (dict(), dict()) | (set(), set()):
            argument.clear()
            argument.update(after)
