"""`millrace report`: the page of one run in one file, which opens from disk, without a server and without a network.

In: a run. Out: an HTML file. It holds the parts of `data.REPORTED`: every curve, at most `MOST_STEPS` points
each; of the trajectories only the groups worth reading, and of the prompts those whose reward changed most.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal.arguments import StoreOption, check_target, open_named, room_at
from cli.terminal.console import say
from settings.places.state_folder import expanded, home

if TYPE_CHECKING:
    from storage.log.run_log import RunLog


def report(
    run: str,
    out: Annotated[Path | None, typer.Option(help="The file; by default reports/RUN.html in the state folder.")] = None,
    store: StoreOption = "",
) -> None:
    """Write one web page about a run, that opens from disk: curves, time, staleness, groups, prompts."""
    say(write_report(open_named(run, store), out).as_uri())


def write_report(log: RunLog, out: Path | None) -> Path:
    """Write the page and return where it is: `out`, or `reports/<run>.html` in the state folder.

    Raises `InvalidInput` for an `out` that is a folder or no HTML file. A page that is there is replaced, whole.
    """
    import tempfile
    import time

    from cli.ui.data import reported
    from cli.ui.page import render
    from storage.retention.retention import reading

    target = expanded(out or home() / "reports" / f"{log.run_id}.html").resolve()
    check_target(target, "--out", make_folder=True, suffix=".html")
    with reading(log, "report", quiet=True):
        page = render({"run": log.run_id, "made_at": time.time(), **reported(log.store, log.run_id)})
    with room_at(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial = Path(scratch, "page.html")
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, target)
    return target
