"""Tests of code as data sets have them: what they consist of, and which names of the code they use.

In: Python source. Out: a `TestPlan`, or the reason why no code could pass them here. `check.py` runs them.

    a top-level statement that asserts, or calls a function of the tests that does     one test
    test… functions without parameters                                                 one test each
    classes, parametrize, fixtures, and all that imports pytest                        pytest collects and runs them
    none of these                                                                      each top-level call is a test

The code's names are what the tests use without defining, importing or finding them in Python. So no name of the code
replaces what they compare with.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollouts.sandbox.code_tests.classes_of_code import Makers, classes_of_code, met_with_data
from rollouts.sandbox.code_tests.unsupported import Function, unsupported

_SET_UPS = ("setup_module", "teardown_module", "setup_function", "teardown_function", "setUpModule", "tearDownModule")
_LATE_SKIPS = ("skipTest", "SkipTest", "importorskip")
LIBRARY = {
    **dict.fromkeys(("isclose", "isnan", "isinf", "inf", "nan", "pi", "sqrt"), "math"),
    **dict.fromkeys(("approx", "raises"), "pytest"),
    **dict.fromkeys(("allclose", "array_equal"), "numpy"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("Any", "Dict", "List", "Optional", "Set", "Tuple", "Union"), "typing"),
    **{"deepcopy": "copy", "Decimal": "decimal", "Fraction": "fractions", "date": "datetime", "timedelta": "datetime"},
    "np": "numpy",
}
"""Names that tests use as if they had imported them → their module."""


class CannotRun(ValueError):
    """Tests that no code can pass here. The message has the line."""


@dataclass(frozen=True)
class TestPlan:
    """What tests consist of."""

    body: list[ast.stmt]
    statements: list[ast.stmt]
    """The statements of `body` that are one test each."""
    functions: dict[str, int]
    """Names of test functions and classes → how many tests each has, at least."""
    needs_pytest: bool
    code_names: dict[str, set[str]]
    """Names that the tests use and do not have → the attributes that they use of them, "" if the name itself."""
    classes: set[str]
    """Names that they use as classes: only objects made by these are asked to compute with plain data."""
    own: set[str]
    """Names that the tests define or import."""
    is_dynamic: bool
    """They also look names up by text."""
    uses_arrays: bool
    """They expect arrays of numpy as such, and not as lists."""
    expects_stop: bool
    """They name `StopIteration`."""

    def takes(self, name: str) -> bool:
        """True if a name of the code's is one that the tests are meant to use."""
        is_python = hasattr(builtins, name) or name in sys.stdlib_module_names or name in LIBRARY
        is_free = name not in self.own and not is_python and not name.startswith("__")
        return name in self.code_names or (self.is_dynamic and is_free)

    @property
    def num_tests(self) -> int:
        """The least number of tests: a parametrized one counts once."""
        return len(self.statements) + sum(self.functions.values())


