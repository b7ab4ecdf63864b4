"""What the installed vLLM takes under `engine.vllm`, read from its source: importing it takes seconds.

In: the arguments of a run file. Out: nothing, or an error for the first that vLLM has not, or whose type or range is
not vLLM's; and for numbers of tokens that do not go together. Other rules between arguments come when an engine starts.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rollouts.chat.tool_parsing import vllm_source
from settings.errors import InvalidInput

_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length")
_ARGUMENTS = "engine/arg_utils.py"
_MOST_CHOICES = 20
"""Names that a sentence can list."""


@dataclass(frozen=True, kw_only=True)
class _Argument:
    """A field of one of vLLM's classes, as its source has it."""

    file: str
    annotation: ast.expr
    default: ast.expr | None


def check_engine_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for a key of `engine.vllm` that the installed vLLM does not take, or for a wrong value.

    What the source does not spell out as a type or a bound passes.
    """
    if not arguments:
        return
    fields = _fields(_ARGUMENTS, "EngineArgs") | _fields(_ARGUMENTS, "AsyncEngineArgs")
    _check_table("engine.vllm", arguments, fields, owner="vLLM's engine")


def check_token_limits(arguments: Mapping[str, Any], *, longest: int) -> None:
    """Raise `InvalidInput` for numbers of tokens that vLLM's `SchedulerConfig` refuses together, with sequences of at
    most `longest` tokens."""
    tokens, sequences = arguments.get("max_num_batched_tokens"), arguments.get("max_num_seqs")
    if tokens and sequences and tokens < sequences:
        raise InvalidInput(
            f"engine.vllm.max_num_batched_tokens = {tokens} is less than engine.vllm.max_num_seqs = {sequences}: each "
            "sequence takes a token; raise the one or lower the other"
        )
    if tokens and tokens < longest and arguments.get("enable_chunked_prefill") is False:
        raise InvalidInput(
            f"engine.vllm.max_num_batched_tokens = {tokens} is less than engine.max_model_len = {longest}, and "
            "engine.vllm.enable_chunked_prefill = false: no long prompt fits; raise the one, lower the other, or leave "
            "the third out"
        )
    if (threshold := arguments.get("long_prefill_token_threshold")) and threshold > longest:
        raise InvalidInput(
            f"engine.vllm.long_prefill_token_threshold = {threshold} is more than engine.max_model_len = {longest}; "
            "lower it"
        )


def _check_table(table: str, values: Mapping[str, Any], fields: Mapping[str, _Argument], *, owner: str) -> None:
    for name, value in values.items() if fields else ():
        key = f"{table}.{name}"
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidInput(f"{key}: {owner} has no such argument{hint}")
        argument = fields[name]
        if isinstance(value, Mapping) and (below := _class_of(argument)):
            file, class_name = below
            _check_table(key, value, _fields(file, class_name), owner=f"vLLM's {class_name}")
            continue
        try:
            TypeAdapter(_type_of(argument.annotation, argument.file)).validate_python(value, strict=True)
            for bounds in _bounds(name, argument) if value is not None else ():
                TypeAdapter(Annotated[Any, Field(**bounds)]).validate_python(value)
        except ValidationError as error:
            wrong = " or ".join(dict.fromkeys(_words(problem, value) for problem in error.errors()))
            raise InvalidInput(f"{key} = {value!r}: vLLM says {wrong}") from None
        except TypeError:
            pass  # a bound for another member of the union, such as numbers for a string
        if isinstance(value, str):
            _check_choice(key, value, argument)


def _check_choice(key: str, value: str, argument: _Argument) -> None:
    """Raise `InvalidInput` for a name that vLLM does not have, of an argument that takes names and any other string.

    The other strings are import paths, and names that a plugin of vLLM's registers.
    """
    names = {name.lower(): name for name in _names_beside_strings(argument)}
    if not names or value.lower() in names or re.search("[.:/]", value) or has_plugins():
        return
    raise InvalidInput(f"{key} = {value!r}: vLLM says {_one_of(list(names.values()), value)}")


def _names_beside_strings(argument: _Argument) -> list[str]:
    """The names in the literals of an argument that takes any string too, or of the field that its default is from."""
    types = [_type_of(member, argument.file) for member in _members(argument.annotation)]
    if str not in types:
        return []
    if (taken := _taken_from(argument)) and (file := _file_of(taken[0], argument.file)):
        field = _fields(file, taken[0]).get(taken[1])
        types += [_type_of(member, file) for member in _members(field.annotation)] if field else []
    literals = [get_args(each)[0] if get_origin(each) is Annotated else each for each in types]
    return [name for each in literals if get_origin(each) is Literal for name in get_args(each) if name]


def _members(annotation: ast.expr) -> list[ast.expr]:
    """The members of a union `a | b`; of anything else itself."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*_members(annotation.left), *_members(annotation.right)]
    return [annotation]


@functools.cache
def has_plugins() -> bool:
    """True if a package beside vLLM registers names of its own."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(not point.value.startswith("vllm.") for point in points)


def _words(problem: ErrorDetails, value: Any) -> str:
    """What is wrong in pydantic's words; of many choices only the nearest."""
    choices = re.findall(r"'(\w+)'", str(problem.get("ctx", {}).get("expected", "")))
    return problem["msg"] if len(choices) <= _MOST_CHOICES else _one_of(choices, value)


