"""Every command of every document has been run: here, in tests/flows/test_documents.py, or where the table says.

What needs no server is typed here: the search agent's corpus, a server's secrets, benchmarks in their smallest form.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from examples.search_agent import world
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.retrieval.passages import Passage
from infra.ports import free_port
from tests.conftest import SCRIPTED
from tests.documents import (
    COVERED_BY,
    DOCUMENTS,
    PROJECT,
    TUTORIAL,
    about_a_run,
    block,
    of_the_corpus,
    quick_start,
    shown,
    trainings,
    tutorial_files,
)
from tests.unit.cli.builders import printed

PATIENCE = 240.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PROJECT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
SMALLEST = {
    "python -m benchmarks.shards": "--rows 8",
    "python -m benchmarks.logprobs_memory": "--tokens 256 --vocabulary 1000 --hidden 64 --plain-tokens 64",
    "python -m benchmarks.publish --s3": "--millions 1 --policies 2",
    "python -m benchmarks.trainer_growth": "--rounds 1",
    "python -m benchmarks.ui": "--steps 12 --attempts 8 --seconds 1",
    "python -m benchmarks.retrieval --rate 510 --connections 64": "--passages 1000 --seconds 1 --judged 5",
}
"""What makes a benchmark of the documents a matter of seconds. The others have no such form: `COVERED_BY`."""


def _bash(script: str, folder: Path) -> str:
    """What a script prints in a folder; it must succeed."""
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run(["bash", "-c", script], **options)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.server
def test_every_training_passes_its_dry_run(tmp_path: Path, base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a start checks, with a model and data of the right layout where a document has the reader's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.checks.preflight.check_on_hub", lambda name, kind: None)  # no network here
    (tmp_path / "examples").symlink_to(PROJECT / "examples")
    for file, text in tutorial_files().items():
        (tmp_path / file).write_text(text)
    sums = tmp_path / "gsm8k"
    sums.mkdir()
    for file in ("train.jsonl", "test.jsonl"):
        (sums / file).write_text('{"question": "Three boxes of 6?", "answer": "3*6 = 18\\n#### 18"}\n' * 64)
    questions = {
        split: [Problem(id=f"{split}{number}", question="Who?", answer="Ada") for number in range(64)]
        for split in ("train", "test")
    }
    write_dataset(Path("data/hotpotqa"), [Passage(id="1", title="", text="Ada.")], questions)
    (notes,) = [shlex.split(line) for line in of_the_corpus() if ".world data/notes " in line]
    world.main(notes[3:])
    for data in ("data/hotpotqa", "data/notes"):
        (Path(data) / "services.toml").write_text('search = ["http://127.0.0.1:8765"]')
    whole = Path("examples/search_agent/search_agent_7b.toml").read_text()
    Path("my_7b.toml").write_text(re.sub(r"^lora = .*\n", "", whole, flags=re.MULTILINE))  # as its page says
    stands_for = {"FILE": str(SCRIPTED), "model=/models/qwen": f"model={base_model}"}
    stands_for["dataset=/data/gsm8k"] = f"dataset={sums}"
    stands_for["tracking=http://127.0.0.1:5001"] = f"tracking=sqlite:///{tmp_path / 'mlflow.db'}"  # no server is up
    asked = trainings()
    assert len(asked) > 8
    for words in asked:
        arguments = [stands_for.get(word, word) for word in words[1:] if word != "--dry-run"]
        if f"model={base_model}" in arguments:  # it has fewer positions than the model that it stands for
            arguments += ["engine.max_model_len=256", "sampling.max_tokens=128"]
        printed("", *arguments, "--dry-run")


@pytest.mark.server
def test_a_corpus_is_made_indexed_and_served_as_its_page_says(tmp_path: Path) -> None:
    asked, servers = of_the_corpus(), []
    assert len(asked) == 9
    try:
        for line in asked:
            if " serve " in line:
                port = str(free_port())
                line = re.sub(r"--port \d+", f"--port {port}", line)
                servers.append(subprocess.Popen(shlex.split(line), cwd=tmp_path, env=ENVIRONMENT))
                deadline = time.monotonic() + PATIENCE
                while not _answers(port):
                    assert servers[-1].poll() is None and time.monotonic() < deadline, line
                    time.sleep(0.1)
                continue
            _bash(line, tmp_path)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert len(servers) == 3 and (tmp_path / "data/notes/services.toml").read_text().startswith("search = ")


def _answers(port: str) -> bool:
    try:
        found = httpx.post(f"http://127.0.0.1:{port}/search", json={"query": "boss", "k": 3}, timeout=30)
    except httpx.TransportError:
        return False
    return bool(found.raise_for_status().json()["results"][0])


def test_the_servers_secrets_are_made_and_read_as_the_deployment_page_says(tmp_path: Path) -> None:
    page = PROJECT / "docs/deployment.md"
    secrets = "\n".join(line for line in block(page, "One server") if not line.startswith("docker "))
    (read,) = [line for line in shown(page) if "PREFECT_API_AUTH_STRING=$" in line]
    script = f"set -e\n{secrets}\n{read}\nprintenv PREFECT_API_AUTH_STRING"
    assert re.fullmatch(r"millrace:[0-9a-f]{48}\n", _bash(script, tmp_path))
    assert (tmp_path / "server.env").stat().st_mode & 0o077 == 0
    names = [line.partition("=")[0] for line in (tmp_path / "server.env").read_text().splitlines()]
    assert names == ["POSTGRES_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "PREFECT_AUTH"]


def test_what_pip_complains_about_is_what_the_locks_page_says() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    of_examples = "|".join(file.read_text().partition("==")[0] for file in PROJECT.glob("examples/*/requirements.txt"))
    missing = re.findall(rf"^(?!{of_examples}).* requires (\w+), which is not installed", done.stdout, re.M)
    if (PROJECT / ".venv/.device").read_text().strip() != "cpu":
        pytest.skip("the page says it of the CPU's lock")
    assert sorted(missing) == ["torchaudio", "torchcodec", "torchvision"], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALLEST)
def test_a_benchmark_runs_in_its_smallest_form(command: str) -> None:
    assert any(command in shown(document) for document in DOCUMENTS)
    assert _bash(f"{command} {SMALLEST[command]}", PROJECT)


# ── The table ───────────────────────────────────────────────────────────────────────────────────────────────────────

PICTURE = "python -m benchmarks.learning_curve arithmetic docs/arithmetic.png"
"""The quick start draws it after `make train`."""


def _typed() -> set[str]:
    """Commands that a test types as they stand, but for the names of the reader's own run and files."""
    every = {line for document in DOCUMENTS for line in shown(document)}
    page = set(shown(PROJECT / "docs/deployment.md"))
    secrets = {line for line in page if line in ("umask 077", "cat >server.env") or "AUTH_STRING=$" in line}
    pools = {line for line in page if "work-pool create " in line}
    runs = [words for on_workers in (False, True) for words in about_a_run(on_workers=on_workers)]
    about = {line for line in every if line.startswith("millrace ") and _words(line) in runs}
    return {*quick_start(), *shown(TUTORIAL, sentences=False), *of_the_corpus(), *secrets, *pools, *about, PICTURE}


