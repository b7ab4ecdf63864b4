"""The architecture as a test: who may import whom, which library lives where, and what an import may cost."""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "benchmarks",
    "cli",
    "examples",
    "flows",
    "infra",
    "millrace",
    "rollouts",
    "settings",
    "storage",
    "tasks",
    "trainers",
)
FACE = "millrace/__init__.py"
"""The `__init__.py` with the names that users import."""
BEFORE_PREFECT = "flows/__init__.py"
"""Turns telemetry off before a flow's import of Prefect reads the environment."""
MAY_USE_ANY_LIBRARY = ("cli", "benchmarks")  # the command talks to Prefect's client; benchmarks measure everything

LIBRARY_EXCEPTIONS = {
    ("rollouts/chat/chat_tokens.py", "transformers"),  # the tokenizer is half of the model; loaded lazily
    ("infra/weight_broadcast.py", "torch"),  # both ends of one wire: a trainer, and vLLM's workers; loaded lazily
    ("rollouts/engines/vllm/fixed_order.py", "torch"),  # as the next but one
    ("rollouts/engines/vllm/repairs.py", "torch"),  # as the next one
    ("rollouts/engines/vllm/worker_extension.py", "torch"),  # it runs inside vLLM's worker; loaded lazily
    ("infra/services/prefect_server.py", "uvicorn"),  # it is Prefect's server
    ("storage/objects/tensor_digests.py", "torch"),  # what both of those, and vLLM's workers, hold; loaded lazily
    ("trainers/data/samples.py", "pyarrow"),  # a table straight into arrays, without a copy through Python lists
    # The search agent's retrieval server and program are programs of their own, which no process of a run imports.
    ("examples/search_agent/program.py", "openai"),
    ("examples/search_agent/retrieval/index.py", "lancedb"),
    ("examples/search_agent/retrieval/index.py", "pyarrow"),
    ("examples/search_agent/retrieval/ranking.py", "torch"),  # numpy multiplies in float32 only
    ("examples/search_agent/retrieval/server.py", "fastapi"),
    ("examples/search_agent/retrieval/server.py", "uvicorn"),
    ("examples/search_agent/retrieval/server.py", "typer"),
    ("examples/search_agent/retrieval/server.py", "rich"),
}

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAY_PICKLE = {"benchmarks/shards.py"}  # shards are measured against it, on a file it has just written itself
VAGUE_FILES = {"base", "common", "core", "misc"}
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager"}
MOST_LINES = 430
MOST_SIBLINGS = 12
MORE_SIBLINGS = {
    "tasks": 15,
    "trainers/model": 15,
    "settings": 15,
    "benchmarks": 32,
}
"""Rooms where splitting would lie. The last two hold programs that nothing imports, side by side."""


@functools.cache
def _files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


class _Source(NamedTuple):
    """What the tests ask of a file, so that each is parsed once."""

    imports: list[str]
    """Dotted names of every imported module, in functions and under `if` too."""
    classes: list[str]
    of_torch: list[str]
    """Names that are looked up in `torch`."""


