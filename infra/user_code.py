"""User code by import path: `package.module:Name` or `path/to/file.py:Name`.

In: such a path. Out: the object. And back: a path under which a child process finds the same object; and a digest of
the code behind it. At the end: how our own packages and the user's modules are kept apart.

A file is the module that Python makes of it: `my/env.py` is `env`, and imports what lies beside it. In a package it is
`package.env`, and relative imports work. If another file or a library has that name, it gets one of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any

from settings.errors import OWN_PACKAGES, InvalidInput, failure_text, path_errors, place_of
from storage.objects.digests import sha256_of_file, sha256_of_json

PRODUCT = Path(__file__).resolve().parents[1]
"""The folder of our packages."""
MOVED = {"rollouts.verifiers_environments:VerifiersWorkflow": "millrace:VerifiersWorkflow"}
"""Import paths that recorded runs have in their configuration, and where the object is now."""
_FOLDERS: set[str] = set()
"""Folders that `load_object` has put into `sys.path`, of files; another process does not have them."""


def load_object(path: str) -> Any:
    """Import what `path` names. A module may lie in the working directory, which is in `sys.path` from here on.

    Raises `InvalidInput` with the fix if the form is wrong, the module, the name or something that it imports is
    missing, or the code does not parse or ends the process; other errors of the code rise.
    """
    module_path, _, name = MOVED.get(path, path).rpartition(":")
    is_file = module_path.endswith(".py") and ":" not in module_path
    is_module = not (":" in module_path or module_path.startswith(".") or os.path.isfile(module_path))
    if not module_path or not name or not (is_file or is_module):
        raise InvalidInput(f"{path!r} is not an import path; write package.module:Name or path/to/file.py:Name")
    try:
        module = _load_file(Path(module_path)) if is_file else _load_module(module_path)
    except (ImportError, FileNotFoundError) as error:
        if advice := _advice(getattr(error, "name", None), Path(module_path).parent):
            raise InvalidInput(f"{path!r} cannot be imported: {error}{_place(error)}; {advice}") from error
        if not isinstance(error, ModuleNotFoundError | FileNotFoundError):
            raise
        is_theirs = isinstance(error, ModuleNotFoundError) and not f"{module_path}.".startswith(f"{error.name}.")
        place = f" at {place_of(failure_text(error))}" if is_theirs else ""
        raise InvalidInput(
            f"{path!r} cannot be imported: {error}{place}; run from the folder that holds it"
            + (", or install it" if is_theirs else "")
        ) from error
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.filename else module_path
        raise InvalidInput(f"{path!r} cannot be imported: {error.msg} in {place}") from error
    except SystemExit as error:
        raise InvalidInput(
            f"{path!r} cannot be imported: its module ends with SystemExit({error.code!r}) at "
            f"{place_of(failure_text(error))}; put what a script does below `if __name__ == '__main__':`"
        ) from error
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            advice = _advice(module_path, Path()) or f"it has {_public_names(module)}"
            raise InvalidInput(f"{module_path} has no {name!r}; {advice}")
        target = getattr(target, part)
    return target


def absolute_path(path: str) -> str:
    """The same import path for a process with another working directory."""
    module_path, _, name = path.rpartition(":")
    return f"{Path(module_path).resolve()}:{name}" if module_path.endswith(".py") else path


def path_of(target: Any) -> str:
    """The import path under which another process can load a module-level function or class."""
    file = ""
    with contextlib.suppress(InvalidInput):
        file = str(source_file(inspect.unwrap(target)))
    is_beside_a_file = any(Path(file).is_relative_to(folder) for folder in _FOLDERS) and not _is_installed(file)
    return f"{file if is_beside_a_file else target.__module__}:{target.__qualname__}"


def source_file(target: Any) -> Path:
    """The file a function or class is written in. Raises `InvalidInput` if there is none."""
    with contextlib.suppress(TypeError):  # built into Python
        if (file := inspect.getsourcefile(target)) and os.path.isfile(file):  # `importlib.util` is frozen, without one
            return Path(file).resolve()
    raise InvalidInput(f"{target!r} has no source file; define it in a module or a file")


def source_sha256(path: str) -> str:
    """Digest of a workflow's code: its file, and those of the functions its module has, wherever they lie.

    Functions of Python and of installed packages do not count: the lock names their versions. Raises as `load_object`.
    """
    target = load_object(path)
    files = {source_file(target)}
    for function in filter(inspect.isfunction, vars(sys.modules[target.__module__]).values()):
        with contextlib.suppress(InvalidInput):  # a function made by `exec` has no file
            file = source_file(function)
            if not _is_installed(file):
                files.add(file)
    return sha256_of_json(sorted(sha256_of_file(file) for file in files))


def _is_installed(file: str | Path) -> bool:
    """True for a file of Python or of an installed package."""
    return any(Path(file).is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))


def _load_module(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        put_into_path()
    is_new = name not in sys.modules
    module = importlib.import_module(name)
    if is_new:
        _refuse_shadowed(Path(folder))
    return module


def _load_file(path: Path) -> Any:
    path = path.resolve()
    with path_errors(f"{path} cannot be imported"):
        if not path.exists():
            raise InvalidInput(
                f"{str(path)!r} cannot be imported: no file {path}; paths in a run file are relative to it, all others "
                "to the current folder. If the folder of a recorded run was moved, stand in the new one"
            )
        path.open("rb").close()  # what its own code opens is another matter
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").exists() and root != root.parent:
        root, names = root.parent, [root.name, *names]
    for folder in dict.fromkeys([path.parent, root]):
        if not PRODUCT.is_relative_to(folder):  # every process finds what is in ours
            _FOLDERS.add(str(folder))
        if str(folder) not in sys.path:
            put_into_path(folder)
    name = ".".join(names)
    if _is_taken(names, root):
        name = ".".join([f"millrace_file_{names[0]}_{abs(hash(str(root)))}", *names[1:]])
        if len(names) > 1 and name.partition(".")[0] not in sys.modules:
            _execute(name.partition(".")[0], root / names[0] / "__init__.py", is_package=True)
    if name not in sys.modules:
        with _siblings(path.parent):
            if len(names) > 1:
                importlib.import_module(name)
            else:
                _execute(name, path)
        _refuse_shadowed(path.parent)
    return sys.modules[name]


def put_into_path(folder: Path | None = None) -> None:
    """Put a folder, by default the current one, before installed packages and other folders of files, and behind
    Python's own modules: a `json.py` beside a file must not be the `json` of the processes that are given this path."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_config_var("DESTSHARED")}
    place = max((place + 1 for place, entry in enumerate(sys.path) if entry in own), default=0)
    sys.path.insert(place, str(folder or Path.cwd()))


