"""How the workers of an engine of several parts answer: all of them, also where one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.worker_extension import ReloadExtension, results, returning_errors


class _Worker:
    def __init__(self, weights: dict[str, str]) -> None:
        self._weights = weights

    load = returning_errors(lambda worker, folder: worker._weights[folder])


def test_every_worker_answers_and_one_that_fails_is_named():
    first, second, broken = _Worker({"policy": "a"}), _Worker({"policy": "b"}), _Worker({})
    assert results([worker.load("policy") for worker in (first, second)]) == ["a", "b"]
    with pytest.raises(EngineError, match="^worker 1 of 2: KeyError: 'policy'$"):
        results([worker.load("policy") for worker in (first, broken)])


class _Model(torch.nn.Linear):
    def load_weights(self, weights: Any) -> None:
        list(weights)


class _Runner:
    """Reloads a model whose kernels ask for vLLM's configuration."""

    model_config = None

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.model = _Model(2, 2)
        self.seen: list[Any] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Any = (), **_: Any) -> None:
        from vllm.config import get_current_vllm_config

        self.seen.append(get_current_vllm_config())
        self.model.load_weights(weights_iterator)
        if self.fails:
            raise ValueError("cut short")


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_that_are_made_anew_in_a_reload_find_vllm_s_configuration(fails: bool) -> None:
    from vllm.config import get_current_vllm_config_or_none

    worker: Any = ReloadExtension()
    worker.vllm_config, worker.model_runner = object(), _Runner(fails=fails)
    if fails:
        with pytest.raises(EngineError, match="ValueError: cut short"):
            results([worker.reload_policy("policy")])
    else:
        results([worker.reload_policy("policy")])
    assert worker.model_runner.seen == [worker.vllm_config] and get_current_vllm_config_or_none() is None


@pytest.mark.parametrize("is_large", [False, True])
def test_a_load_of_a_large_model_gives_back_what_it_took_for_a_moment(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr("infra.environment.give_back_freed_memory", lambda: given_back.append(True))
    worker: Any = ReloadExtension()
    worker.vllm_config, worker.model_runner = object(), _Runner(fails=False)
    weight = torch.empty(50 * 10**6 if is_large else 50, dtype=torch.bfloat16, device="meta")
    worker._reload("a policy", weights_iterator=iter([("weight", weight)]))
    assert given_back == [True] * is_large
