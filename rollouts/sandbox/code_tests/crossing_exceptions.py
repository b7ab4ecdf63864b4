"""Exceptions that cross between two sandboxes by name: a class of Python as itself, one of the code's as one made here.

In: names, arguments, attributes and text of an exception. Out: the exception that the other end raises.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any


class _CodeExit(SystemExit):
    """The code under test wanted to end its process."""


_CLASSES: dict[tuple[str, ...], type[BaseException]] = {}
_RUNNERS = ("unittest", "doctest", "bdb", "pdb")
"""Modules whose exceptions mean something to a test runner."""


def names_of(kind: type[BaseException]) -> list[str]:
    """The names of a class and its bases, for the other end; a name that comes back means this class again."""
    names = [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__[:-1]]
    _CLASSES.setdefault(tuple(names), kind)
    return names


def exception_class(names: tuple[str, ...]) -> type[BaseException]:
    """The class of an exception from a sandbox, whose bases have these names too. Other classes than those of Python
    are made here: the code's own is in its process."""
    if names not in _CLASSES:
        _CLASSES[names] = _python_class(names[0]) or _new_class(names)
    return _CLASSES[names]


def _python_class(name: str) -> type[BaseException] | None:
    module, _, name = name.rpartition(".")
    if name == "SystemExit":
        return _CodeExit
    is_python = module.partition(".")[0] in sys.stdlib_module_names and not module.startswith(_RUNNERS)
    kind = getattr(sys.modules.get(module), name, None) if is_python else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ExceptionGroup):
        return kind
    return None


def _new_class(names: tuple[str, ...]) -> type[BaseException]:
    bases: list[type[BaseException]] = []
    for place in range(1, len(names)):
        kind = exception_class(names[place:]) if not bases else _python_class(names[place])
        if kind is not None and not any(issubclass(base, kind) for base in bases):
            bases.append(kind)
    name, members = names[0].rpartition(".")[2], {"__str__": lambda error: error._text}
    try:
        return type(name, tuple(bases) or (Exception,), members)
    except TypeError:  # they do not go together
        return type(name, (bases[0],), members)


def make_exception(
    kind: type[BaseException], arguments: list[Any], attributes: dict[Any, Any], text: str
) -> BaseException:
    """An exception of the other end: of this class, with its arguments, attributes and text."""
    try:
        error = kind(*arguments)
    except Exception:  # noqa: BLE001 - its own `__init__`, which takes something else
        error = kind.__new__(kind, *arguments)
    vars(error).update({name: value for name, value in attributes.items() if not name.startswith("__")}, _text=text)
    return error


def exception_of(name: str, message: str) -> Exception:
    """An exception from a sandbox: built-in types as they are, others as `RuntimeError` with their name."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind(message)
    return RuntimeError(f"{name}: {message}")
