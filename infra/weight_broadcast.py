"""Send a policy's weights from the trainer directly to engines, in one broadcast over a fast network.

    trainer, rank 0                                    vLLM's workers, ranks 1, 2, …
    send(file, broadcast)  ── header, by the rendezvous ─▶  receive(broadcast, rank) ─▶ (name, tensor), …
                           ── tensors, bucket by bucket ─▶
                           ── digests, by the rendezvous ▶          └─ its own digest of each bucket, compared

The trainer's safetensors file is sent byte for byte, with the sha256 that was taken when it was written, which is the
log's. Both sides digest each bucket where it lies, on the GPU if that is where it was sent: generation is paused
meanwhile. A receiver may load tensors before the last bucket arrives, but must not serve them before `receive` has
ended.
"""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from storage.objects.digests import WEIGHTS_FILE, DigestMismatch, read_seal, sha256_of_json
from storage.objects.tensor_digests import tensor_digests

Backend = Literal["gloo", "nccl"]
BUCKET_BYTES = 256 * 2**20
"""Most bytes in flight at once; a single larger tensor is sent whole."""
SECONDS = 60.0
"""How long each side waits for the others, at the rendezvous and in each bucket."""
_LENGTH_BYTES = 8
"""A safetensors file starts with the length of its header, little-endian, in so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """One broadcast of one policy. The port is free on the trainer's node."""

    host: str
    port: int
    backend: Backend
    version: int
    weights_sha256: str
    """Digest of the weights in the log."""
    num_receivers: int
    first_rank: int = 1
    """First rank of the receivers of one engine; the sender is rank 0."""


def send(file: Path, broadcast: Broadcast, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Send a sealed safetensors file to all receivers, or raise torch's error if one is not there for `SECONDS`."""
    import torch

    digests: list[str] = []
    with open(file, "rb") as weights:
        length = weights.read(_LENGTH_BYTES)
        header = weights.read(int.from_bytes(length, "little"))
        with _Group(broadcast, rank=0) as group:
            group.store.set("header", header)
            group.store.set("sha256", read_seal(file.parent).files[file.name])
            for num_bytes, _ in _buckets(header, bucket_bytes):
                buffer = torch.empty(num_bytes, dtype=torch.uint8)
                weights.readinto(buffer.numpy())
                buffer = buffer.to(group.device)
                digests += tensor_digests([("", buffer)]).values()
                group.broadcast(buffer)
            group.store.set("digests", json.dumps(digests))


def receive(
    broadcast: Broadcast, *, rank: int, device: Any = "cpu", bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Any]]:
    """Names and tensors, on `device`.

    Raises `DigestMismatch` at the end for other weights than the log's, or than those that were sent, and torch's error
    as `send`.
    """
    import torch
    from safetensors.torch import _TYPES

    with _Group(broadcast, rank=rank) as group:
        header = group.store.get("header")
        digests: list[str] = []
        for num_bytes, tensors in _buckets(header, bucket_bytes):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device if group.device == "cuda" else "cpu")
            group.broadcast(buffer)
            buffer = buffer.to(device)
            digests += tensor_digests([("", buffer)]).values()
            for name, about, start, end in tensors:
                # A copy: a layer may keep it until its last tensor arrives, and its bytes may be unaligned.
                yield name, buffer[start:end].clone().view(_TYPES[about["dtype"]]).view(about["shape"])
        arrived_whole = json.loads(group.store.get("digests")) == digests
        sha256 = group.store.get("sha256").decode()
    if not arrived_whole or sha256_of_json({WEIGHTS_FILE: sha256}) != broadcast.weights_sha256:
        raise DigestMismatch(f"policy {broadcast.version} arrived by broadcast with other weights than the log's")


def _buckets(header: bytes, most_bytes: int) -> Iterator[tuple[int, list[tuple[str, dict[str, Any], int, int]]]]:
    """Size of each bucket, and its tensors with start and end in it. Both sides cut the file in the same way."""
    described = {name: about for name, about in json.loads(header).items() if name != "__metadata__"}
    tensors: list[tuple[str, dict[str, Any], int, int]] = []
    size = begin = 0
    for name, about in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = about["data_offsets"]
        if tensors and end - begin > most_bytes:
            yield size, tensors
            tensors, begin = [], start
        tensors.append((name, about, start - begin, end - begin))
        size = end - begin
    if tensors:
        yield size, tensors


def tcp_store(host: str, port: int, size: int, *, rank: int, patience: datetime.timedelta) -> Any:
    """The rendezvous of `size` processes. Rank 0 listens at `host` alone: torch itself would at every address."""
    import torch.distributed as dist

    options: dict[str, Any] = {}
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=2048) as server:
            options = {"master_listen_fd": server.detach()}
    # libuv's server does not take a socket that listens already.
    return dist.TCPStore(host, port, size, rank == 0, patience, use_libuv=False, **options)


class _Group:
    """The processes of one broadcast. Each broadcast has its own group, because its members may differ."""

    def __init__(self, broadcast: Broadcast, *, rank: int) -> None:
        import torch.distributed as dist

        patience = datetime.timedelta(seconds=SECONDS)
        size = broadcast.num_receivers + 1
        rendezvous = tcp_store(broadcast.host, broadcast.port, size, rank=rank, patience=patience)
        self.store: Any = dist.PrefixStore("millrace", rendezvous)
        self.device = "cuda" if broadcast.backend == "nccl" else "cpu"
        self._rank, self._size = rank, size
        if broadcast.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group: Any = dist.ProcessGroupNCCL(self.store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(self.store, rank, size, timeout=patience)

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for all members, because the sender holds the rendezvous; do not wait after an error."""
        try:
            if kind is None and self._rank:
                self.store.set(f"done/{self._rank}", "")
            elif kind is None:
                self.store.wait([f"done/{rank}" for rank in range(1, self._size)])
        finally:
            self._group.abort()

    def broadcast(self, buffer: Any) -> None:
        """Send a buffer from rank 0 to all, and wait."""
        self._group.broadcast([buffer]).wait()
        if buffer.is_cuda:
            import torch

            torch.cuda.current_stream().synchronize()
