"""A worker that is used before it has started says so; one that has works."""

from __future__ import annotations

import copy
import pickle

import pytest

from infra.starting import NotStarted, Startable


class Counter(Startable):
    def start(self, at: int) -> None:
        self._count = at

    def next(self) -> int:
        self._count += 1
        return self._count


def test_what_start_sets_cannot_be_read_before_and_can_be_after() -> None:
    counter = Counter()
    with pytest.raises(NotStarted, match=r"Counter has no '_count' yet: call start\(\) first"):
        counter.next()
    counter.start(4)
    assert counter.next() == 5


def test_it_is_copied_and_sent_like_any_object() -> None:
    counter = Counter()
    for other in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        other.start(1)
        assert other.next() == 2
