"""`millrace pause` and `resume` are entries in the log, and sentences."""

from __future__ import annotations

from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock
from tests.unit.cli.builders import printed


def test_a_pause_stands_in_the_log_until_somebody_resumes(log: RunLog) -> None:
    with trainer_lock(log):
        shown = printed("pause run --reason 'the GPU is needed'")
    assert "run run pauses at step 0;" in shown and "`millrace resume run`" in shown
    assert log.refresh().paused == "the GPU is needed"
    assert "is paused already: the GPU is needed" in printed("pause run")
    with trainer_lock(log):
        assert printed("resume run") == "run run goes on from step 0\n"
    assert log.refresh().paused == ""
    assert "is not paused" in printed("resume run")
    assert "this machine does not train it now" in printed("pause run")
    assert log.refresh().paused.endswith("asked for it"), "who asked is the reason if none is given"
