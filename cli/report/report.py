"""`millrace report`: a run as one web page that opens from disk, without a server and with nothing from the network.

In: a run. Out: one HTML file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal.arguments import StoreOption, check_target, open_named
from settings.errors import InvalidInput
from settings.places.state_folder import home

if TYPE_CHECKING:
    from storage.log.run_log import RunLog


def report(
    run: str,
    out: Annotated[Path | None, typer.Option(help="The file; by default reports/RUN.html in the state folder.")] = None,
    store: StoreOption = "",
) -> None:
    """Write one web page about a run, that opens from disk: curves, time, staleness, groups, prompts."""
    typer.echo(write_report(open_named(run, store), out).as_uri())


def write_report(log: RunLog, out: Path | None) -> Path:
    """Write the page and return where it is: `out`, or `reports/<run>.html` in the state folder.

    Raises `InvalidInput` for an `out` that is a folder. A page that is there already is replaced, whole.
    """
    import tempfile

    from cli.report.report_page import gather, render
    from storage.retention.retention import reading

    target = (out or home() / "reports" / f"{log.run_id}.html").expanduser().resolve()
    check_target(target, "--out", make_folder=True)
    if target.is_dir():
        raise InvalidInput(f"--out {target} is a folder; name a file in it, for example {target / log.run_id}.html")
    with reading(log, "report", quiet=True):
        page = render(gather(log))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        partial = Path(scratch, "page.html")
        partial.write_bytes(page.encode("utf-8", "replace"))  # a lone surrogate in a log has no UTF-8 form
        os.replace(partial, target)
    return target
