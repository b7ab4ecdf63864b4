"""TCP ports: reserved for servers that will listen soon, and kept on loopback for Ray."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from infra.forks import SOURCE

_KEPT: list[ExitStack] = []
_KEEP = 16


def free_port(preferred: int = 0, *, host: str = "127.0.0.1") -> int:
    """`preferred` if it is free on `host` (empty: any address) and not reserved, else a port that the kernel picks.

    This process keeps its last 16 ports bound without listening. Meanwhile the kernel gives them to no connection and
    to no process that asks for any port, but a server that sets SO_REUSEADDR, as servers do, may listen there.
    Raises `OSError` if no port is left.
    """
    for port in (preferred, 0) if preferred else (0,):
        with ExitStack() as kept:
            try:
                bound = kept.enter_context(socket.socket())
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, port))
                if port:  # another process may have reserved it and not listen yet
                    kept.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0millrace/port/{port}")
            except OSError as error:
                failed = error
                continue
            _KEPT.append(kept.pop_all())
            if len(_KEPT) > _KEEP:
                _KEPT.pop(0).close()
            return int(bound.getsockname()[1])
    raise OSError(failed.errno, f"no free TCP port on {host or 'any address'}: {failed.strerror}") from failed


def server_listens(port: int) -> bool:
    """True if a server listens on this port of 127.0.0.1."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def ray_of_our_own() -> Iterator[None]:
    """Let Ray's processes that start meanwhile, and theirs, listen on loopback alone, and start fewer of them.

    Ray has no option for either. It takes 127.0.0.1 for the address of the node only where clusters have one node, as
    on Windows. Its workers may be forks, see `infra/forks.py`. Its autoscaler, its pages and what carries logs to the
    driver are Python processes which we do not use.
    """
    from ray._private import ray_constants
    from ray._private.node import Node

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    chosen, os.environ[name] = os.environ.get(name), "0"
    worker = ray_constants.SETUP_WORKER_FILENAME
    if SOURCE in os.environ:
        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).parent / "ray" / "forked_worker.py")
    needless = {starts: getattr(Node, starts) for starts in ("start_monitor", "start_log_monitor", "start_api_server")}
    for starts in needless:
        setattr(Node, starts, lambda *_, **__: None)
    try:
        yield
    finally:
        for starts, method in needless.items():
            setattr(Node, starts, method)
        ray_constants.SETUP_WORKER_FILENAME = worker
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(name)
        if chosen is not None:
            os.environ[name] = chosen
