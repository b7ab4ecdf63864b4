"""Why attempts failed: an Arrow file beside each shard that has such attempts. It is for people; nothing depends on it.

RolloutGroup ─▶ `FailedAttempt` ─▶ failures/<shard id>.arrow ─▶ `traj ls --failed`, `traj show`, the report
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from settings.errors import failure_kind
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.objects.tables import ipc_bytes
from storage.records import RolloutGroup

logger = logging.getLogger("millrace.failures")

SCHEMA = pa.schema(
    [("group_id", pa.string()), ("attempt", pa.int32()), ("status", pa.string()), ("error", pa.string())]
)


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """An attempt that left no row in its shard."""

    group_id: str
    attempt: int
    status: str
    """One of `storage.records.Status`."""
    error: str
    """What went wrong, and where in the user's code; see `settings.errors.failure_text`."""

    @property
    def id(self) -> str:
        """The name that `traj show` takes."""
        return f"{self.group_id}/{self.attempt}"


def failed_attempts(groups: Iterable[RolloutGroup]) -> list[FailedAttempt]:
    """The attempts that failed by themselves; a cancelled one has its reason in its group."""
    return [
        FailedAttempt(group_id=group.id, attempt=one.attempt, status=one.status, error=one.error)
        for group in groups
        for one in group.trajectories
        if one.error and not one.usable and one.status != "cancelled"
    ]


def put_failures(log: RunLog, shard_id: str, groups: Iterable[RolloutGroup]) -> None:
    """Write the failed attempts of a shard's groups, if any, before the log knows the shard."""
    if rows := [vars(attempt) for attempt in failed_attempts(groups)]:
        log.store.put(_key(log, shard_id), ipc_bytes(pa.Table.from_pylist(rows, schema=SCHEMA), compression="lz4"))


def read_failures(log: RunLog, shards: Sequence[Shard]) -> list[FailedAttempt]:
    """The failed attempts of some shards, in the order of their commits; none of shards whose files are gone, and with
    a warning none of damaged ones."""
    keys = [_key(log, shard.id) for shard in shards if any(group.failures for group in shard.groups)]
    attempts = list[FailedAttempt]()
    for key, data in zip(keys, log.store.get_many(keys), strict=True):
        try:
            table = SCHEMA.empty_table() if data is None else pa.ipc.open_file(pa.py_buffer(data)).read_all()
            table.validate(full=True)
            attempts += [FailedAttempt(**row) for row in table.to_pylist()]
        except (pa.ArrowException, TypeError, ValueError, OSError) as error:
            logger.warning("%s/%s is damaged, so why these attempts failed is not shown: %s", log.store.uri, key, error)
    return attempts


def newest_failures(log: RunLog, count: int, *, include_eval: bool = False) -> list[FailedAttempt]:
    """At most `count` failed attempts, those of the newest shards first."""
    shards, failures = log.state.shards, list[FailedAttempt]()
    for shard_id in reversed(list(shards)):
        if len(failures) >= count:
            break
        if include_eval or not shards[shard_id].is_eval:
            failures += reversed(read_failures(log, [shards[shard_id]]))
    return failures[:count]


def kinds_of(attempts: Iterable[FailedAttempt]) -> list[tuple[int, FailedAttempt]]:
    """How many failed in the same way, with the first of each kind; the most frequent kind first."""
    kinds: dict[str, list[FailedAttempt]] = {}
    for attempt in attempts:
        kinds.setdefault(failure_kind(attempt.error), []).append(attempt)
    return [(len(kind), kind[0]) for kind in sorted(kinds.values(), key=len, reverse=True)]


def _key(log: RunLog, shard_id: str) -> str:
    return log.key(f"failures/{shard_id}.arrow")
