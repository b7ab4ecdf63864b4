"""What the fold of a log needs of an entry, as plain columns; a segment stores them beside the entry's JSON.

Frequent kinds are folded from their columns alone, so opening a long run decodes none of them. For all other kinds the
fold reads the record: a new kind needs nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

from storage.log import entries
from storage.log.entries import OUTCOMES, LogEntry, claimed_groups


class Columns(NamedTuple):
    """One entry; None where its kind has no such column."""

    kind: str
    key: str
    """What the fold looks the entry up by, in text."""
    written_at: float
    num_rows: int | None = None
    """Of a training shard; None for the shard of an evaluation."""
    group_ids: list[str] | None = None
    """Of a training shard, or of a step's claim."""
    positions: list[int] | None = None
    """Of a training shard's groups, or of a lease."""
    retried: list[bool] | None = None
    """Of a training shard's groups."""
    outcomes: list[int] | None = None
    """Of a claim's groups, as places in `OUTCOMES`."""


def columns_of(entry: LogEntry) -> Columns:
    """The columns of an entry."""
    kind, written_at = entry.kind, entry.written_at
    match entry.body:
        case entries.Shard(is_eval=False) as shard:
            return Columns(
                kind,
                shard.id,
                written_at,
                num_rows=shard.num_rows,
                group_ids=[group.id for group in shard.groups],
                positions=[group.position for group in shard.groups],
                retried=[group.retried for group in shard.groups],
            )
        case entries.Step() as step:
            claimed = claimed_groups(step)
            return Columns(
                kind,
                str(step.policy.version),
                written_at,
                group_ids=[group.group_id for _, group in claimed],
                outcomes=[OUTCOMES.index(outcome) for outcome, _ in claimed],
            )
        case entries.Lease(holder=holder, positions=positions):
            return Columns(kind, holder, written_at, positions=positions)
        case entries.Policy(version=version) | entries.Registration(version=version):
            return Columns(kind, str(version), written_at)
        case (
            entries.Session(id=key)
            | entries.Shard(id=key)
            | entries.Alias(name=key)
            | entries.Rescore(name=key)
            | entries.Join(holder=key)
        ):
            return Columns(kind, key, written_at)
        case entries.Release(holder=key) | entries.Evaluation(shard_id=key) | entries.Quarantine(shard_id=key):
            return Columns(kind, key, written_at)
        case _:
            return Columns(kind, "", written_at)
