"""What a step takes: the oldest first, an outcome for all that is done with, nothing while there is too little."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from storage.log.claims import (
    NOTHING,
    NothingAccepted,
    due_version,
    follows_until,
    has_sampled_all,
    next_claim,
    num_counted,
    owed_by,
    smallest_part,
    waits_for_batch,
)
from storage.log.entries import Claim, ClaimedGroup, GroupSummary, Quarantine, Retire
from storage.log.run_state import RunState
from storage.shards.codec import summarise
from tests.builders import a_claim, a_config, a_group, a_log, a_shard, a_step, a_summary, a_trajectory, a_turn

RULES: dict[str, Any] = dict(batch_size=2, max_staleness=0, stale_policy="strict", min_usable=2)
OUTCOMES = ("trained", "stale", "filtered", "failed", "cancelled")


def _state(*groups: GroupSummary, version: int = 0) -> RunState:
    """Pending `groups` in shard `s0`, while policy `version` is live."""
    log = a_log()
    for number in range(version):
        log.append(a_shard(f"old{number}", [a_summary(1000 + number)]))
        log.append(a_step(log.state, trained=[f"0.task{1000 + number}"]))
    return log.append(a_shard("s0", groups))


def _claim(state: RunState, batch_size: int = 2, **rules: Any) -> Claim | None:
    return next_claim(state, a_config(**{**RULES, "batch_size": batch_size, **rules}))


def _ids(groups: list[ClaimedGroup]) -> list[str]:
    return [group.group_id for group in groups]


def _taken(claim: Claim | None) -> dict[str, list[str]]:
    assert claim is not None
    return {outcome: ids for outcome in OUTCOMES if (ids := _ids(getattr(claim, outcome)))}


def _mixed(position: int, *versions: int) -> GroupSummary:
    """A group whose first attempt was sampled by several versions."""
    attempts = [
        a_trajectory(1.0, turns=[a_turn([5] * len(versions), versions=list(versions))]),
        a_trajectory(0.0, attempt=1, turns=[a_turn(versions=versions[-1])]),
    ]
    return summarise(a_group(position, trajectories=attempts))


def _rejected(*positions: int) -> list[GroupSummary]:
    return [a_summary(position, accepted=False) for position in positions]


def _of_versions(*versions: int) -> list[GroupSummary]:
    return [a_summary(position, version=version) for position, version in enumerate(versions)]


FAILED = a_summary(0, rewards=[1, None])
RETRIED = replace(a_summary(0, rewards=[1, None], accepted=False), retried=True)
AGAIN = a_summary(0, group_id="0.task0.retry1")
DYNAMIC = {"dynamic_batch": True}


@pytest.mark.parametrize(
    ("groups", "version", "rules", "taken"),
    [
        # The oldest go first, now or never, and then the first in prompt order, in whatever order they came.
        ([a_summary(5), a_summary(3), a_summary(4)], 0, {}, {"trained": [3, 4]}),
        (_of_versions(2, 2, 1), 2, {"max_staleness": 1}, {"trained": [0, 2]}),
        # Too few attempts fail a group even if a filter rejected it too.
        (
            [a_summary(0, rewards=[1, None], accepted=False), a_summary(1), a_summary(2)],
            *(0, {}, {"trained": [1, 2], "failed": [0]}),
        ),
        # A bound that is a fraction is the next whole number.
        (_of_versions(0, 1, 2), 2, {"max_staleness": 0.5}, {"trained": [1, 2], "stale": [0]}),
        (_of_versions(0, 1, 2), 2, {"max_staleness": 1}, {"trained": [1, 2], "stale": [0]}),
        (_of_versions(0, 1, 2), 2, {"max_staleness": 1.5}, {"trained": [0, 1]}),
        # Three steps per update: the engine serves versions 0, 3 and 6.
        (_of_versions(0, 3, 3), 5, {"max_staleness": 1, "steps_per_update": 3}, {"trained": [0, 1]}),
        (_of_versions(0, 3, 3), 6, {"max_staleness": 1, "steps_per_update": 3}, {"trained": [1, 2], "stale": [0]}),
        # One old token makes a group old under `strict`; `mask` drops only a group without a fresh one.
        ([*_of_versions(2, 2), _mixed(2, 1, 2)], 2, {}, {"trained": [0, 1], "stale": [2]}),
        (
            [_mixed(0, 0, 2), _mixed(1, 0, 1), a_summary(2, version=2)],
            *(2, {"stale_policy": "mask"}, {"trained": [0, 2], "stale": [1]}),
        ),
        (_of_versions(0, 0), 2, {"stale_policy": "correct"}, {"trained": [0, 1]}),
        # A step goes with fewer groups once `max_attempts` batches were attempted.
        ([a_summary(0), *_rejected(1, 2, 3, 4)], 0, {"max_attempts": 3}, None),
        (
            [a_summary(0), *_rejected(1, 2, 3, 4, 5)],
            *(0, {"max_attempts": 3}, {"trained": [0], "filtered": [1, 2, 3, 4, 5]}),
        ),
        # A dynamic batch is so many attempts, and trains what was accepted of them.
        ([*_rejected(1), a_summary(2), FAILED], 0, {"batch_size": 4, **DYNAMIC}, None),
        (
            [*_rejected(1), a_summary(2), FAILED, a_summary(3), a_summary(4)],
            *(0, {"batch_size": 4, **DYNAMIC}, {"trained": [2, 3], "filtered": [1], "failed": [0]}),
        ),
        # It does not count groups whose prompt runs again, and keeps the bound.
        ([RETRIED, AGAIN], 0, DYNAMIC, None),
        ([RETRIED, AGAIN, a_summary(1), a_summary(2)], 0, DYNAMIC, {"trained": ["0.retry1", 1], "failed": [0]}),
        (_of_versions(2, 1, 2), 2, DYNAMIC, {"trained": [0], "stale": [1]}),
    ],
)
def test_what_a_step_takes(
    groups: list[GroupSummary], version: int, rules: dict[str, Any], taken: dict[str, list[Any]] | None
):
    claim = _claim(_state(*groups, version=version), **rules)
    if taken is None:
        assert claim is None
    else:
        assert _taken(claim) == {outcome: [f"0.task{group}" for group in ids] for outcome, ids in taken.items()}


def test_every_group_that_cannot_be_trained_has_an_outcome_and_a_reason():
    cancelled = replace(a_summary(3, rewards=[None, None]), reject_reason="cancelled: 2 updates behind, bound 1")
    groups = [_mixed(8, 0, 1), *_rejected(0), a_summary(1, rewards=[1, None, None]), cancelled]
    claim = _claim(_state(*groups, *(a_summary(position, version=1) for position in (2, 4, 5)), version=1))
    assert claim is not None
    reasons = {outcome: [(g.group_id, g.reason) for g in getattr(claim, outcome)] for outcome in OUTCOMES}
    assert reasons == {
        "trained": [("0.task2", ""), ("0.task4", "")],  # 0.task5 is left for the next step
        "stale": [("0.task8", "oldest token is 1 updates behind, bound 0")],
        "filtered": [("0.task0", "uniform reward 1")],
        "failed": [("0.task1", "1 usable of 3")],
        "cancelled": [("0.task3", "cancelled: 2 updates behind, bound 1")],
    }
    assert (claim.step, claim.base_version, claim.fallback) == (2, 1, "")
    assert {group.shard_id for group in claim.trained} == {"s0"}
    masked = _claim(_state(*_of_versions(2, 2), _mixed(2, 0, 1), version=2), stale_policy="mask")
    assert masked is not None and masked.stale[0].reason == "newest token is 1 updates behind, bound 0"


@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
def test_with_nothing_accepted_the_claim_says_what_the_step_does_instead(fallback: Any):
    rejected = _rejected(*range(6))
    claim = _claim(_state(*rejected), max_attempts=3, on_nothing_accepted=fallback)
    assert claim is not None and claim.fallback == fallback and not claim.trained and len(claim.filtered) == 6
    assert _claim(_state(*rejected[:5]), max_attempts=3, on_nothing_accepted=fallback) is None


def test_with_nothing_accepted_the_default_is_an_error_that_counts_the_reasons():
    groups = [a_summary(position, rewards=[1, None]) for position in range(3)] + _rejected(*range(3, 8))
    with pytest.raises(NothingAccepted) as caught:
        _claim(_state(*groups), max_attempts=4)
    assert "none of 8 groups was accepted: 5 filtered: uniform reward 1; 3 failed: 1 usable of 2" in str(caught.value)
    assert "3 env_error" in str(caught.value) and "rollout.on_nothing_accepted" in str(caught.value)


def test_admission_counts_what_a_step_may_still_train():
    groups = [a_summary(0), a_summary(1, version=2), a_summary(2, version=2, accepted=False), _mixed(3, 0, 2)]
    state = _state(*groups, version=2)
    counts = {
        policy: num_counted(state, a_config(**{**RULES, "stale_policy": policy}))
        for policy in ("strict", "mask", "correct")
    }
    assert counts == {"strict": 1, "mask": 2, "correct": 3}


def test_admission_counts_attempts_where_steps_take_those():
    state = _state(RETRIED, AGAIN, *_rejected(1), a_summary(2))
    assert num_counted(state, a_config(**RULES, dynamic_batch=True)) == 3


def test_what_a_step_takes_does_not_depend_on_the_order_in_which_groups_finished():
    groups = [*_rejected(1), *(a_summary(position) for position in (0, 2, 3)), *_rejected(4)]
    claims = [_claim(_state(*order)) for order in itertools.permutations(groups)]
    assert all(claim == claims[0] for claim in claims)
    assert _taken(claims[0]) == {"trained": ["0.task0", "0.task2"], "filtered": ["0.task1", "0.task4"]}


FIXED: dict[str, Any] = {"schedule": "fixed", "max_staleness": 1}


@pytest.mark.parametrize(
    ("positions", "rules", "taken"),
    [
        ([1, 2, 3], {}, None),  # 0 has no outcome yet
        ([3, 1, 0], {}, {"trained": [0, 1]}),
        ([3, 2, 0], {}, None),
        ([0, -1, 2, 3], {}, {"trained": [0, 2], "filtered": [1]}),
        ([0, 1, -2, 3], {}, {"trained": [0, 1]}),  # what was rejected behind the batch belongs to the next one
        ([0, -1, 3], DYNAMIC, {"trained": [0], "filtered": [1]}),
        ([0, 2, 3], DYNAMIC, None),
    ],
)
def test_in_a_fixed_schedule_batches_are_taken_in_prompt_order_whatever_has_come_by_now(
    positions: list[int], rules: dict[str, Any], taken: dict[str, list[Any]] | None
):
    """A negative position is of a group that was rejected."""
    groups = [a_summary(abs(position), accepted=position >= 0) for position in positions]
    for order in itertools.permutations(groups):
        claim = _claim(_state(*order), **FIXED, **rules)
        if taken is None:
            assert claim is None
        else:
            assert _taken(claim) == {name: [f"0.task{position}" for position in each] for name, each in taken.items()}


def test_a_start_in_a_fixed_schedule_serves_the_policy_whose_batch_is_not_complete():
    config, free = (a_config(**{**RULES, **FIXED, "steps": 4, "schedule": schedule}) for schedule in ("fixed", "free"))
    log, due = a_log(), []
    sampled = [0, 0, 0, 0, 1, 1, 2, 2]  # the first two batches by the base policy, then one by each
    for position, version in enumerate(sampled):
        due.append(due_version(log.state, config))
        assert has_sampled_all(version, log.state, config) is (due[-1] > version)
        state = log.append(a_shard(f"s{position}", [a_summary(position, version=version)]))
        assert due_version(state, free) == state.live.version  # type: ignore[union-attr]
        if (claim := next_claim(state, config)) is not None:
            assert owed_by(state, claim, config) == NOTHING
            log.append(a_step(state, claim))
    assert due == sampled
    assert log.state.step == 4 and due_version(log.state, config) == 3
    log.append(Retire(shard_ids=[], policy_versions=[3], state_paths=[], reason="too old"))
    assert due_version(log.state, config) == 4
    assert due_version(log.state, free) == 4


def test_a_group_that_another_policy_sampled_ends_what_follows_from_the_file():
    config = a_config(**{**RULES, **FIXED})
    for versions in ((0, 0), (1, 0)):
        groups = [a_summary(0, version=1), _mixed(1, *versions)]
        claim = next_claim(state := _state(*groups, version=0), config)
        assert claim is not None
        assert owed_by(state, claim, config) == "group '0.task0' was sampled by policy 1 to 1, and not by 0"
    claim = next_claim(state := _state(a_summary(0), _mixed(1, 0, 1)), config)
    assert claim is not None and "'0.task1' was sampled by policy 0 to 1, and not by 0" in owed_by(state, claim, config)


@pytest.mark.parametrize(
    ("groups", "owes", "rules", "reason"),
    [
        ([0, 1], {}, {}, NOTHING),
        ([0, 1], {"0.task1": "timeout"}, {}, "group '0.task1': timeout"),
        ([0, 1], {"0.task7": "timeout"}, {}, NOTHING),
        ([0, 1], {}, {"max_staleness": 1}, "max_staleness = 1: which policy"),
        ([0, 1], {}, {"steps_per_update": 2}, "train.steps_per_update > 1"),
        ([0, 1], {}, FIXED, NOTHING),
        ([0, 1], {}, {**FIXED, "steps_per_update": 2}, NOTHING),
        ([0], {}, {}, "no whole batch"),
        ([0], {}, DYNAMIC, NOTHING),
    ],
)
def test_a_step_says_what_it_owes_to_anything_but_the_run_file(
    groups: list[int], owes: dict[str, str], rules: dict[str, Any], reason: str
):
    log = a_log()
    state = log.append(replace(a_shard("s0", [a_summary(position) for position in groups]), owes=owes))
    claim = a_claim(state, trained=[f"0.task{position}" for position in groups])
    owed = owed_by(state, claim, a_config(**{**RULES, **rules}))
    assert reason in owed
    state = log.append(replace(a_step(state, claim), owes=owed))
    assert follows_until(state) == ((1, "") if owed == NOTHING else (0, owed))
    log.append(a_shard("s1", [a_summary(9)]))
    older = log.append(a_step(log.state, trained=["0.task9"]))
    assert follows_until(older)[0] == (owed == NOTHING), "unknown for a step from before it was recorded"
    log.append(Quarantine(shard_id="s1", reason="damaged"))
    assert owed_by(log.state, claim, a_config(**RULES)) == "shard s1 was lost, and its prompts ran again"


# Parts of a batch that is still being sampled (`train.stream`)


def test_parts_come_first_as_they_arrived_and_the_others_in_prompt_order() -> None:
    config = a_config(**{**RULES, "batch_size": 5}, stream=True)
    log = a_log()
    log.append(a_shard("s0", [a_summary(4), a_summary(3), a_summary(9, accepted=False)]))
    first = next_claim(log.state, config, [], whole=False)
    assert first is not None and (_ids(first.trained), first.parts) == (["0.task3", "0.task4"], [2])
    assert next_claim(log.state, config, [first.trained], whole=False) is None
    assert next_claim(log.state, config, [first.trained]) is None
    log.append(a_shard("s1", [a_summary(1)]))
    second = next_claim(log.state, config, [first.trained], whole=False)
    assert second is not None and _ids(second.trained) == ["0.task3", "0.task4", "0.task1"]
    assert second.parts == [2, 1] and second.trained[-1].shard_id == "s1"
    log.append(a_shard("s2", [a_summary(2), a_summary(0), a_summary(5)]))  # one more than a batch
    parts = [first.trained, second.trained[2:]]
    claim = next_claim(log.state, config, parts)
    assert claim is not None and claim.parts == [2, 1, 2] and _ids(claim.filtered) == ["0.task9"]
    assert _ids(claim.trained) == [f"0.task{number}" for number in (3, 4, 1, 0, 2)]
    assert next_claim(log.state, config, []) == replace(claim, trained=sorted(claim.trained, key=_id)[:5], parts=[])


def test_a_part_may_be_all_there_is_and_one_that_was_lost_is_none() -> None:
    config = a_config(**RULES, stream=True)
    log = a_log()
    log.append(a_shard("s0", [a_summary(1), a_summary(0)]))
    part = next_claim(log.state, config, [], whole=False)
    assert part is not None
    whole = next_claim(log.state, config, [part.trained])
    assert whole is not None and whole.parts == [2]
    log.append(Quarantine(shard_id="s0", reason="damaged"))
    log.append(a_shard("s1", [a_summary(2), a_summary(3)]))
    assert next_claim(log.state, config, [part.trained], whole=False) is None
    claim = next_claim(log.state, config, [part.trained])
    assert claim is not None and (_ids(claim.trained), claim.parts) == (["0.task2", "0.task3"], [])


def test_a_part_is_worth_a_pass_of_its_own() -> None:
    config = a_config(**{**RULES, "batch_size": 64}, stream=True)
    log = a_log()
    for number in range(smallest_part(config)):
        assert next_claim(log.state, config, [], whole=False) is None
        log.append(a_shard(f"s{number}", [a_summary(number)]))
    part = next_claim(log.state, config, [], whole=False)
    assert part is not None and part.parts == [4]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"advantage": {"kind": "pass_at_k"}, "aggregation": "sequence_mean"}, ""),
        ({"max_staleness": 1}, "whole batch is trained while"),
        ({"share": "phases"}, "take turns"),
        ({"reproducible": True}, "depends on the moment"),
        ({"rollout": {"schedule": "fixed"}}, "depends on the moment"),
        (DYNAMIC, "when all have ended"),
        ({"steps_per_update": 2}, "several steps"),
        ({"num_minibatches": 2}, "several updates"),
        ({"num_epochs": 2}, "several updates"),
        ({"advantage": {"kind": "reinforce++"}}, "relative to the whole batch"),
        ({"advantage": {"kind": "gae"}}, "relative to the whole batch"),
        ({"advantage": {"per_reward": True}}, "relative to the whole batch"),
        ({"advantage": {"scale": "batch"}}, "deviation of the whole batch"),
        ({"top_entropy_fraction": 0.5}, "which tokens"),
        ({"loss": {"kind": "custom", "path": "a:b"}}, "a loss of your own"),
    ],
    ids=str,
)
def test_what_needs_the_batch_waits_for_it(settings: dict[str, Any], reason: str) -> None:
    waits = waits_for_batch(a_config(**{"max_staleness": 0, "stream": True, **settings}))
    assert reason in waits and bool(waits) == bool(reason)


def _id(group: ClaimedGroup) -> str:
    return group.group_id
