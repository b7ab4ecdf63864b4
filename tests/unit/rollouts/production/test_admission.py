"""The admission formula gives the published worked values, and never admits past the staleness bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.production.admission import BUSY, capacity, is_short, should_wait, stragglers


def _room(
    *, eta: float, version: int, accepted: int, running: int, max_concurrent: int = 10_000, steps_per_update: int = 1
) -> int:
    return capacity(
        max_concurrent=max_concurrent,
        running=running,
        max_staleness=eta,
        version=version,
        batch_size=8,
        accepted=accepted,
        steps_per_update=steps_per_update,
    )


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "running", "room"),
    [
        (0, 0, 0, 0, 8),
        (0, 0, 8, 0, 0),  # synchronous: a batch is out, nothing starts
        (0, 1, 8, 0, 8),  # … until the next version
        (2, 0, 0, 0, 24),
        (2, 0, 8, 16, 0),
        (2, 1, 8, 16, 8),
        (0, 0, 5, 3, 0),
        (0, 0, 5, 0, 3),  # … and then 3 are rejected
        (2, 10, 80, 0, 24),  # recovered at version 10: accepted restarts at version · batch size
        (2, 10, 0, 0, 104),  # the burst that follows where it does not
        (0, 0, 10, 2, -4),
        (0.5, 0, 0, 0, 12),
        (0.1, 0, 0, 0, 8),
        (0.5, 3, 24, 0, 12),
    ],
)
def test_worked_values_for_batches_of_eight(eta: float, version: int, accepted: int, running: int, room: int):
    assert _room(eta=eta, version=version, accepted=accepted, running=running) == room


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "room"),
    [
        (0, 0, 0, 32),  # all that is trained before the next weights
        (0, 3, 24, 8),  # the fourth step is not done
        (0, 4, 32, 32),
        (0.5, 0, 0, 48),
        (0.1, 0, 0, 35),  # ⌊1.1 · 4 · 8⌋
        (1, 4, 32, 64),
    ],
)
def test_several_steps_per_weight_update_admit_so_many_batches_at_once(
    eta: float, version: int, accepted: int, room: int
):
    assert _room(eta=eta, version=version, accepted=accepted, running=0, steps_per_update=4) == room


def test_a_quota_is_not_one_short_for_the_way_computers_round():
    assert int((1 + 0.16) * 50) == 57
    room = capacity(max_concurrent=99, running=0, max_staleness=0.16, version=0, batch_size=50, accepted=0)
    assert room == 58


def test_concurrency_binds_where_it_is_smaller():
    assert _room(eta=2, version=0, accepted=0, running=0, max_concurrent=4) == 4
    assert _room(eta=2, version=0, accepted=0, running=3, max_concurrent=4) == 1


small = st.integers(0, 50)


@given(eta=small, version=small, accepted=small, running=small, max_concurrent=st.integers(1, 50))
def test_what_starts_stays_within_both_bounds_and_a_new_version_makes_a_batch_of_room(
    eta: int, version: int, accepted: int, running: int, max_concurrent: int
):
    room = _room(eta=eta, version=version, accepted=accepted, running=running, max_concurrent=max_concurrent)
    if room > 0:
        assert running + room <= max_concurrent
        assert accepted + running + room <= (eta + version + 1) * 8
    unbounded = _room(eta=eta, version=version, accepted=accepted, running=running)
    assert _room(eta=eta, version=version + 1, accepted=accepted, running=running) - unbounded == 8
    assert _room(eta=eta, version=version, accepted=accepted + 1, running=running) == unbounded - 1


@pytest.mark.parametrize(
    ("eta", "steps_per_update", "version", "late"),
    [
        (0, 1, 3, [3]),  # what runs on the version itself is over the bound with the next
        (1, 1, 3, [2]),
        (0.5, 1, 3, [2]),
        (2, 1, 3, [1]),
        (1, 4, 6, []),  # version 7 changes no weights
        (1, 4, 7, [0]),
    ],
)
def test_stragglers_are_those_that_the_next_version_pushes_over_the_bound(
    eta: float, steps_per_update: int, version: int, late: list[int]
):
    heads = [head for head in range(0, version + 1, steps_per_update)]
    counts = {
        head: stragglers([head], version=version, max_staleness=eta, steps_per_update=steps_per_update)
        for head in heads
    }
    assert [head for head, count in counts.items() if count] == late
    # One that is over the bound already is lost: nobody waits for it.
    assert stragglers(heads, version=version, max_staleness=eta, steps_per_update=steps_per_update) == len(late)


def test_a_claim_waits_for_stragglers_while_the_engine_is_busy():
    enough = int(BUSY * 100)
    for running, heads, waits in [(enough, [0, 1, 1], True), (enough - 1, [0, 1, 1], False), (100, [1, 1], False)]:
        assert (
            should_wait(heads, version=1, running=running, max_concurrent=100, max_staleness=1, steps_per_update=1)
            is waits
        )


def test_attempts_begin_ahead_of_steps_that_take_a_hundredth_of_their_time_at_most():
    step = {"load_seconds": 0.5, "train_seconds": 1.0, "save_seconds": 0.5, "loss": 9.0}
    assert is_short(step, 1, attempt_timeout=200.0) and not is_short(step, 1, attempt_timeout=199.0)
    assert is_short(step, 3, attempt_timeout=600.0) and not is_short(step, 4, attempt_timeout=600.0)
    assert not is_short({"train_seconds": 0.1}, 1, attempt_timeout=600.0), "nobody knows how long it took"
