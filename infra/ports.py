"""TCP ports for what will listen soon, kept from everybody else until it does."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_KEPT: list[ExitStack] = []
_KEEP = 16


def free_port(preferred: int = 0, *, host: str = "127.0.0.1") -> int:
    """`preferred` if nobody listens there on `host` (empty: any address) or is about to, else one the kernel picks.

    The last 16 stay bound by this process, which does not listen: until then the kernel gives them to no connection and
    to nobody who asks for any port, while a server that sets SO_REUSEADDR, as servers do, may listen there. Raises
    `OSError` where no port is left.
    """
    for port in (preferred, 0) if preferred else (0,):
        with ExitStack() as kept:
            try:
                bound = kept.enter_context(socket.socket())
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, port))
                if port:  # so could another process that prefers it, and neither listens yet
                    kept.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0millrace/port/{port}")
            except OSError as error:
                failed = error
                continue
            _KEPT.append(kept.pop_all())
            if len(_KEPT) > _KEEP:
                _KEPT.pop(0).close()
            return int(bound.getsockname()[1])
    raise OSError(failed.errno, f"no free TCP port on {host or 'any address'}: {failed.strerror}") from failed


def somebody_listens(port: int) -> bool:
    """On this machine's own address, 127.0.0.1."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
