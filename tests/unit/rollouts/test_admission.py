"""The admission formula gives the published worked values, and never admits past the staleness bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.admission import capacity


def _room(*, eta: int, version: int, accepted: int, running: int, max_concurrent: int = 10_000) -> int:
    return capacity(
        max_concurrent=max_concurrent,
        running=running,
        max_staleness=eta,
        version=version,
        batch_size=8,
        accepted=accepted,
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
    ],
)
def test_worked_values_for_batches_of_eight(eta: int, version: int, accepted: int, running: int, room: int):
    assert _room(eta=eta, version=version, accepted=accepted, running=running) == room


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
