"""Ray in this process: a cluster that is joined, or a Ray of our own that is started; and its end.

In: the cluster's address. Out: a connected client, and the resources of the nodes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.devices import num_gpus
from infra.forks import SOURCE
from settings.errors import InvalidInput, path_errors

LOCAL = "local"
"""The address of a Ray of our own."""
SECONDS_TO_ANSWER = 5.0
_SYSTEM_CONFIG = {
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": 600,  # it may wait for what it is a fork of
}
_HTTP2_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
"""How a client begins (RFC 9113, 3.4); a server answers with a frame of its settings, whose type is its fourth byte."""


def start_ray(address: str, scratch: Path | None, *, log: Path) -> None:
    """Join the cluster at `address`, or if it is `LOCAL` start a Ray that writes below `scratch`; its messages go to
    `log`."""
    import ray

    options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR}
    options |= {"log_to_driver": False, "configure_logging": False}
    if address == LOCAL:
        # A cluster of our own has a token of its own: Ray would write one into the user's home, and warn of it.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        options |= {
            "_temp_dir": str(scratch),
            "include_dashboard": False,
            "num_cpus": _num_slots(),
            "object_store_memory": 128 * 2**20,
            "_system_config": _SYSTEM_CONFIG,
        }
    # Ray replaces it by one that aborts with a page of addresses. Ours cancels, Prefect's knows its Cancel.
    handler = signal.getsignal(signal.SIGTERM)
    # Ray would print the last page of a dead raylet's log.
    ray._private.worker.print_to_stdstream = functools.partial(_keep, log)
    with _of_our_own() if address == LOCAL else contextlib.nullcontext():
        ray.init(**options)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def end_ray() -> None:
    """`ray.shutdown`, with Ray's client out of reach before it ends. A reference to a result that another thread frees
    meanwhile would ask it, and Ray then ends the process."""
    import ray

    worker = ray._private.worker
    worker.disconnect()
    client = vars(worker.global_worker).pop("core_worker", None)
    if client is not None:
        client.shutdown_driver()
    ray.shutdown()


def nodes_to_use() -> list[dict[str, float]]:
    """Resources of each node of the cluster at `RAY_ADDRESS`, or without it of this machine, which Ray is not asked
    for. Raises `InvalidInput` if the cluster does not answer."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        gpus = num_gpus()
        return [{"CPU": float(_num_slots()), **({"GPU": float(gpus)} if gpus else {})}]
    check_cluster_answers(address)
    import ray

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    try:
        return node_resources()
    finally:
        end_ray()


def check_cluster_answers(address: str) -> None:
    """Raise `InvalidInput` unless what listens at `RAY_ADDRESS` speaks HTTP/2, as Ray does, within seconds. Ray itself
    would try for minutes, deaf to Ctrl-C."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    problem = f"RAY_ADDRESS = {address!r}: no Ray cluster answers"
    with path_errors(problem), socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return
        connection.sendall(_HTTP2_GREETING)
        if connection.recv(9)[3:4] != _HTTP2_SETTINGS:
            raise InvalidInput(f"{problem}: something else listens there; give the address that `ray start` printed")


def node_resources() -> list[dict[str, float]]:
    """Resources of each living node of the cluster: "CPU", "GPU" and others by their Ray names."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _num_slots() -> int:
    """What a Ray of our own takes for this machine's CPUs: slots, not cores, because workers mostly wait for each
    other."""
    return max(64, os.cpu_count() or 1)


@contextlib.contextmanager
def _of_our_own() -> Iterator[None]:
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
        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("forked_worker.py"))
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


def _keep(file: Path, message: dict[str, Any], **_: Any) -> None:
    """Append Ray's messages to a log file; of those that matter `Hosted.call` raises errors."""
    with contextlib.suppress(OSError), open(file, "a") as log:
        log.writelines(f"{line}\n" for line in message["lines"])
