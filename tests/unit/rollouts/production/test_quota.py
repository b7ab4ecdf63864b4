"""The quota gives the published worked values, and counts a group from its start to the log within the bounds."""

from __future__ import annotations

import pytest

from rollouts.production.head_start import is_short
from rollouts.production.quota import BUSY, LEASE_SHARE, Quota
from tests.builders import a_config


def _quota(
    *, eta: float, version: int = 0, accepted: int = 0, running: int = 0, max_concurrent: int = 10_000, k: int = 1
) -> Quota:
    quota = Quota(
        a_config(batch_size=8, max_staleness=eta, max_concurrent=max_concurrent, steps_per_update=k, steps=10**6)
    )
    quota.rebase(version=version, committed=accepted)
    quota.running = running
    return quota


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "running", "room"),
    [
        *((0, 0, 0, 0, 8), (0, 0, 8, 0, 0), (0, 1, 8, 0, 8)),  # synchronous: a batch is out, nothing starts until …
        *((2, 0, 0, 0, 24), (2, 0, 8, 16, 0), (2, 1, 8, 16, 8)),
        *((0, 0, 5, 3, 0), (0, 0, 5, 0, 3)),  # … and then 3 are rejected
        *((2, 10, 80, 0, 24), (2, 10, 0, 0, 104)),  # recovered at version 10, and the burst if nothing were accepted
        *((0, 0, 10, 2, -4), (0.5, 0, 0, 0, 12), (0.1, 0, 0, 0, 8), (0.5, 3, 24, 0, 12)),
    ],
)
def test_worked_values_for_batches_of_eight(eta: float, version: int, accepted: int, running: int, room: int):
    assert _quota(eta=eta, version=version, accepted=accepted, running=running).room == room


def test_several_steps_per_weight_update_admit_so_many_batches_at_once():
    worked = [(0, 0, 0, 32), (0, 3, 24, 8), (0, 4, 32, 32), (0.5, 0, 0, 48), (0.1, 0, 0, 35), (1, 4, 32, 64)]
    for eta, version, accepted, room in worked:
        assert _quota(eta=eta, version=version, accepted=accepted, k=4).room == room
    assert int((1 + 0.16) * 50) == 57, "as computers round"
    assert Quota(a_config(batch_size=50, max_staleness=0.16, max_concurrent=99)).room == 58


@pytest.mark.parametrize(
    ("others", "eta", "k", "max_concurrent", "room"),
    [(0, 1, 1, 99, 16), (2, 1, 1, 99, 6), (1, 0.5, 1, 99, 6), (1, 0, 2, 99, 8), (1, 1, 1, 4, 4), (0, 2, 1, 4, 4)],
)
def test_several_workers_share_what_may_be_in_flight_within_their_own_concurrency(
    others: int, eta: float, k: int, max_concurrent: int, room: int
):
    quota = _quota(eta=eta, k=k, max_concurrent=max_concurrent)
    quota.rebase(version=0, committed=0, num_producers=1 + others)
    assert quota.room == room


def test_a_worker_alone_leases_ahead_one_among_several_does_not_and_a_paused_one_wants_nothing():
    quota = Quota(a_config(batch_size=80, max_staleness=0, max_concurrent=3))
    assert (quota.room, quota.wanted) == (3, 80 // LEASE_SHARE)
    quota.lease(3)
    assert quota.wanted == 0
    quota.rebase(version=0, committed=0, num_producers=2)
    quota.waiting = 1
    assert quota.wanted == 2
    quota.rebase(version=0, committed=0, paused=True)
    assert quota.room == quota.wanted == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_group_uses_up_room_from_its_start_to_the_log_and_a_rejected_one_gives_it_back(dynamic: bool):
    """Unless a step takes attempts as they come: then only what runs again gives it back."""
    quota = Quota(a_config(batch_size=8, max_staleness=0, dynamic_batch=dynamic))
    quota.lease(8)
    assert (quota.room, quota.wanted) == (8, 0), "leased and not started yet"
    for room in range(7, -1, -1):
        quota.start()
        assert (quota.room, quota.waiting) == (room, room)
    for accepted, will_retry, room in [(True, False, 0), (False, False, 0 if dynamic else 1), (False, True, 1)]:
        before = quota.room
        quota.end(counted=quota.counts(accepted=accepted, will_retry=will_retry))
        assert quota.room - before == room
    room, counted = quota.room, quota.finished
    quota.hand_out()
    assert (quota.room, quota.finished, quota.handed_out) == (room, 0, counted)
    quota.commit(counted)
    assert (quota.room, quota.handed_out, quota.committed) == (room, 0, counted)
    quota.rebase(version=0, committed=counted, elsewhere=1)  # the log says so too, and another worker leases one
    assert quota.room == room - 1


def test_stragglers_are_those_that_the_next_version_pushes_over_the_bound():
    for eta, k, version, late in [
        (0, 1, 3, [3]),  # what runs on the version itself is over the bound with the next
        *((1, 1, 3, [2]), (0.5, 1, 3, [2]), (2, 1, 3, [1]), (1, 4, 7, [0])),
        (1, 4, 6, []),  # version 7 changes no weights
    ]:
        heads, quota = list(range(0, version + 1, k)), _quota(eta=eta, k=k)
        assert [head for head in heads if quota.stragglers([head], version)] == late
        # One that is over the bound already is lost: nothing waits for it.
        assert quota.stragglers(heads, version) == len(late)


def test_a_claim_waits_for_stragglers_while_the_engine_is_busy():
    enough = int(BUSY * 100)
    for running, heads, waits in [(enough, [0, 1, 1], True), (enough - 1, [0, 1, 1], False), (100, [1, 1], False)]:
        assert _quota(eta=1, running=running, max_concurrent=100).should_wait(heads, 1) is waits


def test_only_a_strict_run_gives_up_what_is_over_the_bound():
    for policy, lost in [("strict", True), ("mask", False), ("correct", False)]:
        quota = Quota(a_config(max_staleness=1, stale_policy=policy))
        quota.rebase(version=3, committed=0)
        assert (quota.is_lost(1), quota.is_lost(2), quota.lag(1)) == (lost, False, 2)


def test_groups_begin_ahead_of_steps_that_take_a_hundredth_of_their_time_at_most():
    step = {"load_seconds": 0.5, "train_seconds": 1.0, "save_seconds": 0.5, "loss": 9.0}
    assert is_short(step, 1, attempt_timeout=200.0) and not is_short(step, 1, attempt_timeout=199.0)
    assert is_short(step, 3, attempt_timeout=600.0) and not is_short(step, 4, attempt_timeout=600.0)
    assert not is_short({"train_seconds": 0.1}, 1, attempt_timeout=600.0), "it is not known how long it took"
