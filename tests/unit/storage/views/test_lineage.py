"""From a policy back to its trajectories, and from a trajectory on to every policy it had a part in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from storage.log.entries import Alias, Evaluation, Quarantine, Registration, Retire, Session
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE
from storage.tracking.registry import dataset_digest
from storage.views.lineage import policy_lineage, prompt_lineage, trajectory_lineage
from tests.builders import (
    MemoryStore,
    a_claim,
    a_group,
    a_log,
    a_policy_folder,
    a_shard,
    a_step,
    a_summary,
    a_trajectory,
    a_turn,
    commit,
    local_store,
)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    """Three steps by two sessions, with real shards and one real policy folder.

    s0: task0, task1, task2 (rejected) ─▶ steps 1, 2; s1: task3, sampled by 0 and 2 ─▶ step 2; s2 ─▶ step 3; task5 waits
    """
    store = local_store(tmp_path)
    log = a_log(store)
    commit(log, "s0", a_group(0), a_group(1, rewards=[1.0, None, 0.0]), a_group(2, accepted=False))
    log.append(a_step(log.state, trained=["0.task0"]))
    log.append(Session(id="second", code_version="c0de2", reward_sha256="4e3a"))
    turns = [a_turn(versions=0), a_turn(versions=2, sequence_idx=1)]
    mixed = [a_trajectory(1.0, turns=turns, reward_parts={"exact": 1.0}), a_trajectory(0.5, attempt=1)]
    commit(log, "s1", a_group(3, trajectories=mixed))
    step = a_step(log.state, a_claim(log.state, trained=["0.task1", "0.task3"], filtered=["0.task2"]))
    digest = a_policy_folder(tmp_path / "made")
    policy = replace(step.policy, weights_sha256=digest)
    store.put_folder(tmp_path / "made", policy.path, last=DIGEST_FILE)
    log.append(replace(step, policy=policy))
    commit(log, "s2", a_group(4, version=2))
    log.append(a_step(log.state, trained=["0.task4"]))
    commit(log, "s3", a_group(5, version=3))
    log.append(Alias(name="rollout", version=3, checksum=""))
    log.append(Alias(name="shipped", version=2, checksum=""))
    log.append(Registration(version=2, model_name="run", registry_version="3"))
    log.append(Registration(version=1, model_name="run", registry_version="7"))
    log.append(Evaluation(version=2, split="test", score=0.5, num_tasks=2, num_failed=0, shard_id="e2", seconds=1.0))
    return log


def test_a_policy_leads_to_all_that_made_it(log: RunLog):
    made = policy_lineage(log, 2)
    assert (made.version, made.step, made.parents, made.live, made.retired) == (2, 2, [1, 0], False, False)
    assert (made.registry_model, made.registry_version, made.aliases) == ("run", "3", ["shipped"])
    assert (made.session_id, made.code_version, made.reward_sha256) == ("second", "c0de2", "4e3a")
    assert made.outcomes == {"trained": 2, "filtered": 1, "stale": 0, "failed": 0, "cancelled": 0}
    assert made.dataset_digest == dataset_digest(log.state.steps[1])
    assert [(s.id, s.rows, s.groups, s.problem) for s in made.shards] == [("s0", 6, 1, ""), ("s1", 3, 1, "")]
    for shard in made.shards:
        assert shard.sha256 == log.state.shards[shard.id].sha256
        assert shard.uri == f"{log.store.uri}/runs/run/shards/{shard.id}.arrow"
    assert [(group.id, group.prompt_id) for group in made.groups] == [("0.task1", "task1"), ("0.task3", "task3")]
    assert made.sampled_by == [0, 2]
    assert [evaluation.score for evaluation in made.evaluations] == [0.5]
    assert made.config_sha256 == json.loads(log.store.get("runs/run/run.json"))["config_sha256"]
    assert made.weights == f"{log.store.uri}/runs/run/policies/2-a" and not made.verified


def test_the_base_model_and_runs_of_older_code_have_less_to_say_and_long_parent_chains_are_cut_short(log: RunLog):
    base = policy_lineage(log, 0)
    assert (base.step, base.parents, base.shards, base.groups, base.dataset_digest) == (None, [], [], [], "")
    first = policy_lineage(log, 1)
    assert first.reward_sha256 == "" and first.code_version == "c0de" and first.registry_version == "7"
    for number in range(6, 12):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        log.append(a_step(log.state, trained=[f"0.task{number}"]))
    assert policy_lineage(log, 9).parents == [8, 7, 6, 5, 4, 3, 2, 1]


def test_checking_reads_every_file_again(log: RunLog):
    made = policy_lineage(log, 2, verify=True)
    assert made.verified and made.problems == [] and made.sampled_by == [0, 2]
    root = log.store.root  # type: ignore[attr-defined]
    weights, shard = root / "runs/run/policies/2-a/model.safetensors", root / "runs/run/shards/s1.arrow"
    weights.write_bytes(b"others")
    shard.write_bytes(shard.read_bytes()[:-9])
    problems = policy_lineage(log, 2, verify=True).problems
    assert len(problems) == 2 and "shard s1" in problems[0] and "model.safetensors differs" in problems[1]
    (root / "runs/run/policies/2-a/digest.json").unlink()
    assert "never finished" in policy_lineage(log, 2, verify=True).problems[1]
    assert "missing" in policy_lineage(log, 3, verify=True).problems[0]
    shard.unlink()
    lineage = trajectory_lineage(log, "0.task3/0")
    assert lineage.attempt is None and "missing" in lineage.shard.problem and lineage.influenced == [2, 3]


def test_checking_finds_versions_the_summaries_cannot_name(log: RunLog):
    """A group knows its oldest and newest version; those in between are in the rows."""
    turn = a_turn(sampled=(5, 6, 7), versions=[0, 1, 3])
    commit(log, "mixed", a_group(9, trajectories=[a_trajectory(turns=[turn])]), a_group(8, version=2))
    log.append(a_step(log.state, trained=["0.task9"]))
    assert policy_lineage(log, 4).sampled_by == [0, 3]
    assert policy_lineage(log, 4, verify=True).sampled_by == [0, 1, 3]


def test_retired_and_quarantined_files_are_named(log: RunLog):
    log.append(Quarantine(shard_id="s0", reason="cut off"))
    log.append(Retire(shard_ids=["s1"], policy_versions=[1], state_paths=[], reason="by age"))
    made = policy_lineage(log, 2, verify=True)
    assert [shard.problem for shard in made.shards] == ["quarantined: cut off", "retired: retention removed its file"]
    assert policy_lineage(log, 1).retired and "retired" in policy_lineage(log, 1, verify=True).problems[-1]
    assert trajectory_lineage(log, "0.task3/0").retired == [] and trajectory_lineage(log, "0.task0/0").retired == [1]


def test_a_trajectory_leads_to_every_policy_it_influenced(log: RunLog):
    lineage = trajectory_lineage(log, "0.task3/0")
    assert (lineage.outcome, lineage.step, lineage.policy, lineage.influenced) == ("trained", 2, 2, [2, 3])
    assert (lineage.live, lineage.aliases, lineage.registered) == (3, {"rollout": 3, "shipped": 2}, [2])
    assert lineage.shard.id == "s1" and lineage.group.head_version == 0 and lineage.group.tail_version == 2
    assert lineage.attempt is not None
    assert (lineage.attempt.reward, lineage.attempt.reward_parts) == (1.0, {"exact": 1.0})
    assert (lineage.attempt.sequences, lineage.attempt.sampled_tokens, lineage.attempt.versions) == (2, 4, [0, 2])
    other = trajectory_lineage(log, "0.task3/1").attempt
    assert other is not None and (other.reward, other.status, other.versions) == (0.5, "ok", [0])


def test_what_was_never_trained_influenced_nothing_and_a_failed_attempt_has_no_row(log: RunLog):
    rejected = trajectory_lineage(log, "0.task2/0")
    assert (rejected.outcome, rejected.step, rejected.policy, rejected.influenced) == ("filtered", 2, None, [])
    waiting = trajectory_lineage(log, "0.task5/1")
    assert (waiting.outcome, waiting.step, waiting.influenced, waiting.live) == ("pending", None, [], None)
    failed = trajectory_lineage(log, "0.task1/1")
    assert failed.attempt is None and failed.group.failures == {"env_error": 1} and failed.policy == 2


def test_an_unknown_trajectory_is_an_error_with_the_nearest_one(log: RunLog):
    for trajectory, sentence in {
        "0.task33/0": "no group '0.task33'; the nearest is '0.task3'",
        "7.task3/0": "nearest is '0.task3'",
        "0.task3/2": "attempts 0 to 1, not 2",
        "0.task3": "GROUP/ATTEMPT",
        "eval2.task3/0": "held-out",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            trajectory_lineage(log, trajectory)


def test_a_prompt_leads_to_all_its_groups():
    log = a_log(MemoryStore())
    names = ["0.7", "1.7", "1.7.retry1", "0.77", "0.7.5", "0.17"]
    prompts = ["7", "7", "7", "77", "7.5", "17"]
    groups = [replace(a_summary(n), id=i, prompt_id=p) for n, (i, p) in enumerate(zip(names, prompts, strict=True))]
    log.append(a_shard("s0", groups))
    log.append(a_step(log.state, trained=["1.7", "0.77"]))
    lineages = prompt_lineage(log, "7")
    assert [lineage.group.id for lineage in lineages] == ["0.7", "1.7", "1.7.retry1"]
    assert [lineage.influenced for lineage in lineages] == [[], [1], []]
    assert [lineage.group.id for lineage in prompt_lineage(log, "7.5")] == ["0.7.5"]
    with pytest.raises(ValueError, match="no group of prompt '8'"):
        prompt_lineage(log, "8")
