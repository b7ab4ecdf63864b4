"""Weights from one process to others over gloo: they arrive byte for byte, or an error says that they did not."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra import weight_broadcast
from infra.weight_broadcast import Broadcast, receive, send
from storage.log.entries import Policy
from storage.objects.digests import WEIGHTS_FILE, DigestMismatch, seal_folder
from tests.builders import a_broadcast


def _policy(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(30, 7, generator=generator).to(torch.bfloat16),
        "odd": torch.randint(0, 255, (5,), generator=generator).to(torch.uint8),
        "b.bias": torch.randn(9, generator=generator),
        "c": torch.randn(11, 3, 2, generator=generator).to(torch.float16),
        "scalar": torch.tensor(3.5),
    }
    folder.mkdir()
    save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    return tensors


def _sealed(folder: Path, *, num_receivers: int) -> tuple[Path, dict[str, torch.Tensor], Broadcast]:
    """A file, what is in it, and its broadcast."""
    tensors = _policy(folder)
    policy = Policy(version=3, path="policies/3", weights_sha256=seal_folder(folder), parent=2)
    return folder / WEIGHTS_FILE, tensors, a_broadcast(policy, num_receivers=num_receivers)


def _exchange(file: Path, broadcast: Broadcast, **settings: Any) -> list[dict[str, torch.Tensor]]:
    """What each receiver gets."""

    def take(rank: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in receive(broadcast, rank=rank, **settings)}

    with ThreadPoolExecutor() as pool:
        taking = [pool.submit(take, rank) for rank in range(1, broadcast.num_receivers + 1)]
        pool.submit(send, file, broadcast, **settings).result()
        return [future.result() for future in taking]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20], ids=["a tensor each", "a few", "all in one"])
def test_every_receiver_gets_every_tensor_bit_for_bit(tmp_path: Path, bucket_bytes: int):
    file, tensors, broadcast = _sealed(tmp_path / "p", num_receivers=2)
    for got in _exchange(file, broadcast, bucket_bytes=bucket_bytes):
        assert got.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)


def test_other_bytes_than_the_log_s_are_refused(tmp_path: Path):
    file, _, broadcast = _sealed(tmp_path / "p", num_receivers=1)
    with pytest.raises(DigestMismatch, match="policy 3 arrived by broadcast with other weights"):
        _exchange(file, dataclasses.replace(broadcast, weights_sha256="0" * 64))


def test_what_arrives_other_than_it_was_sent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, tensors, broadcast = _sealed(tmp_path / "p", num_receivers=2)
    real, got = weight_broadcast._Group.broadcast, []

    def spoil(group: Any, buffer: torch.Tensor) -> None:
        real(group, buffer)
        if group._rank == 2 and buffer.numel() == 5:  # of the tensor `odd`
            buffer[3] ^= 1

    monkeypatch.setattr(weight_broadcast._Group, "broadcast", spoil)
    with ThreadPoolExecutor() as pool:
        sides = [pool.submit(lambda rank: dict(receive(broadcast, rank=rank, bucket_bytes=1)), rank) for rank in (1, 2)]
        pool.submit(send, file, broadcast, bucket_bytes=1).result()
        got.append(sides[0].result())
        with pytest.raises(DigestMismatch, match="policy 3 arrived by broadcast with other weights"):
            sides[1].result()
    assert got[0].keys() == tensors.keys(), "the others have theirs"


def test_a_receiver_that_does_not_come_ends_the_wait_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_broadcast, "SECONDS", 2.0)
    file, _, broadcast = _sealed(tmp_path / "p", num_receivers=2)
    with ThreadPoolExecutor() as pool:
        sides: list[Future[Any]] = [
            pool.submit(lambda: list(receive(broadcast, rank=1))),
            pool.submit(send, file, broadcast),
        ]
        assert all(side.exception(timeout=60) is not None for side in sides)
