"""What a report says of prompts: how each fared every time it was seen.

In: a run opened for SQL. Out: one row per prompt seen more than once, bounded, and what became of all of them.
"""

from __future__ import annotations

import math
from typing import Any

from storage.views.queries import Queries

MOST_PROMPTS = 1000
"""Rows of a history; the prompts whose reward changed most are kept."""
MOST_COLUMNS = 40
"""Columns of a history; more epochs or versions than this are averaged."""
SNIPPET_CHARACTERS = 100
FAILED = "x"
"""A cell whose attempts all failed; null is a prompt not seen."""

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
    else it is the last visit against the first. A cell is a mean reward, `FAILED`, or null.
    """
    unit, visits = VISITS[name]
    low, high = rewards
    bounds = [low, 0.01 * (high - low), high]
    kinds = queries.select(
        f"WITH visits AS ({visits}), prompts AS ({_PROMPTS}) "
        "SELECT kind, count(*) AS number FROM prompts GROUP BY kind",
        bounds,
    )
    number_of = dict(zip(kinds["kind"].to_pylist(), kinds["number"].to_pylist(), strict=True))
    chosen = queries.select(
        f"WITH visits AS ({visits}), prompts AS ({_PROMPTS}) "
        "SELECT prompt_id, kind, mean, last - first AS change FROM prompts "
        "ORDER BY most - least DESC NULLS LAST, mean, prompt_id LIMIT $4",
        [*bounds, MOST_PROMPTS],
    ).to_pylist()
    seen = queries.select(f"WITH visits AS ({visits}) SELECT count(DISTINCT prompt_id) AS number FROM visits")
    columns, cells = _cells(queries, visits, [row["prompt_id"] for row in chosen])
    texts = _texts(queries, visits, list(cells))
    return {
        "name": name,
        "unit": unit,
        "prompts": seen["number"][0].as_py(),
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


def snippet(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text[: 4 * SNIPPET_CHARACTERS].split())
    whole = len(line) <= SNIPPET_CHARACTERS and len(text) <= 4 * SNIPPET_CHARACTERS
    return line if whole else f"{line[:SNIPPET_CHARACTERS]}…"


def _cells(queries: Queries, visits: str, prompts: list[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Labels of the columns, and each prompt's cells."""
    places = queries.select(f"WITH visits AS ({visits}) SELECT DISTINCT place FROM visits ORDER BY place")
    known = places["place"].to_pylist()
    width = max(1, math.ceil(len(known) / MOST_COLUMNS))
    spans = [known[start : start + width] for start in range(0, len(known), width)]
    found = queries.select(
        f"""
        WITH visits AS ({visits}), places AS (SELECT unnest($1) AS place, unnest($2) AS span)
        SELECT prompt_id, span, avg(reward) AS reward FROM visits JOIN places USING (place)
        WHERE prompt_id IN (SELECT unnest($3::VARCHAR[])) GROUP BY prompt_id, span
        """,
        [known, [number // width for number in range(len(known))], prompts],
    )
    cells: dict[str, list[Any]] = {prompt: [None] * len(spans) for prompt in prompts}
    for row in found.to_pylist():
        cells[row["prompt_id"]][row["span"]] = FAILED if row["reward"] is None else _rounded(row["reward"])
    return [str(s[0]) if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in spans], cells


def _texts(queries: Queries, visits: str, prompts: list[str]) -> dict[str, str]:
    """What was asked, shortened; only the readable shards a prompt was last seen in are opened."""
    shards = queries.select(
        f"WITH visits AS ({visits}) SELECT DISTINCT arg_max(shard_id, place) AS id FROM visits "
        "WHERE prompt_id IN (SELECT unnest($1::VARCHAR[])) AND shard_id NOT IN (SELECT unnest($2::VARCHAR[])) "
        "GROUP BY prompt_id",
        [prompts, list(queries.left_out)],
    )["id"].to_pylist()
    if not shards:
        return {}
    # A list of values rather than a subquery: only then does DuckDB tell the scan which shards to leave closed.
    found = queries.select(
        f"""
        SELECT prompt_id, any_value(prompt[:$1]) AS prompt FROM trajectories
        WHERE sequence_idx = 0 AND prompt_id IN (SELECT unnest($2::VARCHAR[]))
            AND shard_id IN ({", ".join(f"${number}" for number in range(3, len(shards) + 3))})
        GROUP BY prompt_id
        """,
        [8 * SNIPPET_CHARACTERS, prompts, *shards],
    )
    return {row["prompt_id"]: snippet(row["prompt"] or "") for row in found.to_pylist()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
