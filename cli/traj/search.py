"""`millrace index` and `millrace traj search`: finding attempts by what was said in them.

In: a run's log, a query and filters as typed. Out: an index brought up to date, and what matches, as a table or JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from cli.terminal.formatting import counted, number, one_line, versions_of
from infra.environment import home
from infra.user_code import absolute_path, load_object
from settings.errors import InvalidInput
from storage.log.run_log import RunLog
from storage.log.run_state import OUTCOMES, RunState
from storage.records import TRAINABLE_STATUSES
from storage.retention.retention import reading
from storage.views.search_index import Found, SearchIndex, Update, index_folder
from storage.views.search_query import Filters, Operator, SearchQuery

_SNIPPET = 120
"""Characters of text shown around the first match."""
_LARGEST_REWARD = 1e38
"""What the shards' 32 bits hold."""


def build_index(log: RunLog, *, embedding: str, rebuild: bool, console: Console) -> None:
    """Bring the index of a run up to date, or make it again, and say what it holds.

    Raises what `SearchIndex.update` raises, and `ValueError` for an embedding that cannot be imported.
    """
    embedding = absolute_path(embedding)
    if embedding:
        load_object(embedding)
    index, started = open_index(log), time.perf_counter()
    with reading(log, "index", quiet=True):
        report = _update(index, console, embedding=embedding, rebuild=rebuild)
    news = f"{counted(report.shards_added, 'shard')} added" if report.shards_added else "nothing new"
    if report.shards_removed:
        news += f", {counted(report.shards_removed, 'shard')} removed"
    console.print(
        f"run {log.run_id}: {news} in {time.perf_counter() - started:.1f} s; {report.trajectories} trajectories to "
        f"search, {f'vectors by {report.embedding}' if report.embedding else 'without vectors'}",
        soft_wrap=True,
    )
    console.print(f"index    {index.folder}  [dim](safe to delete: `millrace index` makes it again)[/]", soft_wrap=True)


def search(
    log: RunLog, query: SearchQuery, filters: Filters, *, count: int, similar: bool, update: bool, notes: Console
) -> list[Found]:
    """What matches, best first, after bringing the index up to date; `notes` hears what else there is to say.

    Raises what `SearchIndex.update` and `SearchIndex.find` raise.
    """
    index = open_index(log)
    if update:
        _update(index, notes)
    elif behind := index.behind():
        notes.print(f"the index lacks {counted(behind, 'shard')} of the run; leave out --no-update to add what is new")
    return index.find(query, filters, count=count, similar=similar)


def open_index(log: RunLog) -> SearchIndex:
    """The index of a run, where this machine keeps it."""
    return SearchIndex(log, index_folder(log, home() / "cache"), load_embedding=load_object)


def parse_filters(
    state: RunState, *, reward: str, status: str, version: str, step: int | None, outcome: str, include_eval: bool
) -> Filters:
    """Filters as typed on the command line. Raises `ValueError` with how to write the one that cannot be read."""
    first_version, last_version = _versions(version)
    if status and status not in TRAINABLE_STATUSES:
        kept = ", ".join(sorted(TRAINABLE_STATUSES))
        raise InvalidInput(f"--status {status!r}: attempts are kept when they ended in one of {kept}")
    if outcome and outcome not in (*OUTCOMES, "pending"):
        raise InvalidInput(f"--outcome {outcome!r}: write one of {', '.join(OUTCOMES)}, pending")
    if step is not None and not 1 <= step <= state.step:
        raise InvalidInput(f"--step {step}: the run has {f'steps 1 to {state.step}' if state.step else 'no step yet'}")
    return Filters(
        reward=_reward(reward) if reward else None,
        status=status,
        first_version=first_version,
        last_version=last_version,
        step=step,
        outcome=outcome,
        include_eval=include_eval,
    )


def print_found(found: list[Found], query: SearchQuery, console: Console) -> None:
    """A line or two for each, the matches highlighted."""
    if not found:
        console.print(
            "nothing found. All words must be in one attempt, as whole words; a term with punctuation in it "
            'must be there exactly, and so must "what is quoted". Held-out attempts are searched with --eval.'
        )
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("id", "score", "reward", "status", "version", "outcome"):
        numeric = name in ("score", "reward", "version")
        table.add_column(name, no_wrap=True, overflow="fold", justify="right" if numeric else "left")
    table.add_column("text", overflow="fold", ratio=1)
    for one in found:
        outcome = "held-out" if one.is_eval else f"{one.outcome or '-'}{f' {one.step}' if one.step else ''}"
        score = "-" if one.score is None else f"{one.score:.2f}"
        versions = versions_of(vars(one))
        table.add_row(one.id, score, number(one.reward), one.status, versions, outcome, snippet(one.text, query))
    console.print(table)


def snippet(text: str, query: SearchQuery) -> Text:
    """The stretch of `text` around its first match, on one line, matches highlighted."""
    spans = query.spans(text)
    first = spans[0][0] if spans else 0
    start = 0 if first <= _SNIPPET // 3 else first - _SNIPPET // 4
    end = min(start + _SNIPPET, len(text))
    shown = Text("…" if start else "", style="dim")
    shown.append(one_line(text[start:end]), style="default")
    offset = start - (1 if start else 0)
    for span_start, span_end in spans:
        if span_start < end:
            shown.stylize("bold green", span_start - offset, min(span_end, end) - offset)
    return shown.append("…") if end < len(text) else shown


def as_json(one: Found) -> dict[str, Any]:
    """A plain JSON value of one result, its whole text included."""
    return dataclasses.asdict(one)


def _update(index: SearchIndex, notes: Console, **options: Any) -> Update:
    with _progress(notes) as progress:
        report = index.update(progress=progress, **options)
    for shard_id, reason in report.damaged.items():
        notes.print(f"[yellow]left out:[/] shard {shard_id}: {reason}", soft_wrap=True)
    return report


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of shards on a terminal; none while there is nothing to do."""
    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("indexing")

    def show(done: int, total: int) -> None:
        if total and console.is_terminal:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _reward(text: str) -> tuple[Operator, float]:
    match = re.fullmatch(r"\s*(<=|>=|!=|==|<|>|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
    if not match or abs(float(match[2])) > _LARGEST_REWARD:
        raise InvalidInput(f"--reward {text!r}: write a comparison in quotes, such as '<0.5', '>=1' or '!=0'")
    operator = (match[1] or "=").replace("==", "=")
    return cast(Operator, operator), float(match[2])


def _versions(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"\s*(\d*)\s*(\.\.)?\s*(\d*)\s*", text)
    if not match or (text and not match[1] and not match[3]) or (match[3] and not match[2]):
        raise InvalidInput(f"--version {text!r}: write a policy version or a range: 5, 3..7, 3.. or ..7")
    first = int(match[1]) if match[1] else None
    last = int(match[3]) if match[3] else None if match[2] else first
    if first is not None and last is not None and first > last:
        raise InvalidInput(f"--version {text!r}: {first} comes after {last}")
    return first, last
