"""`millrace stop` ends the process that trains a run, or says why it will not; `pause` and `resume` are entries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from cli.operate.stop import stop_run
from storage.log.run_log import RunLog
from storage.log.runs import RunBusy, open_run, trainer_lock
from storage.objects.opening import open_store
from tasks.prefect import flow_runs
from tests.unit.cli.builders import printed, running

_TRAINS = """
import ctypes, signal, sys, threading
from storage.objects.opening import open_store
from storage.log.runs import open_run, trainer_lock

if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with trainer_lock(open_run(open_store(sys.argv[1]), "run")):
    print("training", flush=True)
    if sys.argv[2] == "threads":  # Ctrl-C ends its first thread; another goes on and holds the lock
        threading.Thread(target=sys.stdin.read).start()
        signal.signal(signal.SIGINT, lambda *_: ctypes.CDLL(None).pthread_exit(None))
        while True:
            signal.pause()
    sys.stdin.read()
"""


@contextlib.contextmanager
def _training(log: RunLog, *, kind: str = "", **environment: str) -> Iterator[Any]:
    with running("-c", _TRAINS, log.store.uri, kind, **environment) as process:
        assert process.stdout.readline() == "training\n"
        yield process


def test_the_process_ends_and_the_run_is_free(log: RunLog) -> None:
    with _training(log) as process:
        assert printed("stop run") == "run run has stopped at step 0\n"
        assert process.poll() is not None
        with trainer_lock(open_run(open_store(log.store.uri), "run")):
            pass
    assert "is not being trained on this machine; it stands at step 0" in printed("stop run", status=2)


def test_a_process_that_does_not_listen_is_named_with_what_is_safe(log: RunLog) -> None:
    with _training(log, kind="deaf") as process:
        with pytest.raises(ValueError, match=f"`kill -9 {process.pid}` loses nothing that was committed"):
            stop_run(log, seconds=0.2)
        assert process.poll() is None


def test_a_process_whose_threads_go_on_has_not_ended(log: RunLog) -> None:
    with _training(log, kind="threads") as process:
        with pytest.raises(ValueError, match="has not ended within 2 s"):
            stop_run(log, seconds=2)
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        with pytest.raises(RunBusy), trainer_lock(log):
            pass


_FLOW_RUN = "0b5e7a0e-6d3c-4c55-9a52-9d2b0e3a4f11"


def test_a_run_of_prefects_is_cancelled_there_and_not_interrupted(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with _training(log, kind="deaf", PREFECT__FLOW_RUN_ID=_FLOW_RUN, PREFECT_API_URL="http://prefect/api") as process:

        async def cancel(flow_run_id: str, *, api_url: str) -> bool:
            asked.append((flow_run_id, api_url))
            process.kill()  # what Prefect's worker does in the end
            return True

        monkeypatch.setattr(flow_runs, "cancel_flow_run", cancel)
        assert printed("stop run") == "run run has stopped at step 0\n"
    assert asked == [(_FLOW_RUN, "http://prefect/api")]


def test_a_prefect_server_that_does_not_answer_is_a_sentence_with_both_ways_out(log: RunLog) -> None:
    with _training(log, PREFECT__FLOW_RUN_ID=_FLOW_RUN, PREFECT_API_URL="http://me:secret@127.0.0.1:9/api") as process:
        shown = printed("stop run", status=2)
        assert f"prefect flow-run cancel {_FLOW_RUN}" in shown and f"`kill {process.pid}`" in shown
        assert "secret" not in shown and process.poll() is None


def test_a_pause_stands_in_the_log_until_the_run_is_resumed(log: RunLog) -> None:
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
