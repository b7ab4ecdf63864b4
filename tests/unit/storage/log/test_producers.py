"""Who has been silent for too long is told from files that change, on the observer's clock alone."""

from __future__ import annotations

import pytest

from storage.log.entries import Join, Lease
from storage.log.producers import Lookout, check_name, give_sign, withdraw
from storage.log.run_log import RunLog
from tests.builders import a_log

PATIENCE = 60.0


class _Watch:
    """A log, a lookout on it, and a clock that a test moves."""

    def __init__(self) -> None:
        self.log = a_log()
        self.now = 1000.0
        self.lookout = Lookout(self.log, clock=lambda: self.now)

    def join(self, holder: str, *, number: int = 0) -> None:
        give_sign(self.log, holder)
        self.log.append(Join(holder=holder, id=f"{holder}.{number}", outside=True))

    def after(self, seconds: float) -> dict[str, float]:
        self.now += seconds
        return self.lookout.silent(patience=PATIENCE)


@pytest.fixture
def watch() -> _Watch:
    return _Watch()


def test_only_who_has_not_changed_its_sign_for_the_whole_patience_is_silent(watch: _Watch) -> None:
    watch.join("lives")
    watch.join("dies")
    assert watch.after(0) == {}
    for _ in range(5):
        give_sign(watch.log, "lives")
        assert watch.after(11) == {}
    give_sign(watch.log, "lives")
    assert watch.after(11) == {"dies": 66.0}


def test_a_watcher_that_is_new_or_was_busy_gives_every_producer_the_whole_patience(watch: _Watch) -> None:
    watch.join("lives")
    watch.join("dies")
    watch.now += 1e6
    assert watch.after(0) == {} and watch.after(59) == {}
    give_sign(watch.log, "lives")
    assert watch.after(3541) == {"dies": 3600.0}


def test_one_that_comes_back_under_its_name_is_timed_anew(watch: _Watch) -> None:
    watch.join("back")
    watch.after(0)
    withdraw(watch.log, "back", reason="silent")
    watch.after(50)
    watch.join("back", number=1)
    assert watch.after(50) == {} and watch.after(59) == {}
    assert watch.after(11) == {"back": 70.0}


def test_the_store_is_asked_a_few_times_per_patience_and_never_about_the_drivers_own_workers(
    watch: _Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    get_many = watch.log.store.get_many
    monkeypatch.setattr(watch.log.store, "get_many", lambda keys: asked.append(keys) or get_many(keys))
    watch.log.append(Join(holder="rollout-0", id="a"))
    asked.clear()
    assert not any(watch.after(1) for _ in range(100)) and asked == []
    watch.join("elsewhere-0")
    asked.clear()
    for _ in range(60):
        watch.after(1)
    assert len(asked) == 6


def test_who_withdraws_leaves_neither_leases_nor_a_file(watch: _Watch) -> None:
    watch.join("elsewhere-0")
    watch.log.append(Lease(holder="elsewhere-0", positions=[0, 1], number=0))
    withdraw(watch.log, "elsewhere-0", reason="left")
    assert not watch.log.state.leased and not watch.log.state.producers
    assert not watch.log.store.names(watch.log.key("producers"))
    entries = watch.log.state.entries
    withdraw(RunLog(watch.log.store, "run"), "elsewhere-0", reason="again")
    assert watch.log.refresh().entries == entries


@pytest.mark.parametrize("name", ["", "a/b", "..", "with space", "-x", "x" * 62])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="producer name"):
        check_name(name)
