"""Sharding hides nothing from the optimizer."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.processes import num_new_pages
from tests.unit.trainers.builders import largest_difference, random_rows, samples_of, take_step, trainer_of, weights
from trainers.data.samples import Samples
from trainers.model.attention import Layout


def _in_shards(samples: Samples, shards_B: np.ndarray) -> Samples:
    ids = [f"shard{number}" for number in range(int(shards_B.max()) + 1)]
    groups = [f"group{number}" for number in range(int(samples.groups_B.max()) + 1)]
    return Samples(**{**vars(samples), "shards_B": shards_B, "shard_ids": ids, "group_ids": groups})


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
    samples = samples_of(random_rows(tiny_folder, num_groups=4))
    alone, probed = trainer_of(tiny_folder, num_minibatches=4), trainer_of(tiny_folder, num_minibatches=4)
    one = take_step(alone, _in_shards(samples, np.zeros(samples.num_rows, np.int64)))
    each = take_step(probed, _in_shards(samples, samples.groups_B.astype(np.int64)))
    assert largest_difference(weights(alone), weights(probed)) == 0
    assert one["grad_norm"] == each["grad_norm"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize(
    ("first", "is_kept"),
    [("pass", False), ("from trainers.model.distributed import keep_freed_memory; keep_freed_memory()", True)],
)
def test_what_a_step_frees_is_there_for_the_next_one(first: str, is_kept: bool):
    assert (num_new_pages(first) < 8_000) is is_kept, "of 16,384 pages, those the kernel had to give anew"
