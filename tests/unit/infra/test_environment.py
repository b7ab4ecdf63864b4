"""Where state lives: what the run file says, else the environment, else the state folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.environment import local_tracking_uri, tracking_uri
from settings.places.state_folder import store_uri

STATED = {"MILLRACE_STORE": "s3://bucket/store", "MILLRACE_TRACKING": "http://mlflow:5000"}


@pytest.mark.parametrize(
    ("environment", "run_file", "expected"),
    [
        ({}, ("", ""), ("file://HOME/store", "sqlite:///HOME/mlflow.db")),
        (STATED, ("", ""), ("s3://bucket/store", "http://mlflow:5000")),
        ({"MILLRACE_STORE": "HOME/elsewhere"}, ("", ""), ("file://HOME/elsewhere", "sqlite:///HOME/mlflow.db")),
        (STATED, ("s3://other/store", "sqlite:///mine.db"), ("s3://other/store", "sqlite:///mine.db")),
        (STATED, ("HOME/mine", ""), ("file://HOME/mine", "http://mlflow:5000")),
    ],
)
def test_the_run_file_comes_before_the_environment_and_that_before_the_state_folder(
    environment: dict[str, str],
    run_file: tuple[str, str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    for name in STATED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)))
    store, tracking = (value.replace("HOME", str(tmp_path)) for value in run_file)
    assert (store_uri(store), tracking_uri(tracking)) == tuple(e.replace("HOME", str(tmp_path)) for e in expected)
    assert local_tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
