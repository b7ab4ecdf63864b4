"""What the page draws that only the shards know: reply lengths, lags, versions, how hard the prompts were.

In: a run opened for SQL. Out: plain lists, at most a few hundred points each however long the run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cli.ui.curves import Curve, short, spans_of, width_of
from settings.errors import counted
from settings.redaction import without_secrets
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.shards.failed_attempts import kinds_of, newest_failures
from storage.views.queries import Queries, open_queries

MOST_POINTS = 240
"""Spans of steps, and marks of the picture of versions; more than this are merged with their neighbours."""
MOST_LAGS = 16
"""Bars of the picture of lags; longer ones share the last."""
NUM_LEVELS = 9
"""Rows of the picture of rewards over steps."""
MOST_REASONS = 8
MOST_NOTES = 8
MOST_FAILURES = 1000
"""The newest failed attempts, which are counted by kind."""


class Opened:
    """A run's log as it stands, and its shards opened for SQL, once."""

    def __init__(self, log: RunLog) -> None:
        self.log = log

    @functools.cached_property
    def queries(self) -> Queries:
        return open_queries(self.log)

    @functools.cached_property
    def rewards(self) -> tuple[float, float]:
        return reward_range(self.queries)


def contents_of(opened: Opened) -> dict[str, Any]:
    """All that the page draws of the shards at once."""
    log, queries, rewards = opened.log, opened.queries, opened.rewards
    config = run_config(log)
    training, bound = config.get("train", {}), math.ceil(config.get("max_staleness", 0))
    steps = log.state.step
    width = width_of(steps, MOST_POINTS)
    spans = spans_of(steps, width)
    lags = token_lags(queries, steps_per_update=training.get("steps_per_update", 1))
    policy, stale = training.get("stale_policy", "strict"), log.state.counters()["stale"]
    return {
        "spans": spans,
        "rewards": rewards,
        "lengths": reply_lengths(queries, len(spans), width),
        "staleness": staleness(lags, bound=bound, policy=policy, stale_groups=stale),
        "lags": lag_bars(lags, bound=bound),
        "shards": shard_versions(queries),
        "levels": reward_levels(queries, len(spans), width, rewards),
        "losses": losses(queries),
        "failures": [
            {"number": number, "id": failure.id, "error": without_secrets(failure.error)}
            for number, failure in kinds_of(newest_failures(log, MOST_FAILURES, include_eval=True))[:MOST_NOTES]
        ],
        "notes": _left_out(log, queries),  # last: a damaged shard is known once it has been read
    }


def _left_out(log: RunLog, queries: Queries) -> list[str]:
    gone = log.state.quarantined.keys() | log.state.retired_shards  # the overview has them
    notes = [
        f"shard {shard_id} is left out: {why}" for shard_id, why in queries.left_out.items() if shard_id not in gone
    ]
    if len(notes) > MOST_NOTES:
        notes[MOST_NOTES:] = [f"and {counted(len(notes) - MOST_NOTES, 'more shard')}"]
    if notes:
        notes.append(
            "The log's counts and rewards of these shards are in here, their tokens and conversations are not."
        )
    return notes


def reward_range(queries: Queries) -> tuple[float, float]:
    """Lowest and highest reward of any attempt, held-out ones included; (0, 1) without any."""
    rewards = queries.select(
        "SELECT min(reward) AS low, max(reward) AS high FROM trajectories WHERE isfinite(reward)"
    ).to_pylist()[0]
    return (0.0, 1.0) if rewards["low"] is None else (rewards["low"], rewards["high"])


def losses(queries: Queries) -> list[tuple[str, int]]:
    """Why attempts failed and groups of training were taken out, the most frequent reasons first."""
    table = queries.select(
        """
        SELECT reason, sum(number)::BIGINT AS number FROM (
            SELECT 'attempt: ' || unnest(map_keys(failures)) AS reason, unnest(map_values(failures)) AS number
            FROM groups WHERE outcome <> 'eval'
            UNION ALL
            SELECT 'group: ' || reject_reason, 1 FROM groups WHERE outcome <> 'eval' AND reject_reason <> ''
        ) GROUP BY reason ORDER BY number DESC, reason LIMIT ?
        """,
        [MOST_REASONS],
    )
    return list(zip(table["reason"].to_pylist(), table["number"].to_pylist(), strict=True))


