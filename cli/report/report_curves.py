"""What a report draws over steps and shards: metrics, time, reply lengths, lags, versions, how hard the prompts were.

In: a run opened for SQL. Out: plain lists, at most a few hundred points each however long the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.views.queries import Queries

TIME = ("generate", "reward", "commit", "wait", "load", "train", "save", "publish", "idle")
"""Phases of a round in the order they are stacked; each is a metric `<phase>_seconds`, and together they are it."""

MOST_SHARDS = 240
"""Marks of the picture of versions; more shards than this are merged with their neighbours."""
MOST_LAGS = 16
"""Bars of the picture of lags; longer ones share the last."""
NUM_LEVELS = 9
"""Rows of the picture of rewards over steps."""

FIGURES = (
    ("loss", "Loss", "", 1.0),
    ("entropy", "Entropy of the policy", "nats per token", 1.0),
    ("grad_norm", "Gradient norm before clipping", "", 1.0),
    ("approx_kl", "KL to the sampling policy", "nats per token", 1.0),
    ("engine_gap", "Trainer–engine gap", "nats per token", 1.0),
    ("clip_fraction", "Tokens clipped", "%", 100.0),
    ("fraction_groups_without_signal", "Groups without signal", "%", 100.0),
    ("tokens_per_second", "Throughput", "trained tokens/s", 1.0),
    ("reply_length", "Reply length: mean, shortest, longest", "tokens", 1.0),
    ("truncated_share", "Replies cut at the token limit", "%", 100.0),
    ("learning_rate", "Learning rate", "", 1.0),
    ("peak_memory_bytes", "Peak memory of all processes", "GiB", 2.0**-30),
)
"""Small pictures: metric, title, unit, and the factor from the metric's unit to that one."""

ELSEWHERE = {"reward", "round_seconds", "trained_tokens", "trained_rows", "staleness_mean", "staleness_max"} | {
    "masked_stale_fraction",
    *(f"{phase}_seconds" for phase in TIME),
}
"""Metrics that other parts of the page show."""

Curve = dict[str, list[float]]
"""`mean`, and for spans of several steps `low` and `high`, per span; NaN if no step has a value."""


def spans_of(num_steps: int, most: int) -> list[range]:
    """Steps 1 … `num_steps` in at most `most` ranges of equal width. Example: 1,000 in 240 are 200 ranges of 5."""
    width = max(1, math.ceil(num_steps / most))
    return [range(start, min(start + width, num_steps + 1)) for start in range(1, num_steps + 1, width)]


def _width(spans: Sequence[range]) -> int:
    return len(spans[0]) if spans else 1


def step_metrics(queries: Queries) -> dict[str, np.ndarray]:
    """Every metric of any step, by step; NaN if a step lacks it or it is not finite."""
    steps = queries.select("SELECT * FROM steps ORDER BY step")
    columns = {f.name: steps[f.name].to_numpy() for f in steps.schema if pa.types.is_floating(f.type)}
    return {name: np.where(np.isfinite(values), values, np.nan) for name, values in columns.items()}


def curves(metrics: dict[str, np.ndarray], spans: Sequence[range]) -> dict[str, Curve]:
    """Mean, low and high of every metric per span; without steps, nothing."""
    starts = [span[0] - 1 for span in spans]
    drawn: dict[str, Curve] = {}
    for name, values in metrics.items() if spans else ():
        there = np.isfinite(values)
        count = np.add.reduceat(there.astype(int), starts)
        total = np.add.reduceat(np.where(there, values, 0.0), starts)
        drawn[name] = {"mean": _short(np.where(count > 0, total / np.maximum(count, 1), np.nan))}
        if _width(spans) > 1:
            drawn[name]["low"] = _short(np.fmin.reduceat(values, starts))
            drawn[name]["high"] = _short(np.fmax.reduceat(values, starts))
    return drawn


