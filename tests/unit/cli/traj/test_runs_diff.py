"""`millrace diff`: of two runs, what they were given and the first thing that they did otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cli.traj.runs_diff import bits_apart
from storage.log.entries import Session
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_group, a_step, a_trajectory, a_turn, commit
from tests.unit.cli.builders import printed

NEXT = float(np.nextafter(np.float32(-0.5), np.float32(0)))


def _a_run(
    store: LocalStore,
    run: str,
    *,
    position: int = 1,
    norm: float = 2.0,
    code: str = "c0de",
    size: int = 1,
    **turn: Any,
) -> None:
    """Two steps of a group each; the arguments are what may be another in the second."""
    log = create_run(store, run, {"batch_size": size, "run": run})
    log.append(Session(id="s", code_version=code))
    log.append(BASE)
    reward = turn.pop("reward", 1.0)
    for number in range(2):
        given = turn if number else {}
        turns = [a_turn(**{"sampled": (12, 13, 1), "seed": 7, **given})]
        group = a_group(position if number else 0, trajectories=[a_trajectory(reward if number else 1.0, turns=turns)])
        commit(log, f"s{number}", group)
        step = a_step(log.state, trained=[group.id])
        other = number and (norm, position, reward, turn) != (2.0, 1, 1.0, {})
        policy = replace(step.policy, weights_sha256=("f" if other else "e") * 64)
        log.append(replace(step, policy=policy, metrics={"grad_norm": norm if number else 2.0}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"size": 3}, [("setting batch_size", None, None, 1, 3)]),
        ({"code": "other"}, [("code", None, None, ["c0de"], ["other"])]),
        ({"position": 5}, [("claim: groups of one alone", None, None, "0.task1", "0.task5")]),
        ({"context": (2, 9, 3)}, [("prompt", "0.task1/0", None, [2, 8, 3], [2, 9, 3])]),
        ({"seed": 8}, [("draw: seed of the sequence", "0.task1/0", None, 7, 8)]),
        (
            {"logprobs": [-0.5, NEXT, -0.5]},
            [("log-probability of token 13: 1 bits", "0.task1/0", 4, -0.5, pytest.approx(NEXT, abs=1e-9))],
        ),
        (
            {"sampled": (12, 14, 1)},
            [("token", "0.task1/0", 4, "13 (logprob -0.500000)", "14 (logprob -0.500000)")],
        ),
        ({"sampled": (12, 13)}, [("token", "0.task1/0", 5, "1 (logprob -0.500000)", "nothing (logprob 0.000000)")]),
        ({"reward": 0.5}, [("reward", "0.task1/0", None, 1.0, 0.5)]),
        ({"norm": 2.5}, [("gradient", None, None, 2.0, 2.5)]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_first_thing_that_differs_is_named(
    store: LocalStore, changes: dict[str, Any], expected: list[tuple[Any, ...]]
) -> None:
    _a_run(store, "a")
    _a_run(store, "b", **changes)
    found = json.loads(printed("diff a b --json"))
    assert [tuple(each.get(key) for key in ("what", "id", "token", "a", "b")) for each in found] == expected
    assert {each["step"] for each in found if "step" in each} <= {2}
    shown = printed("diff a b", columns=200)
    if not any("step" in each for each in found):
        assert "the 2 steps that both have are the same, bit for bit" in shown
    for each in found:
        assert each["what"] in shown
        assert ("id" not in each) or f"traj diff a {each['id']} {each['id']} --run-b b" in shown


def test_of_a_step_whose_shard_is_gone_the_log_is_compared(store: LocalStore) -> None:
    for run, norm in (("a", 2.0), ("b", 2.5)):
        _a_run(store, run, norm=norm)
    store.delete(["runs/a/shards/s0.arrow", "runs/a/shards/s1.arrow"])
    assert "left out: shard s0: the file is missing" in (shown := printed("diff a b", columns=200))
    assert "2 gradient" in " ".join(shown.split())


def test_bits_apart_counts_float32_between_two() -> None:
    assert [bits_apart(-0.5, -0.5), bits_apart(-0.5, NEXT), bits_apart(-1.0, -1.0 - 4 * 2.0**-23)] == [0, 1, 3]
