"""What a rollout worker is built with follows from the run's configuration."""

from __future__ import annotations

from pathlib import Path

from flows.config import make_config
from tasks.session import code_version
from tasks.worker_arguments import worker_arguments
from tests.builders import a_log


def test_a_worker_names_the_code_of_its_own_machine_and_not_the_drivers(tmp_path: Path) -> None:
    document = {"workflow": "examples.arithmetic:Arithmetic", "batch_size": 32, "rollout": {"lease_timeout": 7}}
    log = a_log()
    arguments = worker_arguments(log, cache=tmp_path, **make_config(document, source="test").of_rollouts)
    assert arguments["code_version"] == code_version() != log.state.sessions[-1].code_version
    assert arguments["lease_timeout"] == 7.0
