"""`millrace gc`: it shows, asks, removes, and says who is in the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from storage.log.run_log import RunLog
from storage.retention.retention import reading
from tests.builders import a_log, a_shard, a_step, a_summary, local_store


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """Four steps with a state each, in the default store."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = a_log(local_store(tmp_path))
    for number in range(1, 5):
        log.store.put(log.shard_key(f"s{number}"), b"rows")
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = replace(a_step(log.state, trained=[f"0.task{number}"]), state_path=log.key(f"state/{number}"))
        log.store.put(f"{step.policy.path}/model.safetensors", b"x" * 1000)
        log.store.put(f"{step.state_path}/state.safetensors", b"x" * 2000)
        log.append(step)
    return log


def _gc(*arguments: str, answer: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, ["gc", *arguments], input=answer, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def _policies(log: RunLog) -> list[str]:
    return list(log.store.names("runs/run/policies"))


def test_it_shows_what_it_would_free_and_leaves_it(log: RunLog) -> None:
    code, output = _gc("run", "--dry-run", "--keep-last", "1")
    assert code == 0 and len(_policies(log)) == 4
    assert "of which would go 7.0 KB" in output  # three policies and the states 1 and 2, whose shards have 4 bytes
    assert "0 (base model); 4 (live, among the newest)" in output
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert {"3 policies 3.0 KB", "2 optimizer states 4.0 KB", "3 shards and their rewards 12 B"} <= set(rows)


def test_it_asks_before_it_removes(log: RunLog) -> None:
    code, output = _gc("--keep-last", "1", answer="n\n")
    assert code == 1 and "Remove 7.0 KB?" in output and len(_policies(log)) == 4
    assert _gc("--keep-last", "1")[0] == 1, "nobody there to ask"
    code, output = _gc("--keep-last", "1", answer="y\n")
    assert code == 0 and "freed 7.0 KB" in output and _policies(log) == ["4-a"]
    code, output = _gc("--keep-last", "1")
    assert code == 0 and "would go 0 B" in output and "Remove" not in output


def test_json_has_a_reason_for_every_item(log: RunLog) -> None:
    code, output = _gc("run", "--keep-last", "2", "--yes", "--json")
    [report] = json.loads(output)
    assert code == 0 and report["removed"] and report["freed_bytes"] == sum(item["bytes"] for item in report["items"])
    assert report["kept_policies"] == {"0": "base model", "3": "among the newest", "4": "live, among the newest"}
    assert {item["name"] for item in report["items"] if item["kind"] == "policy"} == {"1", "2"}
    assert all(item["reason"] and item["files"] == 1 for item in report["items"])
    assert report["by_kind"]["state"] == {"count": 1, "bytes": 2000}
    assert log.refresh().retired_policies == {1, 2}
    code, output = _gc("run", "--json")
    assert code == 2 and "--dry-run" in output


def test_a_reader_is_named_and_can_be_ignored(log: RunLog) -> None:
    with reading(log, "replay"):
        code, output = _gc("--keep-last", "1", "--yes")
        assert code == 0 and "in use by replay" in output and "--ignore-readers" in output and len(_policies(log)) == 4
        [report] = json.loads(_gc("--keep-last", "1", "--yes", "--json")[1])
        assert report["readers"][0]["what"] == "replay" and not report["removed"]
        code, output = _gc("--keep-last", "1", "--yes", "--ignore-readers")
        assert code == 0 and "freed" in output and _policies(log) == ["4-a"]


def test_a_damaged_run_is_named_and_the_others_are_collected(log: RunLog) -> None:
    a_log(log.store, run_id="broken")
    log.store.put("runs/broken/log/00000000000000000001.json", b"{")
    code, output = _gc("--keep-last", "1", "--yes")
    assert code == 0 and "broken  left alone: " in output and "a reader came" not in output
    assert _policies(log) == ["4-a"]
    documents = json.loads(_gc("--dry-run", "--json")[1])
    assert ["cannot be read" in document["problem"] for document in documents] == [False, True]
    code, output = _gc("broken", "--dry-run")
    assert code == 2 and "cannot be read" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--older-than", "soon"], "'soon'"),
        (["--max-size", "5 elephants"], "50GB"),
        (["--keep-last", "-1"], "keep_last = -1"),
        (["nope"], "runs there: run"),
    ],
)
def test_what_cannot_be_meant_is_refused(log: RunLog, arguments: list[str], sentence: str) -> None:
    code, output = _gc(*arguments, "--yes")
    assert code == 2 and sentence in output and len(_policies(log)) == 4


def test_a_store_without_runs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    code, output = _gc("--yes")
    assert code == 0 and "no runs in" in output and str(tmp_path) in output