def _is_taken(names: list[str], root: Path) -> bool:
    """True if the module `names` is another than the one that lies in `root`, or would hide a library."""
    top, place = names[0], root / names[0]
    if root == PRODUCT and len(names) > 1:
        return False
    if any("." in name for name in names) or top in sys.builtin_module_names or top in OWN_PACKAGES:
        return True
    if (module := sys.modules.get(top)) is not None:
        file = Path(str(getattr(module, "__file__", ""))).resolve()
        return file not in (place.with_suffix(".py"), place / "__init__.py")
    spec = PathFinder.find_spec(top, [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")])
    return spec is not None


def _execute(name: str, path: Path, *, is_package: bool = False) -> None:
    places = [str(path.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module would hide the error from the next call
        raise


@contextlib.contextmanager
def _siblings(folder: Path) -> Iterator[None]:
    """Imports inside this context find the modules of `folder`, although other files of their names are loaded."""
    beside = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()}
    beside -= set(OWN_PACKAGES)  # ours stay, and theirs is refused
    others = {}
    for name in [name for name in sys.modules if name.partition(".")[0] in beside]:  # of thousands: paths are slow
        file = Path(str(getattr(sys.modules[name], "__file__", None) or "/")).resolve()
        of_files = any(file.is_relative_to(other) for other in _FOLDERS) and not _is_installed(file)
        if of_files and not file.is_relative_to(folder):
            others[name] = sys.modules.pop(name)
    path = sys.path.copy()
    if others:
        put_into_path(folder)
    try:
        yield
    finally:
        sys.modules.update(others)
        if others:
            sys.path[:] = path


def _public_names(module: Any) -> str:
    """The classes and functions that a module itself defines."""
    defined = {name: value for name, value in vars(module).items() if isinstance(value, type | FunctionType)}
    names = [name for name, value in defined.items() if value.__module__ == module.__name__ and name[0] != "_"]
    return ", ".join(sorted(names)) or "no classes or functions"


# --- packages of ours, and files of the user's with the name of one


def own_command(start: str) -> list[str]:
    """The command of a Python process that calls `start` (`package.module:function`, one of ours).

    Its `sys.path` has the working directory before installed packages, but behind Python's own modules; and our own
    imports find our packages.
    """
    module, _, name = start.partition(":")
    code = f"import sys; sys.path.insert(0, {str(PRODUCT)!r}); import millrace; sys.path.pop(0)"
    code += "; from infra.user_code import put_into_path; put_into_path()"
    return [sys.executable, "-P", "-c", f"{code}; from {module} import {name}; {name}()"]


@contextlib.contextmanager
def own_packages_first() -> Iterator[None]:
    """Processes that multiprocessing spawns meanwhile look for modules in our folder first."""
    sys.path.insert(0, str(PRODUCT))
    try:
        yield
    finally:
        sys.path.remove(str(PRODUCT))


def _advice(module: str | None, folder: Path) -> str:
    """What to do about something that a module of ours does not have; empty for a module that is not ours."""
    package = (module or "").partition(".")[0]
    if package not in OWN_PACKAGES:
        return ""
    if user_file := _shadowed(package, folder):
        return _rename(user_file)
    return "import it from `millrace`, whose names docs/api.md lists"


def _refuse_shadowed(folder: Path) -> None:
    """Raise `InvalidInput` if user code has imported a package of ours while the user's own file has its name."""
    for package in OWN_PACKAGES:
        user_file, own_module = _shadowed(package, folder), sys.modules.get(package)
        if user_file is None or own_module is None:
            continue
        for module in list(sys.modules.values()):
            file = Path(str(getattr(module, "__file__", "")))
            if file.is_relative_to(user_file.parent) and any(value is own_module for value in vars(module).values()):
                raise InvalidInput(f"{file} imports {package!r}; {_rename(user_file)}")


def _rename(user_file: Path) -> str:
    new_name = f"my_{user_file.name}"
    return f"{user_file} has the name of a package of Millrace, which is found first: rename it, to {new_name} say"


def _shadowed(package: str, folder: Path) -> Path | None:
    """The user's file or folder that our package hides: in `folder`, or on `sys.path` before ours; None without one."""
    path = [str(Path(entry).resolve()) for entry in (str(folder), *sys.path)]
    path = list(itertools.takewhile(lambda entry: entry != str(PRODUCT), path))
    if (spec := PathFinder.find_spec(package, path)) is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(str(spec.origin))
    place = Path(next(iter(spec.submodule_search_locations)))
    return place if any(place.glob("*.py")) else None  # else it is a folder of data


def _place(error: Exception) -> str:
    """` in FILE, line N`, where user code raised the error; empty if it did not."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    frames = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    return f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
