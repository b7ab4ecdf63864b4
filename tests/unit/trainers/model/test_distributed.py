"""Sharding hides nothing from the optimizer."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from infra.environment import FEW_PRIMITIVES
from tests.processes import num_new_pages
from tests.unit.trainers.builders import (
    largest_difference,
    named_samples_of,
    random_rows,
    take_step,
    trainer_of,
    weights,
)
from trainers.model.layout import Layout


def test_an_update_reaches_every_parameter_after_a_forward_pass_without_a_gradient(tiny_folder: Path):
    trainer = trainer_of(tiny_folder)
    ids, layout = torch.arange(1, 9), Layout([8], device=trainer.device)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            return trainer.model(ids, ids.roll(-1), torch.arange(8), layout, 1.0)[0].clone()

    before = logprobs()
    embedding = next(p for group in trainer.optimizer.param_groups for p in group["params"])
    with torch.no_grad():
        embedding.mul_(2).add_(0.1)
    assert not torch.allclose(before, logprobs(), atol=1e-3)


def test_measuring_a_shard_that_the_first_minibatch_does_not_see_trains_nothing_else(tiny_folder: Path):
    rows = random_rows(tiny_folder)
    trainers = [trainer_of(tiny_folder, num_minibatches=4) for _ in range(2)]
    norms = [
        take_step(trainer, named_samples_of(rows, shards=shards))["grad_norm"]
        for trainer, shards in zip(trainers, (1, 4), strict=True)
    ]
    assert largest_difference(*map(weights, trainers)) == 0 and norms[0] == norms[1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(
    ("first", "is_kept"),
    [("pass", False), ("from infra.environment import *; adopt_malloc(KEEPS_FREED_MEMORY)", True)],
)
def test_what_a_step_frees_is_there_for_the_next_one(first: str, is_kept: bool):
    assert (num_new_pages(first) < 8_000) is is_kept, "of 16,384 pages, those the kernel had to give anew"


@pytest.mark.parametrize("of_user", [None, "7"])
def test_few_products_are_kept_ready_unless_the_user_has_said_how_many(
    tiny_folder: Path, of_user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, few)] = FEW_PRIMITIVES.items()
    monkeypatch.setenv(name, of_user or "")
    if of_user is None:
        monkeypatch.delenv(name)
    trainer_of(tiny_folder)
    assert os.environ[name] == (of_user or few)
