"""The groups of a report worth reading: best, worst, most surprising, confidently wrong.

In: a run opened for SQL. Out: a few attempts each, with conversation, tokens and their group, all shortened.

    p               geometric mean, over an attempt's sampled tokens, of the probability the policy gave them
    surprise        (reward − mean reward of its group) × (1 − p)      an unlikely reply that beat the others
    overconfidence  (mean reward of its group − reward) × p            a likely reply that lost to the others
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cli.report.report_prompts import snippet
from cli.traj.finding import decode, load_tokenizer
from storage.log.run_log import RunLog
from storage.views.queries import Queries

MOST_GROUPS = 6
"""Groups of each list."""
MOST_MESSAGES = 16
MOST_CHARACTERS = 1500
"""Of one message."""
MOST_TOKENS = 600
"""Of one attempt, shared by its turns, of which each keeps at least `FEWEST_TOKENS`."""
FEWEST_TOKENS = 40
MOST_ATTEMPTS = 16

LISTS = (
    ("best", "Best", "highest mean reward of the group; among equals the newest"),
    ("worst", "Worst", "lowest mean reward of the group; among equals the newest"),
    (
        "surprise",
        "Most surprising",
        "the attempt beat its group with a reply the policy found unlikely: (reward − group's mean) × (1 − p)",
    ),
    (
        "overconfidence",
        "Confidently wrong",
        "the attempt fell below its group with a reply the policy found likely: (group's mean − reward) × p",
    ),
)
"""Key, title and definition of each list of groups."""

# One pass over the shards: of each group its best, worst, most surprising and most overconfident attempt.
_PICKS = """
WITH attempts AS (
    SELECT g.shard_number, g.position, g.shard_id, g.id AS group_id, g.mean_reward, t.attempt, t.reward,
        exp(t.mean_logprob) AS p,
        (t.reward - g.mean_reward) * (1 - exp(t.mean_logprob)) AS surprise,
        (g.mean_reward - t.reward) * exp(t.mean_logprob) AS overconfidence
    FROM trajectories t JOIN groups g ON g.shard_id = t.shard_id AND g.id = t.group_id
    WHERE g.outcome <> 'eval'
), picked AS MATERIALIZED (
    SELECT shard_number, position, shard_id, group_id, any_value(mean_reward) AS mean_reward,
        max(surprise) AS surprise, max(overconfidence) AS overconfidence,
        arg_max({attempt: attempt, p: p}, (reward, -attempt)) AS the_best,
        arg_min({attempt: attempt, p: p}, (reward, attempt)) AS the_worst,
        arg_max({attempt: attempt, p: p}, (surprise, -attempt)) AS the_surprise,
        arg_max({attempt: attempt, p: p}, (overconfidence, -attempt)) AS the_overconfidence
    FROM attempts GROUP BY shard_number, position, shard_id, group_id
)
(SELECT 'best' AS list, shard_id, group_id, the_best AS pick FROM picked
    ORDER BY mean_reward DESC, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'worst', shard_id, group_id, the_worst FROM picked
    ORDER BY mean_reward, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'surprise', shard_id, group_id, the_surprise FROM picked
    WHERE surprise > 1e-6 ORDER BY surprise DESC, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'overconfidence', shard_id, group_id, the_overconfidence FROM picked
    WHERE overconfidence > 1e-6 ORDER BY overconfidence DESC, shard_number DESC, position DESC LIMIT $1)
