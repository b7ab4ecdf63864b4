"""The programs inside a sandbox: a script, a tool, and for tests of code the pair `serve` and `check`.

    check (has the tests)  ── {"do": "call", "arguments": [add, 2, 3]} ─▶  serve (has the policy's code)
                           ◀──────────── {"value": 5} ────────────────

The code under test never sees the tests, and the tests see plain data instead of its objects. So nothing that the code
does in its own process, from `os._exit` to objects that equal everything, makes a test pass. Started by `sandbox.py`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import operator
import os
import sys
import traceback
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO

from rollouts.sandbox.sandbox_rules import die_with_parent, lock_down


def main() -> None:
    """Lock this process down, report what could not be isolated, and run one program."""
    _, product, order_text, *numbers = sys.argv
    sys.path.remove(product)
    order = json.loads(order_text)
    folder = Path(order["folder"])
    die_with_parent()
    function = _load_function(order) if order["program"] == "function" else None
    missing = lock_down(folder, seconds=order["seconds"], memory_gb=order["memory_gb"])
    os.write(order["report"], json.dumps(missing).encode() + b"\n")
    os.close(order["report"])
    sys.set_int_max_str_digits(0)  # code may print a large factorial; its time is limited anyway
    match order["program"], [int(number) for number in numbers]:
        case "script", []:
            sys.excepthook = _print_error
            _run("__main__", folder / "solution.py")
        case "function", [answers]:
            assert function is not None
            _answer(function, folder / "arguments.json", os.fdopen(answers, "w"))
        case "serve", [requests, answers]:
            _serve(folder / "solution.py", os.fdopen(requests), os.fdopen(answers, "w"))
        case "check", [requests, answers, verdicts]:
            solution = _Solution(os.fdopen(requests, "w"), os.fdopen(answers))
            _check((folder / "tests.py").read_text(), solution, os.fdopen(verdicts, "w"))


def _load_function(order: dict[str, Any]) -> Callable[..., Any]:
    """A function of the user, imported before the lock, because its module may read files.

    Raises `RuntimeError` if the module started threads: the kernel would not lock those.
    """
    sys.path[:] = order["path"]
    from infra.user_code import load_object

    function = load_object(order["function"])
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing its module started threads, which cannot be locked down; start them when called")
    return inspect.unwrap(getattr(function, "function", function))  # a `Tool` holds its function


def _answer(function: Callable[..., Any], arguments: Path, answers: TextIO) -> None:
    from rollouts.chat.plain_data import plain  # the function's module has imported it, as it has `sandboxed`

    try:
        _send(answers, {"value": plain(function(**json.loads(arguments.read_text())))})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again by the caller
        _send(answers, {"error": [type(error).__name__, str(error)]})


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback after the output, from the program's own first line on."""
    sys.stdout.flush()
    while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def _run(name: str, file: Path) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = [file.name]
    exec(compile(file.read_text(), file.name, "exec"), vars(module))
    return vars(module)


# --- plain data as JSON; a type that JSON lacks is an object with one key, any other object is a numbered reference

_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "dict": (dict, lambda mapping: [[key, mapping[key]] for key in mapping], dict),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
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
        case dict():
            [(key, parts)] = data.items()
            return _PLAIN[key][2](_decode(parts, object_of))
    return data


def _standard_module(name: str) -> types.ModuleType | None:
    return importlib.import_module(name) if name in sys.stdlib_module_names else None


