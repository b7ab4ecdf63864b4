"""What crosses between two processes that do not trust each other: plain data as JSON, and requests for the rest.

In: values of one end. Out: the same values at the other one. A type that JSON lacks is an object with one key. Any
other object stays where it is, and the other end has a `Far` one instead, whose operations ask. Exceptions cross by
name.
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from pathlib import Path, PurePath
from typing import Any, TextIO
from uuid import UUID

from rollouts.sandbox.crossing_exceptions import exception_class, make_exception, names_of


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
    "UUID": (UUID, str, UUID),
    "Path": (PurePath, str, Path),
}
"""Key → the type, its parts as JSON, and the value of such parts."""
_TYPES = {
    kind.__name__: kind
    for kind in (*(kind for kind, _, _ in _PLAIN.values()), bool, int, float, str, list, object, type(None))
}
DATA_NAMES = {name for kind in _TYPES.values() for name in dir(kind)}
DATA_NAMES |= {"all", "any", "equals", "shape", "dtype", "tolist", "sum", "mean", "max", "min"}  # arrays and tables
_Mutable = list | dict | set | deque | bytearray


def _is_array(value: Any) -> bool:
    """True for an array of numpy's that holds numbers, texts or times, and not objects."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy" and value.dtype.kind in _ARRAY_KINDS


_ARRAY_KINDS = "biufcSUmM"


def _array(kind: str, shape: list[int], items: list[Any]) -> Any:
    import numpy as np

    if np.dtype(kind).kind not in _ARRAY_KINDS:
        raise TypeError(f"an array of {kind} does not cross")
    return np.array(items, dtype=kind).reshape(shape)


def _containers(value: Any) -> list[Any]:
    """What a function can change in its arguments, outer first."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    is_mutable = isinstance(value, _Mutable) or _is_array(value)
    return [*([value] if is_mutable else []), *(c for part in parts for c in _containers(part))]


def _contents(container: Any) -> list[Any]:
    if _is_array(container):
        return [container.copy()]
    return _pairs(container) if isinstance(container, dict) else [*container]


def _fill(container: Any, contents: list[Any]) -> None:
    if _is_array(container):
        container[...] = contents[0]
    elif isinstance(container, list | bytearray):
        container[:] = contents
    else:
        container.clear()
        (dict.update if isinstance(container, dict) else deque.extend if isinstance(container, deque) else set.update)(
            container, contents
        )


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one line of JSON. A tool may return what JSON lacks; it is written as its text."""
    stream.write(json.dumps(message, default=str) + "\n")
    stream.flush()


# --- the two ends

_OPERATORS = "add sub mul truediv floordiv mod pow"
_HARMLESS = (
    "setattr delattr iter next getitem setitem delitem len str repr hash bool round neg abs int float index enter"
)
"""They pass nothing that is compared with."""
DOES: dict[str, Callable[..., Any]] = {
    **{"call": operator.call, "getattr": getattr, "setattr": setattr, "delattr": delattr, "iter": iter, "next": next},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem},
    **{"len": len, "str": str, "repr": repr, "hash": hash, "bool": bool, "round": round},
    **{"neg": operator.neg, "abs": abs, "int": int, "float": float, "index": operator.index},
    **{"enter": lambda manager: manager.__enter__(), "exit": lambda manager: manager.__exit__(None, None, None)},
    **{"contains": operator.contains, "eq": operator.eq, "lt": operator.lt, "le": operator.le},
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
}


_IS_DATA = {name for kind in (str, float, set) for name in dir(kind) if name.startswith("is") or name.endswith("with")}
_IS_DATA |= {"all", "any", "equals", "index", "count", "find"}


class Gone(BaseException):
    """The other process has ended."""


