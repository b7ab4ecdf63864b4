"""The page of a run: everything it shows, and its HTML.

In: a run's log and its shards. Out: one HTML file as text.

                          ┌─▶ report_curves   over steps and shards ─┐
    log, shards ─▶ SQL ───┼─▶ report_prompts  over visits            ├─▶ report.html + .css + .js ─▶ one file
                          └─▶ report_groups   worth reading          ┘

DuckDB streams over the shards, so memory does not grow with them; the page is bounded by the `MOST_…` of each module.
Prompts and replies are untrusted text: the template escapes them, and the page's own policy runs no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from cli.report import report_curves
from cli.report.report_groups import group_lists
from cli.report.report_prompts import VISITS, prompt_history
from cli.terminal.formatting import counted, held_out
from rollouts.production.evaluation import failure_of
from settings.errors import in_one_line
from storage.log.entries import OUTCOMES
from storage.log.run_log import RunLog
from storage.log.runs import own_scores, run_config
from storage.shards.failed_attempts import kinds_of, newest_failures
from storage.views.queries import Queries, open_queries

MOST_STEPS = 240
"""Points of a curve; more steps than this are averaged in spans of equal width."""
MOST_NOTES = 8
MOST_FAILURES = 1000
"""The newest failed attempts, which are counted by kind."""
MOST_SESSIONS = 20


def gather(log: RunLog) -> dict[str, Any]:
    """Everything the template shows; `data` is the part the page's script draws."""
    state, config, queries = log.state, run_config(log), open_queries(log)
    spans = report_curves.spans_of(len(state.steps), MOST_STEPS)
    metrics = report_curves.step_metrics(queries)
    drawn = {**report_curves.curves(metrics, spans), **report_curves.reply_lengths(queries, spans)}
    rewards = _reward_range(queries)
    training, bound = config.get("train", {}), math.ceil(config.get("max_staleness", 0))
    lags = report_curves.token_lags(queries, steps_per_update=training.get("steps_per_update", 1))
    policy = training.get("stale_policy", "strict")
    evaluations = sorted((e for e in state.evaluations if not e.failed), key=lambda evaluation: evaluation.version)
    histories = [prompt_history(queries, name, rewards) for name in VISITS]
    counters = state.counters()
    return {
        "run": log.run_id,
        "state": state,
        "place": f"{log.store.uri}/{log.prefix}",
        "started": _date(state.started_at),
        "made": _date(datetime.now(tz=UTC).timestamp()),
        "code_version": state.sessions[-1].code_version if state.sessions else "unknown",
        "sessions": list(state.sessions[-MOST_SESSIONS:]),
        "peak_memory_bytes": float(max(metrics.get("peak_memory_bytes", ()), default=0)),
        "counters": counters,
        "terms": [(name, counters[name]) for name in (*OUTCOMES, "pending")],
        "losses": _losses(queries),
        "failures": kinds_of(newest_failures(log, MOST_FAILURES, include_eval=True))[:MOST_NOTES],
        "rewards": rewards,
        "evaluations": own_scores(log, config),
        "settings": _flat(config),
        "figures": report_curves.figures(drawn),
        "time": report_curves.time_budget(metrics),
        "staleness": report_curves.staleness(lags, bound=bound, policy=policy, stale_groups=counters["stale"]),
        "lists": group_lists(log, queries),
        "histories": histories,
        "data": {
            "spans": [(span[0], span[-1]) for span in spans],
            "metrics": drawn,
            "held_out": [
                {"x": e.version, "y": e.score, "text": " ".join(held_out(e)), "split": e.split} for e in evaluations
            ],
            "lags": report_curves.lag_bars(lags, bound=bound),
            "shards": report_curves.shard_versions(queries),
            "levels": report_curves.reward_levels(queries, spans, rewards),
            "rewards": rewards,
            "histories": {history["name"]: history for history in histories},
        },
        "notes": _notes(log, queries),  # last: a damaged shard is known once it has been read
    }


def render(report: dict[str, Any]) -> str:
    """The page. Its script is named by digest in the page's security policy, so no other one runs."""
    folder = Path(__file__).parent
    script = (folder / "report.js").read_text()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for text_filter in (amount, count, counted, duration, in_one_line, number, percent, visible):
        environment.filters[text_filter.__name__] = text_filter
    return environment.get_template("report.html").render(
        **{**report, "data": _finite(report["data"])},
        script=script,
        script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=(folder / "report.css").read_text(),
    )


def _reward_range(queries: Queries) -> tuple[float, float]:
    """Lowest and highest reward of any attempt, held-out ones included; (0, 1) without any."""
    rewards = queries.select(
        "SELECT min(reward) AS low, max(reward) AS high FROM trajectories WHERE isfinite(reward)"
    ).to_pylist()[0]
    return (0.0, 1.0) if rewards["low"] is None else (rewards["low"], rewards["high"])


def _losses(queries: Queries) -> list[tuple[str, int]]:
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
        [MOST_NOTES],
    )
    return list(zip(table["reason"].to_pylist(), table["number"].to_pylist(), strict=True))


def _notes(log: RunLog, queries: Queries) -> list[str]:
    """What this page leaves out, in sentences."""
    state = log.state
    causes = [(shard_id, why) for shard_id, why in queries.left_out.items() if shard_id not in state.retired_shards]
    notes = [f"shard {shard_id} is left out: {why}" for shard_id, why in causes[:MOST_NOTES]]
    if len(causes) > MOST_NOTES:
        notes.append(f"and {len(causes) - MOST_NOTES:,} more shards")
    if causes:
        notes.append(
            "The log's counts and rewards of these shards are in here, their tokens and conversations are not."
        )
    failed = [failure_of(evaluation) for evaluation in state.evaluations if evaluation.failed]
    notes += [f"{text[0].upper()}{text[1:]}." for text in failed[:MOST_NOTES]]
    if len(failed) > MOST_NOTES:
        notes.append(f"and {len(failed) - MOST_NOTES:,} more failed evaluations")
    if retired := sum(shard_id in state.shards for shard_id in state.retired_shards):  # the rest never were in the log
        shards = counted(retired, "shard")
        policies = counted(len(state.retired_policies), "policy version")
        notes.append(
            f"Retention has removed the files of {shards}, and the weights of {policies}. "
            "Their groups are counted; their tokens and conversations are gone."
        )
    return notes


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and JSON values of a nested configuration."""
    if isinstance(value, dict) and value:
        return [pair for key in value for pair in _flat(value[key], f"{prefix}.{key}" if prefix else key)]
    text = json.dumps(value, ensure_ascii=False)
    return [(prefix, text if len(text) <= 500 else f"{text[:500]}… ({len(text):,} characters)")]


def _finite(value: Any) -> Any:
    """The same with None for NaN and the infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def visible(text: str) -> str:
    """Control characters as their pictures (␀), so that they are seen and cannot disturb the page."""
    return text.translate(_PICTURES)


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}


def count(value: float) -> str:
    return f"{value:,.0f}"


def amount(value: float) -> str:
    """Short enough for a tile: 20,480, and 123 M."""
    return count(value) if value < 1e7 else f"{value / 1e6:,.0f} M" if value < 1e10 else f"{value / 1e9:,.0f} G"


def number(value: float | None) -> str:
    """Three decimals without trailing zeros; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3f}".rstrip("0").rstrip(".") if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC") if seconds else "not started"
