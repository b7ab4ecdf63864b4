from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from infra import ports
from infra.ports import free_port, server_listens


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(ports, "_KEPT", kept := [])
    yield
    for stack in kept:
        stack.close()


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_rendezvous_may_listen_there_and_no_other_program_is_given_it(host) -> None:
    port = free_port(host=host)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((host, port))
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    store.set("key", "value")
    assert store.port == port and store.get("key") == b"value"


@pytest.fixture
def preferred() -> int:
    """None of those that the kernel gives to connections."""
    return 20_000 + secrets.randbelow(10_000)


def test_the_preferred_port_is_given_unless_a_server_listens_there_or_another_process_was_given_it(
    preferred: int,
) -> None:
    with socket.create_server(("127.0.0.1", preferred)):
        assert free_port(preferred) != preferred and server_listens(preferred)
    # As two services on one machine, each of which listens ten seconds later.
    code = f"from infra.ports import free_port; print(free_port({preferred}), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert int(other.stdout.readline()) == preferred != free_port(preferred)
        other.stdin.close()
    assert free_port(preferred) == preferred and not server_listens(preferred), "it has ended"


def test_only_the_latest_ports_are_kept() -> None:
    first, *_ = [free_port() for _ in range(17)]
    assert len(ports._KEPT) == 16
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