def _words(line: str) -> list[str]:
    return line.split() if "…" in line else shlex.split(line)


def _entry(line: str) -> str | None:
    """The first pattern of the table that fits."""
    return next((p for p in COVERED_BY if re.fullmatch(re.escape(p).replace(r"\*", ".*"), line)), None)


def test_every_command_of_the_documents_is_typed_or_stands_in_the_table() -> None:
    """A sentence may name a command by its first words alone."""
    typed = _typed()
    blocks = {line for document in DOCUMENTS for line in shown(document, sentences=False)}
    every = {line for document in DOCUMENTS for line in shown(document)}
    known = [_words(line) for line in every if line in typed or _entry(line)]
    unrun = [
        line
        for line in every
        if line not in typed and not _entry(line)
        if line in blocks or not any(words[: len(_words(line))] == _words(line) for words in known)
    ]
    assert sorted(unrun) == [] and len(typed) > 80
    assert sorted(typed - every) == [], "typed by a test, and no document shows it any more"


def test_the_table_has_no_needless_entry() -> None:
    left = {line for document in DOCUMENTS for line in shown(document)} - _typed()
    assert set(COVERED_BY) - {_entry(line) for line in left} == set()


def test_every_test_that_the_table_names_is_there() -> None:
    tests = "".join(file.read_text() for file in (PROJECT / "tests").rglob("test_*.py"))
    for pattern, where in COVERED_BY.items():
        named = re.findall(r"\btest_\w+", where)
        assert named or where.startswith(("needs ", ".ci/run")), pattern
        for test in named:
            assert re.search(rf"^(async )?def {test}\(", tests, flags=re.MULTILINE), where
        assert not where.startswith(".ci/run") or pattern in (PROJECT / ".ci/run").read_text()
