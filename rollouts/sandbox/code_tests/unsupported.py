"""What tests use that has no effect on code in another process, or does not reach it.

In: tests, parsed. Out: sentences that name the line, for `plan.py` to refuse the tests with.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_FILES = "neither opens the files of the other"
_REPLACED = "what the tests replace is not replaced there"
_SEEN = "what it consists of is not seen here"
_IN_ONE_PROCESS = {
    "caplog": "what it logs is not seen by the tests",
    "recwarn": "what it warns of is not seen by the tests",
    **dict.fromkeys(("monkeypatch", "mocker", "mock", "unittest.mock"), _REPLACED),
    **dict.fromkeys(("tmp_path", "tmpdir", "tmp_path_factory", "tmpdir_factory"), _FILES),
}
"""Fixtures and modules that have an effect within one process only → why they have none on the code under test."""
_NOT_ACROSS = {
    **dict.fromkeys(("asyncio", "anyio", "trio"), "its coroutines cannot be awaited here"),
    **dict.fromkeys(("inspect", "dis", "vars", "typing.get_type_hints"), _SEEN),
    **dict.fromkeys(("types.GeneratorType", "types.FunctionType", "types.LambdaType", "types.MethodType"), _SEEN),
    **dict.fromkeys(
        ("__doc__", "__annotations__", "__code__", "__defaults__", "__dict__", "__mro__", "__bases__"), _SEEN
    ),
    **dict.fromkeys((f"dataclasses.{name}" for name in ("asdict", "astuple", "fields", "is_dataclass")), _SEEN),
    **dict.fromkeys(("tempfile", "pyfakefs", "shutil", "glob", "zipfile", "tarfile", "open", "io.open"), _FILES),
    **dict.fromkeys(("subprocess", "multiprocessing", "runpy"), "no process can be started here"),
    **dict.fromkeys(("pytest.warns", "pytest.deprecated_call"), "what it warns of is not seen by the tests"),
    **dict.fromkeys(("self.assertWarns", "self.assertWarnsRegex"), "what it warns of is not seen by the tests"),
    **dict.fromkeys(("self.assertLogs", "self.assertNoLogs"), "what it logs is not seen by the tests"),
    **dict.fromkeys(
        ("pandas", "pd", "polars", "pyarrow", "xarray", "torch", "tensorflow", "jax", "sympy", "networkx", "PIL")
        + ("sqlite3",),
        "objects of this library do not reach it",
    ),
}
"""Modules, names and attributes that tests use for what does not cross → why it does not."""
_FILE_METHODS = (
    "exists is_file is_dir stat read_text read_bytes write_text write_bytes open mkdir rmdir touch unlink iterdir rglob"
)
_TEXT_OF_PATHS = (
    "path sep linesep fspath PathLike join basename dirname split splitext normpath isabs commonprefix commonpath "
    "abspath realpath relpath pardir curdir extsep pathsep name"
)
"""What is in `os` and `os.path` for which it does not matter whose files and environment it sees."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def unsupported(body: list[ast.stmt], own: set[str], *, bound_at_top: set[str]) -> Iterator[str]:
    """A sentence for each such use, with its line and the reason. `own` are the names that the tests bind anywhere."""
    nodes = [node for statement in body if not _sets_path(statement) for node in ast.walk(statement)]
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules = {"sys", "builtins", "solution", *((each.asname or each.name).partition(".")[0] for each in imports)}
    functions = {node.name for node in nodes if isinstance(node, Function)}
    has_paths = bool({"Path", "pathlib"} & own)
    for node in nodes:
        for name, reason in _uses(node, own, modules, functions, has_paths=has_paths):
            why = f"the code under test runs in a process of its own, and {reason}"
            yield f"line {getattr(node, 'lineno', 0)}: the tests use {name}: {why}; compare what functions return"
        if isinstance(node, Function):
            yield from _bound_globals(node, bound_at_top)


def _sets_path(statement: ast.stmt) -> bool:
    """True for `sys.path.insert(…)`, which is without effect here."""
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("sys.path.")


def _uses(
    node: ast.AST, own: set[str], modules: set[str], functions: set[str], *, has_paths: bool
) -> Iterator[tuple[str, str]]:
    """What a node uses that has no effect across processes, and why; `functions` are those of the tests."""
    names: list[str] = []
    reasons = _NOT_ACROSS
    match node:
        case ast.arg(arg=name):
            names, reasons = [name], _IN_ONE_PROCESS
        case ast.ImportFrom(module="os" | "os.path", names=aliases):
            yield from ((f"os.{each.name}", _FILES) for each in aliases if each.name not in _TEXT_OF_PATHS.split())
        case ast.ImportFrom(module="unittest" | "unittest.mock" as module, names=aliases):
            names, reasons = [str(module), *(each.name for each in aliases)], _IN_ONE_PROCESS
        case ast.ImportFrom(module=str(module), names=aliases):
            names = [module.partition(".")[0], *(f"{module}.{each.name}" for each in aliases)]
        case ast.Import(names=[ast.alias(name="unittest.mock" | "mock" as name)]):
            names, reasons = [name], _IN_ONE_PROCESS
        case ast.Import(names=aliases):
            names = [each.name.partition(".")[0] for each in aliases]
        case ast.Name(id="pd" | "open" | "vars" as name) if name == "pd" or name not in own:
            names = [name]
        case ast.Call(func=function, keywords=[ast.keyword(arg="record")]) if "catch_warnings" in ast.unparse(function):
            yield "catch_warnings", "what it warns of is not seen by the tests"
        case ast.Attribute(attr=name):
            names = [name] if name.startswith("__") else [ast.unparse(node)]
            owner = ast.unparse(node.value)
            if owner in ("os", "os.path") and name not in _TEXT_OF_PATHS.split():
                yield f"{owner}.{name}", "it has files and an environment of its own"
            if has_paths and name in _FILE_METHODS.split():
                yield name, _FILES
        case ast.Assign(targets=targets, value=value):
            is_function = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr not in ("stdout", "stderr"):
                    owner = ast.unparse(target.value)
                    if owner in modules or (is_function and owner[:1].isupper() and owner not in own):
                        yield owner, _REPLACED
    yield from ((name, reasons[name]) for name in names if name in reasons)


def _bound_globals(function: Function, bound_at_top: set[str]) -> Iterator[str]:
    """`global count; count = 0` may mean the code's; what the code has returned or made does not."""
    parts = list(ast.walk(function))
    declared = {name for part in parts if isinstance(part, ast.Global) for name in part.names} - bound_at_top
    for part in parts:
        if isinstance(part, ast.Assign) and not any(isinstance(each, ast.Call) for each in ast.walk(part.value)):
            for name in {ast.unparse(target) for target in part.targets} & declared:
                problem = f"line {part.lineno}: the tests bind the global {name} in a function"
                yield f"{problem}, where it could be one of the code's: bind it at the top if it is not"
