"""The quota gives the published worked values, counts as a brute-force count does, and never exceeds the bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollouts.production.head_start import is_short
from rollouts.production.quota import BUSY, LEASE_SHARE, Quota
from settings.run_file import RunConfig
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


def test_a_quota_is_not_one_short_for_the_way_computers_round():
    assert int((1 + 0.16) * 50) == 57
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


def test_a_worker_alone_leases_ahead_and_one_among_several_does_not():
    quota = Quota(a_config(batch_size=80, max_staleness=0, max_concurrent=3))
    assert (quota.room, quota.wanted) == (3, 80 // LEASE_SHARE)
    quota.lease(3)
    assert quota.wanted == 0
    quota.rebase(version=0, committed=0, num_producers=2)
    quota.waiting = 1
    assert quota.wanted == 2


def test_a_paused_worker_wants_nothing():
    quota = _quota(eta=1)
    quota.rebase(version=0, committed=0, paused=True)
    assert quota.room == quota.wanted == 0


# ── Random lives, against a count by hand ───────────────────────────────────────────────────────────────────────────


@dataclass
class _Group:
    state: str = "waiting"
    counted: bool = False


@dataclass
class _Life:
    """A worker's groups one by one, and a log that outlives it."""

    config: RunConfig
    version: int = 0
    logged: int = 0
    """Groups that the log counts, since version 0."""
    elsewhere: int = 0
    groups: list[_Group] = field(default_factory=list)

    def all(self, state: str) -> list[_Group]:
        return [group for group in self.groups if group.state == state]

    def _fits(self, extra: int) -> bool:
        """Whether so many groups more may run, asked of each bound as the documents state it."""
        running = len(self.all("running")) + extra
        counted = self.logged + self.elsewhere + sum(group.counted for group in self.groups)
        k, batch, eta = self.config.train.steps_per_update, self.config.batch_size, self.config.max_staleness
        updates, ahead = self.version // k, int((1 + eta) * 10) * k * batch // 10  # η has one decimal here
        return (
            running <= self.config.rollout.max_concurrent
            and counted + running <= updates * k * batch + ahead
            and counted + running <= self.config.steps * batch
        )

    def room(self) -> int:
        room = 0
        while self._fits(room + 1):
            room += 1
        return room


_CHOICES = ("lease", "start", "accept", "reject", "retry", "hand out", "commit", "version", "elsewhere", "restart")


@settings(max_examples=300)
@given(
    actions=st.lists(st.tuples(st.sampled_from(_CHOICES), st.integers(1, 4)), max_size=60),
    eta=st.sampled_from([0, 0.5, 1, 2]),
    k=st.integers(1, 3),
    dynamic=st.booleans(),
    max_concurrent=st.integers(1, 12),
)
def test_a_quota_counts_as_a_count_of_every_group_does(
    actions: list[tuple[str, int]], eta: float, k: int, dynamic: bool, max_concurrent: int
):
    config = a_config(
        batch_size=4,
        steps=6,
        max_staleness=eta,
        steps_per_update=k,
        dynamic_batch=dynamic,
        max_concurrent=max_concurrent,
    )
    life, quota = _Life(config), Quota(config)
    for action, number in actions:
        match action:
            case "lease":
                quota.lease(number)
                life.groups += [_Group() for _ in range(number)]
            case "start":
                for group in life.all("waiting")[:number]:
                    if quota.room > 0:
                        quota.start()
                        group.state = "running"
            case "accept" | "reject" | "retry":
                for group in life.all("running")[:number]:
                    accepted, again = action == "accept", action == "retry"
                    group.state, group.counted = "finished", (not again if dynamic else accepted)
                    quota.end(counted=quota.counts(accepted=accepted, will_retry=again))
            case "hand out":
                quota.hand_out()
                for group in life.all("finished"):
                    group.state = "handed out"
            case "commit":
                committed = life.all("handed out")
                counted = sum(group.counted for group in committed)
                quota.commit(counted)
                life.logged += counted
                life.groups = [group for group in life.groups if group.state != "handed out"]
            case "version":
                life.version += number
            case "elsewhere":
                life.elsewhere = number
            case "restart":  # only what is in the log outlives it
                life.groups, quota = [], Quota(config)
        quota.rebase(version=life.version, committed=life.logged, elsewhere=life.elsewhere)
        assert max(0, quota.room) == life.room()
        assert quota.wanted == _wanted(life)
        assert quota.waits_for_policy == _waits(life)


def _wanted(life: _Life) -> int:
    missing = life.room() - len(life.all("waiting"))
    return max(missing, life.config.batch_size // LEASE_SHARE) if missing > 0 else 0


def _waits(life: _Life) -> bool:
    busy = life.all("running") or any(group.counted for group in life.groups)
    if busy or life.logged + life.elsewhere >= life.config.steps * life.config.batch_size:
        return False
    k, batch = life.config.train.steps_per_update, life.config.batch_size
    allowed = life.version // k * k * batch + int((1 + life.config.max_staleness) * 10) * k * batch // 10
    return life.logged >= allowed


# ── Waiting for each other ──────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize(
    ("settings", "finished", "is_batch"),
    [
        ({}, 31, False),
        ({}, 32, True),
        ({"stream": True}, 1, False),
        ({"stream": True}, 2, True),
        ({"stream": True, "max_staleness": 1}, 31, False),
    ],
)
def test_with_streamed_gradients_a_part_is_enough_for_a_shard(
    settings: dict[str, object], finished: int, is_batch: bool
):
    quota = Quota(a_config(**{"batch_size": 32, "max_staleness": 0, **settings}))
    quota.finished = finished
    assert quota.is_batch is is_batch
