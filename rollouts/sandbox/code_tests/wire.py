"""What crosses between two processes that do not trust each other: plain data as JSON, and requests for the rest.

In: values of one end. Out: the same values at the other one. A type that JSON lacks is an object with one key. Lists,
dictionaries, sets and arrays are kept equal at both ends while both hold them. Any other object stays where it is, and
the other end has a `Far` one instead, whose operations ask. Exceptions cross by name.
"""

from __future__ import annotations

import datetime
import json
import operator
import threading
from collections import namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from pathlib import Path, PurePath
from typing import Any, TextIO
from uuid import UUID

from rollouts.sandbox.code_tests.crossing_exceptions import exception_class, make_exception, names_of
from rollouts.sandbox.code_tests.shared_containers import KINDS, Shared, empty, facts_of, fill, kind_of

_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "complex": (complex, lambda number: [number.real, number.imag], lambda parts: complex(*parts)),
    "slice": (slice, lambda part: [part.start, part.stop, part.step], lambda parts: slice(*parts)),
    "range": (range, lambda span: [span.start, span.stop, span.step], lambda parts: range(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "UUID": (UUID, str, UUID),
    "Path": (PurePath, str, Path),
}
"""Key → the type, its parts as JSON, and the value of such parts."""
_TYPES = {
    kind.__name__: kind
    for kind in (*(kind for kind, _, _ in _PLAIN.values()), *KINDS.values(), bool, int, float, str, object, type(None))
}
DATA_NAMES = {name for kind in _TYPES.values() for name in dir(kind)}
DATA_NAMES |= {"all", "any", "equals", "shape", "dtype", "tolist", "sum", "mean", "max", "min"}  # arrays and tables


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one line of JSON. A tool may return what JSON lacks; it is written as its text."""
    stream.write(json.dumps(message, default=str) + "\n")
    stream.flush()


# --- the two ends

_OPERATORS = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
_HARMLESS = (
    "setattr delattr iter next getitem setitem delitem len str repr hash bool round neg pos invert abs int float"
    " index enter reversed"
)
"""They pass nothing that is compared with."""
DOES: dict[str, Callable[..., Any]] = {
    **{"call": operator.call, "getattr": getattr, "setattr": setattr, "delattr": delattr, "iter": iter, "next": next},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem},
    **{"len": len, "str": str, "repr": repr, "hash": hash, "bool": bool, "round": round},
    **{"neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "reversed": reversed},
    **{"abs": abs, "int": int, "float": float, "index": operator.index, "divmod": divmod},
    **{"enter": lambda manager: manager.__enter__(), "exit": lambda manager: manager.__exit__(None, None, None)},
    **{"contains": operator.contains, "eq": operator.eq, "lt": operator.lt, "le": operator.le},
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    **{f"i{name.rstrip('_')}": getattr(operator, f"i{name.rstrip('_')}") for name in _OPERATORS.split()},
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

    may_stop = True
    """False if a `StopIteration` of the other end is an error, because it would end a `map` or `zip` early."""

    reads_arrays = True
    """False if an array is to arrive as a list."""

    classes: set[str] = set()
    """Names of the other end's classes that this one uses as such."""

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self._requests = requests
        self._replies = replies
        self._own: list[Any] = []
        self._places: dict[int, int] = {}
        """Identity → place in `_own`, which keeps the object alive."""
        self._far: dict[tuple[int, bool, str], Far] = {}
        self._shared = Shared(parity=int(self.is_strict))
        self._asking = threading.RLock()

    def ask(self, does: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the other end returns, or raises. It may ask back meanwhile."""
        with self._asking:
            self.num_asked += 1
            self._shared.let_go()
            order = {"do": does, "arguments": [self._encode(each) for each in arguments]}
            self.tell({**order, "keywords": {name: self._encode(value) for name, value in keywords.items()}})
            while "do" in (message := self.hear()):
                self.tell(self.done(message))
            is_error = "error" in message
            value = self._decode(message["error" if is_error else "value"])
            self.heard(message)
        if is_error:
            if isinstance(value, StopIteration) and does != "next" and not self.may_stop:
                raise RuntimeError("the code raised StopIteration") from value  # as in a generator (PEP 479)
            raise value
        return value

    def far(self, number: int, *, is_made: bool = False, name: str = "") -> Far:
        """The object of the other end, always the same one, so that `is` compares."""
        name = name if name in self.classes else ""  # one object may have several names, and one that is no class
        return self._far.setdefault((number, is_made, name), Far(self, number, is_made, name))

    def tell(self, message: dict[str, Any]) -> None:
        changed = [self._container(number) for number in self._shared.changed()]
        try:
            send(self._requests, {**message, "changed": changed, "forgotten": self._shared.sent()})
        except BrokenPipeError:
            self._end()

    def hear(self) -> dict[str, Any]:
        if not (line := self._replies.readline()):
            self._end()
        return json.loads(line)

    def heard(self, message: dict[str, Any]) -> None:
        """Call it when what a message is about has been decoded: the rest of it."""
        for each in message["changed"]:
            self._decode(each)
        self._shared.forget(message["forgotten"])

    def _end(self) -> None:
        self.is_gone = True
        raise Gone

    def done(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            arguments = [self._decode(each) for each in order["arguments"]]
            keywords = {name: self._decode(value) for name, value in order["keywords"].items()}
            self.heard(order)
            self._shared.let_go()
            return {"value": self._encode(self.do(order["do"], order["arguments"], arguments, keywords))}
        except self.caught as error:
            self._shared.unsent()  # for example because it is nested too deeply
            return {"error": self._encode(error)}

    caught: type[BaseException] = Exception

    def do(self, does: str, encoded: list[Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _container(self, number: int) -> dict[str, Any]:
        container = self._shared.get(number)
        facts = self._encode(facts_of(container))
        return {
            "shared": [number, kind_of(container), facts, [self._encode(each) for each in self._shared.hold(number)]]
        }

    def _encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if kind_of(value):
            number, is_new = self._shared.number_of(value)
            return self._container(number) if is_new else {"same": number}
        if isinstance(value, Far):
            return {"yours": value.__dict__["_number"]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"namedtuple": [type(value).__name__, list(value._fields), [self._encode(each) for each in value]]}
        if isinstance(value, BaseException):
            arguments = [self._encode(each) for each in value.args]
            attributes = [[name, self._encode(each)] for name, each in vars(value).items()]
            return {"error": [names_of(type(value)), arguments, attributes, str(value)]}
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return {"exception": names_of(value)}
            if _TYPES.get(value.__name__) is value:
                return {"type": value.__name__}
        for key, (kind, parts_of, _) in _PLAIN.items():
            if isinstance(value, kind):
                parts = parts_of(value)
                return {key: [self._encode(each) for each in parts] if isinstance(parts, list) else parts}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self._encode(value.tolist())
        if id(value) not in self._places:
            self._places[id(value)] = len(self._own)
            self._own.append(value)
        return {"mine": self._places[id(value)]}

    def _decode(self, data: Any) -> Any:
        match data:
            case list():
                return [self._decode(item) for item in data]
            case {"shared": [int(number), str(kind), facts, items]}:
                facts, items = self._decode(facts), self._decode(items) if kind == "array" else items
                if kind == "array" and not self.reads_arrays:
                    fill(array := empty(kind, facts), items)
                    kind, items = "list", array.tolist()
                container = self._shared.meet(number, kind, facts)  # before what it holds: that may be itself
                fill(container, self._decode(items))
                self._shared.hold(number)
                return container
            case {"same": int(number)}:
                return self._shared.get(number)
            case {"mine": int(number)}:
                return self.far(number)
            case {"yours": int(number)}:
                return self._own[number]
            case {"type": name}:
                return _TYPES[name]
            case {"exception": names}:
                return exception_class(tuple(names))
            case {"error": [names, arguments, attributes, text]}:
                values = self._decode(arguments), dict(self._decode(attributes)), str(text)
                return make_exception(exception_class(tuple(names)), *values)
            case {"namedtuple": [name, fields, values]}:
                return namedtuple(name, fields)(*self._decode(values))
            case dict():
                [(key, parts)] = data.items()
                return _PLAIN[key][2](self._decode(parts))
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
        if name.startswith("__") and name not in ("__name__", "__qualname__", "__wrapped__"):
            raise AttributeError(name)
        if name in self._link.closed and not self._is_made:
            raise AttributeError(f"an object of the code is no data, so its {name} says nothing")
        return named(self._ask("getattr", name), name)

    __divmod__ = partialmethod(_operate, "divmod")

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


def type_of(value: Any) -> Any:
    """What `type` is for tests: an object of the code has its class, and not `Far`."""
    if not isinstance(value, Far):
        return type(value)
    kind = value._ask("getattr", "__class__")
    return named(kind, kind.__name__)


def named(value: Any, name: str) -> Any:
    """A value by the name that the tests call it."""
    return value._link.far(value._number, name=name) if isinstance(value, Far) else value


for _name in _HARMLESS.split():
    setattr(Far, f"__{_name}__", partialmethod(Far._ask, _name))
for _name in _OPERATORS.split():
    _short = _name.rstrip("_")
    setattr(Far, f"__{_short}__", partialmethod(Far._operate, _name))
    setattr(Far, f"__r{_short}__", partialmethod(Far._operate, _name, is_reflected=True))
    setattr(Far, f"__i{_short}__", partialmethod(Far._operate, f"i{_short}"))
