"""Which groups the next optimizer step takes: a deterministic function of the log.

In: the fold of a run's log. Out: a `Claim`, or null while too few groups are committed.
The staleness bound is enforced here, from the versions the engine stamped on every token; the admission
formula in `rollouts/admission.py` only paces production.
"""

from __future__ import annotations

from typing import Literal

from storage.log_entries import Claim, ClaimedGroup
from storage.run_state import RunState

StalePolicy = Literal["strict", "mask", "correct"]


def next_claim(
    state: RunState, *, batch_size: int, max_staleness: float, stale_policy: StalePolicy, min_usable: int
) -> Claim | None:
    """Walk the pending groups in commit order until `batch_size` of them can be trained.

    Every group passed on the way gets an outcome: `trained`, `stale` (its oldest token is more than
    `max_staleness` versions behind, under `strict`), `filtered`, or `failed` (fewer than `min_usable` attempts).
    Under `mask` and `correct` an old group is trained; its old tokens are masked or weighted by the trainer.
    Returns null when the pending groups do not suffice, in which case nothing is taken.
    """
    live = state.live
    assert live is not None, "a run has its base policy before anything is claimed"
    claim = Claim(step=state.step + 1, base_version=live.version, trained=[], stale=[], filtered=[], failed=[])
    for group_id in state.pending:
        group = state.groups[group_id]
        lag = live.version - group.head_version
        if group.usable < min_usable:
            outcome, reason = (
                claim.failed,
                group.reject_reason or f"{group.usable} usable of {group.expected}",
            )
        elif not group.accepted:
            outcome, reason = claim.filtered, group.reject_reason
        elif stale_policy == "strict" and lag > max_staleness:
            outcome, reason = claim.stale, f"oldest token is {lag} versions behind, bound {max_staleness}"
        else:
            outcome, reason = claim.trained, ""
        outcome.append(ClaimedGroup(shard_id=state.shard_of[group_id], group_id=group_id, reason=reason))
        if len(claim.trained) == batch_size:
            # Groups finish in any order; trained in prompt order, the same groups give bit-identical weights.
            claim.trained.sort(key=lambda claimed: state.groups[claimed.group_id].position)
            return claim
    return None
