"""The prompt order is a function of the seed, so what a log lacks is exactly what is asked next."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.production.prompts import PromptOrder, epoch_order, task_set
from settings.errors import InvalidInput
from storage.log.entries import Evaluation, Session, TaskSet
from storage.log.history import from_json, to_json
from storage.log.run_log import RunLog
from storage.records import Task
from tests.builders import a_log, a_shard, a_summary

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


def _session(log: RunLog, tasks: list[Task], *, adopt: bool = False) -> TaskSet:
    found = task_set(log.state, tasks, run="run", adopt=adopt)
    log.append(Session(id=f"s{len(log.state.sessions)}", code_version="", tasks=found))
    return found


_CHANGES = pytest.mark.parametrize(
    ("tasks", "change"),
    [
        (TASKS[:4], "there were 5, and now there are 4"),
        ([*TASKS, Task(id="new", prompt="")], "there were 5, and now there are 6"),
        (TASKS[::-1], "as many, with other ids or in another order"),
        ([*TASKS[:4], Task(id="task4", prompt="", answer="42")], "a prompt, an answer or metadata is another"),
        ([*TASKS[:4], Task(id="task4", prompt="", metadata={"a": "b"})], "a prompt, an answer or metadata is another"),
    ],
)


@_CHANGES
def test_other_tasks_than_before_are_refused_or_begin_an_epoch_of_their_own(tasks: list[Task], change: str):
    log = a_log()
    assert _session(log, TASKS) == _session(log, TASKS)
    asked = [PromptOrder(TASKS, seed=0).at(position) for position in range(8) if position != 3]  # 3 came to nothing
    groups = [dataclasses.replace(a_summary(each.position), id=each.group_id, epoch=each.epoch) for each in asked]
    log.append(a_shard("a", groups))
    with pytest.raises(InvalidInput, match=f"not those that run 'run' has had: .*{change}.*--adopt-tasks"):
        task_set(log.state, tasks, run="run")
    adopted = _session(log, tasks, adopt=True)
    assert (adopted.first_position, adopted.first_epoch) == (8, 4)
    assert _session(log, tasks) == adopted, "from now on they are the run's"
    order = PromptOrder(tasks, seed=0, since=adopted)
    fresh = [order.at(position) for position in log.state.free_positions(2 * len(tasks) + 1)]
    assert [(each.position, each.epoch) for each in fresh[1:3]] == [(8, 4), (9, 4)]
    assert fresh[0].position == 3 and 1 < fresh[0].epoch < 4
    assert {each.task.id for each in fresh[1 : 1 + len(tasks)]} == {task.id for task in tasks}, "a whole epoch"
    assert not {each.group_id for each in fresh} & {each.group_id for each in asked}


def _evaluation_of(tasks: TaskSet) -> Evaluation:
    facts = {
        "version": 0,
        "split": "dev",
        "score": 0.0,
        "num_tasks": 1,
        "num_failed": 0,
        "shard_id": "e",
        "seconds": 1.0,
    }
    return from_json(Evaluation, {**facts, "tasks": to_json(tasks)})


@_CHANGES
def test_other_held_out_tasks_are_refused_or_adopted(tasks: list[Task], change: str):
    held_out = functools.partial(task_set, run="run", split="dev")
    asked = held_out(a_log().state, TASKS)
    for entry in (Session(id="s", code_version="", held_out={"dev": asked}), _evaluation_of(asked)):
        log = a_log()
        log.append(entry)
        assert held_out(log.state, TASKS) == asked and task_set(log.state, tasks, run="run", split="hard")
        with pytest.raises(InvalidInput, match=f"of split 'dev' are not .*{change}; scores would be .*--adopt-tasks"):
            held_out(log.state, tasks)
        adopted = held_out(log.state, tasks, adopt=True)
        assert (adopted.count, adopted.first_position) == (len(tasks), 0)
        assert len(log.state.evaluations_of("dev")) == len(log.state.evaluations)
        log.append(Session(id="t", code_version="", held_out={"dev": adopted}))
        assert log.state.evaluations_of("dev") == []  # scores of other problems
        assert held_out(log.state, tasks) == adopted
