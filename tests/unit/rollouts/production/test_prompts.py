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
    for seed, epoch, num_tasks in [(0, 0, 1), (1, 9_999, 50), (2**32, 7, 33)]:
        assert sorted(epoch_order(seed, epoch, num_tasks)) == list(range(num_tasks)), "every task once"


@given(num_tasks=st.integers(1, 5), positions=st.lists(st.integers(0, 60)))
def test_a_position_holds_the_same_prompt_in_whatever_order_it_is_asked(num_tasks: int, positions: list[int]):
    order, prompts = PromptOrder(TASKS[:num_tasks], seed=0), PromptOrder(TASKS[:num_tasks], seed=0)
    one_by_one = [prompts.at(position) for position in range(61)]
    for position in positions:
        prompt = order.at(position)
        assert prompt == one_by_one[position]
        assert (prompt.position, prompt.epoch) == (position, position // num_tasks)
        assert prompt.group_id == f"{prompt.epoch}.{prompt.task.id}"
        assert order.at(position, retry=2).group_id == prompt.group_id + ".retry2"


def test_an_empty_split_and_double_ids_are_refused():
    with pytest.raises(ValueError, match="train split is empty"):
        PromptOrder([], seed=0)
    with pytest.raises(ValueError, match="not unique: 2 tasks, 1 ids"):
        PromptOrder([TASKS[0], TASKS[0]], seed=0)
