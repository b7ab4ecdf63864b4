"""An attempt as the page shows it: messages, with the tokens of those that the policy wrote, tool calls, its group.

In: ids of trajectories, the run's tokenizer, a colouring of `cli.traj.coloring`. Out: plain values, shortened to
`Limits`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cli.traj.coloring import Coloring, by_logprob
from cli.traj.finding import decode, load_tokenizer
from storage.log.run_log import RunLog
from storage.views.queries import open_queries

SNIPPET_CHARACTERS = 100
MOST_ATTEMPTS = 64
_PLAIN = Console(width=10_000)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of an attempt is shown; the middle is left out."""

    messages: int
    characters: int
    """Most characters of one message."""
    tokens: int
    """Most tokens of one attempt, shared by its turns; each turn keeps at least `fewest_tokens`."""
    fewest_tokens: int = 40


SHORT = Limits(messages=16, characters=1500, tokens=600)
"""In a list, and in a report."""
LONG = Limits(messages=400, characters=40_000, tokens=8000)
"""The limits of an attempt that was opened."""

_ROWS = """
SELECT r.*, r.group_id || '/' || r.attempt AS id, g.outcome, g.step, g.mean_reward, g.reject_reason AS rejected
FROM shard_rows r LEFT JOIN groups g ON g.shard_id = r.shard_id AND g.id = r.group_id
WHERE r.group_id || '/' || r.attempt IN (SELECT unnest($1::VARCHAR[])) ORDER BY r.sequence_idx
"""
_GROUPS = """
SELECT group_id, attempt, reward, status, reply FROM trajectories
WHERE group_id IN (SELECT unnest($1::VARCHAR[])) AND sequence_idx = 0 ORDER BY attempt
"""


def conversations(
    log: RunLog,
    ids: Mapping[str, str],
    tokenizer: Any,
    limits: Limits,
    *,
    color: Callable[[dict[str, Any]], Coloring] = by_logprob,
) -> dict[str, list[dict[str, Any]]]:
    """Attempts by id, of each a conversation per training sequence; an attempt is missing if its shard has gone since.

    `ids` are those of trajectories, each with its shard.
    """
    queries = open_queries(log, shard_ids=set(ids.values()))
    rows = queries.select(_ROWS, [list(ids)]).to_pylist()
    groups, shown = defaultdict(list), defaultdict(list)
    for attempt in queries.select(_GROUPS, [list({row["group_id"] for row in rows})]).to_pylist():
        groups[attempt.pop("group_id")].append(attempt)
    for row in rows:
        shown[row["id"]].append(_conversation(row, groups[row["group_id"]], tokenizer, limits, color(row)))
    return shown


def _conversation(
    row: dict[str, Any], group: list[dict[str, Any]], tokenizer: Any, limits: Limits, coloring: Coloring
) -> dict[str, Any]:
    turns = list(_turns(row, tokenizer, limits, coloring))
    messages = row["messages"]
    spoken = [index for index, message in enumerate(messages) if message["is_completion"]]
    # One sequence holds all turns unless the history was edited; only then do tokens stand apart from the messages.
    tokens_of = dict(zip(spoken, turns, strict=True)) if len(spoken) == len(turns) else {}
    sampled = sum(turn["sampled_len"] for turn in row["turns"])
    facts = ("id", "reward", "status", "outcome", "step", "head_version", "tail_version", "mean_reward", "rejected")
    calls = [call for turn in row["turns"] for call in turn["tool_calls"]]
    return {
        **{name: row[name] for name in facts},
        "prompt_id": row["prompt_id"],
        "shard": row["shard_id"],
        "sequence": row["sequence_idx"],
        "reward_parts": [list(part) for part in row["reward_parts"]],
        "p": math.exp(sum(row["logprobs"]) / sampled) if sampled else None,
        "sampled": sampled,
        "messages": [
            {**message, "content": shortened(message["content"], limits.characters), "tokens": tokens_of.get(index)}
            for index, message in _ends(list(enumerate(messages)), limits.messages)
        ],
        "left_out": max(0, len(messages) - limits.messages),
        "turns": [] if tokens_of else turns[: limits.messages],
        "calls": [
            {
                "name": call["name"],
                "arguments": shortened(call["arguments"], limits.characters),
                "result": shortened(call["result"], limits.characters),
                "failed": call["failed"],
                "seconds": call["seconds"],
            }
            for call in calls[: limits.messages]
        ],
        "color": coloring.name,
        "legend": [[segment.text, str(segment.style or "")] for segment in coloring.legend.render(_PLAIN, end="")],
        "attempts": [{**attempt, "reply": snippet(attempt["reply"] or "")} for attempt in group[:MOST_ATTEMPTS]],
        "num_attempts": len(group),
    }


def _turns(row: dict[str, Any], tokenizer: Any, limits: Limits, coloring: Coloring) -> Iterator[dict[str, Any]]:
    """The sampled tokens of each turn as columns, the middle left out if it is long."""
    start, most = 0, max(limits.fewest_tokens, limits.tokens // max(1, len(row["turns"])))
    for turn in row["turns"]:
        start += turn["context_len"]
        places = range(start, start + turn["sampled_len"])
        start = places.stop
        if not places:
            continue
        ids = row["input_ids"][places.start : places.stop]
        # `·` is a token that only begins a character
        texts = [f"#{token} " for token in ids] if tokenizer is None else decode(tokenizer, ids, unfinished="·")
        shown = _ends(list(places), most)
        yield {
            "texts": [texts[place - places.start] for place in shown],
            "styles": [coloring.styles[place] for place in shown],
            "values": [coloring.values[place] if coloring.values else "" for place in shown],
            "logprobs": [round(row["logprobs"][place], 4) for place in shown],
            "versions": [row["weight_versions"][place] for place in shown],
            "left_out": max(0, len(places) - most),
            "finish_reason": turn["finish_reason"],
            "seconds": turn["generate_seconds"],
        }


def tokenizer_of(log: RunLog) -> Any:
    """The run's tokenizer; None if the base policy's folder is gone."""
    try:
        return load_tokenizer(log)
    except (FileNotFoundError, KeyError):
        return None


def snippet(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text[: 4 * SNIPPET_CHARACTERS].split())
    whole = len(line) <= SNIPPET_CHARACTERS and len(text) <= 4 * SNIPPET_CHARACTERS
    return line if whole else f"{line[:SNIPPET_CHARACTERS]}…"


def shortened(text: str, most: int) -> str:
    """The first three quarters of `most` characters and the last quarter, if there are more."""
    if len(text) <= most:
        return text
    return f"{text[: most * 3 // 4]}\n[… {len(text) - most:,} characters left out …]\n{text[-(most // 4) :]}"


def _ends(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else items[: most * 3 // 4] + items[-(most // 4) :]