"""


def group_lists(log: RunLog, queries: Queries) -> list[dict[str, Any]]:
    """Every list of `LISTS`, with all that the page shows of its groups."""
    picks = queries.select(_PICKS, [MOST_GROUPS]).to_pylist()
    tokenizer = _tokenizer(log) if picks else None
    cards: dict[str, list[dict[str, Any]]] = {key: [] for key, *_ in LISTS}
    for pick in picks:
        cards[pick["list"]] += _card(queries, tokenizer, pick["shard_id"], pick["group_id"], **pick["pick"])
    return [{"key": key, "title": title, "definition": text, "groups": cards[key]} for key, title, text in LISTS]


def _card(
    queries: Queries, tokenizer: Any, shard_id: str, group_id: str, *, attempt: int, p: float
) -> list[dict[str, Any]]:
    """One card, or none if the shard has gone since it was picked."""
    key = [shard_id, group_id]
    rows = queries.select(
        "SELECT * FROM shard_rows WHERE shard_id = ? AND group_id = ? AND attempt = ? ORDER BY sequence_idx LIMIT 1",
        [*key, attempt],
    ).to_pylist()
    others = queries.select(
        "SELECT attempt, reward, status, reply FROM trajectories "
        "WHERE shard_id = ? AND group_id = ? AND sequence_idx = 0 ORDER BY attempt",
        key,
    ).to_pylist()
    groups = queries.select("SELECT * FROM groups WHERE shard_id = ? AND id = ?", key).to_pylist()
    return [
        {
            "id": f"{group_id}/{attempt}",
            "shard": shard_id,
            "p": p,
            "group": group,
            "row": row,
            **_conversation(row, tokenizer),
            "attempts": [{**other, "reply": snippet(other["reply"] or "")} for other in others[:MOST_ATTEMPTS]],
            "num_attempts": len(others),
        }
        for row, group in zip(rows, groups, strict=False)
    ]


def _conversation(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Messages, with the tokens of those the policy wrote, and tool calls."""
    turns = list(_turns(row, tokenizer))
    messages = row["messages"]
    spoken = [index for index, message in enumerate(messages) if message["is_completion"]]
    # One sequence holds all turns unless the history was edited; only then do tokens stand apart from the messages.
    tokens_of = dict(zip(spoken, turns, strict=True)) if len(spoken) == len(turns) else {}
    calls = [call for turn in row["turns"] for call in turn["tool_calls"]]
    return {
        "messages": [
            {**message, "content": _shortened(message["content"]), "tokens": tokens_of.get(index)}
            for index, message in _ends(list(enumerate(messages)), MOST_MESSAGES)
        ],
        "left_out": max(0, len(messages) - MOST_MESSAGES),
        "turns": [] if tokens_of else turns[:MOST_MESSAGES],
        "calls": [
            {**call, "arguments": _shortened(call["arguments"]), "result": _shortened(call["result"])}
            for call in calls[:MOST_MESSAGES]
        ],
    }


def _turns(row: dict[str, Any], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The sampled tokens of each turn: text, probability, logprob and version, the middle left out when long."""
    start, most = 0, max(FEWEST_TOKENS, MOST_TOKENS // max(1, len(row["turns"])))
    for turn in row["turns"]:
        start += turn["context_len"]
        stop = start + turn["sampled_len"]
        ids, logprobs = row["input_ids"][start:stop], row["logprobs"][start:stop]
        versions = row["weight_versions"][start:stop]
        # `·` is a token that only begins a character
        texts = [f"#{token} " for token in ids] if tokenizer is None else decode(tokenizer, ids, unfinished="·")
        tokens = [
            {"text": text, "p": math.exp(logprob), "logprob": logprob, "version": version}
            for text, logprob, version in zip(texts, logprobs, versions, strict=True)
        ]
        start = stop
        if tokens:
            yield {"tokens": _ends(tokens, most), "left_out": max(0, len(tokens) - most)}


def _tokenizer(log: RunLog) -> Any:
    """The run's tokenizer; None if the base policy's folder is gone."""
    try:
        return load_tokenizer(log)
    except (FileNotFoundError, KeyError):
        return None


def _ends(items: list[Any], most: int) -> list[Any]:
    """All items, or the first three quarters of `most` and the last quarter of it."""
    return items if len(items) <= most else items[: most * 3 // 4] + items[-(most // 4) :]


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    head, tail = text[: MOST_CHARACTERS * 3 // 4], text[-(MOST_CHARACTERS // 4) :]
    return f"{head}\n[… {len(text) - MOST_CHARACTERS:,} characters left out …]\n{tail}"
