"""Containers that both ends of a link hold: numbered once, told when changed, and let go of."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest

from rollouts.sandbox.code_tests.shared_containers import Shared, contents, empty, facts_of, fill, kind_of


@pytest.mark.parametrize(
    "container",
    [
        *([1, [2]], {"a": 1, (2, 3): None}, {1, 2}, deque([1, 2], maxlen=3), bytearray(b"ab"), Counter("aab")),
        *(defaultdict(list, {1: [2]}), OrderedDict([("b", 1), ("a", 2)]), np.array([[1.5, 2.5]]), np.array(["a"])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_empty_container_that_is_filled_is_the_same_one(container: Any):
    copy = empty(kind_of(container), facts_of(container))
    fill(copy, contents(container))
    assert type(copy) is type(container) and repr(copy) == repr(container)


def test_only_what_the_other_end_does_not_know_is_told():
    shared, numbers, texts = Shared(0), [1, 2, 3], {"a": 1}
    places = [shared.number_of(each)[0] for each in (numbers, texts)]
    assert places == [0, 2] and shared.number_of(numbers) == (0, False)
    for place in places:
        shared.hold(place)
    assert shared.sent() == [] == shared.changed()
    numbers[0], texts["a"] = True, 2  # True equals 1, and is not the same
    assert shared.changed() == places


def test_what_only_the_table_has_is_forgotten_when_its_last_change_is_told():
    shared, outer = Shared(1), [[1]]
    for each in (outer, outer[0]):
        shared.hold(shared.number_of(each)[0])
    shared.sent()
    shared.let_go()
    assert shared.sent() == []
    outer[0].append(2)
    del each, outer
    shared.let_go()
    assert shared.sent() == [1], "the outer one holds what it held; the inner one has changed"
    assert shared.changed() == [3] and shared.hold(3) == [1, 2]
    shared.let_go()
    assert shared.sent() == [3] and shared.changed() == []


def test_an_end_cannot_make_containers_of_the_other():
    shared = Shared(0)
    with pytest.raises(ValueError, match="would be one of this end"):
        shared.meet(4, "list", None)
    assert shared.meet(1, "list", None) == []
