"""TCP ports, reserved for servers that will listen soon."""

from __future__ import annotations

import socket
from contextlib import ExitStack

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
