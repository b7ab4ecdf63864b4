"""What a step takes: commit order, one outcome for every group passed over, nothing while there is too little."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from storage.claims import StalePolicy, next_claim
from storage.log_entries import Claim, ClaimedGroup, GroupSummary
from storage.run_state import RunState
from storage.shard_codec import summarise
from tests.builders import a_group, a_log, a_shard, a_step, a_summary, a_trajectory, a_turn


def _state(*groups: GroupSummary, version: int = 0) -> RunState:
    """Pending `groups` in shard `s0`, while policy `version` is live."""
    log = a_log()
    for number in range(version):
        log.append(a_shard(f"old{number}", [a_summary(1000 + number)]))
        log.append(a_step(log.state, trained=[f"0.task{1000 + number}"]))
    return log.append(a_shard("s0", groups))


def _claim(
    state: RunState, batch_size: int = 2, *, max_staleness: int = 0, stale_policy: StalePolicy = "strict"
) -> Claim | None:
    return next_claim(
        state, batch_size=batch_size, max_staleness=max_staleness, stale_policy=stale_policy, min_usable=2
    )


def _ids(groups: list[ClaimedGroup]) -> list[str]:
    return [group.group_id for group in groups]


def test_groups_are_taken_in_commit_order_and_trained_in_prompt_order():
    """Groups finish in any order; what is trained together is the same bits whichever came first."""
    state = _state(a_summary(5), a_summary(3), a_summary(4))
    claim = _claim(state)
    assert claim is not None
    assert _ids(claim.trained) == ["0.task3", "0.task5"]
    assert (claim.step, claim.base_version) == (1, 0)
    assert {group.shard_id for group in claim.trained} == {"s0"}


def test_too_few_groups_are_no_claim_and_nothing_is_taken():
    state = _state(a_summary(0), a_summary(1, accepted=False), a_summary(2, rewards=[1, None]))
    assert _claim(state) is None
    assert len(state.pending) == 3 and not state.outcomes


def test_every_group_passed_over_has_an_outcome_and_a_reason():
    rejected = a_summary(0, accepted=False)
    broken = a_summary(1, rewards=[1, None, None])
    state = _state(rejected, broken, a_summary(2), a_summary(3), a_summary(4))
    claim = _claim(state)
    assert claim is not None
    assert claim.filtered == [ClaimedGroup(shard_id="s0", group_id="0.task0", reason="uniform reward 1")]
    assert claim.failed == [ClaimedGroup(shard_id="s0", group_id="0.task1", reason="1 usable of 3")]
    assert _ids(claim.trained) == ["0.task2", "0.task3"]
    assert claim.stale == []  # 0.task4 was not reached and stays pending


def test_too_few_attempts_fail_a_group_even_when_a_filter_took_it_too():
    state = _state(a_summary(0, rewards=[1, None], accepted=False), a_summary(1), a_summary(2))
    claim = _claim(state)
    assert claim is not None and _ids(claim.failed) == ["0.task0"] and not claim.filtered


def test_strict_drops_groups_older_than_the_bound_and_keeps_those_at_it():
    groups = [a_summary(position, version=version) for position, version in enumerate([0, 1, 2, 2])]
    state = _state(*groups, version=2)
    claim = _claim(state, 3, max_staleness=1)
    assert claim is not None
    assert _ids(claim.stale) == ["0.task0"]
    assert claim.stale[0].reason == "oldest token is 2 versions behind, bound 1"
    assert _ids(claim.trained) == ["0.task1", "0.task2", "0.task3"]


def test_mask_and_correct_train_old_groups():
    for stale_policy in ("mask", "correct"):
        claim = _claim(_state(a_summary(0), a_summary(1), version=2), stale_policy=stale_policy)
        assert claim is not None and _ids(claim.trained) == ["0.task0", "0.task1"] and not claim.stale


def test_one_old_token_makes_a_group_old():
    mixed = a_group(
        0,
        trajectories=[
            a_trajectory(1.0, turns=[a_turn(versions=[2, 2])]),
            a_trajectory(0.0, attempt=1, turns=[a_turn(versions=[1, 2])]),
        ],
    )
    claim = _claim(_state(summarise(mixed), a_summary(1, version=2), a_summary(2, version=2), version=2))
    assert claim is not None and _ids(claim.stale) == ["0.task0"]


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
    strict=st.booleans(),
)
def test_a_claim_is_a_prefix_of_the_queue_split_by_outcome(
    kinds: list[dict[str, Any]], batch_size: int, bound: int, strict: bool
):
    state = _state(*(a_summary(position, **kind) for position, kind in enumerate(kinds)), version=3)
    policy: StalePolicy = "strict" if strict else "mask"
    claim = _claim(state, batch_size, max_staleness=bound, stale_policy=policy)
    trainable = [
        f"0.task{position}"
        for position, kind in enumerate(kinds)
        if kind["accepted"]
        and sum(reward is not None for reward in kind["rewards"]) >= 2
        and (kind["version"] >= 3 - bound or not strict)
    ]
    if len(trainable) < batch_size:
        assert claim is None
        return
    assert claim is not None
    assert _ids(claim.trained) == trainable[:batch_size]
    taken = {outcome: _ids(getattr(claim, outcome)) for outcome in ("trained", "stale", "filtered", "failed")}
    everything = [group_id for ids in taken.values() for group_id in ids]
    last = list(state.pending).index(taken["trained"][-1])
    assert sorted(everything) == sorted(list(state.pending)[: last + 1])
    assert all(group.reason for group in [*claim.stale, *claim.filtered, *claim.failed])
    assert claim == _claim(state, batch_size, max_staleness=bound, stale_policy=policy)
