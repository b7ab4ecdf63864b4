"""`millrace rescore`: the report, and errors as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from settings.run_file import default_values
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run
from storage.objects.object_store import LocalStore
from storage.records import Message
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, a_trajectory, provenance
from tests.unit.rollouts.rewards.test_rescoring import WORKFLOW

REWARDS = """
def half(reply, answer):
    if reply == "x2":
        raise KeyError("not this one")
    return 0.5 if reply.startswith("x") else 1.0
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward file beside a run of one shard: replies `x0`, `x1`, `x2` and `y`, with rewards 0, 1, 0 and 1."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = create_run(LocalStore(tmp_path / "store"), "run", {**default_values(), "workflow": WORKFLOW})
    attempts = [
        a_trajectory(
            float(attempt % 2),
            attempt=attempt,
            messages=[Message(role="assistant", content=reply, is_completion=True)],
        )
        for attempt, reply in enumerate(["x0", "x1", "x2", "y"])
    ]
    groups = [a_group(0, trajectories=attempts)]
    commit_shard(log, groups, provenance=provenance("s0"), sampling=SAMPLING)
    (tmp_path / "half.py").write_text(REWARDS)
    return tmp_path / "half.py"


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["rescore", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def _log(file: Path) -> RunLog:
    return open_run(LocalStore(file.parent / "store"), "run")


def test_the_report_compares_old_and_new(file: Path) -> None:
    code, text = _invoke("run", "--reward", f"{file}:half", "--processes", "1")
    assert code == 0, text
    row = next(line.split() for line in text.splitlines() if line.startswith("train"))
    # Of the three attempts with both, 0 → 0.5, 1 → 0.5, 1 → 1; the fourth is null.
    assert row == ["train", "4", "1", "0.6667", "→", "0.6667", "3", "(75.0", "%)", "0.5000"]
    assert "1 shards scored" in text and "1 raised" in text and "not this one" in text
    assert list(_log(file).state.rescored) == ["half"]


def test_the_same_in_json_and_a_second_time(file: Path) -> None:
    _invoke("run", "--reward", f"{file}:half", "--name", "mine", "--json")
    code, text = _invoke("run", "--reward", f"{file}:half", "--name", "mine", "--json")
    found = json.loads(text[text.index("{") :])
    assert code == 0 and (found["name"], found["new_shards"], found["known_shards"]) == ("mine", 0, 1)
    assert found["splits"]["train"] == {
        "attempts": 4,
        "nulls": 1,
        "changed": 3,
        "mean_old": pytest.approx(2 / 3),
        "mean_new": pytest.approx(2 / 3),
        "correlation": pytest.approx(0.5),
    }


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("half", "is not an import path"),
        ("rollouts.nothing:half", "cannot be imported"),
        ("rollouts.rewards.answers:absent", "has no 'absent'"),
        ("rollouts.rewards.scoring:RewardPool", "no function at the top level"),
        ("rollouts.rewards.answers:final_answer", "cannot be called as function(reply, answer)"),
    ],
)
def test_what_is_no_reward_is_one_sentence(file: Path, reward: str, sentence: str) -> None:
    code, text = _invoke("run", "--reward", reward)
    assert code == 2 and sentence in text and "Traceback" not in text
    assert not _log(file).state.rescored


def test_an_edited_function_is_asked_for_another_name(file: Path) -> None:
    _invoke("run", "--reward", f"{file}:half")
    file.write_text(REWARDS + "# edited\n")
    code, text = _invoke("run", "--reward", f"{file}:half")
    assert code == 2 and "--name half-2" in text
