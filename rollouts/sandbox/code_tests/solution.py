"""The code under test and its tests, in two sandboxes: what crosses between them, and both ends of it.

    tests (plan.py) ──────── {"do": "call", "arguments": [apply, key, 2]} ─▶  serve (the policy's code)
                           ◀───────── {"do": "call", "arguments": [key, 2]} ──   a function that the tests passed
                           ── {"value": 4} ─▶
                           ◀──────────────────────────────── {"value": 4} ──

The code never sees the tests, and the tests see plain data: JSON, never pickle. An object that is none stays where it
is, and the other side has a `Far` one instead, whose operations ask. So nothing that the code does in its own process,
from `os._exit` to objects that equal everything, makes a test pass: what the tests compare with never goes there.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import operator
import random
import re
import sys
import types
from pathlib import Path
from typing import Any, TextIO

from rollouts.sandbox.code_tests.wire import DOES, Gone, Link, named


def run_module(name: str, file: Path) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = [file.name]
    exec(compile(file.read_text(), file.name, "exec"), vars(module))
    return vars(module)


class _Served(Link):
    """The end of the code under test. It has nothing to hide."""

    caught = BaseException

    def __init__(self, requests: TextIO, replies: TextIO, file: Path) -> None:
        super().__init__(requests, replies)
        self._file = file
        self._space: dict[str, Any] = {}
        self._named: dict[str, Any] = {}
        """Values that the tests have by their names."""
        self._printed = [io.BytesIO(), io.BytesIO()]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(each, "utf-8", "replace", write_through=True) for each in self._printed
        )

    def run(self) -> None:
        while True:
            self.tell(self.done(self.hear()))

    def tell(self, message: dict[str, Any]) -> None:
        rebound = {
            name: self._space.get(name) for name, value in self._named.items() if self._space.get(name) is not value
        }
        self._named |= rebound
        names = {name: self._encode(value) for name, value in rebound.items()}
        printed = [each.getvalue().decode("utf-8", "replace") for each in self._printed]
        super().tell({**message, "names": names, "printed": printed})
        for each in self._printed:
            each.seek(0)
            each.truncate()

    def do(self, does: str, encoded: list[Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if does == "define":
            if keywords.get("as_leetcode"):
                _give_leetcode_names()
            self._space = run_module("solution", self._file)
            return [str(name) for name in self._space]
        if does == "name":
            self._named[arguments[0]] = self._space[arguments[0]]
            return self._space[arguments[0]]
        if does == "python":
            return operator.attrgetter(arguments[1])(importlib.import_module(arguments[0]))(*arguments[2:])
        return DOES[does](*arguments, **keywords)


def serve(file: Path, requests: TextIO, replies: TextIO) -> None:
    """Do what the tests ask, until they end."""
    with contextlib.suppress(Gone):
        _Served(replies, requests, file).run()


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


class Solution(Link):
    """The code under test, as its tests see it. What they pass can be used by the code, and no more than that."""

    is_strict = True
    _given: dict[str, Any] = {}
    has_failed = False
    """True if an assertion failed in a function that the tests passed."""

    def names(self, **options: bool) -> list[str]:
        """Run the code; the names that it says it defines."""
        return [str(name) for name in self.ask("define", **options)]

    def named(self, name: str) -> Any:
        """What the code has by this name. Raises `KeyError`."""
        return named(self.ask("name", name), name)

    def give(self, names: list[str], space: dict[str, Any]) -> None:
        """Put what the code has by these names into `space`, and what it binds them to later."""
        self._given, self._space = {name: self.named(name) for name in names}, space
        space.update(self._given)

    def heard(self, message: dict[str, Any]) -> None:
        super().heard(message)
        for name, encoded in message["names"].items():
            value = named(self._decode(encoded), name)
            if name in self._given and self._space.get(name) is self._given[name]:  # the tests have not bound it anew
                self._space[name] = self._given[name] = value

    def hear(self) -> dict[str, Any]:
        message = super().hear()
        for stream, text in zip((sys.stdout, sys.stderr), message.get("printed", []), strict=False):
            stream.write(str(text).encode("utf-8", "replace").decode())
        return message

    def do(self, does: str, encoded: list[Any], arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Only with objects that the tests passed, and not with what leads from them to the tests."""
        match encoded[0], arguments:
            case {"yours": _}, [owner, str(name), *_] if does.endswith("attr"):
                kind = type(owner)
                is_read = isinstance(owner, _OPEN) and does == "getattr"
                is_read |= isinstance(owner, type) and owner.__module__ == "__main__" and does == "getattr"
                is_open = is_read or kind.__module__ == "__main__" or kind is types.SimpleNamespace
                is_method = does != "getattr" and callable(getattr(kind, name, None))
                if name.startswith("_") or not is_open or is_method:
                    raise AttributeError(f"the tests' {kind.__name__} has no attribute {name!r} for the code")
            case {"yours": _}, _:
                pass
            case _:
                raise TypeError("the code can use only objects that the tests pass")
        try:
            return DOES[does](*arguments, **keywords)
        except AssertionError:  # the code may catch it
            self.has_failed = True
            raise


_OPEN = (random.Random, io.StringIO, io.BytesIO, re.Pattern, re.Match, types.SimpleNamespace)
"""Types of Python whose attributes the code may read, besides those that the tests define. A function or generator has
some that lead to the names of the tests."""
