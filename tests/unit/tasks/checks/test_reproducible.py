"""`reproducible = true` is refused, before anything starts, where a run is no function of its file."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from settings.errors import InvalidInput
from settings.run_file import RunConfig, Settings
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tasks.checks import reproducible
from tasks.checks.reproducible import check_settings
from tests.builders import a_config
from tests.unit.tasks.checks.test_trial import _check


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"max_staleness": 0.5}, "max_staleness = 0.5: which policy answers a prompt would depend on the moment"),
        ({"steps_per_update": 2}, "train.steps_per_update = 2: which groups come first would depend on the moment"),
        ({"num_workers": 0, "own_engine": True}, "rollout.num_workers = 0: an engine elsewhere cannot prove"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "speculative_config: vLLM draws such tokens from"),
        ({"vllm": {"enforce_eager": False}}, "enforce_eager = false: on CPUs only layers that are not compiled"),
    ],
)
def test_settings_under_which_the_moment_decides_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"reproducible = true with .*{sentence}"):
        check_settings(a_config(reproducible=True, **settings), on_gpus=False)
    check_settings(a_config(reproducible=True), on_gpus=False)


def test_a_fixed_schedule_is_reproducible_whatever_the_staleness() -> None:
    for settings in ({"max_staleness": 0.5}, {"max_staleness": 3, "steps_per_update": 2}, {"steps_per_update": 2}):
        check_settings(a_config(reproducible=True, schedule="fixed", **settings), on_gpus=False)


def test_ranks_on_gpus_need_a_fixed_order_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    config = a_config(reproducible=True, num_ranks=2)
    with pytest.raises(InvalidInput, match="num_ranks = 2: NCCL adds up gradients in an order of its own choice"):
        check_settings(config, on_gpus=True)
    check_settings(config, on_gpus=False)
    check_settings(a_config(reproducible=True), on_gpus=True)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    check_settings(config, on_gpus=True)


def test_a_compiled_engine_is_refused_on_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducible, "is_cpu_build", lambda: False)
    check_settings(a_config(reproducible=True, vllm={"enforce_eager": False}), on_gpus=True)


_ASKS = """
async def run(self, task, chat):
    reply = await chat.ask({ask})
    return {reward}
"""


@pytest.mark.parametrize(
    "ask, reward, sentence",
    [
        ("task.prompt", "__import__('random').random()", "draws from the global random generator"),
        ("str(__import__('numpy').random.randint(10**9))", "1.0", "draws from the global random generator"),
        ("str(__import__('random').Random().random())", "1.0", "reads the clock, a service or a generator without"),
        ("task.prompt", "__import__('time').perf_counter()", "asks or scores otherwise when the same replies"),
    ],
)
def test_a_task_that_does_not_repeat_itself_is_refused(ask: str, reward: str, sentence: str, tmp_path: Path) -> None:
    run = _ASKS.format(ask=ask, reward=reward)
    with pytest.raises(InvalidInput, match=rf"reproducible = true: task 'train-0' .*{sentence}.*mine\.py:14"):
        _check(tmp_path, run, reproducible=True)
    _check(tmp_path, run)


def test_a_task_with_a_generator_of_its_own_passes_and_the_global_ones_go_on_where_they_were(tmp_path: Path) -> None:
    import random

    run = _ASKS.format(ask="str(__import__('random').Random(task.id).random())", reward="1.0")
    before = random.getstate()
    _check(tmp_path, run, reproducible=True)
    assert random.getstate() == before


def test_the_flow_takes_every_key_that_is_in_no_table() -> None:
    from flows.train_grpo import train_grpo

    assert set(RunConfig.model_fields) - set(Settings.model_fields) <= set(inspect.signature(train_grpo.fn).parameters)


def test_a_producer_elsewhere_is_refused(tmp_path: Path) -> None:
    from flows.rollout import plan_rollouts

    for run, exact in (("exact", True), ("free", False)):
        config = a_config(run=run, workflow="examples.arithmetic:Arithmetic", reproducible=exact, store=str(tmp_path))
        create_run(LocalStore(tmp_path), run, config.model_dump(mode="json"))
    asked = {"store": str(tmp_path), "name": "there", "shards": 0, "patience": 1.0}
    with pytest.raises(InvalidInput, match="run 'exact' is reproducible, and an engine elsewhere cannot prove"):
        plan_rollouts(run="exact", **asked)
    plan_rollouts(run="free", **asked)
