"""User code by import path: `package.module:Name` or `path/to/file.py:Name`.

In: such a path. Out: the object. And back: a path under which a child process finds the same object; and a digest of
the code behind it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from settings.errors import InvalidInput, NotFound, path_errors
from storage.objects.digests import sha256_of_file, sha256_of_json


def load_object(path: str) -> Any:
    """Import what `path` names.

    A module may lie in the working directory, which is first in `sys.path` from here on: a console script has it not.
    Raises `ValueError` with the fix when the form is wrong, the module or the name is missing, or the code does not
    parse; what else the code raises rises.
    """
    module_path, _, name = path.rpartition(":")
    is_file = module_path.endswith(".py")
    if not module_path or not name or (module_path.startswith(".") and not is_file):
        raise InvalidInput(f"{path!r} is not an import path; write package.module:Name or path/to/file.py:Name")
    try:
        module = _load_file(Path(module_path)) if is_file else _load_module(module_path)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise InvalidInput(f"{path!r} cannot be imported: {error}; run from the folder that holds it") from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else module_path
        raise InvalidInput(f"{path!r} cannot be imported: {error.msg} in {where}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidInput(f"{module_path} has no {name!r}; it has {_public_names(module)}")
        found = getattr(found, part)
    return found


def absolute_path(path: str) -> str:
    """The same import path for a process with another working directory."""
    module_path, _, name = path.rpartition(":")
    return f"{Path(module_path).resolve()}:{name}" if module_path.endswith(".py") else path


def path_of(target: Any) -> str:
    """The import path under which another process can load a module-level function or class."""
    module = sys.modules[target.__module__]
    file = getattr(module, "__millrace_file__", None)
    return f"{file or target.__module__}:{target.__qualname__}"


def source_file(target: Any) -> Path:
    """The file a function or class is written in. Raises `ValueError` where there is none."""
    file = _source_file(target)
    if file is None:
        raise InvalidInput(f"{target!r} has no source file; define it in a module or a file")
    return file


def source_sha256(path: str) -> str:
    """Digest of the code behind the import path of a workflow: its file, and those of the functions its module has.

    Functions of Python itself and of installed packages do not count: the lock names their versions. Equal code has
    equal digests wherever it lies. Raises what `load_object` raises.
    """
    target = load_object(path)
    functions = [value for value in vars(sys.modules[target.__module__]).values() if inspect.isfunction(value)]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    files = {source_file(target)} | {
        file
        for function in functions
        if (file := _source_file(function)) and not any(file.is_relative_to(folder) for folder in installed)
    }
    return sha256_of_json(sorted(sha256_of_file(file) for file in files))


def _source_file(target: Any) -> Path | None:
    try:
        file = inspect.getsourcefile(target)
    except TypeError:  # built into Python
        return None
    return Path(file).resolve() if file else None


def _load_module(name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    path = path.resolve()
    with path_errors(f"{path} cannot be imported"):
        if not path.exists():
            raise NotFound(f"no file {path}")
        path.open("rb").close()  # what its own code opens is another matter
    name = f"millrace_file_{path.stem}_{abs(hash(str(path)))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__millrace_file__ = str(path)  # type: ignore[attr-defined]
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # half a module would hide the error from the next call
            raise
    return sys.modules[name]


def _public_names(module: Any) -> str:
    """The classes and functions that a module itself defines."""
    names = [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return ", ".join(sorted(names)) or "no classes or functions"
