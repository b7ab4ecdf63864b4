"""How the workers of an engine of several parts answer: all of them, also where one fails."""

from __future__ import annotations

import pytest

from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.worker_extension import results, returning_errors


class _Worker:
    def __init__(self, weights: dict[str, str]) -> None:
        self._weights = weights

    load = returning_errors(lambda worker, folder: worker._weights[folder])


def test_every_worker_answers_and_one_that_fails_is_named():
    first, second, broken = _Worker({"policy": "a"}), _Worker({"policy": "b"}), _Worker({})
    assert results([worker.load("policy") for worker in (first, second)]) == ["a", "b"]
    with pytest.raises(EngineError, match="^worker 1 of 2: KeyError: 'policy'$"):
        results([worker.load("policy") for worker in (first, broken)])
