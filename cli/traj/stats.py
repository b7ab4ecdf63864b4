"""`millrace traj stats`: the attempts of a run in numbers.

In: an open run and a filter. Out: a dictionary of plain numbers, or the same as text with a histogram.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import EvalOption, JsonOption, StoreOption, WhereOption, open_named, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import facts_table, number, plain_table
from cli.traj.finding import condition, note_left_out
from settings.errors import InvalidInput, counted
from settings.redaction import one_line

if TYPE_CHECKING:
    from storage.views.queries import Queries

BY = {"version": "tail_version", "step": "step", "prompt": "prompt_id", "status": "status"}
"""What attempts can be told apart by, and its column."""
MOST_ROWS = 100
_BINS = 10
_BAR = 36

_ATTEMPTS = """
CREATE OR REPLACE TEMP TABLE attempts AS
SELECT
    shard_id, group_id, attempt,
    any_value(prompt_id) AS prompt_id, any_value(reward)::DOUBLE AS reward, any_value(status) AS status,
    any_value(outcome) AS outcome, any_value(step) AS step, max(tail_version) AS tail_version,
    sum(num_sampled)::INTEGER AS num_sampled, sum(num_turns)::INTEGER AS num_turns,
    any_value(finished_at - started_at) FILTER (started_at > 0) AS seconds,
    any_value(hash(reply)) FILTER (sequence_idx = 0) AS reply
FROM trajectories WHERE {condition} GROUP BY shard_id, group_id, attempt
"""
# A forked attempt has its messages in its first sequence alone.

_FAILURES = """
SELECT failure.key, sum(failure.value)::BIGINT FROM (
    SELECT unnest(map_entries(failures)) AS failure FROM groups {outcomes}
) GROUP BY 1 ORDER BY 2 DESC
"""
"""Attempts that became no row, by failing status, from the log."""

_MEASURES = {"seconds": "seconds", "tokens": "num_sampled", "turns": "num_turns"}
"""What has a mean, quantiles and a maximum, and its column of `attempts`."""
_SPREADS = ", ".join(
    f"avg({column}) AS {name}_mean, max({column}) AS {name}_max, "
    + ", ".join(f"quantile_cont({column}, {point / 100}) AS {name}_p{point}" for point in (50, 95, 99))
    for name, column in _MEASURES.items()
)
_NUMBERS = f"""
    count(*) AS attempts, count(reward) AS rewarded,
    avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std,
    min(reward) AS reward_min, quantile_cont(reward, 0.1) AS reward_p10, median(reward) AS reward_p50,
    quantile_cont(reward, 0.9) AS reward_p90, max(reward) AS reward_max,
    {_SPREADS}, quantile_cont(num_sampled, 0.9) AS tokens_p90,
    avg((status = 'truncated')::INTEGER) AS truncated_share,
    1 - count(DISTINCT (shard_id, group_id, reply)) / count(*) AS same_in_group_share
"""


def stats(
    run: str,
    by: Annotated[str, typer.Option(help="Also by version, step, prompt or status.")] = "",
    where: WhereOption = "",
    include_eval: EvalOption = False,
    solved: Annotated[float, typer.Option(help="An attempt is solved from this reward on.")] = 1.0,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Rewards, lengths, statuses and repeated replies in numbers."""
    from storage.views.queries import open_queries

    queries = open_queries(open_named(run, store))
    numbers = trajectory_stats(queries, by=by, where=where, include_eval=include_eval, solved=solved)
    if as_json:
        print_json(numbers)
    else:
        _print(numbers, open_console(), by=by)
    note_left_out(queries.left_out)


def trajectory_stats(
    queries: Queries, *, by: str = "", where: str = "", include_eval: bool = False, solved: float = 1.0
) -> dict[str, Any]:
    """Numbers over attempts (not sequences), shares from 0 to 1; with `by`, a list of them under `by` as well.

    An attempt is solved from a reward of `solved` on. A reply repeats if an earlier attempt of the same group, or at
    the same prompt, has the same text. Quantiles are interpolated linearly, as `numpy.percentile` does. `seconds` are
    from an attempt's start to its end; failed attempts left no row and are not counted.

    Raises `InvalidInput` for another `by` than in `BY`, wrong SQL, or no attempt.
    """
    if by and by not in BY:
        raise InvalidInput(f"--by {by!r}: write one of {', '.join(BY)}")
    queries.select(_ATTEMPTS.format(condition=condition(where, include_eval)))
    overall = queries.select(f"SELECT {_NUMBERS} FROM attempts").to_pylist()[0]
    if not overall["attempts"]:
        hint = "" if include_eval else "; --eval adds held-out ones"
        raise InvalidInput(f"no trajectory satisfies the conditions{hint}")
    prompts = queries.select(
        """
        SELECT count(*) AS number,
            count(*) FILTER (best < $1) AS never_solved, count(*) FILTER (worst >= $1) AS always_solved,
            1 - sum(replies) / sum(attempts) AS same_reply_share, sum(groups)::BIGINT AS groups
        FROM (
            SELECT min(reward) AS worst, max(reward) AS best, count(*) AS attempts,
                count(DISTINCT reply) AS replies, count(DISTINCT (shard_id, group_id)) AS groups
            FROM attempts GROUP BY prompt_id
        )
        """,
        [solved],
    ).to_pylist()[0]
    outcomes = "" if include_eval else "WHERE outcome <> 'eval'"
    stats = {
        **overall,
        "groups": prompts.pop("groups"),
        "same_over_run_share": prompts.pop("same_reply_share"),
        "prompts": {**prompts, "solved_from": solved},
        "statuses": _counts(queries, "SELECT status, count(*) FROM attempts GROUP BY 1 ORDER BY 2 DESC"),
        "outcomes": _counts(queries, "SELECT outcome, count(*) FROM attempts GROUP BY 1 ORDER BY 2 DESC"),
        "failures": {} if where else _counts(queries, _FAILURES.format(outcomes=outcomes)),
        "histogram": _histogram(queries),
    }
    if by:
        order = "reward_mean, key" if by == "prompt" else "key"
        sql = f"SELECT {BY[by]} AS key, {_NUMBERS} FROM attempts GROUP BY key ORDER BY {order}"
        stats["by"] = queries.select(sql).to_pylist()
    return stats


