"""`millrace traj search`: finding attempts by their text; `millrace index`: its index, brought up to date.

In: a run, a query and filters as typed. Out: what matches, best first, as a table or JSON; the index on this machine.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cli.terminal.arguments import EvalOption, JsonOption, StoreOption, open_named, print_json
from cli.terminal.console import open_console, prints_to_stderr
from cli.terminal.formatting import number, plain_table, versions_of
from cli.traj.finding import check_step
from infra.environment import cache_folder
from settings.errors import InvalidInput, counted
from settings.places.hints import command
from settings.redaction import one_line

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.log.run_state import RunState
    from storage.views.search_index import Match, SearchIndex, Update
    from storage.views.search_query import Filters, Operator, SearchQuery

_SNIPPET = 120
"""Characters of text shown around the first match."""
_LARGEST_REWARD = 1e38
"""What the shards' 32 bits hold."""


def index(
    run: str,
    embedding: Annotated[
        str, typer.Option(help="module:function from texts to vectors, for `traj search --similar`; it is remembered.")
    ] = "",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start again from the shards.")] = False,
    store: StoreOption = "",
) -> None:
    """Bring a run's search index up to date with its shards."""
    from infra.user_code import absolute_path, load_object
    from storage.retention.retention import reading

    log, console = open_named(run, store), open_console()
    embedding = absolute_path(embedding)
    if embedding:
        load_object(embedding)
    index, started = open_index(log), time.perf_counter()
    with reading(log, "index", quiet=True):
        report = _update_index(index, console, embedding=embedding, rebuild=rebuild)
    news = f"{counted(report.shards_added, 'shard')} added" if report.shards_added else "nothing new"
    if report.shards_removed:
        news += f", {counted(report.shards_removed, 'shard')} removed"
    again = escape(command("index", run, store=log.store.uri))
    console.print(
        f"run {run}: {news} in {time.perf_counter() - started:.1f} s; "
        f"{counted(report.trajectories, 'row')} to search, "
        f"{f'vectors by {report.embedding}' if report.embedding else 'without vectors'}\n"
        f"index    {index.folder}  [dim](safe to delete: `{again}` makes it again)[/]",
        soft_wrap=True,
    )


def search(
    run: str,
    text: Annotated[str, typer.Argument(help='Words, all of which must be there; "quoted": exactly so.')],
    reward: Annotated[str, typer.Option(help="For example '<0.5', '>=1', '!=0'.")] = "",
    status: Annotated[str, typer.Option(help="ok, truncated or max_turns.")] = "",
    version: Annotated[str, typer.Option(help="Sampled by this policy version or range: 5, 3..7, 3.., ..7.")] = "",
    step: Annotated[int | None, typer.Option(help="Only groups this step passed over.")] = None,
    outcome: Annotated[str, typer.Option(help="trained, filtered, stale, failed or pending.")] = "",
    include_eval: EvalOption = False,
    similar: Annotated[bool, typer.Option("--similar", help="Nearest in meaning, by the index's embedding.")] = False,
    update: Annotated[bool, typer.Option(help="First index what was committed since.")] = True,
    count: Annotated[int, typer.Option("-n", min=1, help="At most this many.")] = 10,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Find trajectories by their text and tool calls, best match first."""
    from storage.views.search_query import SearchQuery

    log, query, notes = open_named(run, store), SearchQuery(text), open_console(stderr=True)
    others = {"status": status, "step": step, "outcome": outcome, "include_eval": include_eval}
    filters = parse_filters(log.state, reward=reward, version=version, **others)
    index = open_index(log)
    with prints_to_stderr(as_json):  # an embedding is code of the user's
        if update:
            _update_index(index, notes)
        elif behind := index.behind():
            lacks = counted(behind, "shard")
            notes.print(f"the index lacks {lacks} of the run; leave out --no-update to add what is new")
        matches = index.find(query, filters, count=count, similar=similar)
    if as_json:
        print_json([dataclasses.asdict(match) for match in matches])
    else:
        _print(matches, query, open_console())


def open_index(log: RunLog) -> SearchIndex:
    """The index of a run on this machine."""
    from infra.user_code import load_object
    from storage.views.search_index import SearchIndex, index_folder

    return SearchIndex(log, index_folder(log, cache_folder()), load_embedding=load_object)


def _update_index(index: SearchIndex, notes: Console, **options: Any) -> Update:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("indexing", visible=False)  # nothing to do shows nothing

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total > 0)

        report = index.update(progress=progress, **options)
    for shard_id, reason in report.damaged.items():
        notes.print(f"[yellow]left out:[/] shard {escape(shard_id)}: {escape(reason)}", soft_wrap=True)
    return report


def parse_filters(state: RunState, *, reward: str, version: str, **others: Any) -> Filters:
    """Filters as typed on the command line. Raises `InvalidInput` with how to write the one that cannot be read."""
    from storage.log.entries import OUTCOMES
    from storage.records import TRAINABLE_STATUSES
    from storage.views.search_query import Filters

    first, last = _versions(version)
    filters = Filters(reward=_reward(reward) if reward else None, first_version=first, last_version=last, **others)
    if filters.status and filters.status not in TRAINABLE_STATUSES:
        kept = ", ".join(sorted(TRAINABLE_STATUSES))
        raise InvalidInput(f"--status {filters.status!r}: attempts are kept when they ended in one of {kept}")
    if filters.outcome and filters.outcome not in (*OUTCOMES, "pending"):
        raise InvalidInput(f"--outcome {filters.outcome!r}: write one of {', '.join(OUTCOMES)}, pending")
    if filters.step is not None:
        check_step(state, filters.step)
    return filters


def _print(matches: list[Match], query: SearchQuery, console: Console) -> None:
    """A line or two for each, the matches highlighted."""
    if not matches:
        console.print(
            "nothing found. All words must be in one attempt, as whole words; a term with punctuation in it "
            'must be there exactly, and so must "what is quoted". Held-out attempts are searched with --eval.'
        )
        return
    names = ("id", "score", "reward", "status", "version", "outcome")
    table = plain_table(*names, right=("score", "reward", "version"), no_wrap=True)
    table.add_column("text", overflow="fold", ratio=1)
    for one in matches:
        outcome = "held-out" if one.is_eval else f"{one.outcome or '-'}{f' {one.step}' if one.step else ''}"
        score = "-" if one.score is None else f"{one.score:.2f}"
        versions = versions_of(vars(one))
        cells = (one.id, score, number(one.reward), one.status, versions, outcome)
        table.add_row(*(Text(one_line(cell)) for cell in cells), snippet(one.text, query))
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


def _reward(text: str) -> tuple[Operator, float]:
    match = re.fullmatch(r"\s*(<=|>=|!=|==|<|>|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
    if not match or abs(float(match[2])) > _LARGEST_REWARD:
        raise InvalidInput(f"--reward {text!r}: write a comparison in quotes, such as '<0.5', '>=1' or '!=0'")
    operator = (match[1] or "=").replace("==", "=")
    return cast("Operator", operator), float(match[2])


def _versions(text: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"\s*(\d{0,9})\s*(\.\.)?\s*(\d{0,9})\s*", text)
    if not match or (text and not match[1] and not match[3]) or (match[3] and not match[2]):
        raise InvalidInput(f"--version {text!r}: write a policy version or a range: 5, 3..7, 3.. or ..7")
    first = int(match[1]) if match[1] else None
    last = int(match[3]) if match[3] else None if match[2] else first
    if first is not None and last is not None and first > last:
        raise InvalidInput(f"--version {text!r}: {first} comes after {last}")
    return first, last