def reply_lengths(queries: Queries, num_points: int, width: int) -> dict[str, Curve]:
    """Sampled tokens per trained sequence, and the share that was cut at the limit, per span of `width` steps.

    Empty if none can be read.
    """
    table = queries.select(
        """
        SELECT (step - 1) // ? AS span, avg(num_sampled) AS mean, min(num_sampled) AS low, max(num_sampled) AS high,
            avg((status = 'truncated')::INTEGER) AS truncated
        FROM trajectories WHERE outcome = 'trained' GROUP BY span
        """,
        [width],
    )
    if not table.num_rows:
        return {}
    columns = {name: np.full(num_points, np.nan) for name in ("mean", "low", "high", "truncated")}
    for name, values in columns.items():
        values[table["span"].to_numpy()] = table[name].to_numpy()
    truncated = columns.pop("truncated")
    return {
        "reply_length": {name: short(values) for name, values in columns.items()},
        "truncated_share": {"mean": short(truncated)},
    }


def token_lags(queries: Queries, *, steps_per_update: int) -> list[tuple[int, int]]:
    """Trained tokens by lag: how many weight updates behind the policy being trained they were sampled."""
    k = int(steps_per_update)
    table = queries.select(
        f"""
        SELECT (g.policy_version - 1) // {k} - versions.key // {k} AS lag, sum(versions.value)::BIGINT AS tokens
        FROM (
            SELECT shard_id, group_id, unnest(map_entries(list_aggregate(weight_versions, 'histogram'))) AS versions
            FROM shard_rows WHERE NOT is_eval
        ) r JOIN groups g ON g.shard_id = r.shard_id AND g.id = r.group_id
        WHERE g.outcome = 'trained' AND versions.key >= 0 GROUP BY lag ORDER BY lag
        """
    )
    return list(zip(table["lag"].to_pylist(), table["tokens"].to_pylist(), strict=True))


def staleness(lags: list[tuple[int, int]], *, bound: int, policy: str, stale_groups: int) -> dict[str, Any]:
    """The lags in numbers, and what happened to what was over the bound."""
    tokens = sum(count for _, count in lags)
    return {
        "bound": bound,
        "policy": policy,
        "tokens": tokens,
        "mean": sum(lag * count for lag, count in lags) / tokens if tokens else None,
        "max": max((lag for lag, _ in lags), default=None),
        "over": sum(count for lag, count in lags if lag > bound),
        "stale_groups": stale_groups,
    }


def lag_bars(lags: list[tuple[int, int]], *, bound: int) -> list[dict[str, Any]]:
    """Bars of the picture: label, tokens, and whether the lag is over the bound."""
    tokens = dict(lags)
    longest = max(tokens, default=-1)
    bars: list[dict[str, Any]] = [
        {"label": str(lag), "tokens": tokens.get(lag, 0), "over": lag > bound} for lag in range(longest + 1)
    ]
    if len(bars) <= MOST_LAGS:
        return bars
    rest = sum(bar["tokens"] for bar in bars[MOST_LAGS - 1 :])
    return [*bars[: MOST_LAGS - 1], {"label": f"{MOST_LAGS - 1}+", "tokens": rest, "over": longest > bound}]


def shard_versions(queries: Queries) -> dict[str, list[float]]:
    """For each training shard, in commit order: oldest and newest version that sampled it, and that trained on it.

    NaN if nothing was sampled or trained; `width` is the number of neighbours merged into one.
    """
    table = queries.select(
        """
        SELECT min(nullif(head_version, -1)) AS head, max(nullif(tail_version, -1)) AS tail,
            min(policy_version - 1) AS trained_first, max(policy_version - 1) AS trained_last
        FROM groups WHERE outcome <> 'eval' GROUP BY shard_number ORDER BY shard_number
        """
    )
    width = max(1, math.ceil(table.num_rows / MOST_POINTS))
    starts = np.arange(0, table.num_rows, width)
    merged: dict[str, list[float]] = {"width": [width]}
    for name in table.column_names:
        values = table[name].to_numpy().astype(float)
        merge = np.fmax if name in ("tail", "trained_last") else np.fmin
        merged[name] = merge.reduceat(values, starts).tolist() if len(values) else []
    return merged


def reward_levels(queries: Queries, num_points: int, width: int, rewards: tuple[float, float]) -> dict[str, Any]:
    """Share of trained groups by mean reward, per span: `shares[level][span]`, levels from low to high."""
    low, high = rewards
    table = queries.select(
        """
        SELECT (step - 1) // ? AS span, count(*) AS groups,
            greatest(0, least(? - 1, floor(? * (mean_reward - ?) / ?)))::INTEGER AS level
        FROM groups WHERE outcome = 'trained' AND mean_reward IS NOT NULL GROUP BY span, level
        """,
        [width, NUM_LEVELS, NUM_LEVELS, low, (high - low) or 1.0],
    )
    if not table.num_rows or high <= low:
        return {"edges": [], "shares": []}
    counts = np.zeros((NUM_LEVELS, num_points))
    counts[table["level"].to_numpy(), table["span"].to_numpy()] = table["groups"].to_numpy()
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    return {"edges": short(np.linspace(low, high, NUM_LEVELS + 1)), "shares": np.round(shares, 4).tolist()}
