"""`millrace ui`: every run of a store as a page in the browser, served from this machine.

In: a store. Out: a local web server, until Ctrl-C.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Annotated

import typer

from cli.terminal.arguments import StoreOption, open_named, open_named_store
from cli.terminal.console import say
from settings.errors import InvalidInput

TOKEN_VARIABLE = "MILLRACE_UI_TOKEN"
_PATIENCE = 3.0
"""Seconds in which the page's server waits for a store that is away: the page says so, and asks again."""


def ui(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Open the page of this run.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 4300,
    host: Annotated[
        str, typer.Option(help=f"Address to listen on; but for loopback with a token: ${TOKEN_VARIABLE} or a new one")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    store: StoreOption = "",
) -> None:
    """Look at runs in a browser: curves as they grow, comparisons, trajectories, lineage, promotion."""
    from cli.ui.server import create_app, is_loopback, serve

    opened = open_named(run, store, patience=_PATIENCE).store if run else open_named_store(store, patience=_PATIENCE)
    token = os.environ.get(TOKEN_VARIABLE, "") or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    if not host:
        raise InvalidInput("--host '' is no address; 0.0.0.0 listens on all of this machine's")
    if not token.isascii():
        raise InvalidInput(f"${TOKEN_VARIABLE}: a header of HTTP holds ASCII alone; choose letters and digits")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # before the address is printed: who opens it at once waits
    except OSError as error:
        reason = error.strerror or error
        raise InvalidInput(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host") from error
    port = listener.getsockname()[1]
    reached = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    # Behind the `#`: a browser sends that part to no server, so no log of one has the token.
    place = f"#token={token}" if token else ""
    address = f"http://{reached}:{port}/{place}{('&' if place else '#') + f'run={run}' if run else ''}"
    say(f"{address} has the runs of {opened.uri}; Ctrl-C ends it")
    if browser and is_loopback(host):
        import webbrowser

        webbrowser.open(address)
    serve(create_app(opened, host=host, token=token), listener)
