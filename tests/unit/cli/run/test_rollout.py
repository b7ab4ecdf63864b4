"""What `rollout once` says of many attempts: how far it is, and what became of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cli.run.rollout import _play, summary
from settings.run_file import RunConfig
from storage.records import RolloutGroup, Task, Trajectory, Turn

_TURN = Turn(context_ids=[1], sampled_ids=[2], logprobs=[-1.0], weight_versions=[0], finish_reason="stop")


def _group(*rewards: float | None, position: int = 0) -> RolloutGroup:
    attempts = [
        Trajectory(attempt=i, turns=[_TURN], messages=[], status="error" if reward is None else "ok", reward=reward)
        for i, reward in enumerate(rewards)
    ]
    task = Task(id=str(position), prompt="")
    return RolloutGroup(
        id=f"0.{position}", task=task, position=position, epoch=0, expected=len(rewards), trajectories=attempts
    )


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (
            [_group(0.0, 1.0, None), _group(1.0, 1.0, 1.0)],
            "6 attempts: 5 ok, 1 error; mean reward 0.8 of 5, from 0 to 1; rewards differ within 1 of 2 groups",
        ),
        ([_group(None, None)], "2 attempts: 2 error; rewards differ within 0 of 1 group"),
    ],
)
def test_the_summary_counts_every_attempt(groups: list[RolloutGroup], line: str) -> None:
    assert summary(groups) == line


@pytest.mark.parametrize(("most", "num_prompts", "lines"), [(7, 200, 9), (300, 5, 4), (1, 1, 0)])
def test_prompts_are_played_some_at_a_time_come_in_their_order_and_it_says_how_far_it_is(
    most: int, num_prompts: int, lines: int
) -> None:
    running, peak, tasks, shown = 0, 0, 0, []

    class Worker:
        async def call(self, method: str, position: int) -> RolloutGroup:
            nonlocal running, peak, tasks
            running += 1
            tasks = max(tasks, len(asyncio.all_tasks()))
            peak = max(peak, running)
            for _ in range(1 + (num_prompts - position) % 3):  # later ones may be done first
                await asyncio.sleep(0)
            running -= 1
            return _group(1.0, position=position)

    worker: Any = Worker()
    config = RunConfig(workflow="a:B", rollout={"max_concurrent": most})  # type: ignore[arg-type]
    groups = asyncio.run(_play(worker, config, num_prompts=num_prompts, show=shown.append))
    assert [group.position for group in groups] == list(range(num_prompts))
    assert peak <= min(most, 64) and tasks <= peak + 1 and len(shown) == lines
    assert shown[-1:] == ([f"{num_prompts * 9 // 10} of {num_prompts} prompts attempted"] if lines else [])
