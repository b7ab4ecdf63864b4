"""How the workers of an engine of several parts answer: all of them, also where one fails."""

from __future__ import annotations

import pytest

from rollouts.engines.engine import EngineError
from rollouts.engines.vllm_worker import answering, results


class _Worker:
    def __init__(self, weights: dict[str, str]) -> None:
        self._weights = weights

    @answering
    def load(self, folder: str) -> str:
        """Weights of a folder."""
        return self._weights[folder]


def test_what_every_worker_returned():
    workers = [_Worker({"policy": "first half"}), _Worker({"policy": "second half"})]
    assert results([worker.load("policy") for worker in workers]) == ["first half", "second half"]


def test_a_worker_that_fails_answers_too_and_is_named():
    answers = [worker.load("policy") for worker in (_Worker({"policy": "first half"}), _Worker({}))]
    with pytest.raises(EngineError, match="^worker 1 of 2: KeyError: 'policy'$"):
        results(answers)
