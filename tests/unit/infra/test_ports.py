from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from infra import ports
from infra.ports import free_port


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch) -> None:
    monkeypatch.setattr(ports, "_KEPT", [])


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_rendezvous_may_listen_there_and_no_other_program_is_given_it(host) -> None:
    port = free_port(host=host)
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((host, port))
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    store.set("key", "value")
    assert store.port == port and store.get("key") == b"value"


def test_the_preferred_port_is_taken_unless_somebody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


def test_only_the_latest_ports_are_kept() -> None:
    first, *_ = [free_port() for _ in range(17)]
    assert len(ports._KEPT) == 16
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