class Link:
    """One end: it asks the other one what its objects do, and does what is asked of its own."""

    num_asked = 0
    """Requests so far."""
    is_gone = False
    is_strict = False
    """True at the end of the tests, which must not believe what they hear."""
    closed: frozenset[str] = frozenset(_IS_DATA)
    """Methods of data by which tests compare, and what the tests define: a result with such a name is none of these."""

    reads_arrays = True
    """False if an array is to arrive as a list."""

    classes: set[str] = set()
    """Names of the other end's classes that this one uses as such."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers
        self._own: list[Any] = []
        self._places: dict[int, int] = {}
        """Identity → place in `_own`, which keeps the object alive."""
        self._far: dict[tuple[int, bool, str], Far] = {}

    def ask(self, does: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the other end returns, or raises. It may ask back meanwhile."""
        self.num_asked += 1
        containers = _containers([arguments, keywords])[1:]  # without the list of both
        self.tell({"do": does, "arguments": self._encode(list(arguments)), "keywords": self._encode(keywords)})
        while "do" in (message := self.hear()):
            self.tell(self.done(message))
        for container, after in zip(containers, self._decode(message.get("after", []), containers), strict=False):
            _fill(container, after)
        if "error" in message:
            raise self._decode(message["error"])
        return self._decode(message["value"])

    def far(self, number: int, *, is_made: bool = False, name: str = "") -> Far:
        """The object of the other end, always the same one, so that `is` compares."""
        name = name if name in self.classes else ""  # one object may have several names, and one that is no class
        return self._far.setdefault((number, is_made, name), Far(self, number, is_made, name))

    def tell(self, message: dict[str, Any]) -> None:
        try:
            send(self._requests, message)
        except BrokenPipeError:
            self._end()

    def hear(self) -> dict[str, Any]:
        if not (line := self._answers.readline()):
            self._end()
        return json.loads(line)

    def _end(self) -> None:
        self.is_gone = True
        raise Gone

    def done(self, order: dict[str, Any]) -> dict[str, Any]:
        containers: list[Any] = []
        try:
            arguments, keywords = self._decode([order["arguments"], order["keywords"]])
            containers = _containers([tuple(arguments), keywords])[1:]
            answer = {"value": self._encode(self.do(order["do"], order["arguments"], arguments, keywords))}
        except self.caught as error:
            answer = {"error": self._encode(error)}
        kept = {id(container): place for place, container in enumerate(containers)}
        contents = [_contents(each) for each in containers]
        try:
            return {**answer, "after": [[self._encode(item, kept) for item in each] for each in contents]}
        except self.caught as error:  # for example a list that has itself as an item
            return {"error": self._encode(error)}

    caught: type[BaseException] = Exception

    def do(self, does: str, encoded: list[Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _encode(self, value: Any, kept: dict[int, int] | None = None) -> Any:
        """`kept`: identity → place of the arguments' containers, which the other end has."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if kept and id(value) in kept:
            return {"kept": kept[id(value)]}
        encode = functools.partial(self._encode, kept=kept)
        if isinstance(value, list):
            return [encode(item) for item in value]
        if isinstance(value, Far):
            return {"yours": value.__dict__["_number"]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": [type(value).__name__, list(value._fields), encode(list(value))]}
        if isinstance(value, BaseException):
            return {"error": [names_of(type(value)), encode(list(value.args)), encode(dict(vars(value))), str(value)]}
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return {"exception": names_of(value)}
            if _TYPES.get(value.__name__) is value:
                return {"type": value.__name__}
        for key, (kind, parts_of, _) in _PLAIN.items():
            if isinstance(value, kind):
                return {key: encode(parts_of(value))}
        if _is_array(value):
            return {"array": [value.dtype.str, list(value.shape), encode(value.tolist())]}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return encode(value.tolist())
        if id(value) not in self._places:
            self._places[id(value)] = len(self._own)
            self._own.append(value)
        return {"mine": self._places[id(value)]}

    def _decode(self, data: Any, kept: list[Any] | None = None) -> Any:
        match data:
            case list():
                return [self._decode(item, kept) for item in data]
            case {"mine": int(number)}:
                return self.far(number)
            case {"yours": int(number)}:
                return self._own[number]
            case {"kept": int(place)} if kept is not None:
                return kept[place]
            case {"array": [str(kind), shape, items]}:
                decoded = self._decode(items, kept)
                return _array(kind, shape, decoded) if self.reads_arrays else decoded
            case {"type": name}:
                return _TYPES[name]
            case {"exception": names}:
                return exception_class(tuple(names))
            case {"error": [names, arguments, attributes, text]}:
                decoded = self._decode([arguments, attributes], kept)
                return make_exception(exception_class(tuple(names)), decoded[0], decoded[1], str(text))
            case {"namedtuple": [name, fields, values]}:
                return namedtuple(name, fields)(*self._decode(values, kept))
            case dict():
                [(key, parts)] = data.items()
                return _PLAIN[key][2](self._decode(parts, kept))
        return data


class Far:
    """An object of the other end. Tests compare it only with such objects, because it could equal everything.

    For the same reason, operators pass plain data only to an object which the tests made by calling what they use as
    a class. For any other, `f(2) - 5` would show the code what to compare with.
    """

    def __init__(self, link: Link, number: int, is_made: bool, class_name: str) -> None:
        is_made = is_made or not link.is_strict
        self.__dict__.update(_link=link, _number=number, _is_made=is_made, _is_class=bool(class_name))

    def _ask(self, does: str, /, *arguments: Any, **keywords: Any) -> Any:
        return self._link.ask(does, self, *arguments, **keywords)

    def _made(self, value: Any) -> Any:
        return self._link.far(value._number, is_made=True) if isinstance(value, Far) else value

    def _compare(self, does: str, other: Any) -> Any:
        return self._ask(does, other) if isinstance(other, Far) else NotImplemented

    def _operate(self, does: str, other: Any, *, is_reflected: bool = False) -> Any:
        if not self._is_made and not isinstance(other, Far):
            return NotImplemented
        ends = (other, self) if is_reflected else (self, other)
        value = self._link.ask(does, *ends)
        return self._made(value) if self._is_made else value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value = self._ask("call", *arguments, **keywords)
        return self._made(value) if self._is_class else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__wrapped__"):
            raise AttributeError(name)
        if name in self._link.closed and not self._is_made:
            raise AttributeError(f"an object of the code is no data, so its {name} says nothing")
        return named(self._ask("getattr", name), name)

    def __contains__(self, item: Any) -> bool:
        return self._ask("contains", item) is True if self._is_made else any(item == each for each in self._ask("iter"))

    def __exit__(self, *_: object) -> None:
        self._ask("exit")  # without the exception: the code could swallow a failed assertion

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Far) and self._ask("isinstance", instance) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Far) and self._ask("issubclass", kind) is True

    def __mro_entries__(self, bases: Any) -> Any:
        raise TypeError("the tests derive a class from one of the code; only plain data crosses between the two")

    def __eq__(self, other: Any) -> bool:
        if self._compare("eq", other) is not True:
            return False
        try:
            return self._ask("eq", None) is not True  # an object that equals everything equals nothing
        except Exception:  # noqa: BLE001 - it can be compared with its own kind only
            return True

    __lt__ = partialmethod(_compare, "lt")
    __le__ = partialmethod(_compare, "le")


def named(value: Any, name: str) -> Any:
    """A value by the name that the tests call it."""
    return value._link.far(value._number, name=name) if isinstance(value, Far) else value


for _name in _HARMLESS.split():
    setattr(Far, f"__{_name}__", partialmethod(Far._ask, _name))
for _name in _OPERATORS.split():
    setattr(Far, f"__{_name}__", partialmethod(Far._operate, _name))
    setattr(Far, f"__r{_name}__", partialmethod(Far._operate, _name, is_reflected=True))
