"""Ray's raylet runs this file instead of its own `setup_worker.py`: the worker is a fork of a process that has imported
its libraries, see `infra/forks.py`. If there is none, Ray's own file runs.

It imports nothing of ours, nor of Ray's: it starts as fast as Python does.
"""

import argparse
import importlib.util
import json
import os
import socket
import struct
import sys


def _fork() -> None:
    """Ask for the fork, and wait until it is there. Raises `OSError` if the source does not answer."""
    parser = argparse.ArgumentParser(add_help=False)
    for option in ("--serialized-runtime-env-context", "--language"):
        parser.add_argument(option)
    _, argv = parser.parse_known_args()
    request = {"kind": "worker", "argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + os.environ["MILLRACE_FORKS_FROM"])
        socket.send_fds(connection, [struct.pack("!I", len(message))], [0, 1, 2])
        connection.sendall(message)
        connection.recv(1)


if __name__ == "__main__":
    try:
        _fork()
    except (OSError, KeyError):
        ray = importlib.util.find_spec("ray").submodule_search_locations[0]  # type: ignore[union-attr, index]
        script = os.path.join(ray, "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
