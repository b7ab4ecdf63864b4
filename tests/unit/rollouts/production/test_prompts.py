"""The prompt order is a function of the seed, so what a log lacks is exactly what is asked next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.production.prompts import PromptOrder, epoch_order
from storage.records import Task

TASKS = [Task(id=f"task{index}", prompt="") for index in range(5)]


def test_the_order_is_fixed_by_seed_and_epoch_alone():
    assert epoch_order(1, 0, 8).tolist() == [5, 0, 1, 4, 2, 6, 3, 7]  # must never change: runs resume by it
    assert epoch_order(1, 1, 8).tolist() != epoch_order(1, 0, 8).tolist()
    assert epoch_order(2, 0, 8).tolist() != epoch_order(1, 0, 8).tolist()
    assert epoch_order(1, 0, 8).tolist() == epoch_order(1, 0, 8).tolist()


@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 10_000), num_tasks=st.integers(1, 50))
def test_every_task_comes_once_in_every_epoch(seed: int, epoch: int, num_tasks: int):
    assert sorted(epoch_order(seed, epoch, num_tasks)) == list(range(num_tasks))


def test_positions_are_dense_and_epochs_follow_each_other():
    order = PromptOrder(TASKS, seed=0)
    prompts = [order.at(position) for position in range(15)]
    assert [prompt.position for prompt in prompts] == list(range(15))
    assert [prompt.epoch for prompt in prompts] == [0] * 5 + [1] * 5 + [2] * 5
    for epoch in range(3):
        assert sorted(prompt.task.id for prompt in prompts if prompt.epoch == epoch) == [task.id for task in TASKS]


def test_a_data_set_smaller_than_a_batch_goes_on_into_later_epochs():
    order = PromptOrder(TASKS[:1], seed=0)
    assert [order.at(position).group_id for position in range(3)] == ["0.task0", "1.task0", "2.task0"]


@given(num_tasks=st.integers(1, 5), positions=st.lists(st.integers(0, 60)))
def test_a_position_holds_the_same_prompt_however_it_is_come_by(num_tasks: int, positions: list[int]):
    order = PromptOrder(TASKS[:num_tasks], seed=0)
    for position in positions:
        assert order.at(position) == PromptOrder(TASKS[:num_tasks], seed=0).at(position)


def test_a_prompt_that_runs_again_has_a_group_of_its_own():
    order = PromptOrder(TASKS, seed=0)
    assert order.at(7, retry=2).group_id == order.at(7).group_id + ".retry2"


def test_an_empty_split_and_double_ids_are_refused():
    with pytest.raises(ValueError, match="train split is empty"):
        PromptOrder([], seed=0)
    with pytest.raises(ValueError, match="not unique: 2 tasks, 1 ids"):
        PromptOrder([TASKS[0], TASKS[0]], seed=0)
