"""What the page says of prompts: how each fared every time it was seen.

In: a run opened for SQL. Out: one row per prompt seen more than once, bounded, and what became of all of them.
"""

from __future__ import annotations

from typing import Any

from cli.ui.conversations import SNIPPET_CHARACTERS, snippet
from settings.errors import ranges
from storage.views.queries import Queries

MOST_PROMPTS = 1000
"""Rows of a history; the prompts whose reward changed most are kept."""
MOST_COLUMNS = 40
"""Columns of a history; more epochs or versions than this are averaged."""
FAILED = "x"
"""A cell whose attempts all failed; None is a prompt not seen."""

VISITS = {
    "held-out": (
        "policy version",
        "SELECT g.prompt_id, e.version AS place, g.mean_reward AS reward, g.shard_id "
        "FROM groups g JOIN (SELECT version, unnest(shard_ids) AS shard_id FROM evaluations) e "
        "ON e.shard_id = g.shard_id",
    ),
    "training": (
        "epoch",
        "SELECT prompt_id, epoch AS place, mean_reward AS reward, shard_id FROM groups WHERE outcome <> 'eval'",
    ),
}
"""Each history's unit of columns, and one row per time a prompt was seen."""

_PROMPTS = """
CREATE OR REPLACE TEMP TABLE prompts AS
SELECT *, CASE
    WHEN most IS NULL OR most <= $1 + $2 THEN 'never'
    WHEN least >= $3 - $2 THEN 'always'
    WHEN last > first THEN 'rose' WHEN last < first THEN 'fell' ELSE 'same' END AS kind
FROM (
    SELECT prompt_id, avg(reward) AS mean, min(reward) AS least, max(reward) AS most,
        arg_min(reward, place) FILTER (reward IS NOT NULL) AS first,
        arg_max(reward, place) FILTER (reward IS NOT NULL) AS last
    FROM visits GROUP BY prompt_id HAVING count(*) > 1
)
"""


def prompt_history(queries: Queries, name: str, rewards: tuple[float, float]) -> dict[str, Any]:
    """The prompts of one of `VISITS`, by what became of them, and the cells of those the page has room for.

    `never` rose above the lowest reward of the run, `always` had the highest (each within 1 % of their distance);
    else it is the last visit against the first. A cell is a mean reward, `FAILED`, or None.
    """
    unit, visits = VISITS[name]
    low, high = rewards
    numbered = f"SELECT *, dense_rank() OVER (ORDER BY place) - 1 AS number FROM ({visits})"
    queries.select(f"CREATE OR REPLACE TEMP TABLE visits AS {numbered}")
    queries.select(_PROMPTS, [low, 0.01 * (high - low), high])
    kinds = queries.select("SELECT kind, count(*) AS number FROM prompts GROUP BY kind").to_pylist()
    number_of = {row["kind"]: row["number"] for row in kinds}
    chosen = queries.select(
        "SELECT prompt_id, kind, mean, last - first AS change FROM prompts "
        "ORDER BY most - least DESC NULLS LAST, mean, prompt_id LIMIT ?",
        [MOST_PROMPTS],
    ).to_pylist()
    columns, cells = _cells(queries, [row["prompt_id"] for row in chosen])
    texts = _texts(queries, list(cells))
    return {
        "name": name,
        "unit": unit,
        "prompts": queries.select("SELECT count(DISTINCT prompt_id) AS number FROM visits")["number"][0].as_py(),
        "repeated": sum(number_of.values()),
        "shown": len(chosen),
        "kinds": {kind: number_of.get(kind, 0) for kind in ("never", "always", "rose", "fell", "same")},
        "columns": columns,
        "rows": [
            {
                "id": row["prompt_id"][: 2 * SNIPPET_CHARACTERS],
                "text": texts.get(row["prompt_id"], ""),
                "kind": row["kind"],
                "mean": _rounded(row["mean"]),
                "change": _rounded(row["change"]),
                "cells": cells[row["prompt_id"]],
            }
            for row in chosen
        ],
    }


def _cells(queries: Queries, prompts: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Labels of the columns, and each prompt's cells."""
    last = queries.select("SELECT max(number) AS last FROM visits")["last"][0].as_py()
    width = 1 if last is None else last // MOST_COLUMNS + 1
    spans = queries.select(
        "SELECT min(place) AS first, max(place) AS last FROM visits GROUP BY number // ? ORDER BY first", [width]
    ).to_pylist()
    rows = queries.select(
        "SELECT prompt_id, number // ? AS span, avg(reward) AS reward FROM visits "
        "WHERE prompt_id IN (SELECT unnest(?::VARCHAR[])) GROUP BY prompt_id, span",
        [width, prompts],
    )
    cells: dict[str, list[Any]] = {prompt: [None] * len(spans) for prompt in prompts}
    for row in rows.to_pylist():
        cells[row["prompt_id"]][row["span"]] = FAILED if row["reward"] is None else _rounded(row["reward"])
    return [ranges(range(span["first"], span["last"] + 1)) for span in spans], cells


def _texts(queries: Queries, prompts: list[str]) -> dict[str, str]:
    """What was asked, shortened; only the readable shards a prompt was last seen in are opened."""
    shards = queries.select(
        "SELECT DISTINCT arg_max(shard_id, place) AS id FROM visits "
        "WHERE prompt_id IN (SELECT unnest($1::VARCHAR[])) AND shard_id NOT IN (SELECT unnest($2::VARCHAR[])) "
        "GROUP BY prompt_id",
        [prompts, list(queries.left_out)],
    )["id"].to_pylist()
    if not shards:
        return {}
    # A list of values rather than a subquery: only then does DuckDB tell the scan which shards to leave closed.
    rows = queries.select(
        f"""
        SELECT prompt_id, any_value(prompt[:$1]) AS prompt FROM trajectories
        WHERE sequence_idx = 0 AND prompt_id IN (SELECT unnest($2::VARCHAR[]))
            AND shard_id IN ({", ".join(f"${number}" for number in range(3, len(shards) + 3))})
        GROUP BY prompt_id
        """,
        [8 * SNIPPET_CHARACTERS, prompts, *shards],
    )
    return {row["prompt_id"]: snippet(row["prompt"] or "") for row in rows.to_pylist()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
