"""The attempts of a run that a person asks for on the page, newest first, or best match first.

In: a run and filters as typed. Out: at most `MOST_ROWS` rows, and where to go on.

    words ─▶ LanceDB index ─▶ ids ─┐
    steps ─▶ their shards ─────────┼─▶ shards, newest first ─▶ DuckDB, a few at a time ─▶ rows, until enough
    none ──▶ every shard ──────────┘
"""

from __future__ import annotations

import re
import time
from typing import Any

from cli.traj.search import open_index, parse_filters
from cli.ui.conversations import SNIPPET_CHARACTERS, snippet
from settings.errors import WHOLE_NUMBER, InvalidInput
from storage.log.entries import claimed_groups
from storage.log.run_log import RunLog
from storage.shards.failed_attempts import newest_failures
from storage.views.queries import open_queries
from storage.views.search_query import SearchQuery

MOST_ROWS = 50
SECONDS = 1.5
"""After this long the rows so far are returned, with the place to go on from."""
FAILED = "failed"
"""As a status: the newest attempts that failed, which have no tokens."""
_SHARDS_AT_ONCE = 16
_MOST_MATCHES = 400
_PLACE = re.compile(f"{WHOLE_NUMBER}:{WHOLE_NUMBER}")
_COMPARISON = re.compile(rf"(<=|>=|!=|=|<|>)?\s*({WHOLE_NUMBER})")

_ROWS = """
SELECT id, prompt_id, prompt[:$1] AS prompt, reply[:$1] AS reply, reward, status, outcome, step, is_eval,
    head_version, tail_version, num_sampled, num_turns, num_tool_calls, shard_id
FROM trajectories WHERE sequence_idx = 0 AND {conditions}
ORDER BY shard_number DESC, position DESC, attempt LIMIT $2 OFFSET $3
"""


def find(
    log: RunLog,
    *,
    words: str = "",
    step: str = "",
    reward: str = "",
    status: str = "",
    length: str = "",
    environment: str = "",
    held_out: bool = False,
    after: str = "",
) -> dict[str, Any]:
    """Rows that satisfy every filter, and `next`: `after` of the call that goes on, None at the end.

    `step` is `12` or `3..7`, `reward` and `length` (sampled tokens) are comparisons such as `<0.5`. Raises
    `InvalidInput` for a filter that cannot be read, and `NotFound` if words are asked of a run without an index.
    """
    state = log.state
    if status == FAILED:
        failures = newest_failures(log, MOST_ROWS, include_eval=held_out)
        lost = [{"id": one.id, "status": one.status, "reply": one.error, "failed": True} for one in failures]
        return {"rows": lost, "next": None, "left_out": {}}
    filters = parse_filters(state, reward=reward, version="", status=status, include_eval=held_out)
    conditions, parameters = [filters.sql()], list[Any]()
    first, last = _steps(step, state.step)
    if step:
        conditions.append(f"outcome = 'trained' AND step BETWEEN {first} AND {last}")
    if length:
        conditions.append(f"num_sampled {_length(length)}")
    if environment:
        parameters.append(environment)
        conditions.append("(starts_with(prompt_id, $4 || '/') OR starts_with(prompt_id, $4 || ':'))")
    matches: dict[str, str] = {}
    if words:
        best_first = open_index(log).find(SearchQuery(words), filters, count=_MOST_MATCHES)
        matches = {match.id: match.shard_id for match in best_first}
        parameters.append(list(matches))
        conditions.append(f"id IN (SELECT unnest(${3 + len(parameters)}::VARCHAR[]))")
        shard_ids = list(dict.fromkeys(matches.values()))
    elif step:
        claims = (claimed_groups(each) for each in state.steps[first - 1 : last])
        shard_ids = list(dict.fromkeys(group.shard_id for claim in claims for _, group in claim))[::-1]
    else:
        shard_ids = list(state.shards)[::-1]
    gone = state.quarantined.keys() | state.retired_shards
    shard_ids = [s for s in shard_ids if s not in gone and (held_out or s not in state.evaluation_shards)]
    sql, rows, left_out = _ROWS.format(conditions=" AND ".join(conditions)), list[dict[str, Any]](), dict[str, str]()
    place, skipped = (int(part) for part in after.split(":")) if _PLACE.fullmatch(after) else (0, 0)
    began = time.monotonic()
    while place < len(shard_ids) and (words or (len(rows) < MOST_ROWS and time.monotonic() - began < SECONDS)):
        queries = open_queries(log, shard_ids=shard_ids[place : place + _SHARDS_AT_ONCE])
        most = _MOST_MATCHES if words else MOST_ROWS - len(rows)
        more = queries.select(sql, [8 * SNIPPET_CHARACTERS, most + 1, skipped, *parameters]).to_pylist()
        left_out |= queries.left_out
        rows += more[:most]
        place, skipped = (place, skipped + most) if len(more) > most else (place + _SHARDS_AT_ONCE, 0)
    if words:
        order = {attempt_id: number for number, attempt_id in enumerate(matches)}
        rows.sort(key=lambda row: order[row["id"]])
    for row in rows:
        row["prompt"], row["reply"] = snippet(row["prompt"] or ""), snippet(row["reply"] or "")
    return {
        "rows": rows,
        "next": f"{place}:{skipped}" if place < len(shard_ids) else None,
        "looked": min(place + (_SHARDS_AT_ONCE if skipped else 0), len(shard_ids)),
        "shards": len(shard_ids),
        "left_out": left_out,
    }


def update_index(log: RunLog) -> int:
    """Bring the run's search index up to date; returns the attempts in it."""
    return open_index(log).update().trajectories


def shards_to_index(log: RunLog) -> int | None:
    """Shards that the index lacks; None without an index."""
    index = open_index(log)
    return index.behind() if index.exists else None


def _steps(text: str, newest: int) -> tuple[int, int]:
    match = re.fullmatch(rf"\s*({WHOLE_NUMBER})?\s*(\.\.)?\s*({WHOLE_NUMBER})?\s*", text)
    if not match or (match[3] and not match[2]):
        raise InvalidInput(f"step {text!r}: write a step or a range: 12, 3..7, 3.. or ..7")
    first = int(match[1] or 1)
    last = int(match[3] or newest) if match[2] else int(match[1] or newest)
    if text.strip() and not 1 <= first <= last <= max(newest, last if match[2] else 0):
        raise InvalidInput(f"step {text!r}: the run has {f'steps 1 to {newest}' if newest else 'no step yet'}")
    return first, min(last, newest)


def _length(text: str) -> str:
    match = _COMPARISON.fullmatch(text.strip())
    if not match:
        raise InvalidInput(f"length {text!r}: write a comparison of sampled tokens, such as >100")
    return f"{match[1] or '='} {int(match[2])}"
