"""`millrace pause` and `resume` are entries in the log, and sentences."""

from __future__ import annotations

from typer.testing import CliRunner

from cli.main import app
from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock


def _say(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_pause_stands_in_the_log_until_somebody_resumes(log: RunLog) -> None:
    with trainer_lock(log):
        said = _say("pause", "run", "--reason", "the GPU is needed")
    assert "run run pauses at step 0;" in said and "`millrace resume run`" in said
    assert log.refresh().paused == "the GPU is needed"
    assert "is paused already: the GPU is needed" in _say("pause", "run")
    with trainer_lock(log):
        assert _say("resume", "run") == "run run goes on from step 0\n"
    assert log.refresh().paused == ""
    assert "is not paused" in _say("resume", "run")


def test_who_asked_is_the_reason_where_none_is_given(log: RunLog) -> None:
    assert "nobody on this machine does now" in _say("pause", "run")
    assert log.refresh().paused.endswith("asked for it")


def test_an_unknown_run_is_a_sentence(log: RunLog) -> None:
    result = CliRunner().invoke(app, ["pause", "other"])
    assert result.exit_code == 2 and "no run 'other'" in result.output