def _print(stats: dict[str, Any], console: Console, *, by: str) -> None:
    prompts, lines = stats["prompts"], facts_table()
    lines.add_row(
        "attempts",
        f"{stats['attempts']} in {counted(stats['groups'], 'group')} at {counted(prompts['number'], 'prompt')}",
    )
    over = "" if stats["rewarded"] == stats["attempts"] else f"  over {stats['rewarded']}, the others have none"
    spread = _spread(stats, "reward", ("p10", "p50", "p90"))
    lines.add_row("reward", f"{spread}  std {number(stats['reward_std'])}{over}")
    for label, count in stats["histogram"]:
        share = count / stats["attempts"]
        bar = "█" * round(_BAR * count / max(1, max(n for _, n in stats["histogram"])))
        lines.add_row(label, Text(f"{bar or '▏'} {count}  ").append(f"{share:.1%}", style="dim"))
    truncated = f"  truncated {stats['truncated_share']:.1%}"
    lines.add_row("tokens", _spread(stats, "tokens", ("p50", "p90", "p95", "p99", "max")) + truncated)
    for name in ("turns", "seconds"):
        lines.add_row(name, _spread(stats, name, ("p50", "p95", "p99", "max")))
    for name in ("statuses", "outcomes", "failures"):
        if stats[name]:
            note = "  [dim]attempts that left no trajectory[/]" if name == "failures" else ""
            lines.add_row(name, escape("  ".join(f"{key} {count}" for key, count in stats[name].items())) + note)
    lines.add_row(
        "repeats",
        f"{stats['same_in_group_share']:.1%} of replies repeat one of their group, "
        f"{stats['same_over_run_share']:.1%} one at the same prompt",
    )
    lines.add_row(
        "prompts",
        f"never solved {prompts['never_solved']} ({prompts['never_solved'] / prompts['number']:.1%}), "
        f"always solved {prompts['always_solved']} ({prompts['always_solved'] / prompts['number']:.1%}); "
        f"solved is a reward of {prompts['solved_from']:g} or more",
    )
    console.print(lines)
    if by:
        console.print()
        console.print(_table(stats["by"], by))
        if len(stats["by"]) > MOST_ROWS:
            console.print(f"[dim]{MOST_ROWS} of {len(stats['by'])}; all with --json[/]")


_COLUMNS = {
    "attempts": "attempts",
    "reward": "reward_mean",
    "std": "reward_std",
    "p10": "reward_p10",
    "p50": "reward_p50",
    "p90": "reward_p90",
    "tokens": "tokens_mean",
    "p90 ": "tokens_p90",
    "truncated": "truncated_share",
    "repeats": "same_in_group_share",
}
"""Headings of the table by version, step, prompt or status, and the numbers under them."""


def _table(rows: list[dict[str, Any]], by: str) -> Table:
    table = plain_table(by, *_COLUMNS, right=[*_COLUMNS, *({by} & {"version", "step"})])
    for row in rows[:MOST_ROWS]:
        numbers = {name: number(row[key], digits=3, missing="-") for name, key in _COLUMNS.items()}
        shares = {name: f"{row[key]:.1%}" for name, key in _COLUMNS.items() if key.endswith("_share")}
        cells = {**numbers, **shares, "attempts": str(row["attempts"])}.values()
        table.add_row(Text("none" if row["key"] is None else one_line(str(row["key"]))), *cells)
    return table


def _spread(stats: dict[str, Any], name: str, points: tuple[str, ...]) -> str:
    quantiles = "  ".join(f"{point} {number(stats[f'{name}_{point}'])}" for point in points)
    return f"mean {number(stats[f'{name}_mean'])}  {quantiles}"


def _counts(queries: Queries, sql: str) -> dict[Any, int]:
    table = queries.select(sql)
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _histogram(queries: Queries) -> list[tuple[str, int]]:
    """Attempts by reward: a bar for each of few values, equal bins for many."""
    import numpy as np

    numbers = _counts(queries, "SELECT reward, count(*) FROM attempts WHERE reward IS NOT NULL GROUP BY 1 ORDER BY 1")
    if len(numbers) <= _BINS:
        return [(number(reward), count) for reward, count in numbers.items()]
    counts, edges = np.histogram(list(numbers), bins=_BINS, weights=list(numbers.values()))
    return [(f"{edge:.3g} …", int(count)) for edge, count in zip(edges, counts, strict=False)]
