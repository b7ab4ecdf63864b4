"""Which numbers of workers, ranks and parts of engines the nodes of a cluster can hold."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from infra.ray.cluster import Cluster
from infra.ray.placement import check_shares


def _nodes(gpus: list[int]) -> list[dict[str, float]]:
    """With so many GPUs and 64 CPUs each."""
    return [{"CPU": 64.0, **({"GPU": float(number)} if number else {})} for number in gpus]


_TOO_LARGE = "× pipeline_parallel_size.*, all of one node, and no node has more than"


@pytest.mark.parametrize(
    ("gpus", "num_workers", "gpus_per_engine", "num_ranks", "refused"),
    [
        # Ranks do not share a GPU.
        ([1], 2, 1, 1, ""),
        ([0], 3, 1, 2, ""),
        ([3], 3, 1, 2, ""),
        ([4], 3, 1, 2, ""),
        ([2], 3, 1, 2, "train.num_ranks = 2: 3 processes"),
        ([1], 2, 1, 2, "train.num_ranks = 2: 2 processes"),
        # Neither do the parts of an engine.
        ([2], 3, 2, 1, "on 2 GPUs .*: with trainer and other engines that makes 3, and there are 2"),
        # All parts of an engine are on one node.
        ([1, 1], 2, 2, 0, f"on 2 GPUs .* {_TOO_LARGE} 1: lower one"),
        ([4, 0, 4], 8, 8, 0, f"on 8 GPUs .* {_TOO_LARGE} 4"),
        ([0, 0], 65, 65, 0, f"on 65 CPUs .* {_TOO_LARGE} 64"),
        ([0, 2], 2, 2, 0, ""),
        ([0, 0], 64, 64, 0, ""),
        # A run that starts no engine needs none of that.
        ([2], 2, 8, 2, ""),
        # The nodes have places for all engines.
        ([3, 3], 6, 2, 0, "on 2 GPUs .* the nodes have places for 2 of 3 engines; lower rollout.num_workers to 2"),
        ([3, 5], 7, 2, 1, ""),
        ([4, 2], 6, 2, 0, ""),
        ([7], 7, 2, 1, ""),
    ],
)
def test_what_the_nodes_cannot_hold_is_refused(
    gpus: list[int], num_workers: int, gpus_per_engine: int, num_ranks: int, refused: str
) -> None:
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        check_shares(_nodes(gpus), num_workers=num_workers, gpus_per_engine=gpus_per_engine, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("gpus_per_engine", "num_workers", "num_gpus", "expected"),
    [(1, 2, 0, 0), (1, 2, 2, 1), (1, 2, 1, 0.5), (2, 3, 0, 0), (2, 3, 3, 2), (2, 5, 8, 2), (4, 9, 9, 4)],
)
def test_an_engine_has_as_many_gpus_as_it_has_parts(
    gpus_per_engine: int, num_workers: int, num_gpus: int, expected: float
) -> None:
    cluster = Cluster(log_folder=Path("unused"), num_workers=num_workers, gpus_per_engine=gpus_per_engine)
    cluster.nodes = _nodes([num_gpus])
    assert cluster.gpus_per_engine == expected