def _send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one line of JSON. A tool may return what JSON lacks; it is written as its text."""
    stream.write(json.dumps(message, default=str) + "\n")
    stream.flush()


# --- serve: the side of the code under test

_DOES: dict[str, Callable[..., Any]] = {
    **{"call": operator.call, "getattr": getattr, "setattr": setattr, "iter": iter, "next": next},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "len": len, "str": str, "repr": repr},
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul},
    **{"eq": operator.eq, "lt": operator.lt, "le": operator.le},
}


def _serve(file: Path, requests: TextIO, answers: TextIO) -> None:
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

    def define(_: dict[str, Any]) -> dict[str, Any]:
        names = _run("solution", file).items()
        return {"value": _encode({name: value for name, value in names if not name.startswith("_")}, number_of)}

    for step, line in enumerate(requests):
        try:
            answer = (do if step else define)(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - the tests judge what the code raises
            answer = {"error": [type(error).__name__, str(error)]}
        _send(answers, answer)


# --- check: the side of the tests


class _NotPlain(BaseException):
    """The tests pass an object that is no plain data. The code is not to blame, and tests cannot catch it."""


class _Gone(BaseException):
    """The process of the code under test has ended."""


class _Solution:
    """The code under test, as its tests see it."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers

    def names(self) -> dict[str, Any]:
        """The names that the code defines, without those of built-in functions, which the tests compare with."""
        names = self.ask("define")
        return {name: value for name, value in names.items() if not hasattr(builtins, name) and value is not None}

    def ask(self, does: str, *arguments: Any, **keywords: Any) -> Any:
        order = {
            "do": does,
            "arguments": _encode(list(arguments), self._number_of),
            "keywords": _encode(keywords, self._number_of),
        }
        try:
            _send(self._requests, order)
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise _Gone
        answer = json.loads(line)
        if "error" in answer:
            name, message = answer["error"]
            raise exception_of(name, message)
        for argument, after in zip(arguments, _decode(answer.get("after", []), self._object), strict=False):
            _become(argument, after)
        return _decode(answer["value"], self._object)

    def _object(self, number: int) -> _Remote:
        return _Remote(self, number)

    @staticmethod
    def _number_of(value: Any) -> int:
        if isinstance(value, _Remote):
            return value.__dict__["_number"]
        raise _NotPlain(f"the tests pass a {type(value).__name__} to the code; only plain data can be passed")


class _Remote:
    """An object of the code under test. It is compared only with such objects, because it could equal everything."""

    def __init__(self, solution: _Solution, number: int) -> None:
        self.__dict__.update(_solution=solution, _number=number)

    def _ask(self, does: str, *arguments: Any, **keywords: Any) -> Any:
        return self._solution.ask(does, self, *arguments, **keywords)

    def _compare(self, does: str, other: Any) -> Any:
        return self._ask(does, other) if isinstance(other, _Remote) else NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __eq__(self, other: Any) -> bool:
        return self._compare("eq", other) is True

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
    __lt__ = partialmethod(_compare, "lt")
    __le__ = partialmethod(_compare, "le")


for _name in _DOES.keys() - {"getattr", "eq", "lt", "le"}:
    setattr(_Remote, f"__{_name}__", partialmethod(_Remote._ask, _name))


def exception_of(name: str, message: str) -> Exception:
    """An exception from a sandbox: built-in types as they are, others as `RuntimeError` with their name."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


def _become(argument: Any, after: Any) -> None:
    match argument, after:
        case list(), list():
            argument[:] = after
        case (dict(), dict()) | (set(), set()):
            argument.clear()
            argument.update(after)


def _check(source: str, solution: _Solution, verdicts: TextIO) -> None:
    """Write the number of tests, then the verdict on each as soon as it has run."""

    try:
        body = ast.parse(source, "tests.py").body
    except SyntaxError as error:
        return _send(verdicts, {"fault": f"the tests do not parse: {error}"})
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    others = [node for node in body if not isinstance(node, definitions)]
    statements = [node for node in others if any(isinstance(inner, ast.Assert) for inner in ast.walk(node))]
    if not functions and not statements:  # the tests are in a function, as in HumanEval's `check(add)`
        statements = [node for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    _send(verdicts, {"tests": len(functions) + len(statements)})
    names = solution.names()
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    sys.modules["solution"] = types.ModuleType("solution")
    vars(sys.modules["solution"]).update(names)
    space = vars(module)
    space.update(names)
    calls = [ast.parse(f"{name}()").body[0] for name in functions]
    for node in [*body, *calls]:
        passed = True
        try:
            exec(compile(ast.Module([node], []), "tests.py", "exec"), space)
        except _NotPlain as error:
            return _send(verdicts, {"fault": str(error)})
        except ImportError as error:
            if error.name != "solution":
                return _send(verdicts, {"fault": f"the tests cannot be run here: {error}"})
            passed = False
        except Exception:  # noqa: BLE001 - any exception fails the test
            passed = False
        if node in statements or node in calls:
            _send(verdicts, {"passed": passed})
