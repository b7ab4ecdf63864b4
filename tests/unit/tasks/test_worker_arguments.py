"""What a rollout worker is built with follows from the run's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings.rollout import RolloutSettings
from settings.run_file import make_config
from tasks.session import code_version
from tasks.worker_arguments import worker_arguments
from tests.builders import a_log


def test_a_worker_names_the_code_of_its_own_machine_and_not_the_drivers(tmp_path: Path) -> None:
    document = {"workflow": "examples.arithmetic:Arithmetic", "batch_size": 32, "rollout": {"lease_timeout": 7}}
    log = a_log()
    arguments = worker_arguments(log, cache=tmp_path, **make_config(document, source="test").of_rollouts)
    assert arguments["code_version"] == code_version() != log.state.sessions[-1].code_version
    assert arguments["lease_timeout"] == 7.0


ROLLOUT = {
    "max_concurrent": 3,
    "min_usable": 4,
    "retries": 5,
    "exclude_statuses": ["truncated"],
    "drop_uniform_groups": True,
    "dynamic_batch": True,
    "attempt_timeout": 6.0,
    "max_tool_turns": 7,
    "tool_timeout": 8.0,
    "tool_output_chars": 900,
    "shard_bytes": 2048,
    "shard_seconds": 10.0,
}
"""None of them the default."""


def test_every_bound_is_the_runs_own(tmp_path: Path) -> None:
    document = {"workflow": "examples.arithmetic:Arithmetic", "n_samples": 8, "rollout": ROLLOUT}
    arguments = worker_arguments(a_log(), cache=tmp_path, **make_config(document, source="test").of_rollouts)
    bounds = vars(arguments["attempt_limits"]) | vars(arguments["limits"])
    assert {name: bounds[name] for name in ROLLOUT} == ROLLOUT
    assert bounds.keys() & RolloutSettings.model_fields.keys() == ROLLOUT.keys()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_how_many_produce_is_for_the_log_to_say_and_not_how_many_the_driver_starts(
    tmp_path: Path, num_workers: int
) -> None:
    """A producer of a run whose driver only trains is one of one, as long as nobody else has joined."""
    document = {"workflow": "examples.arithmetic:Arithmetic", "evaluation": {"every": 0}}
    document |= {"rollout": {"num_workers": num_workers}}
    settings = make_config(document, source="test").of_rollouts
    assert worker_arguments(a_log(), cache=tmp_path, **settings)["limits"].num_producers == 1
