"""Which numbers of workers, ranks and parts of engines the nodes of a cluster can hold."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from infra.ray import placement
from infra.ray.cluster import Cluster
from infra.ray.placement import check_shares, gpu_memory, nodes_to_use, num_gpus
from settings.errors import InvalidInput


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


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "no Ray cluster answers: Connection refused"),
        (b"", "no Ray cluster answers: timed out"),  # also of a cluster whose processes are stopped
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no Ray cluster answers: something else listens there; give the address"),
    ],
)
def test_an_address_without_a_ray_cluster_is_refused_within_seconds(
    answer: bytes | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SECONDS_TO_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        if answer is None:
            server.close()
        elif answer:
            threading.Thread(target=lambda: server.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(InvalidInput, match=f"^RAY_ADDRESS = '{address}': {sentence}"):
            nodes_to_use()


@pytest.mark.parametrize(
    ("listed", "says", "visible", "expected"),
    [
        (2, "exit 9", None, 2),
        (2, "exit 9", "1", 1),
        (
            0,
            "printf '0, GPU-a, 24576, 24000\\n1, GPU-b, 81920, 500\\n'",
            None,
            2,
        ),  # a sandbox without the kernel's list
        (0, "printf '0, GPU-a, 24576, 24000\\n1, GPU-b, 81920, 500\\n'", "GPU-b", 1),
        (0, "printf '0, GPU-a, [N/A], [N/A]\\n'", None, 0),  # its memory is the CPU's
        (1, "printf '0, GPU-a, [N/A], [N/A]\\n'", None, 1),
        (0, "echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9", None, 0),
        (0, "exec tail -f /dev/null", None, 0),  # a card that hangs
    ],
)
def test_gpus_are_counted_by_the_kernel_s_list_or_else_by_the_driver_s_program(
    listed: int, says: str, visible: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gpus"
    for number in range(listed):
        (folder / f"0000:0{number}:00.0").mkdir(parents=True)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setattr(placement, "_LISTED_GPUS", folder)
    monkeypatch.setattr(placement, "_SECONDS_TO_LIST", 0.2 if "tail" in says else 30.0)
    monkeypatch.setattr(placement, "_ELSEWHERE", str(tmp_path))  # and not on PATH, as in some containers
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus() == expected
    assert nodes_to_use()[0].get("GPU", 0.0) == expected
    assert len(gpu_memory()) == (0 if listed or "GPU-a, 24576" not in says else expected)
