"""Whole runs with the settings of the rollout side: filters, batches, workers, updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.log.run_state import RunState
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home


def _run(home: Home, base_model: Path, *arguments: str) -> RunState:
    home.run("train", str(SCRIPTED), f"model={base_model}", *arguments)
    return open_run(LocalStore(home.path / "store"), "scripted").state


@pytest.mark.slow
@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
def test_a_run_whose_every_group_is_filtered_ends(home: Home, base_model: Path, fallback: str) -> None:
    dull = ["workflow=tests.flows.dull:Dull", "rollout.drop_uniform_groups=true", "rollout.max_attempts=1"]
    state = _run(home, base_model, *dull, f"rollout.on_nothing_accepted={fallback}", "steps=3", "evaluation.every=0")
    counters = state.counters()
    assert state.step == 3 and counters["filtered"] >= 12 and counters["trained"] == 0
    assert [step.claim.fallback for step in state.steps] == [fallback] * 3
    assert len({policy.weights_sha256 for policy in state.policies.values()}) == 1
    assert all(group.reject_reason == "uniform reward 1" for group in state.groups.values())


@pytest.mark.slow
def test_a_run_that_may_not_go_on_without_a_group_says_why(home: Home, base_model: Path) -> None:
    dull = ["workflow=tests.flows.dull:Dull", "rollout.drop_uniform_groups=true", "rollout.max_attempts=1"]
    done = home.run("train", str(SCRIPTED), f"model={base_model}", *dull, "evaluation.every=0", check=False)
    assert done.returncode == 2
    assert "step 1 has nothing to train" in done.stderr and "uniform reward 1" in done.stderr


def test_two_workers_two_steps_an_update_and_an_evaluator_of_its_own(home: Home, base_model: Path) -> None:
    crowd = [
        "rollout.num_workers=2",
        "rollout.max_concurrent=2",
        "train.steps_per_update=2",
        "evaluation.own_engine=true",
    ]
    state = _run(home, base_model, *crowd, "max_staleness=0.5", "steps=8")
    assert state.step == 8 and state.counters()["trained"] == 32 and not state.leased
    sampled = {group.head_version for group in state.groups.values()}
    assert sampled <= {0, 2, 4, 6}, "the engine serves every second policy"
    assert max(step.metrics["staleness_max"] for step in state.steps) <= 1
    assert {e.version for e in state.evaluations} >= {0, 8}
    producers = {shard.producer for shard in state.shards.values()}
    assert {"rollout-0", "rollout-1", "evaluator-0"} <= producers
    assert all((shard.producer == "evaluator-0") == shard.is_eval for shard in state.shards.values())

    first = sorted(state.groups, key=lambda group: state.groups[group].position)[:2]
    done = home.run("rollout", "once", "scripted", "--n", "2")
    assert done.stderr.startswith("starting the inference engine, then 2 prompts of run scripted, 4 attempts each\n")
    shown = done.stdout.splitlines()
    assert {line.split()[0] for line in shown if " usable, " in line} == set(first)
    assert sum(line.split()[:1] == ["user"] for line in shown) == 8
    assert sum(line.startswith("  attempt ") and ": " in line and ", reward " in line for line in shown) == 8
    assert shown[-1].endswith("of 2 groups accepted; nothing was committed")
    assert shown[-2].startswith("8 attempts: ") and "; mean reward " in shown[-2]
    assert "\n1 of 2 prompts attempted\n" in done.stderr
    assert open_run(LocalStore(home.path / "store"), "scripted").state.counters() == state.counters()


@pytest.mark.slow
def test_a_batch_of_attempts_trains_what_was_accepted(home: Home, base_model: Path) -> None:
    dynamic = [
        "rollout.dynamic_batch=true",
        "rollout.drop_uniform_groups=true",
        "rollout.on_nothing_accepted=skip_step",
    ]
    state = _run(home, base_model, *dynamic, "steps=6", "evaluation.every=0")
    for step in state.steps:
        assert len(step.claim.trained) + len(step.claim.filtered) == 4
    assert state.counters()["submitted"] == 24 and state.counters()["filtered"] > 0


@pytest.mark.slow
def test_three_problems_fill_batches_of_four(home: Home, base_model: Path) -> None:
    few = ["workflow=tests.flows.dull:Few", "steps=3", "evaluation.num_tasks=2"]
    state = _run(home, base_model, *few)
    assert state.counters()["trained"] == 12 and state.positions == set(range(12))
    assert sorted({group.epoch for group in state.groups.values()}) == [0, 1, 2, 3]