@functools.cache
def _source(file: Path) -> _Source:
    source = _Source([], [], [])
    for node in ast.walk(ast.parse((ROOT / file).read_text(), filename=str(file))):
        match node:
            case ast.Import():
                source.imports.extend(alias.name for alias in node.names)
            case ast.ImportFrom(module=module, level=level):
                assert level == 0 and module, f"{file}:{node.lineno} imports relatively; write the whole path"
                # `from storage import records` names a module too.
                source.imports.extend(f"{module}.{a.name}" if module in PRODUCT else module for a in node.names)
            case ast.ClassDef(name=name):
                source.classes.append(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                source.of_torch.append(name)
    return source


def _room(name: str) -> str:
    """The room of a file (`storage/log/runs.py`) or of a dotted module of ours."""
    return (name if name.endswith(".py") else name.replace(".", "/")).rpartition("/")[0] or name


def _modules() -> dict[str, Path]:
    return {
        str(file.with_suffix("")).replace("/", ".").removesuffix(".__init__"): file
        for file in _files()
        if file.name != "__init__.py" or str(file) == FACE
    }


@functools.cache
def _import_graph() -> dict[str, set[str]]:
    """Dotted modules of ours → those of ours that they import."""
    modules = _modules()
    return {
        name: {
            known
            for module in _source(file).imports
            for known in (module, module.rpartition(".")[0])  # the last part may be a name in the module
            if known in modules and known != name
        }
        for name, file in modules.items()
    }


def _table() -> dict[str, tuple[str, set[str]]]:
    """Rooms of docs/architecture.md → what they may import, as it stands there, and the libraries that live there."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(
        r"^\| `([\w/]+)` \| (.*?) ?\| (.*?) ?\|$", text[text.index("## Who may import whom") :], flags=re.M
    )
    return {room: (allowed, set(libraries.split(", ")) - {""}) for room, allowed, libraries in rows}


def _may_import(allowed: str, room: str) -> bool:
    named = re.findall(r"`([\w/]+(?:/\*)?)`", allowed)
    listed = room in named or (f"{room.split('/')[0]}/*" in named and "/" in room)
    return not listed if allowed.startswith("anything") else listed


def _circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of nodes that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            fresh = graph.get(waiting.pop(), set()) - seen
            seen |= fresh
            waiting += fresh
        reached[start] = seen
    return sorted(
        {tuple(sorted({a} | {b for b in reached[a] if a in reached.get(b, ())})) for a in graph if a in reached[a]}
    )


def test_the_table_of_the_architecture_has_every_room_and_no_other():
    assert set(_table()) == {_room(str(file)) for file in _modules().values()}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(PRODUCT)


def test_rooms_import_only_what_the_table_allows():
    table = _table()
    broken = [
        f"{name} imports {other}"
        for name, imported in _import_graph().items()
        for other in imported
        if _room(other) != _room(name)
        and not _room(other).startswith("settings")
        and not _may_import(table[_room(name)][0], _room(other))
    ]
    assert not broken, "\n".join(broken)


def test_the_table_allows_nothing_that_no_module_does():
    used: dict[str, set[str]] = {}
    for name, imported in _import_graph().items():
        used.setdefault(_room(name), set()).update(_room(other) for other in imported)
    idle = [
        f"{room} → {named}"
        for room, (allowed, _) in _table().items()
        if not allowed.startswith("anything")
        for named in re.findall(r"`([\w/]+)`", allowed)
        if named not in used.get(room, ())
    ]
    assert not idle, idle


def test_imports_make_no_circle():
    """Neither between modules, not even within a function or a folder, nor between rooms."""
    graph = _import_graph()
    assert not _circles(graph)
    rooms: dict[str, set[str]] = {}
    for name, imported in graph.items():
        rooms.setdefault(_room(name), set()).update({_room(other) for other in imported} - {_room(name)})
    assert not _circles(rooms)


def test_circles_are_found():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [("b", "c")]


def test_rooms_are_small_enough_to_be_seen_at_a_glance():
    counts = collections.Counter(_room(str(file)) for file in _modules().values())
    assert not {room: n for room, n in counts.items() if n > MORE_SIBLINGS.get(room, MOST_SIBLINGS)}


def test_only_workers_reach_past_the_records_into_the_store():
    """Everything else in rollouts/ and trainers/ runs on records and arrays, without a store or a log."""
    durable = {
        "storage.log.run_log",
        "storage.log.runs",
        "storage.shards.shards",
        "storage.objects.object_store",
        "storage.tracking.registry",
    }
    durable |= {"storage.shards.reward_sets", "storage.policies.policies"}
    reaching = {
        str(file)
        for file in _files()
        if file.parts[0] in ("rollouts", "trainers") and durable.intersection(_source(file).imports)
    }
    # A replay and a rescore start from what is committed, as the workers do.
    replaying = {"trainers/run_trainer.py", "trainers/replay.py", "rollouts/rewards/rescoring.py"}
    workers = {
        "rollouts/production/worker.py",
        "rollouts/engines/served_policy.py",
        "rollouts/production/leases.py",
        "rollouts/production/head_start.py",
        "trainers/worker.py",
    }
    assert reaching <= workers | replaying


def test_examples_import_nothing_of_ours_but_the_public_face():
    used = {
        module.split(".")[0] for file in _files() if file.parts[0] == "examples" for module in _source(file).imports
    }
    assert used & set(PRODUCT) == {"examples", "millrace"}


def test_each_library_lives_in_its_rooms():
    rooms = {room: libraries for room, (_, libraries) in _table().items()}
    at_home = set().union(*rooms.values())
    broken = [
        f"{file} imports {module}, which docs/architecture.md has in other rooms"
        for file in _files()
        for module in _source(file).imports
        if (library := module.split(".")[0]) in at_home
        and library not in rooms[_room(str(file))]
        and file.parts[0] not in MAY_USE_ANY_LIBRARY
        and (str(file), library) not in LIBRARY_EXCEPTIONS
    ]
    assert not broken, "\n".join(broken)


def test_no_exception_outlives_its_reason():
    used = {(str(file), module.split(".")[0]) for file in _files() for module in _source(file).imports}
    assert used >= LIBRARY_EXCEPTIONS


def test_nothing_is_pickled():
    importing = {str(file): m for file in _files() for m in _source(file).imports if m.split(".")[0] in PICKLES}
    assert importing.keys() == MAY_PICKLE, importing
    assert not [file for file in _files() if {"save", "load"}.intersection(_source(file).of_torch)]


def test_init_files_are_empty():
    inits = [file for file in _files() if file.name == "__init__.py"]
    assert {str(file.parent) for file in inits} == {_room(str(file)) for file in _modules().values()}
    assert [str(file) for file in inits if (ROOT / file).read_text()] == [BEFORE_PREFECT, FACE]


def test_file_names_collide_with_nothing():
    names = {file.stem: str(file) for file in _files() if file.name != "__init__.py"}
    assert not names.keys() & set(PRODUCT), "named like a top-level folder"
    assert not names.keys() & sys.stdlib_module_names, "named like one of Python's own modules"


def test_names_say_what_they_hold():
    for file in _files():
        assert not VAGUE_FILES & set(file.with_suffix("").parts), file
        assert not VAGUE_WORDS & {word for name in file.with_suffix("").parts for word in name.split("_")}, file
        assert not [c for c in _source(file).classes if c.lower().endswith(tuple(VAGUE_WORDS))], file


def test_files_stay_readable():
    lines = {str(file): len((ROOT / file).read_text().splitlines()) for file in _files()}
    too_long = {file: count for file, count in lines.items() if count > MOST_LINES}
    assert not too_long, f"look for the missing noun in {too_long}"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("flows.train_grpo", ["torch", "vllm", "mlflow", "ray"]),
        (
            "storage.log.runs, storage.shards.shards, storage.log.claims, storage.tracking.registry",
            ["torch", "vllm", "mlflow", "lancedb"],
        ),
        ("rollouts.production.worker", ["torch", "vllm", "transformers"]),
        ("millrace", ["torch", "vllm", "mlflow", "ray", "duckdb", "pydantic", "rollouts.workflow"]),
    ],
)
def test_importing_is_free(modules: str, forbidden: list[str]):
    code = f"import sys, {modules}; print([m for m in {forbidden} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