def reply_lengths(queries: Queries, spans: Sequence[range]) -> dict[str, Curve]:
    """Sampled tokens per trained sequence, and the share that was cut at the limit. Empty if none can be read."""
    table = queries.select(
        """
        SELECT (step - 1) // ? AS span, avg(num_sampled) AS mean, min(num_sampled) AS low, max(num_sampled) AS high,
            avg((status = 'truncated')::INTEGER) AS truncated
        FROM trajectories WHERE outcome = 'trained' GROUP BY span
        """,
        [_width(spans)],
    )
    if not table.num_rows:
        return {}
    columns = {name: np.full(len(spans), np.nan) for name in ("mean", "low", "high", "truncated")}
    for name, values in columns.items():
        values[table["span"].to_numpy()] = table[name].to_numpy()
    truncated = columns.pop("truncated")
    return {
        "reply_length": {name: _short(values) for name, values in columns.items()},
        "truncated_share": {"mean": _short(truncated)},
    }


def figures(drawn: dict[str, Curve]) -> list[tuple[str, str, str, float]]:
    """Those of `FIGURES` that can be drawn, then one for each other metric that the steps recorded."""
    others = sorted(drawn.keys() - {name for name, *_ in FIGURES} - ELSEWHERE)
    plain = [(name, name.replace("_", " ").capitalize(), "", 1.0) for name in others]
    return [figure for figure in FIGURES if figure[0] in drawn] + plain


def time_budget(metrics: dict[str, np.ndarray]) -> dict[str, Any]:
    """Seconds by phase over the whole run, beside the rounds' wall-clock."""

    def total(name: str) -> float:
        return float(np.nansum(metrics.get(f"{name}_seconds", 0.0)))

    phases = [(name, total(name)) for name in TIME]
    together, rounds = sum(seconds for _, seconds in phases), total("round")
    return {"phases": phases, "round": rounds, "sum": together, "overlap": together > 1.02 * rounds}


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
    """Of each training shard, in commit order: oldest and newest version that sampled it, and that trained on it.

    NaN if nothing was sampled or trained; `width` is the number of neighbours merged into one.
    """
    table = queries.select(
        """
        SELECT min(nullif(head_version, -1)) AS head, max(nullif(tail_version, -1)) AS tail,
            min(policy_version - 1) AS trained_first, max(policy_version - 1) AS trained_last
        FROM groups WHERE outcome <> 'eval' GROUP BY shard_number ORDER BY shard_number
        """
    )
    width = max(1, math.ceil(table.num_rows / MOST_SHARDS))
    starts = np.arange(0, table.num_rows, width)
    merged: dict[str, list[float]] = {"width": [width]}
    for name in table.column_names:
        values = table[name].to_numpy().astype(float)
        merge = np.fmax if name in ("tail", "trained_last") else np.fmin
        merged[name] = merge.reduceat(values, starts).tolist() if len(values) else []
    return merged


def reward_levels(queries: Queries, spans: Sequence[range], rewards: tuple[float, float]) -> dict[str, Any]:
    """Share of trained groups by mean reward, per span: `shares[level][span]`, levels from low to high."""
    low, high = rewards
    table = queries.select(
        """
        SELECT (step - 1) // ? AS span, count(*) AS groups,
            greatest(0, least(? - 1, floor(? * (mean_reward - ?) / ?)))::INTEGER AS level
        FROM groups WHERE outcome = 'trained' AND mean_reward IS NOT NULL GROUP BY span, level
        """,
        [_width(spans), NUM_LEVELS, NUM_LEVELS, low, (high - low) or 1.0],
    )
    if not table.num_rows or high <= low:
        return {"edges": [], "shares": []}
    counts = np.zeros((NUM_LEVELS, len(spans)))
    counts[table["level"].to_numpy(), table["span"].to_numpy()] = table["groups"].to_numpy()
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    return {"edges": _short(np.linspace(low, high, NUM_LEVELS + 1)), "shares": np.round(shares, 4).tolist()}


def _short(values: np.ndarray) -> list[float]:
    """Six significant digits: a picture shows no more, and the page stays small."""
    return [float(f"{value:.6g}") for value in values.tolist()]
