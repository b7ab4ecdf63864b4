"""Many writers on one log in a real bucket: killed 200 times, and 1,600 commits by eight processes."""

from __future__ import annotations

import pytest

from storage.log.run_log import RunLog
from storage.objects.opening import open_store
from tests.builders import a_log
from tests.chaos.test_storm import check, weather
from tests.processes import commit_shards, run_together

pytestmark = pytest.mark.slow


def test_200_kills_over_a_real_bucket_lose_nothing(bucket: str, server: dict[str, str]):
    uri = f"s3://{bucket}/prefix"
    check(uri, weather(uri, kills=200, longest_pause=0.5, environment=server))


def test_eight_processes_commit_200_shards_each_and_every_one_is_there_once(bucket: str):
    store = open_store(f"s3://{bucket}/prefix")
    log = a_log(store)
    run_together(commit_shards, 8, store.uri, "run", 200)
    state = log.refresh()
    assert set(state.shards) == {f"{rank}.{number}" for rank in range(8) for number in range(200)}
    assert state.entries == 2 + 1600 and state.positions == set(range(1600))
    assert RunLog(store, "run").refresh() == state, "what comes out of a segment differs"
