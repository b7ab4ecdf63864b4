"""What several commands take: where the runs are, and a run by its name.

In: option values as typed. Out: the run's log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from storage.log.run_log import RunLog

StoreOption = Annotated[str, typer.Option(help="Where the runs are; by default $MILLRACE_STORE, or .millrace/store.")]
EvalOption = Annotated[bool, typer.Option("--eval", help="Held-out attempts too.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def open_named(run: str, store: str) -> RunLog:
    """The log of a run in a store, or in the default one. Raises `FileNotFoundError` listing the runs there are."""
    from infra.environment import store_uri
    from storage.log.runs import open_run
    from storage.objects.opening import open_store

    return open_run(open_store(store_uri(store)), run)
