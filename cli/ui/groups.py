"""The groups of a run worth reading: best, worst, most surprising, confidently wrong.

In: a run opened for SQL. Out: one attempt of each, as a conversation that is shortened.

    p               geometric mean, over an attempt's sampled tokens, of the probability the policy gave them
    surprise        (reward − mean reward of its group) × (1 − p)      an unlikely reply that beat the others
    overconfidence  (mean reward of its group − reward) × p            a likely reply that lost to the others
"""

from __future__ import annotations

from typing import Any

from cli.ui.conversations import SHORT, conversations, tokenizer_of
from storage.log.run_log import RunLog
from storage.views.queries import Queries

MOST_GROUPS = 6
"""Groups of each list."""

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
        arg_max({attempt: attempt}, (reward, -attempt)) AS the_best,
        arg_min({attempt: attempt}, (reward, attempt)) AS the_worst,
        arg_max({attempt: attempt}, (surprise, -attempt)) AS the_surprise,
        arg_max({attempt: attempt}, (overconfidence, -attempt)) AS the_overconfidence
    FROM attempts GROUP BY shard_number, position, shard_id, group_id
)
(SELECT 'best' AS list, shard_id, group_id || '/' || the_best.attempt AS id FROM picked
    ORDER BY mean_reward DESC, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'worst', shard_id, group_id || '/' || the_worst.attempt FROM picked
    ORDER BY mean_reward, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'surprise', shard_id, group_id || '/' || the_surprise.attempt FROM picked
    WHERE surprise > 1e-6 ORDER BY surprise DESC, shard_number DESC, position DESC LIMIT $1)
UNION ALL (SELECT 'overconfidence', shard_id, group_id || '/' || the_overconfidence.attempt FROM picked
    WHERE overconfidence > 1e-6 ORDER BY overconfidence DESC, shard_number DESC, position DESC LIMIT $1)
"""


def group_lists(log: RunLog, queries: Queries) -> list[dict[str, Any]]:
    """Every list of `LISTS`, with all that the page shows of its groups."""
    picks = queries.select(_PICKS, [MOST_GROUPS]).to_pylist()
    tokenizer = tokenizer_of(log) if picks else None
    cards: dict[str, list[dict[str, Any]]] = {key: [] for key, *_ in LISTS}

    shown = conversations(log, {pick["id"]: pick["shard_id"] for pick in picks}, tokenizer, SHORT)
    for pick in picks:
        cards[pick["list"]] += shown[pick["id"]][:1]
    return [{"key": key, "title": title, "definition": text, "groups": cards[key]} for key, title, text in LISTS]
