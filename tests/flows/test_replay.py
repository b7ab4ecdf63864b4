"""Replay and rescore of a whole run, through the real command: the recorded weights come out again, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.user_code import source_sha256
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.digests import verify_folder
from storage.objects.object_store import LocalStore
from storage.shards.reward_sets import read_rewards
from storage.shards.shards import read_shard
from tests.conftest import Home


@pytest.fixture(scope="module")
def rescored(finished: Home) -> Home:
    """The finished run with its own reward computed again."""
    finished.run("rescore", "scripted", "--reward", "tests.flows.guesses:parity", "--eval")
    return finished


def _log(home: Home) -> RunLog:
    return open_run(LocalStore(home.path / "store"), "scripted")


def test_the_rewards_a_rescore_computes_again_are_the_recorded_ones(rescored: Home) -> None:
    log = _log(rescored)
    files = log.state.rescored["parity"].files
    assert files.keys() == log.state.shards.keys()
    for shard in log.state.shards.values():
        assert read_rewards(log, shard, "parity")["reward"].equals(read_shard(log, shard)["reward"])
    again = json.loads(rescored.run("rescore", "scripted", "--reward", "tests.flows.guesses:parity", "--json").stdout)
    assert (again["new_shards"], again["failures"], again["skipped"]) == (0, {}, {})
    train = again["splits"]["train"]
    assert train["attempts"] == 96 and train["changed"] == 0 and train["mean_old"] == train["mean_new"]


def test_a_span_from_the_base_policy_comes_out_as_recorded_on_rescored_rewards(rescored: Home, tmp_path: Path) -> None:
    entries = _log(rescored).state.entries
    span = ["--from", "1", "--rewards", "parity", "--save", str(tmp_path / "kept")]
    done = rescored.run("replay", "scripted", *span, "--json")
    assert "starting from the base policy" in done.stderr and "6 of 6: step 6, same weights" in done.stderr
    result = json.loads(done.stdout)
    state = _log(rescored).state
    steps = state.steps
    assert state.entries == entries, "a replay commits nothing"
    assert verify_folder(tmp_path / "kept") == steps[5].policy.weights_sha256
    assert result["plan"] == {"resumed_from": 0, "first": 1, "last": 6} and result["rewards"] == "parity"
    assert [step["replayed_sha256"] for step in result["steps"]] == [step.policy.weights_sha256 for step in steps]
    assert result["identical"] and result["start_identical"]
    assert len({step.policy.weights_sha256 for step in steps}) == 6, "the weights moved at every step"
    assert all(step["replayed"] == step["recorded"] for step in result["steps"])


def test_one_change_from_the_nearest_state_is_reported_with_how_far_it_leads(finished: Home) -> None:
    span = ["--from", "4", "--to", "5", "--loss", "cispo", "train.loss.clip_high=0.1"]
    result = json.loads(finished.run("replay", "scripted", *span, "--json").stdout)
    assert result["plan"] == {"resumed_from": 2, "first": 4, "last": 5} and result["start_identical"]
    assert result["changes"] == {
        "train.loss.kind": "clip → cispo",
        "train.loss.clip_low": "0.2 → None",
        "train.loss.clip_high": "0.28 → 0.1",
    }
    assert not result["identical"] and not result["unchanged"]
    for step in result["steps"]:
        assert step["replayed_sha256"] != step["recorded_sha256"]
        assert step["distance"] > 0 and -1 <= step["cosine"] < 1


def test_a_session_says_which_reward_code_it_ran(finished: Home) -> None:
    assert _log(finished).state.sessions[0].reward_sha256 == source_sha256("tests.flows.guesses:Guesses")
