"""The Prefect worker dies, and nothing stays Running: what becomes of its flow run, and that the run goes on."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.ports import free_port
from infra.services.services import _end, _start_prefect, _wait_until_up, running_services
from storage.log.run_state import RunState
from tests.chaos.outcomes import check_trained_once, state_of
from tests.chaos.test_faults import LONG
from tests.conftest import Home
from tests.flows.test_control import Server
from tests.prefect_api import ask

FINAL = {"Completed", "Failed", "Crashed", "Cancelled", "TimedOut"}
SECONDS_TO_NOTICE = 150.0
"""Three heartbeats and a look, with as much again for a slow machine."""
PATIENCE = 200.0
LONG_FORM = pytest.mark.skipif(not LONG, reason="takes minutes: `make chaos`")


@pytest.fixture(scope="module")
def own_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Services that only these tests use, because they kill one. Prefect's usual port is taken, so it has another."""
    home = Home(tmp_path_factory.mktemp("own"), "")
    del home.environment["PREFECT_API_URL"]
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):
            taken.enter_context(socket.create_server(("127.0.0.1", 4200)))
        yield home
        home.run("down")
    for process in _started(MILLRACE_HOME=str(home.path)):  # a failed test may leave a flow run without its worker
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "steps", "lives_on", "ends"),
    [
        pytest.param(signal.SIGKILL, 60, True, "Completed", marks=LONG_FORM),
        (signal.SIGTERM, 100_000, False, "Crashed"),
    ],
)
def test_a_worker_that_dies_leaves_no_run_running_and_the_next_one_goes_on(
    own_services: Home, base_model: Path, number: signal.Signals, steps: int, lives_on: bool, ends: str
) -> None:
    """Killed, the worker cannot take its flow run along: that trains to its end and says so itself. Asked to end, it
    ends its flow run without a word, and the server misses the heartbeats."""
    home, run = own_services, f"orphaned-{number.name.lower()}"
    home.run("up")
    services = running_services(home.path)
    server = Server(f"{services['prefect'].url}/api")
    settings = {
        "engine": {"kind": "scripted", "max_model_len": 64},
        "sampling": {"max_tokens": 8},
        "evaluation": {"every": 0},
    }
    parameters = {"run": run, "batch_size": 4, "n_samples": 4, "model": str(base_model), "settings": settings}

    def state() -> RunState:
        return state_of(home, run)

    def wait(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            said = (home.path / "logs" / "worker.log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"{state().counters()}\n{home.worker_logs()}\n{said}"
            time.sleep(0.1)

    flow_run = server.start("train-grpo/train", steps=steps, **parameters)
    wait(lambda: state().step >= 2)
    driver = psutil.Process(int((home.path / f"store/runs/{run}/trainer.lock").read_text()))
    family = _started(PREFECT__FLOW_RUN_ID=flow_run)
    assert len(family) >= 3, "driver, engine and trainer"
    worker = services["worker"].process()
    assert worker is not None and server.state(flow_run) == "Running"
    worker.send_signal(number)
    psutil.wait_procs([worker], timeout=120)
    assert "worker" not in running_services(home.path)
    assert state().step < steps, "too quick to have been interrupted"
    assert (driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE) is lives_on

    wait(lambda: server.state(flow_run) in FINAL, SECONDS_TO_NOTICE)
    assert server.state(flow_run) == ends
    assert psutil.wait_procs(family, timeout=10)[1] == [] == _started(PREFECT__FLOW_RUN_ID=flow_run)

    home.run("up")
    found = running_services(home.path)
    assert found["worker"].pid != worker.pid
    assert found["prefect"].url == services["prefect"].url, "who has outlived the worker could not find it"
    reached = state().step
    assert 2 <= reached <= steps and (reached == steps) is lives_on
    again = server.start("train-grpo/train", steps=reached + 2, **parameters)
    wait(lambda: server.state(again) in FINAL)
    assert server.state(again) == "Completed"
    log = state()
    check_trained_once(log, steps=reached + 2)
    assert [step.session_id for step in log.steps].count(log.sessions[-1].id) == 2
    assert len(log.sessions) == 2


def test_a_server_that_starts_again_knows_whom_it_has_given_a_deployments_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a flow run that has outlived worker and server ends itself when it renews the slot, within four minutes."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    port, lease = free_port(), ""
    for _ in range(2):
        service = _start_prefect(port, tmp_path, evaluates_triggers=False)
        try:
            _wait_until_up(service, "/api/health", tmp_path)
            limits = f"{service.url}/api/v2/concurrency_limits"
            if not lease:
                ask("POST", f"{limits}/", {"name": "deployment", "limit": 1})
                slot = {"names": ["deployment"], "slots": 1, "mode": "concurrency"}
                lease = ask("POST", f"{limits}/increment-with-lease", slot)["lease_id"]
            ask("POST", f"{limits}/leases/{lease}/renew", {"lease_duration": 300})
        finally:
            _end(service)


def _started(**variables: str) -> list[psutil.Process]:
    """The processes that were started with these environment variables, wherever they have gone since."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if variables.items() <= process.environ().items():
                found.append(process)
    return found
