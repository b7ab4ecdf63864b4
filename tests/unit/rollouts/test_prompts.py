"""The prompt order is a function of the seed, so what a log lacks is exactly what is asked next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.prompts import PromptStream, epoch_order
from storage.records import RolloutTask

TASKS = [RolloutTask(id=f"task{index}", prompt="") for index in range(5)]


def _stream(num_tasks: int = 5, *, seed: int = 0, committed: set[int] | None = None) -> PromptStream:
    return PromptStream(TASKS[:num_tasks], seed=seed, committed=committed or set())


def _taken(stream: PromptStream, count: int) -> list[tuple[int, int, str]]:
    return [(position, epoch, task.id) for position, epoch, task in (stream.next() for _ in range(count))]


def test_the_order_is_fixed_by_seed_and_epoch_alone():
    assert epoch_order(1, 0, 8).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]  # must never change: runs resume by it
    assert epoch_order(1, 1, 8).tolist() != epoch_order(1, 0, 8).tolist()
    assert epoch_order(2, 0, 8).tolist() != epoch_order(1, 0, 8).tolist()
    assert epoch_order(1, 0, 8).tolist() == epoch_order(1, 0, 8).tolist()


@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 10_000), num_tasks=st.integers(1, 50))
def test_every_task_comes_once_in_every_epoch(seed: int, epoch: int, num_tasks: int):
    assert sorted(epoch_order(seed, epoch, num_tasks)) == list(range(num_tasks))


def test_positions_are_dense_and_epochs_follow_each_other():
    taken = _taken(_stream(), 15)
    assert [position for position, _, _ in taken] == list(range(15))
    assert [epoch for _, epoch, _ in taken] == [0] * 5 + [1] * 5 + [2] * 5
    for epoch in range(3):
        assert sorted(name for _, e, name in taken if e == epoch) == [task.id for task in TASKS]


def test_a_data_set_smaller_than_a_batch_goes_on_into_later_epochs():
    taken = _taken(_stream(1), 8)
    assert taken == [(number, number, "task0") for number in range(8)]


def test_a_position_given_back_comes_next():
    stream = _stream()
    first = _taken(stream, 4)
    stream.give_back(2)
    assert _taken(stream, 2) == [first[2], (4, *_taken(_stream(), 5)[4][1:])]


def test_a_resumed_stream_asks_what_the_log_lacks():
    whole = _taken(_stream(), 12)
    resumed = _taken(_stream(committed={0, 1, 3, 7}), 8)
    assert resumed == [item for item in whole if item[0] not in {0, 1, 3, 7}]


@given(
    num_tasks=st.integers(1, 5),
    committed=st.sets(st.integers(0, 30)),
    operations=st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=40),
)
def test_always_the_smallest_position_nobody_has(num_tasks: int, committed: set[int], operations: list[int | None]):
    """None takes a prompt; a number gives that position back."""
    stream, taken = _stream(num_tasks, committed=committed), set(committed)
    order = {position: (epoch, name) for position, epoch, name in _taken(_stream(num_tasks), 80)}
    for given_back in operations:
        if given_back is None:
            position, epoch, task = stream.next()
            assert position == next(p for p in range(80) if p not in taken)
            assert (epoch, task.id) == order[position]
            taken.add(position)
        else:
            stream.give_back(given_back)
            taken.discard(given_back)


def test_an_empty_split_and_double_ids_are_refused():
    with pytest.raises(ValueError, match="train split is empty"):
        PromptStream([], seed=0, committed=set())
    with pytest.raises(ValueError, match="not unique: 2 tasks, 1 ids"):
        PromptStream([TASKS[0], TASKS[0]], seed=0, committed=set())