def _one_of(choices: Sequence[str], value: Any) -> str:
    if len(choices) <= _MOST_CHOICES:
        return f"Input should be one of {', '.join(map(repr, choices))}"
    nearest = difflib.get_close_matches(str(value), choices, n=3, cutoff=0.3) or choices[:3]
    return f"Input should be one of {len(choices)} names, such as {', '.join(map(repr, nearest))}"


def _fields(file: str, class_name: str) -> dict[str, _Argument]:
    """The fields of a class that `file` defines."""
    return {
        field.target.id: _Argument(file=file, annotation=field.annotation, default=field.value)
        for statement in _source(file)
        if isinstance(statement, ast.ClassDef) and statement.name == class_name
        for field in statement.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _bounds(name: str, argument: _Argument) -> Iterator[dict[str, Any]]:
    """The bounds of a value: in the field itself, in the one that its default is taken from, or where an argument
    without a default is of the same name, as `max_num_seqs` is in `SchedulerConfig`."""
    if taken := _taken_from(argument):
        yield from _bounds_of(*taken, argument.file)
    match argument.default:
        case ast.Call(func=ast.Name(id="Field"), keywords=words):
            bounds = {word.arg: word.value for word in words if word.arg in _BOUNDS}
            yield {key: ast.literal_eval(bound) for key, bound in bounds.items()}
        case ast.Constant(value=None) if argument.file == _ARGUMENTS:
            for owner in ("SchedulerConfig", "CacheConfig", "ParallelConfig"):
                yield from _bounds_of(owner, name, argument.file)


def _taken_from(argument: _Argument) -> tuple[str, str] | None:
    """Class and field that an argument has its default from."""
    match argument.default:
        case ast.Attribute(value=ast.Name(id=owner), attr=field):
            return owner, field
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=owner), ast.Constant(value=str(field))]):
            return owner, field
    return None


def _bounds_of(class_name: str, field: str, file: str) -> Iterator[dict[str, Any]]:
    if (defined_in := _file_of(class_name, file)) and field in (fields := _fields(defined_in, class_name)):
        yield from _bounds(field, fields[field])


def _class_of(argument: _Argument) -> tuple[str, str] | None:
    """File and name of the class of vLLM's configuration that an argument is a table of."""
    for node in ast.walk(argument.annotation):
        if isinstance(node, ast.Name) and node.id.endswith("Config"):
            file = _file_of(node.id, argument.file)
            if file and _fields(file, node.id):
                return file, node.id
    return None


def _type_of(annotation: ast.expr, file: str) -> Any:
    """The type that an annotation names, of builtins and the literals that vLLM's configuration defines; else `Any`."""
    names: dict[str, Any] = {"Any": Any, "Literal": Literal, "set": list}  # a run file has no sets
    for name in {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} - names.keys():
        if not hasattr(builtins, name):
            names[name] = _named_type(name, file)
    try:
        return Any if isinstance(annotation, ast.Constant) else eval(_compiled(annotation), {}, names)
    except Exception:  # noqa: BLE001 - what is no plain type is not checked
        return Any


def _compiled(expression: ast.expr) -> Any:
    return compile(ast.Expression(expression), "vllm", "eval")


def _named_type(name: str, file: str) -> Any:
    """What `file` calls `name`, if it is a `Literal` of vLLM's configuration, or a table of it; else `Any`."""
    defined_in = _file_of(name, file)
    for statement in _source(defined_in) if defined_in else ():
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return dict if name.endswith("Config") else _enumeration(statement)
        match statement:
            case ast.Assign(targets=[ast.Name(id=assigned)], value=ast.Subscript() as value) if assigned == name:
                return _type_of(value, defined_in)
    return Any


def _enumeration(defined: ast.ClassDef) -> Any:
    """The names of an enumeration's members, in any case, and its numbers: vLLM takes both. Of another class `Any`."""
    if not any("Enum" in ast.unparse(parent) for parent in defined.bases):
        return Any
    members = [line for line in defined.body if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)]
    names = tuple(ast.unparse(member.targets[0]) for member in members)
    numbers = tuple(
        member.value.value
        for member in members
        if isinstance(member.value, ast.Constant) and isinstance(member.value.value, int)
    )
    upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
    return Annotated[Literal[(*names, *numbers, "AUTO", None)], upper]


def _file_of(name: str, file: str) -> str:
    """The file of vLLM that defines what `file` calls `name`; empty if there is none."""
    for statement in _source(file):
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return file
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in statement.targets
        ):
            return file
        if isinstance(statement, ast.ImportFrom) and name in [alias.name for alias in statement.names]:
            package, _, module = (statement.module or "").partition(".")
            if package != "vllm":
                return ""
            return _file_of(name, "config/__init__.py" if module == "config" else f"{module.replace('.', '/')}.py")
    return ""


@functools.cache
def _source(file: str) -> list[ast.stmt]:
    """The statements of a file, those for type checkers in the place of the condition."""
    return [part for line in vllm_source(file) for part in (line.body if _is_for_types(line) else [line])]


def _is_for_types(line: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(line, ast.If) and ast.unparse(line.test) == "TYPE_CHECKING"
