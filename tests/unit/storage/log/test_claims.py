"""What a step takes: the oldest first, an outcome for all that is done with, nothing while there is too little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings.train import StalePolicy
from storage.log.claims import NothingAccepted, next_claim, num_counted, updates_behind
from storage.log.entries import Claim, ClaimedGroup, GroupSummary
from storage.log.run_state import RunState
from storage.shards.codec import summarise
from tests.builders import a_config, a_group, a_log, a_shard, a_step, a_summary, a_trajectory, a_turn

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


def test_groups_are_taken_in_commit_order_and_trained_in_prompt_order():
    """Groups finish in any order; what is trained together is the same bits whichever came first."""
    state = _state(a_summary(5), a_summary(3), a_summary(4))
    claim = _claim(state)
    assert claim is not None
    assert _ids(claim.trained) == ["0.task3", "0.task5"]
    assert (claim.step, claim.base_version, claim.fallback) == (1, 0, "")
    assert {group.shard_id for group in claim.trained} == {"s0"}


def test_the_oldest_go_first_because_they_go_now_or_never():
    state = _state(a_summary(0, version=2), a_summary(1, version=2), a_summary(2, version=1), version=2)
    assert _taken(_claim(state, max_staleness=1)) == {"trained": ["0.task0", "0.task2"]}


def test_too_few_groups_are_no_claim_and_nothing_is_taken():
    state = _state(a_summary(0), a_summary(1, accepted=False), a_summary(2, rewards=[1, None]))
    assert _claim(state) is None
    assert len(state.pending) == 3 and not state.outcomes


def test_every_group_that_cannot_be_trained_has_an_outcome_and_a_reason():
    cancelled = replace(
        a_summary(3, rewards=[None, None], accepted=False), reject_reason="cancelled: 2 updates behind, bound 1"
    )
    groups = [a_summary(0, accepted=False), a_summary(1, rewards=[1, None, None]), a_summary(2), cancelled]
    state = _state(*groups, a_summary(4), a_summary(5), a_summary(6, accepted=False))
    claim = _claim(state)
    assert claim is not None
    assert claim.filtered == [
        ClaimedGroup(shard_id="s0", group_id=f"0.task{position}", reason="uniform reward 1") for position in (0, 6)
    ]
    assert claim.failed == [ClaimedGroup(shard_id="s0", group_id="0.task1", reason="1 usable of 3")]
    assert claim.cancelled == [
        ClaimedGroup(shard_id="s0", group_id="0.task3", reason="cancelled: 2 updates behind, bound 1")
    ]
    assert _ids(claim.trained) == ["0.task2", "0.task4"]
    assert claim.stale == []  # 0.task5 is left for the next step


def test_too_few_attempts_fail_a_group_even_when_a_filter_took_it_too():
    state = _state(a_summary(0, rewards=[1, None], accepted=False), a_summary(1), a_summary(2))
    assert _taken(_claim(state)) == {"trained": ["0.task1", "0.task2"], "failed": ["0.task0"]}


def test_strict_drops_groups_older_than_the_bound_and_keeps_those_at_it():
    groups = [a_summary(position, version=version) for position, version in enumerate([0, 1, 2, 2])]
    state = _state(*groups, version=2)
    claim = _claim(state, 3, max_staleness=1)
    assert claim is not None
    assert _ids(claim.stale) == ["0.task0"]
    assert claim.stale[0].reason == "oldest token is 2 updates behind, bound 1"
    assert _ids(claim.trained) == ["0.task1", "0.task2", "0.task3"]


def test_workers_that_serve_different_versions_fill_one_batch():
    log = a_log()
    for number in range(2):
        log.append(a_shard(f"old{number}", [a_summary(1000 + number)]))
        log.append(a_step(log.state, trained=[f"0.task{1000 + number}"]))
    log.append(replace(a_shard("ahead", [a_summary(0, version=2)]), producer="rollout-0"))
    log.append(replace(a_shard("behind", [a_summary(1, version=1)]), producer="rollout-1"))
    claim = _claim(log.state, max_staleness=1)
    assert claim is not None and not claim.stale
    assert [(group.shard_id, group.group_id) for group in claim.trained] == [
        ("ahead", "0.task0"),
        ("behind", "0.task1"),
    ]


@pytest.mark.parametrize(("max_staleness", "trained"), [(0.5, [1, 2]), (1, [1, 2]), (1.5, [0, 1])])
def test_the_bound_of_a_fraction_is_the_next_whole_number(max_staleness: float, trained: list[int]):
    groups = [a_summary(position, version=position) for position in range(3)]
    taken = _taken(_claim(_state(*groups, version=2), max_staleness=max_staleness))
    assert taken["trained"] == [f"0.task{position}" for position in trained]


def test_lag_is_counted_in_weight_updates():
    # Three steps per update: the engine serves versions 0, 3, 6.
    assert [updates_behind(v, live=8, steps_per_update=3) for v in (0, 3, 6)] == [2, 1, 0]
    groups = [a_summary(position, version=version) for position, version in enumerate([0, 3, 3])]
    assert "stale" not in _taken(_claim(_state(*groups, version=5), max_staleness=1, steps_per_update=3))
    taken = _taken(_claim(_state(*groups, version=6), max_staleness=1, steps_per_update=3))
    assert taken == {"stale": ["0.task0"], "trained": ["0.task1", "0.task2"]}


def _mixed(position: int, *versions: int) -> GroupSummary:
    """A group whose first attempt was sampled by several versions."""
    attempts = [
        a_trajectory(1.0, turns=[a_turn([5] * len(versions), versions=list(versions))]),
        a_trajectory(0.0, attempt=1, turns=[a_turn(versions=versions[-1])]),
    ]
    return summarise(a_group(position, trajectories=attempts))


def test_one_old_token_makes_a_group_old_under_strict():
    state = _state(_mixed(0, 1, 2), a_summary(1, version=2), a_summary(2, version=2), version=2)
    assert _taken(_claim(state)) == {"stale": ["0.task0"], "trained": ["0.task1", "0.task2"]}


def test_mask_trains_a_group_for_its_fresh_tokens_and_drops_one_without_any():
    state = _state(_mixed(0, 0, 2), _mixed(1, 0, 1), a_summary(2, version=2), version=2)
    claim = _claim(state, stale_policy="mask")
    assert _taken(claim) == {"trained": ["0.task0", "0.task2"], "stale": ["0.task1"]}
    assert claim is not None and claim.stale[0].reason == "newest token is 1 updates behind, bound 0"


def test_correct_trains_groups_however_old():
    taken = _taken(_claim(_state(a_summary(0), a_summary(1), version=2), stale_policy="correct"))
    assert taken == {"trained": ["0.task0", "0.task1"]}


def test_a_step_goes_with_fewer_once_so_many_batches_were_attempted():
    rejected = [a_summary(position, accepted=False) for position in range(1, 6)]
    assert _claim(_state(a_summary(0), *rejected[:4]), max_attempts=3) is None
    taken = _taken(_claim(_state(a_summary(0), *rejected), max_attempts=3))
    assert taken["trained"] == ["0.task0"] and len(taken["filtered"]) == 5


@pytest.mark.parametrize("fallback", ["skip_step", "masked"])
def test_with_nothing_accepted_the_claim_says_what_the_step_does_instead(fallback: Any):
    rejected = [a_summary(position, accepted=False) for position in range(6)]
    claim = _claim(_state(*rejected), max_attempts=3, on_nothing_accepted=fallback)
    assert claim is not None and claim.fallback == fallback and not claim.trained and len(claim.filtered) == 6
    assert _claim(_state(*rejected[:5]), max_attempts=3, on_nothing_accepted=fallback) is None


def test_with_nothing_accepted_the_default_is_an_error_that_counts_the_reasons():
    groups = [a_summary(position, rewards=[1, None]) for position in range(3)]
    groups += [a_summary(position, accepted=False) for position in range(3, 8)]
    with pytest.raises(NothingAccepted) as caught:
        _claim(_state(*groups), max_attempts=4)
    assert "none of 8 groups was accepted: 5 filtered: uniform reward 1; 3 failed: 1 usable of 2" in str(caught.value)
    assert "3 env_error" in str(caught.value) and "rollout.on_nothing_accepted" in str(caught.value)


def test_a_dynamic_batch_is_so_many_attempts_and_trains_what_was_accepted():
    groups = [a_summary(0, accepted=False), a_summary(1), a_summary(2, rewards=[1, None]), a_summary(3), a_summary(4)]
    assert _claim(_state(*groups[:3]), 4, dynamic_batch=True) is None
    taken = _taken(_claim(_state(*groups), 4, dynamic_batch=True))
    assert taken == {"trained": ["0.task1", "0.task3"], "filtered": ["0.task0"], "failed": ["0.task2"]}


def test_a_dynamic_batch_does_not_count_groups_whose_prompt_runs_again():
    retried = replace(a_summary(0, rewards=[1, None], accepted=False), retried=True)
    again = a_summary(0, group_id="0.task0.retry1")
    assert _claim(_state(retried, again), dynamic_batch=True) is None
    taken = _taken(_claim(_state(retried, again, a_summary(1), a_summary(2)), dynamic_batch=True))
    assert taken == {"trained": ["0.task0.retry1", "0.task1"], "failed": ["0.task0"]}


def test_the_bound_holds_in_a_dynamic_batch():
    groups = [a_summary(0, version=2), a_summary(1, version=1), a_summary(2, version=2)]
    claim = _claim(_state(*groups, version=2), dynamic_batch=True, on_nothing_accepted="skip_step")
    assert _taken(claim) == {"trained": ["0.task0"], "stale": ["0.task1"]}


group_kinds = st.fixed_dictionaries(
    {
        "rewards": st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=4),
        "accepted": st.booleans(),
        "version": st.integers(0, 3),
    }
)


@given(
    kinds=st.lists(group_kinds, max_size=12),
    batch_size=st.integers(1, 4),
    bound=st.integers(0, 3),
    stale_policy=st.sampled_from(["strict", "mask"]),
    max_attempts=st.integers(1, 4),
)
def test_a_claim_splits_the_queue_into_trained_left_and_done_with(
    kinds: list[dict[str, Any]], batch_size: int, bound: int, stale_policy: StalePolicy, max_attempts: int
):
    groups = [a_summary(position, **kind) for position, kind in enumerate(kinds)]
    state = _state(*groups, version=3)
    rules = {"max_staleness": bound, "stale_policy": stale_policy, "max_attempts": max_attempts}
    claim = _claim(state, batch_size, on_nothing_accepted="skip_step", **rules)
    fit = [g for g in groups if g.accepted and g.usable >= 2 and g.head_version >= 3 - bound]
    if len(fit) < batch_size and len(groups) < max_attempts * batch_size:
        assert claim is None
        return
    assert claim is not None and bool(claim.fallback) == (not fit)
    oldest = sorted(fit, key=lambda group: group.head_version)[:batch_size]
    assert _ids(claim.trained) == [g.id for g in sorted(oldest, key=lambda group: group.position)]
    taken = [group_id for ids in _taken(claim).values() for group_id in ids]
    assert len(taken) == len(set(taken))
    assert set(state.pending) - set(taken) == {g.id for g in fit} - set(_ids(claim.trained))
    assert all(group.reason for group in [*claim.stale, *claim.filtered, *claim.failed])
    assert claim == _claim(state, batch_size, on_nothing_accepted="skip_step", **rules)


def test_admission_counts_what_a_step_may_still_train():
    groups = [a_summary(0), a_summary(1, version=2), a_summary(2, version=2, accepted=False), _mixed(3, 0, 2)]
    state = _state(*groups, version=2)
    counts = {
        policy: num_counted(state, a_config(**{**RULES, "stale_policy": policy}))
        for policy in ("strict", "mask", "correct")
    }
    assert counts == {"strict": 1, "mask": 2, "correct": 3}


def test_admission_counts_attempts_where_steps_take_those():
    retried = replace(a_summary(0, rewards=[1, None], accepted=False), retried=True)
    state = _state(retried, a_summary(0, group_id="0.task0.retry1"), a_summary(1, accepted=False), a_summary(2))
    assert num_counted(state, a_config(**RULES, dynamic_batch=True)) == 3
