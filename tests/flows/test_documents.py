"""The documents' commands, run one after another on a run that has finished."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from cli.main import app
from storage.object_store import LocalStore
from storage.runs import open_run
from tests.conftest import Home
from tests.documents import DOCUMENTS, commands, refusal

RUN = "scripted"
ATTEMPTS = "select group_id || '/' || sample_idx as trajectory_id from trajectories where not is_eval"
# `replay` starts a fleet of its own: test_replay.py.
OF_A_RUN = {"runs", "status", "report", "traj", "lineage", "rescore", "export", "promote", "rollback", "gc", "index"}


@pytest.fixture
def copy(finished: Home, tmp_path: Path) -> Iterator[Path]:
    """A copy of the finished run's state folder, which commands in this process use; they set variables themselves."""
    folder = tmp_path / "home"
    shutil.copytree(finished.path, folder)
    with patch.dict(os.environ, {**finished.environment, "MILLRACE_HOME": str(folder)}):
        yield folder


def test_every_command_about_a_run_works_on_a_finished_one(copy: Path, tmp_path: Path) -> None:
    """In the documents' order, with this run's names in place of theirs."""
    state = open_run(LocalStore(copy / "store"), RUN).state
    shown = [words for d in DOCUMENTS if "search" not in str(d) for words in commands(d) if words[0] == "millrace"]
    asked = [words[1:] for words in shown if words[1] in OF_A_RUN and not refusal(words[1:])]
    attempts = json.loads(_run(["traj", "sql", RUN, ATTEMPTS, "--json"]))
    ids = [attempt["trajectory_id"] for attempt in attempts]
    stands_for = {
        **dict.fromkeys(["arithmetic", "my-run", "RUN"], RUN),
        "arithmetic@rollout": f"{RUN}@rollout",
        "MODEL@rollout": f"{RUN}@rollout",
        "ID": ids[0],
        "ID_A": ids[0],
        "ID_B": ids[1],
        "PROMPT_ID": next(iter(state.groups.values())).prompt_id,
        "13": "5",
        "14": "6",
        "12": "5",
        "20": "6",
        "8": "5",
        "my/file.py:f": "rollouts.rewards:exact",
        "f": "exact",
        "pairs.parquet": str(tmp_path / "pairs.parquet"),
    }
    assert len(asked) > 35
    _run(["promote", RUN, "--version", "3"])  # there is something to roll back to
    for number, words in enumerate(asked):
        _run([stands_for.get(word, str(tmp_path / f"out-{number}") if word == "out" else word) for word in words])


def _run(words: list[str]) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"millrace {' '.join(words)}: {done.output}\n{done.exception!r}"
    return done.output
