"""TCP ports for what will listen soon, kept from everybody else until it does."""

from __future__ import annotations

import socket

_KEPT: list[socket.socket] = []
_KEEP = 16


def free_port(preferred: int = 0, *, host: str = "127.0.0.1") -> int:
    """`preferred` if nobody listens there on `host` (empty: any address), else one that the kernel picks.

    The last 16 stay bound by this process, which does not listen: until then the kernel gives them to no connection and
    to nobody who asks for any port, while a server that sets SO_REUSEADDR, as servers do, may listen there. Raises
    `OSError` where no port is left.
    """
    for port in (preferred, 0) if preferred else (0,):
        kept = socket.socket()
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            kept.bind((host, port))
        except OSError as error:
            kept.close()
            failed = error
            continue
        _KEPT.append(kept)
        if len(_KEPT) > _KEEP:
            _KEPT.pop(0).close()
        return int(kept.getsockname()[1])
    raise OSError(failed.errno, f"no free TCP port on {host or 'any address'}: {failed.strerror}") from failed
