"""The architecture as a test: who may import whom, which library lives where, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("benchmarks", "cli", "examples", "flows", "infra", "rollouts", "storage", "tasks", "trainers")
ANYTHING = set(PRODUCT)

MAY_IMPORT = {
    "flows": {"flows", "tasks"},  # and config modules: see below
    "tasks": {"tasks", "rollouts", "trainers", "storage", "infra"},
    "rollouts": {"rollouts", "storage"},
    "storage": {"storage"},
    "trainers": {"trainers", "storage"},
    "infra": {"infra"},
    "cli": ANYTHING,
    "examples": {"examples", "rollouts", "storage"},
    "benchmarks": ANYTHING,
}

LIVES_IN = {
    "prefect": {"flows", "tasks"},
    "vllm": {"rollouts"},
    "fastapi": {"rollouts"},
    "uvicorn": {"rollouts"},
    "openai": {"rollouts"},
    "verifiers": {"rollouts"},
    "pyarrow": {"storage"},
    "fsspec": {"storage"},
    "s3fs": {"storage"},
    "mlflow": {"storage"},
    "lancedb": {"storage"},
    "duckdb": {"storage"},
    "torch": {"trainers"},
    "transformers": {"trainers"},
    "peft": {"trainers"},
    "ray": {"infra"},
    "typer": {"cli"},
    "rich": {"cli"},
}
MAY_USE_ANY_LIBRARY = {"cli", "benchmarks"}  # the command talks to Prefect's client; benchmarks measure everything

LIBRARY_EXCEPTIONS = {
    ("rollouts/chat_tokens.py", "transformers"),  # the tokenizer is half of the model; loaded lazily
    ("storage/weight_broadcast.py", "torch"),  # both ends of one wire: a trainer, and vLLM's workers; loaded lazily
    ("trainers/samples.py", "pyarrow"),  # a table straight into arrays, without a copy through Python lists
    # The search agent's retrieval server and program are programs of their own, which no process of a run imports.
    ("examples/search_agent/program.py", "openai"),
    ("examples/search_agent/index.py", "lancedb"),
    ("examples/search_agent/index.py", "pyarrow"),
    ("examples/search_agent/ranking.py", "torch"),  # numpy multiplies in float32 only
    ("examples/search_agent/retrieval_server.py", "fastapi"),
    ("examples/search_agent/retrieval_server.py", "uvicorn"),
    ("examples/search_agent/retrieval_server.py", "typer"),
    ("examples/search_agent/retrieval_server.py", "rich"),
}

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MAY_PICKLE = {"benchmarks/shards.py"}  # shards are measured against it, on a file it has just written itself
VAGUE_FILES = {"base", "common", "core", "misc"}
VAGUE_WORDS = {"util", "utils", "helper", "helpers", "manager"}
MOST_LINES = 430


def _files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def _tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), filename=str(file))


def _imports(file: Path) -> Iterator[str]:
    """Dotted names of every imported module, in functions and under `if` too."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} imports relatively; write the whole path"
            assert node.module is not None
            # `from storage import records` names a module too.
            yield from (
                f"{node.module}.{alias.name}" if node.module in PRODUCT else node.module for alias in node.names
            )


def _is_config(module: str) -> bool:
    return module.split(".")[1:2] == ["config"]


def test_every_product_folder_has_a_rule():
    assert set(MAY_IMPORT) == set(PRODUCT)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(PRODUCT)


def test_folders_import_only_whom_they_may():
    broken = [
        f"{file} imports {module}"
        for file in _files()
        for module in _imports(file)
        if (folder := module.split(".")[0]) in PRODUCT
        and folder not in MAY_IMPORT[file.parts[0]]
        and not (file.parts[0] == "flows" and _is_config(module))
        and module != "storage.redaction"  # text in, text out, for everybody who says something
    ]
    assert not broken, "\n".join(broken)


def test_only_workers_reach_past_the_records_into_the_store():
    """Everything else in rollouts/ and trainers/ runs on records and arrays, without a store or a log."""
    durable = {"storage.run_log", "storage.runs", "storage.shards", "storage.object_store", "storage.registry"}
    durable |= {"storage.rewards", "storage.policies"}
    reaching = {
        str(file)
        for file in _files()
        if file.parts[0] in ("rollouts", "trainers") and durable.intersection(_imports(file))
    }
    # A replay and a rescore start from what is committed, as the workers do.
    replaying = {"trainers/replay.py", "rollouts/rescoring.py"}
    workers = {"rollouts/worker.py", "rollouts/served_policy.py", "rollouts/shard_writer.py", "trainers/worker.py"}
    assert reaching <= workers | replaying


def test_examples_need_nothing_of_ours_but_rollouts_and_the_records():
    used = {module for file in _files() if file.parts[0] == "examples" for module in _imports(file)}
    assert {module for module in used if module.startswith("storage")} <= {"storage.records"}


def test_each_library_lives_in_its_folder():
    broken = [
        f"{file} imports {module}: {library} lives only in {', '.join(sorted(LIVES_IN[library]))}/"
        for file in _files()
        for module in _imports(file)
        if (library := module.split(".")[0]) in LIVES_IN
        and file.parts[0] not in LIVES_IN[library] | MAY_USE_ANY_LIBRARY
        and (str(file), library) not in LIBRARY_EXCEPTIONS
    ]
    assert not broken, "\n".join(broken)


def test_no_exception_outlives_its_reason():
    used = {(str(file), module.split(".")[0]) for file in _files() for module in _imports(file)}
    assert used >= LIBRARY_EXCEPTIONS


def test_nothing_is_pickled():
    importing = {str(file): m for file in _files() for m in _imports(file) if m.split(".")[0] in PICKLES}
    assert importing.keys() == MAY_PICKLE, importing
    pickling = [
        f"{file}:{node.lineno} torch.{node.attr}"
        for file in _files()
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("torch", "save"), ("torch", "load")}
    ]
    assert not pickling


def test_init_files_are_empty():
    inits = [file for file in _files() if file.name == "__init__.py"]
    assert {file.parts[0] for file in inits} == set(PRODUCT)
    assert not [str(file) for file in inits if (ROOT / file).read_text()]


def test_file_names_collide_with_nothing():
    names = {file.stem: str(file) for file in _files() if file.name != "__init__.py"}
    assert not names.keys() & set(PRODUCT), "named like a top-level folder"
    assert not names.keys() & sys.stdlib_module_names, "named like one of Python's own modules"


def test_names_say_what_they_hold():
    for file in _files():
        assert not VAGUE_FILES & set(file.with_suffix("").parts), file
        assert not VAGUE_WORDS & {word for name in file.with_suffix("").parts for word in name.split("_")}, file
        classes = [node.name for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)]
        assert not [c for c in classes if c.lower().endswith(tuple(VAGUE_WORDS))], file


def test_files_stay_readable():
    lines = {str(file): len((ROOT / file).read_text().splitlines()) for file in _files()}
    too_long = {file: count for file, count in lines.items() if count > MOST_LINES}
    assert not too_long, f"look for the missing noun in {too_long}"


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("flows.train_grpo", ["torch", "vllm", "mlflow", "ray"]),
        ("storage.runs, storage.shards, storage.claims, storage.registry", ["torch", "vllm", "mlflow", "lancedb"]),
        ("rollouts.worker", ["torch", "vllm", "transformers"]),
    ],
)
def test_importing_is_free(modules: str, forbidden: list[str]):
    code = f"import sys, {modules}; print([m for m in {forbidden} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
