"""`millrace replay` refuses what cannot work in one sentence, and prints what came out so that a person sees it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.main import app
from cli.run.replay import print_replay, span_of
from settings.run_file import default_values
from storage.log.entries import Policy
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import a_shard, a_step, a_summary


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder with a run of one step, whose files do not exist, and one without steps."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    config = {**default_values(), "workflow": "examples.arithmetic:Arithmetic"}
    for run in ("stepped", "empty"):
        log = create_run(LocalStore(tmp_path / "store"), run, config)
        log.append(Policy(version=0, path="models/base", weights_sha256="0" * 64, parent=None))
        if run == "stepped":
            log.append(a_shard("s1", [a_summary(1)]))
            log.append(a_step(log.state, trained=["0.task1"]))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stepped"], "say which steps: --step 7, or --from 1 --to 10"),
        (["stepped", "--step", "1", "--to", "1"], "say which steps"),
        (["stepped", "--step", "2"], "no step 2; it has steps 1 to 1"),
        (["stepped", "--from", "2"], "no steps 2 to 1"),
        (["empty", "--step", "1"], "no steps yet"),
        (["absent", "--step", "1"], "runs there: empty, stepped"),
        (["stepped", "--step", "1", "--loss", "ppo"], "there are 'clip', 'gspo', 'cispo'"),
        (["stepped", "--step", "1", "--advantage", "rank"], "there are 'grpo', 'leave_one_out'"),
        (["stepped", "--step", "1", "--lr", "0"], "learning_rate = 0"),
        (["stepped", "--step", "1", "n_samples=4"], "a replay can change learning_rate"),
        (["stepped", "--step", "1", "train.loss.clip_hi=4"], "did you mean 'train.loss.clip_high'"),
        (["stepped", "--step", "1", "train.loss.clip_high"], "key=value"),
        (["stepped", "--step", "1", "--rewards", "mine"], "no rewards 'mine'"),
        (["stepped", "--step", "1", "--save", "."], "exists already"),
    ],
)
def test_what_cannot_work_is_one_sentence_before_anything_starts(
    home: Path, arguments: list[str], sentence: str
) -> None:
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 2 and sentence in result.output and "Traceback" not in result.output
    assert not (home / "logs").exists(), "no worker was started"


def test_a_span_is_a_step_or_two_ends_of_which_one_may_be_open() -> None:
    assert span_of(step=7, first=None, last=None) == (7, 7)
    assert span_of(step=None, first=3, last=None) == (3, None)
    assert span_of(step=None, first=None, last=5) == (1, 5)
    assert span_of(step=None, first=3, last=5) == (3, 5)


def _found(**fields: Any) -> dict[str, Any]:
    """What the flow returns for one unchanged step that came out as recorded."""
    same = {
        "step": 3,
        "identical": True,
        "recorded_sha256": "a" * 64,
        "replayed_sha256": "a" * 64,
        "recorded": {"loss": 0.125, "grad_norm": 2.0},
        "replayed": {"loss": 0.125, "grad_norm": 2.0},
        "distance": 0.0,
        "cosine": 1.0,
    }
    return {
        "run": "run",
        "plan": {"resumed_from": 0, "first": 3, "last": 3},
        "changes": {},
        "rewards": "",
        "start_identical": True,
        "steps": [same],
        "recorded_code": "c0de",
        "code": "c0de+changes",
        "unchanged": True,
        "identical": True,
        **fields,
    }


def _printed(found: dict[str, Any]) -> str:
    output = io.StringIO()
    print_replay(found, Console(file=output, width=200))
    return output.getvalue()


def test_an_unchanged_step_that_comes_out_as_recorded_says_so() -> None:
    text = _printed(_found())
    assert "steps 3 to 3, from the base policy; nothing changed" in text
    assert "bit for bit" in text and "0.125" in text


def test_an_unchanged_step_that_does_not_names_what_may_differ() -> None:
    other = {**_found()["steps"][0], "identical": False, "replayed_sha256": "b" * 64, "distance": 0.5, "cosine": 0.9}
    text = _printed(_found(steps=[other], identical=False, start_identical=False))
    assert "the weights differ" in text and "c0de+changes" in text and "bit for bit" not in text
    assert "steps before 3 gave other weights" in text


def test_a_change_shows_old_and_new_side_by_side() -> None:
    first = {
        **_found()["steps"][0],
        "identical": False,
        "replayed": {"loss": 0.25, "grad_norm": 2.0},
        "distance": 0.5,
        "cosine": None,
    }
    text = _printed(
        _found(
            plan={"resumed_from": 2, "first": 3, "last": 4},
            steps=[first, {**first, "step": 4}],
            changes={"train.loss": "clip → cispo"},
            rewards="mine",
            unchanged=False,
            identical=False,
        )
    )
    assert "from the state saved at step 2; changed: train.loss clip → cispo, rewards mine" in text
    row = next(line for line in text.splitlines() if line.startswith("4"))
    assert row.split()[:8] == ["4", "other", "0.5", "-", "0.125", "→", "0.25", "2"]
    assert "distance: " in text