def read_tests(source: str) -> TestPlan:
    """What the tests consist of. Raises `CannotRun`."""
    try:
        body = ast.parse(source, "tests.py").body
        own, used = _names(table := symtable.symtable(source, "tests.py", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotRun(f"the tests do not parse: {error}") from error
    body = body if "type" in own else [_Types().visit(statement) for statement in body]
    nodes = list(ast.walk(ast.Module(body, [])))
    top = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    if reason := next(unsupported(body, own, bound_at_top=top), ""):
        raise CannotRun(reason)
    _check_choices(nodes)
    helpers = _called_with_arguments(body)  # HumanEval's `check(add)` by another name
    defined = [
        node
        for node in body
        if isinstance(node, Function) and node.name.startswith("test") and node.name not in helpers
    ]
    if late := [node for node in nodes if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test")]:
        raise CannotRun(f"line {late[0].lineno}: {late[0].name} is a coroutine; tests are called, not awaited")
    in_classes = {each.name: num for each in body if isinstance(each, ast.ClassDef) and (num := _num_methods(each))}
    needs_pytest = bool(in_classes) or any(_needs_pytest(node) for node in nodes)
    needs_pytest = needs_pytest or any(ast.unparse(each.args) or each.decorator_list for each in defined)
    asserting = _asserting(body, {node.name for node in defined})
    statements = [node for node in body if not isinstance(node, Function | ast.ClassDef) and _asserts(node, asserting)]
    functions = dict.fromkeys((node.name for node in defined), 1) | in_classes
    if not functions and not statements:
        statements = [node for node in body if isinstance(node, ast.Expr) and _calls_something(node.value)]
    if not functions and not statements:
        raise CannotRun("the tests have no assert, no test function and no call, so there is nothing to pass")
    code_names = {name: _attributes(nodes, name) for name in used - own if not hasattr(builtins, name)}
    is_dynamic = bool(used & {"eval", "exec", "globals", "locals", "vars"})
    if not code_names and not is_dynamic and not any(_module(node) == "solution" for node in nodes):
        raise CannotRun(
            "the tests use no name that the code could define; to test one that Python has, import it from solution"
        )
    given = {"solution", *(code_names.keys() - LIBRARY.keys()), *_imported_from_solution(nodes)}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).partition(".")[0] in given for base in node.bases):
            raise CannotRun(
                f"line {node.lineno}: {node.name} derives from a class of the code, which is in a process of its own"
            )
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    uses_arrays = bool((used | own) & {"np", "numpy"} or attributes & {"shape", "dtype", "ndim", "tolist"})
    makers = Makers(nodes)
    classes = classes_of_code(nodes, makers)
    if reason := next(met_with_data(nodes, makers, classes, given), ""):
        raise CannotRun(reason)
    return TestPlan(
        body,
        statements,
        functions,
        needs_pytest,
        code_names,
        classes,
        own,
        is_dynamic,
        uses_arrays,
        expects_stop="StopIteration" in used,
    )


def _imported_from_solution(nodes: Sequence[ast.AST]) -> set[str]:
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _names(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Names that the tests bind at the top level, and those that they use there or anywhere as global ones."""
    own, used = set(), set()
    is_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
        if is_bound and (is_top or symbol.is_declared_global()):
            own.add(symbol.get_name())
        if symbol.is_referenced() and (is_top or symbol.is_global()):
            used.add(symbol.get_name())
    for child in table.get_children():
        own |= _names(child)[0]
        used |= _names(child)[1]
    return own, {name for name in used if not name.startswith("__")}


def _attributes(nodes: Sequence[ast.AST], name: str) -> set[str]:
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    owners = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in uses]
    return {node.attr for node in owners} | ({""} if len(uses) > len(owners) else set())


def _module(node: ast.AST) -> str | None:
    if isinstance(node, ast.ImportFrom):
        return node.module
    return next((alias.name for alias in node.names), None) if isinstance(node, ast.Import) else None


def check_imports(plan: TestPlan) -> None:
    """Raise `CannotRun` for a package that the tests import and that is not installed."""
    for node in _imports(plan.body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name != "solution" and importlib.util.find_spec(name.partition(".")[0]) is None:
                raise CannotRun(f"line {node.lineno}: the tests import {name}, which is not installed: install it")
    if plan.needs_pytest and importlib.util.find_spec("pytest") is None:
        raise CannotRun("the tests have classes, parameters or fixtures, which pytest runs: `pip install pytest`")


def _imports(body: Sequence[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that the tests cannot do without: not those in `try`."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.Try | ast.expr):
            yield from _imports([*ast.iter_child_nodes(node)])


class _Types(ast.NodeTransformer):
    """`type(x)` and `x.__class__` become what knows the classes of the code."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_type = isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
        return self._type_of(node, node.args[0]) if is_type else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return self._type_of(node, node.value) if node.attr == "__class__" else node

    def _type_of(self, node: ast.expr, value: ast.expr) -> ast.AST:
        function = ast.copy_location(ast.Name("_type_of_", ast.Load()), node)
        return ast.copy_location(ast.Call(function, [value], []), node)


def _check_choices(nodes: Sequence[ast.AST]) -> None:
    """Refuse tests that can count or not, as the code likes."""
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) and _module(node) != "solution"]
    aliases = [alias for node in imports for alias in node.names if alias.name.partition(".")[0] != "solution"]
    libraries = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if ast.unparse(node.value) == "pytest" or name in _LATE_SKIPS:
                pass
            case ast.Name(id=name) | ast.alias(name=name) if name in _LATE_SKIPS:
                pass
            case ast.Call(func=ast.Attribute(attr="skipif" | "skipIf" | "skipUnless" | "xfail" as name)):
                parts = [part for argument in [*node.args, *node.keywords] for part in ast.walk(argument)]
                names = {part.id for part in parts if isinstance(part, ast.Name) and not hasattr(builtins, part.id)}
                if names <= libraries:
                    continue
                name = "skip"
            case _:
                continue
        if name in ("skip", "xfail", *_LATE_SKIPS):
            problem = f"line {getattr(node, 'lineno', 0)}: the tests decide while they run whether one counts"
            raise CannotRun(f"{problem}, so the code could choose: mark it with @pytest.mark.skip, or remove it")


def _needs_pytest(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef) and node.name in _SET_UPS:
        return True
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == "pytest" for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pytest"


def _num_methods(node: ast.ClassDef) -> int:
    return sum(isinstance(method, ast.FunctionDef) and method.name.startswith("test") for method in node.body)


def _called_with_arguments(body: list[ast.stmt]) -> set[str]:
    """Functions that top-level statements call, with arguments."""
    statements = [node for node in body if not isinstance(node, Function | ast.ClassDef)]
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
