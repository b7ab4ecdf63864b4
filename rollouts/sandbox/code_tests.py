"""Tests of code as data sets have them: what they consist of, and the verdict on each.

In: Python source, and the code under test as `Solution`. Out: the number of tests, then a verdict on each.

    a top-level statement that asserts, or calls a function of the tests that does     one test
    test… functions without parameters                                                 one test each
    classes, parametrize, fixtures, and all that imports pytest                        pytest collects and runs them
    none of these                                                                      each top-level call is a test
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import importlib.util
import os
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rollouts.sandbox.solution import Gone, NotPlain, Solution, send

_IN_ONE_PROCESS = {
    "capsys": "what it prints is not seen by the tests",
    **dict.fromkeys(("capfd", "capsysbinary", "capfdbinary", "caplog"), "what it prints is not seen by the tests"),
    **dict.fromkeys(("redirect_stdout", "redirect_stderr"), "what it prints is not seen by the tests"),
    **dict.fromkeys(("monkeypatch", "mocker", "mock", "unittest.mock"), "what the tests replace is not replaced there"),
    **dict.fromkeys(("sys", "builtins", "solution"), "what the tests replace is not replaced there"),
}
"""Names that have an effect within one process only → why they have none on the code under test."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class CannotRun(ValueError):
    """Tests that no code can pass here. The message has the line."""


@dataclass(frozen=True)
class TestPlan:
    """What tests consist of."""

    body: list[ast.stmt]
    statements: list[ast.stmt]
    """Those of `body` that are one test each."""
    functions: dict[str, int]
    """Names of test functions and classes → how many tests each has, at least."""
    needs_pytest: bool

    @property
    def num_tests(self) -> int:
        """At least; what is parametrized counts once."""
        return len(self.statements) + sum(self.functions.values())


def read_tests(source: str) -> TestPlan:
    """What the tests consist of. Raises `CannotRun`."""
    try:
        body = ast.parse(source, "tests.py").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotRun(f"the tests do not parse: {error}") from error
    nodes = list(ast.walk(ast.Module(body, [])))
    _check_names(nodes)
    helpers = _called_with_arguments(body)  # HumanEval's `check(add)` by another name
    defined = [
        node
        for node in body
        if isinstance(node, _Function) and node.name.startswith("test") and node.name not in helpers
    ]
    if late := [node for node in nodes if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test")]:
        raise CannotRun(f"line {late[0].lineno}: {late[0].name} is a coroutine; tests are called, not awaited")
    classes = {node.name: count for node in body if isinstance(node, ast.ClassDef) and (count := _num_methods(node))}
    needs_pytest = bool(classes) or any(_needs_pytest(node) for node in nodes)
    needs_pytest = needs_pytest or any(ast.unparse(each.args) or each.decorator_list for each in defined)
    asserting = _asserting(body, {node.name for node in defined})
    statements = [node for node in body if not isinstance(node, _Function | ast.ClassDef) and _asserts(node, asserting)]
    functions = dict.fromkeys((node.name for node in defined), 1) | classes
    if not functions and not statements:
        statements = [node for node in body if isinstance(node, ast.Expr) and _calls_something(node.value)]
    if not functions and not statements:
        raise CannotRun("the tests have no assert, no test function and no call, so there is nothing to pass")
    return TestPlan(body, statements, functions, needs_pytest)


def check_imports(plan: TestPlan) -> None:
    """Raise `CannotRun` for a package that the tests import and that is not installed."""
    for node in plan.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name != "solution" and importlib.util.find_spec(name.partition(".")[0]) is None:
                raise CannotRun(f"line {node.lineno}: the tests import {name}, which is not installed: install it")
    if plan.needs_pytest and importlib.util.find_spec("pytest") is None:
        raise CannotRun("the tests have classes, parameters or fixtures, which pytest runs: `pip install pytest`")


def _check_names(nodes: Sequence[ast.AST]) -> None:
    for node in nodes:
        match node:
            case ast.arg(arg=name):
                names = [name]
            case ast.ImportFrom(module="unittest" | "unittest.mock" as module, names=aliases):
                names = [str(module), *(alias.name for alias in aliases)]
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases if alias.name in ("unittest.mock", "mock")]
            case ast.Assign(targets=targets):
                names = [ast.unparse(target.value) for target in targets if isinstance(target, ast.Attribute)]
            case ast.Attribute(attr=name) | ast.Name(id=name) if name.startswith("redirect_std"):
                names = [name]
            case _:
                continue
        for name in names:
            if name in _IN_ONE_PROCESS:
                line = getattr(node, "lineno", 0)
                why = f"the code under test runs in a process of its own, and {_IN_ONE_PROCESS[name]}"
                raise CannotRun(f"line {line}: the tests use {name}: {why}; compare what functions return")


def _needs_pytest(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "pytest" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pytest"


def _num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(method, ast.FunctionDef) and method.name.startswith("test") for method in node.body)


