"""What the producers benchmark counts."""

from __future__ import annotations

import pytest

from benchmarks.producers import rate
from storage.log.entries import LogEntry
from tests.builders import a_shard, a_summary


def test_only_attempts_committed_within_the_window_count():
    shards = [a_shard(f"s{number}", [a_summary()]) for number in range(4)]
    entries = [
        LogEntry(number=number, kind="shard", written_at=float(number), body=shard)
        for number, shard in enumerate(shards)
    ]
    found = rate(entries, 1.0, 3.0)
    counted = sum(shard.num_rows for shard in shards[1:3])
    assert counted and found["attempts_per_second"] == pytest.approx(counted / 2)
    assert sum(found["rows_of"].values()) == counted
