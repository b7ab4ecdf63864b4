"""The program `check` in a sandbox: runs tests of code as `plan.py` reads them.

In: the tests, and the code under test as `Solution`. Out: the number of tests, then a verdict on each.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rollouts.sandbox.code_tests.plan import LIBRARY, CannotRun, Function, TestPlan, read_tests
from rollouts.sandbox.code_tests.solution import Solution
from rollouts.sandbox.code_tests.wire import send, type_of


def check(source: str, solution: Solution, verdicts: TextIO, *, as_leetcode: bool = False) -> None:
    """Write the number of tests, then the verdict on each as soon as it has run."""
    try:
        _run(read_tests(source), solution, verdicts, as_leetcode=as_leetcode)
    except CannotRun as error:
        send(verdicts, {"fault": str(error)})


class _Code(types.ModuleType):
    """The module `solution`, as the tests import it."""

    def __init__(self, solution: Solution, defined: set[str]) -> None:
        super().__init__("solution")
        self.__dict__.update(__solution=solution, __defined=defined)

    def __dir__(self) -> list[str]:
        return [*self.__dict__["__defined"]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.__dict__["__defined"]:
            raise AttributeError(name)
        return self.__dict__["__solution"].named(name)


def _library(plan: TestPlan) -> dict[str, Any]:
    """What the tests use of Python without importing it, as if the code's imports were theirs."""
    values: dict[str, Any] = {}
    for name, attributes in plan.code_names.items():
        is_module = name in sys.stdlib_module_names and "" not in attributes
        if is_module or (name in LIBRARY and plan.code_names.keys() - LIBRARY.keys()):
            with contextlib.suppress(ImportError):
                module = importlib.import_module(name if is_module else LIBRARY[name])
                if not is_module or all(hasattr(module, attribute) for attribute in attributes):
                    values[name] = module if is_module else getattr(module, name, module)
    return values


def _run(plan: TestPlan, solution: Solution, verdicts: TextIO, *, as_leetcode: bool) -> None:
    send(verdicts, {"tests": plan.num_tests})
    module = types.ModuleType("__main__")
    sys.modules["tests"] = module
    space = vars(module)
    space.update(_library(plan))
    methods = [node for each in plan.body if isinstance(each, ast.ClassDef) for node in each.body]
    solution.classes, solution.reads_arrays, solution.may_stop = plan.classes, plan.uses_arrays, plan.expects_stop
    solution.closed |= {node.name for node in methods if isinstance(node, Function)}
    space["_type_of_"] = type_of
    defined = solution.names(as_leetcode=as_leetcode)
    for module_name, name in _FOR_BOTH:
        if module_name != "numpy" or plan.uses_arrays:
            _do_in_both(solution, module_name, name)
    names = [name for name in defined if plan.takes(name) and name not in space]
    solution.give(names, space)
    sys.modules["solution"] = code = _Code(solution, {*defined})
    code.__all__ = [*names]  # type: ignore[attr-defined]
    num_asked = solution.num_asked

    def was_asked() -> bool:
        return solution.num_asked > num_asked

    calls = [] if plan.needs_pytest else [ast.parse(f"{name}()").body[0] for name in plan.functions]
    num_lost = 0
    if plan.needs_pytest:
        importlib.import_module("pytest")
    with _without_runners():
        for node in [*plan.body, *calls]:
            solution.has_failed = False
            passed = _passes(node, space, was_asked)
            passed = passed and not solution.has_failed and not solution.is_gone
            if node in plan.statements or node in calls:
                send(verdicts, {"passed": passed})
            elif not passed and isinstance(node, Function | ast.ClassDef):
                num_lost += plan.functions.get(node.name, 0)
    if plan.needs_pytest:
        num_pytest = plan.num_tests - len(plan.statements) - num_lost
        _run_pytest(module, solution, plan.num_tests - num_pytest, verdicts, lambda: num_pytest if was_asked() else 0)


_FOR_BOTH = (("sys", "setrecursionlimit"), ("random", "seed"), ("numpy", "random.seed"))


def _do_in_both(solution: Solution, module: str, name: str) -> None:
    """Make a function that sets something in Python, such as `random.seed`, set it in the code's process too."""
    path, _, last = f"{module}.{name}".rpartition(".")
    owner = importlib.import_module(path)
    here = getattr(owner, last)

    def both(*arguments: Any) -> Any:
        solution.ask("python", module, name, *arguments)
        solution.num_asked -= 1  # none of the code's own has run
        return here(*arguments)

    setattr(owner, last, both)


def _passes(node: ast.stmt, space: dict[str, Any], was_asked: Callable[[], bool]) -> bool:
    try:
        exec(compile(ast.Module([node], []), "tests.py", "exec"), space)
    except (ImportError, OSError) as error:
        # Only what no code had a part in is a fault of the tests: else the code could choose not to be scored.
        if was_asked() or getattr(error, "name", "") == "solution":
            return False
        raise CannotRun(f"line {node.lineno}: the tests cannot be run here: {error}") from error
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


def _run_pytest(
    module: types.ModuleType, solution: Solution, num_others: int, verdicts: TextIO, num_if_broken: Callable[[], int]
) -> None:
    """Let pytest run the functions and classes of a module that has been executed.

    If it cannot collect them, they count as `num_if_broken`.
    """
    import pytest
    from _pytest.fixtures import FixtureLookupError

    def _is_marked(item: Any) -> bool:
        owners = [item.obj, item.cls]
        is_marked = any(mark.name in ("skip", "skipif") for mark in item.iter_markers())
        return is_marked or any(getattr(owner, "__unittest_skip__", False) is True for owner in owners)

    class Executed(pytest.Module):
        def _getobj(self) -> types.ModuleType:
            return module

    class Verdicts:
        marked: set[str] = set()
        failed: set[str] = set()
        skipped: set[str] = set()
        fault = ""

        def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> pytest.Module:
            return Executed.from_parent(parent, path=module_path)

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.marked |= {item.nodeid for item in session.items if _is_marked(item)}
            num_tests = num_if_broken() if session.testsfailed else len(session.items)
            send(verdicts, {"tests": num_others + num_tests})

        def pytest_runtest_logstart(self) -> None:
            solution.has_failed = False

        def pytest_exception_interact(self, call: Any) -> None:
            if isinstance(call.excinfo.value, FixtureLookupError):
                self.fault = f"there is no fixture {call.excinfo.value.argname!r}"

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.skipped and report.nodeid in self.marked:
                self.skipped.add(report.nodeid)
            elif report.failed or (report.skipped and not hasattr(report, "wasxfail")):
                self.failed.add(report.nodeid)

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            if self.fault:
                send(verdicts, {"fault": f"{nodeid.partition('::')[2]}: {self.fault}"})
            is_skipped = nodeid in self.skipped - self.failed
            has_passed = nodeid not in self.failed and not solution.has_failed and not solution.is_gone
            send(verdicts, {"skipped": True} if is_skipped else {"passed": has_passed})

    settings = Path("pytest.ini")
    settings.write_text("[pytest]\n")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", str(settings), "-s", "--tb=no", "--noconftest", "-p", "no:cacheprovider", "-o", "python_classes=*"]
    options += ["-o", "empty_parameter_set_mark=fail_at_collect"]  # the code may have had a part in the parameters
    pytest.main(["tests.py", *options, "--basetemp=tmp"], plugins=[Verdicts()])
