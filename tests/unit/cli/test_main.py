"""The command line: overrides, errors as sentences, and what a run's log says."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.main import app
from cli.operate.status import run_status, status_table
from cli.terminal.arguments import parse_overrides
from storage.log.entries import Evaluation, LogEntry, Policy, Session
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore

PROJECT = Path(__file__).resolve().parents[3]


def _invoke(tmp_path: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_overrides_are_toml_values_and_bare_words() -> None:
    parsed = parse_overrides(["steps=5", "train.loss=cispo", "learning_rate=1e-3", "rollout.drop_uniform_groups=true"])
    assert parsed == {
        "steps": 5,
        "train.loss": "cispo",
        "learning_rate": 1e-3,
        "rollout.drop_uniform_groups": True,
    }


def test_an_override_without_a_value_says_how_to_write_it() -> None:
    with pytest.raises(ValueError, match="key=value"):
        parse_overrides(["steps"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["stepz=4"], "did you mean 'steps'"),
        (["train.shedule=linear"], "did you mean 'train.schedule'"),
        (["n_samples=1", "rollout.min_usable=1"], "n_samples of 2 or more"),
        (["max_staleness=-1"], "max_staleness = -1"),
        (["model=/nowhere"], "no such folder"),
        (["workflow=examples.nothing:X"], "cannot be imported"),
        (["workflow=examples.gsm8k:Gsm8k"], "dataset must be set"),
        (["store=/dev/null/store"], "cannot be opened (Not a directory); choose another `store`"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], sentence: str
) -> None:
    code, output = _invoke(
        tmp_path, "train", str(PROJECT / "examples/arithmetic.toml"), *overrides, monkeypatch=monkeypatch
    )
    assert code == 2 and sentence in output and "Traceback" not in output
    assert not (tmp_path / "store" / "runs").exists(), "nothing was created"


@pytest.mark.parametrize(
    "arguments",
    [
        ["rescore", "run", "--reward", "rollouts.rewards.answers:exact", "--processes", "-1"],
        ["eval", "run", "--num-tasks", "0"],
        ["eval", "run", "--n-samples", "0"],
        ["eval", "run", "--version", "-1"],
        ["eval", "run", "--temperature", "-1"],
    ],
)
def test_a_count_that_cannot_be_is_refused_by_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    create_run(LocalStore(tmp_path / "store"), "run", {})
    code, output = _invoke(tmp_path, *arguments, monkeypatch=monkeypatch)
    assert code == 2 and "Invalid value" in output and "Traceback" not in output


def test_a_data_file_with_a_broken_line_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?"}\n')
    code, output = _invoke(
        tmp_path, "train", str(PROJECT / "examples/gsm8k.toml"), f"dataset={data}", monkeypatch=monkeypatch
    )
    assert code == 2 and "line 2" in output and "'answer' missing" in output


def test_an_unknown_run_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(LocalStore(tmp_path / "store"), "known", {})
    code, output = _invoke(tmp_path, "status", "unknown", monkeypatch=monkeypatch)
    assert code == 2 and "known" in output


def test_status_of_a_run_without_steps_has_nulls(tmp_path: Path) -> None:
    log = create_run(LocalStore(tmp_path), "run", {})
    status = run_status(log)
    assert status["step"] == 0 and status["weight_version"] is None and status["accuracy_before"] is None


def test_accuracy_before_and_after_are_the_first_and_last_version(tmp_path: Path) -> None:
    log = create_run(LocalStore(tmp_path), "run", {})
    log.append(Policy(version=0, path="models/x", weights_sha256="", parent=None))
    for version, score in [(5, 0.9), (0, 0.4)]:
        log.append(
            Evaluation(
                version=version,
                split="test",
                score=score,
                num_tasks=1,
                num_failed=0,
                shard_id=f"s{version}",
                seconds=0.0,
            )
        )
    status = run_status(log)
    assert (status["accuracy_before"], status["accuracy_after"]) == (0.4, 0.9)


def test_an_evaluation_in_which_everything_failed_is_no_accuracy(tmp_path: Path) -> None:
    log = create_run(LocalStore(tmp_path), "run", {})
    log.append(Policy(version=0, path="models/x", weights_sha256="", parent=None))
    scored = Evaluation(
        version=0, split="test", score=0.4, num_tasks=2, n_samples=2, num_failed=1, failures={"timeout": 1},
        pass_at={"1": 0.5, "2": 0.5}, standard_error=0.1, shard_id="e0", seconds=0.0,
    )  # fmt: skip
    log.append(scored)
    log.append(replace(scored, version=3, score=0.0, num_failed=4, shard_id="e1"))
    status = run_status(log)
    assert (status["accuracy_before"], status["accuracy_after"], status["failed_evaluations"]) == (0.4, 0.4, 1)
    assert status["accuracy_standard_error"] == 0.1 and status["pass_at"] == {"1": 0.5, "2": 0.5}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status_table(status))
    shown = console.export_text()
    assert "failed evaluations       1" in shown and "pass@k                   1: 0.500, 2: 0.500" in shown


def test_wall_seconds_leave_out_the_time_between_sessions(tmp_path: Path) -> None:
    log = create_run(LocalStore(tmp_path), "run", {})
    times = iter([100.0, 110.0, 500.0, 505.0])
    for number, session in enumerate([Session(id="a", code_version=""), Session(id="b", code_version="")]):
        policy = Policy(version=number, path=session.id, weights_sha256="", parent=None)
        for kind, body in [("session", session), ("policy", policy)]:
            log.state.apply(LogEntry(number=log.state.entries, kind=kind, written_at=next(times), body=body))
    assert run_status(log)["wall_seconds"] == 15.0