def _called_with_arguments(body: list[ast.stmt]) -> set[str]:
    """Functions that top-level statements call, with arguments."""
    statements = [node for node in body if not isinstance(node, _Function | ast.ClassDef)]
    calls = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name) and call.args}


def _asserting(body: list[ast.stmt], tests: set[str]) -> set[str]:
    """Functions of the tests that assert, or call one that does; those that are tests count on their own."""
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name not in tests]
    names: set[str] = set()
    while added := {node.name for node in functions if node.name not in names and _asserts(node, names)}:
        names |= added
    return names


def _asserts(node: ast.AST, asserting: set[str]) -> bool:
    for inner in ast.walk(node):
        match inner:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.startswith("assert"):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in asserting:
                return True
    return False


def _calls_something(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id))


def check(source: str, solution: Solution, verdicts: TextIO, *, as_leetcode: bool = False) -> None:
    """Write the number of tests, then the verdict on each as soon as it has run."""
    try:
        _run(read_tests(source), solution, verdicts, as_leetcode=as_leetcode)
    except (CannotRun, NotPlain) as error:
        send(verdicts, {"fault": str(error)})


def _run(plan: TestPlan, solution: Solution, verdicts: TextIO, *, as_leetcode: bool) -> None:
    send(verdicts, {"tests": plan.num_tests})
    module = types.ModuleType("__main__")
    sys.modules["tests"] = module
    sys.modules["solution"] = types.ModuleType("solution")
    names = solution.names(as_leetcode=as_leetcode)
    # Tests compare with built-in functions; they get the code's own one only if they import it by name.
    plain = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    vars(sys.modules["solution"]).update(names, __all__=[*plain])
    space = vars(module)
    space.update(plain)
    calls = [] if plan.needs_pytest else [ast.parse(f"{name}()").body[0] for name in plan.functions]
    num_lost = 0
    if plan.needs_pytest:
        importlib.import_module("pytest")
    with _without_runners():
        for node in [*plan.body, *calls]:
            passed = _passes(node, space, solution)
            if node in plan.statements or node in calls:
                send(verdicts, {"passed": passed})
            elif not passed and isinstance(node, _Function | ast.ClassDef):
                num_lost += plan.functions.get(node.name, 0)
    if plan.needs_pytest:
        _run_pytest(module, len(plan.statements) + num_lost, verdicts)


def _passes(node: ast.stmt, space: dict[str, Any], solution: Solution) -> bool:
    num_asked = solution.num_asked
    try:
        exec(compile(ast.Module([node], []), "tests.py", "exec"), space)
    except (NotPlain, Gone):
        raise
    except ImportError as error:
        if error.name != "solution":
            raise CannotRun(f"line {node.lineno}: the tests cannot be run here: {error}") from error
        return False
    except OSError as error:
        if solution.num_asked == num_asked:  # no code had a part in it
            raise CannotRun(f"line {node.lineno}: the tests cannot be run here: {error}") from error
        return False
    except SystemExit as error:
        return type(error) is SystemExit and not error.code  # the tests' own, as in `sys.exit(1)`
    except BaseException:  # noqa: BLE001 - any exception fails the test
        return False
    return True


@contextlib.contextmanager
def _without_runners() -> Iterator[None]:
    """Tests often end by running themselves: that does nothing, they are run here."""
    owners = [module for module in (unittest, sys.modules.get("pytest")) if module is not None]
    kept = [(owner, owner.main) for owner in owners]
    for owner in owners:
        owner.main = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for owner, main in kept:
            owner.main = main  # type: ignore[attr-defined]


def _run_pytest(module: types.ModuleType, num_others: int, verdicts: TextIO) -> None:
    """Let pytest run the functions and classes of a module that has been executed."""
    import pytest

    class Executed(pytest.Module):
        def _getobj(self) -> types.ModuleType:
            return module

    class Verdicts:
        failed: set[str] = set()
        skipped: set[str] = set()
        fault = ""

        def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> pytest.Module:
            return Executed.from_parent(parent, path=module_path)

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            send(verdicts, {"tests": num_others + len(session.items)})

        def pytest_exception_interact(self, call: Any) -> None:
            error = call.excinfo.value
            if isinstance(error, NotPlain):
                self.fault = str(error)
            elif type(error).__name__ == "FixtureLookupError":
                self.fault = f"there is no fixture {error.argname!r}"

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                self.failed.add(report.nodeid)
            elif report.skipped and not hasattr(report, "wasxfail"):
                self.skipped.add(report.nodeid)

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            if self.fault:
                send(verdicts, {"fault": f"{nodeid.partition('::')[2]}: {self.fault}"})
            is_skipped = nodeid in self.skipped - self.failed
            send(verdicts, {"skipped": True} if is_skipped else {"passed": nodeid not in self.failed})

    settings = Path("pytest.ini")
    settings.write_text("[pytest]\n")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", str(settings), "-s", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-o", "python_classes=*"]
    pytest.main(["tests.py", *options, "--basetemp=tmp"], plugins=[Verdicts()])
