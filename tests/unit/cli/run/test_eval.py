"""`millrace eval` says what cannot work before it starts an engine, a flow or anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from cli.run.eval import print_evaluation
from flows.evaluate import plan_evaluation
from settings.run_file import make_config
from storage.log.entries import Retire, TaskSet
from storage.log.history import to_json
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.unit.cli.builders import a_run_of_one_step, an_evaluation, assert_refused

CONFIG: dict[str, Any] = {"workflow": "examples.arithmetic:Arithmetic", "evaluation": {"n_samples": 4, "num_tasks": 9}}


@pytest.fixture
def log(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """A run with policies 0 and 1, the first of them retired."""
    monkeypatch.setattr("cli.run.flow.run_flow", lambda *_, **__: pytest.fail("the flow was started"))
    log = a_run_of_one_step(store, make_config(CONFIG, source="test").model_dump(mode="json"))
    log.append(Retire(shard_ids=[], policy_versions=[0], state_paths=[], reason="test"))
    return log


def test_what_cannot_work_is_one_sentence(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.arithmetic import Arithmetic

    tasks = Arithmetic.tasks
    monkeypatch.setattr(Arithmetic, "tasks", lambda self, split: [] if split == "empty" else tasks(self, split))
    create_run(log.store, "fresh", CONFIG)
    refused = {
        "nobody": "no run 'nobody'",
        "fresh": "run 'fresh' has no policy yet; train it first",
        "run --version 7": "no policy version 7; it has 0 to 1",
        "run --version 0": "policy version 0 of run 'run' was retired: its weights are gone; there are those of 1",
        "run --split empty": "no tasks in split 'empty'",
    }
    assert_refused("eval {}", refused)
    log.append(an_evaluation(1, 0.5, split="test", tasks=TaskSet(count=3, sha256="", ids_sha256="")))
    assert_refused("eval {}", {"run": "there were 3, and now there are 200; scores would be of other problems"})
    assert plan_evaluation(run="run", store="", version=None, wanted={}, adopt_tasks=True)[1] == 1


def test_what_is_not_wanted_is_as_the_run_evaluates(log: RunLog) -> None:
    config, version = plan_evaluation(run="run", store="", version=None, wanted={"n_samples": 2, "split": None})
    evaluation = config.evaluation
    assert version == 1
    assert (evaluation.n_samples, evaluation.num_tasks, evaluation.split) == (2, 9, "test")
    for key in ("n_samples", "num_tasks"):
        with pytest.raises(ValueError, match=f"evaluation.{key} = 0"):
            plan_evaluation(run="run", store="", version=None, wanted={key: 0})


def test_the_result_is_printed_with_error_chances_and_failures() -> None:
    found = an_evaluation(3, 0.25, split="[test]", num_tasks=8, n_samples=2, num_failed=1, failures={"timeout": 1})
    chances = {"pass_at": {"1": 0.25, "2": 0.5}, "standard_error": 0.125, "seconds": 2.0}
    console = Console(width=200, record=True)
    print_evaluation({"run": "run", **json.loads(json.dumps(to_json(found))), **chances}, console)
    assert console.export_text().strip() == (
        "policy 3 of run run, split '[test]': held-out avg@2 0.250 ± 0.125 "
        "on 8 tasks × 2 attempts, pass@1 0.250, pass@2 0.500, 1 failed (timeout 1), 2.0 s"
    )
