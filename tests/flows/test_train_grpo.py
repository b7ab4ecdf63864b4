"""Whole runs through the real command, with a scripted engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.ui.metrics import described
from storage.log.entries import Alias
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from storage.shards.shards import read_shard
from tests.conftest import SCRIPTED, Home


def _log(home: Home, run: str = "scripted") -> RunLog:
    return open_run(LocalStore(home.path / "store"), run)


def test_a_run_trains_every_prompt_once_and_says_so(finished: Home) -> None:
    status = finished.status("scripted")
    assert status["step"] == status["weight_version"] == 6
    assert status["submitted"] == status["trained"] == 24
    assert status["pending"] == status["stale"] == status["filtered"] == status["failed"] == 0
    assert status["accuracy_before"] is not None and status["accuracy_after"] is not None
    assert status["mlflow_model"] == "scripted" and status["mlflow_version"] == "3", "0, 3 and 6 are evaluated"
    assert _log(finished).state.positions == set(range(24))


def test_synchronous_training_uses_only_tokens_of_the_policy_being_trained(finished: Home) -> None:
    log = _log(finished)
    for step in log.state.steps:
        for claimed in step.claim.trained:
            group = log.state.groups[claimed.group_id]
            assert group.head_version == group.tail_version == step.claim.base_version


def test_the_log_says_of_each_publication_what_became_of_requests_and_their_cache(finished: Home) -> None:
    aliases = [entry.body for entry in _log(finished).entries if isinstance(entry.body, Alias)]
    published = [alias for alias in aliases if alias.name == "rollout" and alias.version > 0]
    assert [alias.version for alias in published] == [1, 2, 3, 4, 5, 6]
    assert {(alias.update_mode, alias.cache_cleared) for alias in published} == {("keep", True)}


def test_evaluation_rows_are_kept_apart_and_of_one_version(finished: Home) -> None:
    log = _log(finished)
    assert [evaluation.version for evaluation in log.state.evaluations] == [0, 3, 6]
    for evaluation in log.state.evaluations:
        shard = log.state.shards[evaluation.shard_id]
        assert shard.is_eval and shard.head_version == shard.tail_version == evaluation.version
        assert all(row["is_eval"] for row in read_shard(log, shard).to_pylist())


def test_a_model_version_leads_to_the_shards_its_step_consumed(finished: Home) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{finished.path / 'mlflow.db'}")
    version = client.get_model_version_by_alias("scripted", "rollout")
    step = _log(finished).state.steps[-1]
    assert version.tags["millrace.step"] == "6" and "made by step 6 from policy 5." in version.description
    assert version.tags["millrace.weights_sha256"] == step.policy.weights_sha256
    inputs = client.get_run(version.run_id).inputs.dataset_inputs
    source = next(i.dataset.source for i in inputs if i.dataset.digest == version.tags["millrace.dataset_digest"])
    assert [(shard["id"], shard["sha256"]) for shard in json.loads(source)] == list(step.shard_sha256.items())


def test_every_metric_of_the_log_is_described(finished: Home) -> None:
    """Those of the driver and the machine too; `tests/unit/trainers/test_metrics.py` has the trainer's settings."""
    patterns = [re.compile(metric["match"]) for section in described() for metric in section["metrics"]]
    names = {name for step in _log(finished).state.steps for name in step.metrics}
    assert {"round_seconds", "train_flops_per_second", "peak_memory_bytes", "planned_peak_memory_bytes"} <= names
    assert [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_a_finished_run_started_again_does_nothing_more(finished: Home) -> None:
    before, written = _log(finished).state, finished.worker_logs()
    finished.run("train", str(SCRIPTED), _model_of(finished))
    after = _log(finished).state
    assert written and finished.worker_logs() == written, "no engine and no trainer had a reason to start"
    assert after.step == before.step and after.shards.keys() == before.shards.keys()


def _model_of(home: Home) -> str:
    """The key the fixture set beside the run file."""
    return f"model={json.loads((home.path / 'store/runs/scripted/run.json').read_text())['config']['model']}"


def test_another_configuration_under_the_same_run_id_is_refused(finished: Home) -> None:
    done = finished.run("train", str(SCRIPTED), _model_of(finished), "batch_size=8", check=False)
    assert done.returncode == 2
    assert "batch_size (4 → 8)" in done.stderr and "scripted-2" in done.stderr


def test_a_debug_rollout_shows_its_groups_and_commits_nothing(finished: Home) -> None:
    before = _log(finished).state
    first = sorted(before.groups, key=lambda group: before.groups[group].position)[:2]
    done = finished.run("rollout", "once", "scripted", "--n", "2")
    assert done.stderr.startswith("starting the inference engine, then 2 prompts of run scripted, 4 attempts each\n")
    shown = done.stdout.splitlines()
    assert {line.split()[0] for line in shown if " usable, " in line} == set(first)
    assert sum(line.split()[:1] == ["user"] for line in shown) == 8
    assert sum(line.startswith("  attempt ") and ": " in line and ", reward " in line for line in shown) == 8
    assert shown[-1].endswith("2 of 2 groups accepted; nothing was committed")
    assert shown[-2].startswith("8 attempts: ") and "; mean reward " in shown[-2]
    assert "\n1 of 2 prompts attempted\n" in done.stderr
    assert _log(finished).state.entries == before.entries


@pytest.mark.slow
def test_a_damaged_shard_is_quarantined_and_its_prompts_run_again(home: Home, base_model: Path) -> None:
    home.run("train", str(SCRIPTED), f"model={base_model}", "steps=2")
    log = _log(home)
    pending = RunLog(log.store, "scripted")
    pending.refresh()
    # A shard that was committed, and then rotted before any step could use it.
    victim = _commit_one_more_shard(home)
    path = home.path / "store" / log.shard_key(victim)
    path.write_bytes(path.read_bytes()[:-40])
    home.run("train", str(SCRIPTED), f"model={base_model}", "steps=4")
    state = _log(home).state
    assert victim in state.quarantined and "sha256 differs" in state.quarantined[victim]
    assert state.step == 4 and state.positions == set(range(16))
    assert sum(".retry1" in group_id for group_id in state.groups) == 4


def _commit_one_more_shard(home: Home) -> str:
    """Copy the last training shard's rows under the next four prompts."""
    from storage.records import RolloutGroup, Sampling, Task, Trajectory, Turn
    from storage.shards.codec import Provenance
    from storage.shards.shards import commit_shard

    log = _log(home)
    groups = []
    for position in range(8, 12):
        turn = Turn(
            context_ids=[2, 5], sampled_ids=[6, 1], logprobs=[-1.0, -1.0], weight_versions=[2, 2], finish_reason="stop"
        )
        attempts = [
            Trajectory(attempt=i, turns=[turn], messages=[], status="ok", reward=float(i % 2)) for i in range(4)
        ]
        groups.append(
            RolloutGroup(
                id=f"0.by-hand-{position}",
                task=Task(id=f"by-hand-{position}", prompt=""),
                position=position,
                epoch=0,
                expected=4,
                trajectories=attempts,
            )
        )
    provenance = Provenance(
        run_id="scripted",
        shard_id="by-hand",
        producer="test",
        tokenizer_sha256="",
        chat_template_sha256="",
        config_sha256="",
        code_version="",
    )
    commit_shard(log, groups, provenance=provenance, sampling=Sampling())
    return "by-hand"
