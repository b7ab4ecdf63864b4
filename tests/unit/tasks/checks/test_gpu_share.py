"""How engine and trainer use one GPU, and which runs are refused, each in a sentence with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from settings.errors import InvalidInput
from settings.run_file import RunConfig, load_run_file
from tasks.checks import gpu_share, preflight
from tasks.checks.gpu_share import check_share, share_of, with_share


def _run(**overrides: Any) -> RunConfig:
    return load_run_file({"workflow": "examples.arithmetic:Arithmetic"}, overrides)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_share, "needs_gpu", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "share"),
    [
        ({}, 1, "phases"),
        ({"max_staleness": 1}, 1, "split"),
        ({"max_staleness": 0.5}, 1, "split"),
        ({"engine.share": "split"}, 1, "split"),
        ({"engine.share": "phases"}, 1, "phases"),
        ({}, 2, ""),  # a GPU each
        ({}, 0, ""),
        ({"train.device": "cpu"}, 1, ""),
        ({"rollout.num_workers": 3}, 2, "split"),
        ({"engine.kind": "scripted"}, 1, "split"),
    ],
)
def test_the_rule(overrides: dict[str, Any], num_gpus: int, share: str) -> None:
    config = _run(**overrides)
    assert share_of(config, num_gpus) == share
    resolved = with_share(config, num_gpus).engine
    assert resolved.share == (share or "auto")
    assert resolved.vllm == ({"enable_sleep_mode": True} if share == "phases" else {})


def test_an_engine_without_a_trainer_and_one_of_a_cluster_do_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of(_run(), 1, trains=False) == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert share_of(_run(), 1) == "split"


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "reason"),
    [
        ({"engine.share": "phases"}, 0, r'engine.share = "phases" is about a GPU .* there are 0 GPUs; leave it out'),
        ({"engine.share": "split"}, 0, r'engine.share = "split" is about a GPU .* there are 0 GPUs; leave it out'),
        ({"engine.share": "split", "engine.kind": "scripted"}, 1, r'engine.kind = "scripted" has no memory on a GPU'),
        ({"engine.share": "phases"}, 2, r"1 engine and 1 trainer rank share none of 2 GPUs; leave it out"),
        ({"engine.share": "phases", "max_staleness": 1}, 1, r"with max_staleness = 1: .* set max_staleness = 0, or"),
        ({"engine.share": "phases", "max_staleness": 0.5}, 1, r"with max_staleness = 0\.5: the engine would sleep"),
        ({"rollout.num_workers": 2}, 1, r"2 engines and 1 trainer rank for 1 GPU: 3 on one, .*num_workers = 1"),
        ({"evaluation.own_engine": True}, 1, r"2 engines and 1 trainer rank for 1 GPU: 3 on one, .*own_engine = f"),
        ({"rollout.num_workers": 4}, 2, r"4 engines and 1 trainer rank for 2 GPUs: 3 on one"),
        ({"engine.share": "phases", "rollout.num_workers": 2}, 2, r"one engine and one rank on 1 GPU, .* has 2; use"),
    ],
)
def test_what_cannot_be_shared_is_refused(overrides: dict[str, Any], num_gpus: int, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        check_share(_run(**overrides), num_gpus)


def test_turns_with_an_engine_on_another_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(InvalidInput, match=r"RAY_ADDRESS = 10\.0\.0\.1:6379 may place the two on different machines"):
        check_share(_run(**{"engine.share": "phases"}), 1)
    check_share(_run(), 1)


def test_a_vllm_for_gpus_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_share, "needs_gpu", lambda: True)
    with pytest.raises(InvalidInput, match="the installed vLLM computes on GPUs, and this machine has 0: install the"):
        check_share(_run(), 0)
    check_share(_run(), 1)
    check_share(_run(**{"engine.kind": "scripted"}), 0)


def test_the_refusal_is_part_of_the_checks_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match='engine.share = "phases" is about a GPU'):
        preflight.check_devices(_run(**{"engine.share": "phases"}))
    preflight.check_devices(_run())
