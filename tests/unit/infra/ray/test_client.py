"""Ray in this process: an address without a cluster, and its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.ray import client
from infra.ray.client import nodes_to_use
from settings.errors import InvalidInput
from tests.conftest import PROJECT


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
    monkeypatch.setattr(client, "SECONDS_TO_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        if answer is None:
            server.close()
        elif answer:
            threading.Thread(target=lambda: server.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(InvalidInput, match=f"^RAY_ADDRESS = '{address}': {sentence}"):
            nodes_to_use()


_FREES = """
import asyncio, os, pathlib, sys, threading
import ray
from infra.ray.cluster import Cluster

async def main():
    async with Cluster(log_folder=pathlib.Path(sys.argv[1])):
        references = [ray.ObjectRef(os.urandom(28)) for _ in range(200_000)]
        freeing = threading.Thread(target=lambda: [references.pop() for _ in range(200_000)])
        freeing.start()
    freeing.join()

asyncio.run(main())
"""


@pytest.mark.server
def test_a_reference_that_a_thread_frees_while_ray_ends_does_not_end_the_process(tmp_path: Path) -> None:
    """Python collects garbage in whatever thread, also those references that the error of a dead worker holds."""
    done = subprocess.run([sys.executable, "-c", _FREES, tmp_path], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0 and "already been shutdown" not in done.stderr, done.stderr
