"""`millrace gc`: it shows, asks, removes, and says who is in the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock
from storage.objects.object_store import LocalStore
from storage.retention.retention import reading
from tests.builders import a_log, a_shard, a_step, a_summary
from tests.unit.cli.builders import assert_refused, printed


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """Four steps with a state each."""
    log = a_log(store)
    for number in range(1, 5):
        log.store.put(log.shard_key(f"s{number}"), b"rows")
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = replace(a_step(log.state, trained=[f"0.task{number}"]), state_path=log.key(f"state/{number}"))
        log.store.put(f"{step.policy.path}/model.safetensors", b"x" * 1000)
        log.store.put(f"{step.state_path}/state.safetensors", b"x" * 2000)
        log.append(step)
    return log


def _policies(log: RunLog) -> list[str]:
    return list(log.store.names("runs/run/policies"))


def test_it_shows_what_it_would_free_and_asks_before_it_removes(log: RunLog) -> None:
    shown = printed("gc run --dry-run --keep-last 1")
    assert "of which would go 7.0 KB" in shown  # three policies and the states 1 and 2, whose shards have 4 bytes
    assert "0 (base model); 4 (live, among the newest)" in shown
    rows = {" ".join(line.split()) for line in shown.splitlines()}
    assert {"3 policies 3.0 KB", "2 optimizer states 4.0 KB", "3 shards and their rewards 12 B"} <= rows
    assert "Remove 7.0 KB?" in printed("gc --keep-last 1", status=1, answer="n\n")
    printed("gc --keep-last 1", status=1)  # no terminal to ask on
    assert len(_policies(log)) == 4
    assert "freed 7.0 KB" in printed("gc --keep-last 1", answer="y\n") and _policies(log) == ["4-a"]
    shown = printed("gc --keep-last 1")
    assert "would go 0 B" in shown and "Remove" not in shown


def test_json_has_a_reason_for_every_item(log: RunLog) -> None:
    [report] = json.loads(printed("gc run --keep-last 2 --yes --json"))
    assert report["removed"] and report["freed_bytes"] == sum(item["bytes"] for item in report["items"])
    assert report["kept_policies"] == {"0": "base model", "3": "among the newest", "4": "live, among the newest"}
    assert {item["name"] for item in report["items"] if item["kind"] == "policy"} == {"1", "2"}
    assert all(item["reason"] and item["files"] == 1 for item in report["items"])
    assert report["by_kind"]["state"] == {"count": 1, "bytes": 2000}
    assert log.refresh().retired_policies == {1, 2}
    assert "--dry-run" in printed("gc run --json", status=2)


def test_a_reader_is_named_and_can_be_ignored(log: RunLog) -> None:
    with reading(log, "replay"):
        shown = printed("gc --keep-last 1 --yes")
        assert "in use by replay" in shown and "--ignore-readers" in shown and len(_policies(log)) == 4
        [report] = json.loads(printed("gc --keep-last 1 --yes --json"))
        assert report["readers"][0]["what"] == "replay" and not report["removed"]
        assert "freed" in printed("gc --keep-last 1 --yes --ignore-readers") and _policies(log) == ["4-a"]


def test_a_damaged_run_is_named_and_the_others_are_collected(log: RunLog) -> None:
    a_log(log.store, run_id="broken")
    log.store.put("runs/broken/log/00000000000000000001.json", b"{")
    shown = printed("gc --keep-last 1 --yes")
    assert "broken  left alone: " in shown and "a reader came" not in shown
    assert _policies(log) == ["4-a"]
    documents = json.loads(printed("gc --dry-run --json"))
    assert ["cannot be read" in document["problem"] for document in documents] == [False, True]
    assert "cannot be read" in printed("gc broken --dry-run", status=2)


def test_what_cannot_be_meant_is_refused(log: RunLog) -> None:
    refused = {"--older-than soon": "'soon'", "--max-size '5 elephants'": "50GB"}
    refused |= {f"--max-size {'9' * 400}GB": "write a number and a unit"}  # which no float holds
    refused |= {"--keep-last -1": "keep_last = -1", "nope": "runs there: run"}
    assert_refused("gc {} --yes", refused)
    assert len(_policies(log)) == 4


def test_a_store_without_runs_says_so(home: Path) -> None:
    shown = printed("gc --yes")
    assert "no runs in" in shown and str(home) in shown


def test_a_run_is_removed_for_good_after_a_question_and_not_while_it_is_trained(log: RunLog) -> None:
    question = "Remove run run with 4 steps, 4 shards"
    assert question in printed("rm run", status=1, answer="n\n") and _policies(log)
    with trainer_lock(log):
        assert "is being trained by process" in printed("rm run --yes", status=2)
    assert "removed run run with 4 steps, 4 shards" in printed("rm run --yes")
    assert "no run 'run'" in printed("rm run", status=2) and not log.store.names("runs")


def test_a_removal_that_was_cut_off_is_gone_on_with(log: RunLog) -> None:
    log.store.delete([log.key(f"log/{0:020d}.json")])  # the log goes first, `run.json` last
    printed("rm run --yes")
    assert not log.store.names("runs")
