"""`millrace rescore`: the report, and errors as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts.production.prompts import task_set
from settings.run_file import default_values
from storage.log.entries import Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from storage.records import Message, Task
from tests.builders import a_group, a_trajectory
from tests.unit.cli.builders import assert_refused, commit, printed
from tests.unit.rollouts.rewards.test_rescoring import WORKFLOW, Numbers

REWARDS = """
def half(reply, answer):
    if reply == "x2":
        raise KeyError("not this one")
    return 0.5 if reply.startswith("x") else 1.0
"""


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """One shard: replies `x0`, `x1`, `x2` and `y`, with rewards 0, 1, 0 and 1."""
    log = create_run(store, "run", {**default_values(), "workflow": WORKFLOW})
    attempts = [
        a_trajectory(
            float(attempt % 2), attempt=attempt, messages=[Message(role="assistant", content=reply, is_completion=True)]
        )
        for attempt, reply in enumerate(["x0", "x1", "x2", "y"])
    ]
    commit(log, "s0", a_group(0, trajectories=attempts))
    return log


@pytest.fixture
def file(home: Path) -> Path:
    (home / "half.py").write_text(REWARDS)
    return home / "half.py"


def test_the_report_compares_old_and_new(log: RunLog, file: Path) -> None:
    text = printed(f"rescore run --reward {file}:half --processes 1")
    row = next(line.split() for line in text.splitlines() if line.startswith("train"))
    # Of the three attempts with both, 0 → 0.5, 1 → 0.5, 1 → 1; the fourth is null.
    assert row == ["train", "4", "1", "0.6667", "→", "0.6667", "3", "(75.0", "%)", "0.5000"]
    assert "1 shard scored" in text and "1 raised" in text and "not this one" in text
    assert list(log.refresh().rescored) == ["half"]
    file.write_text(REWARDS + "# edited\n")
    assert "--name half-2" in printed(f"rescore run --reward {file}:half", status=2)


def test_other_answers_than_the_runs_are_refused_or_adopted(
    log: RunLog, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(Session(id="s", code_version="", tasks=task_set(log.state, Numbers().tasks("train"), run="run")))
    printed(f"rescore run --reward {file}:half")
    monkeypatch.setattr(Numbers, "tasks", lambda *_: [Task(id=f"task{n}", prompt="?", answer="7") for n in range(10)])
    refused = printed(f"rescore run --reward {file}:half --name other", status=2)
    assert "an answer or metadata is another" in refused and "--adopt-tasks" in refused
    assert list(log.refresh().rescored) == ["half"]
    printed(f"rescore run --reward {file}:half --name other --adopt-tasks")
    assert list(log.refresh().rescored) == ["half", "other"]


def test_the_same_in_json_and_a_second_time(log: RunLog, file: Path) -> None:
    for new, known in ((1, 0), (0, 1)):
        text = printed(f"rescore run --reward {file}:half --name mine --json")
        found = json.loads(text[text.index("{") :])
        assert (found["name"], found["new_shards"], found["known_shards"]) == ("mine", new, known)
    assert found["splits"]["train"] == {
        "attempts": 4,
        "nulls": 1,
        "changed": 3,
        "mean_old": pytest.approx(2 / 3),
        "mean_new": pytest.approx(2 / 3),
        "correlation": pytest.approx(0.5),
    }


def test_what_is_no_reward_is_one_sentence(log: RunLog) -> None:
    refused = {
        "half": "is not an import path",
        "rollouts.nothing:half": "cannot be imported",
        "rollouts.rewards.answers:absent": "has no 'absent'",
        "rollouts.rewards.scoring:RewardPool": "no function at the top level",
        "rollouts.rewards.answers:final_answer": "cannot be called as function(reply, answer)",
    }
    assert_refused("rescore run --reward {}", refused)
    assert not log.refresh().rescored
