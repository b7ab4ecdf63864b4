"""Which groups the next optimizer step takes, and which policy samples what: deterministic functions of the log.

In: the fold of a run's log, and its settings. Out: a `Claim`, or None while too few groups are committed; the policy
that engines are to serve; also, up to which step the run follows from its run file.
The staleness bound is enforced here, from the versions the engine stamped on every token;
`rollouts/production/quota.py` only paces production.

    pending, oldest token first ─▶ accepted and within the bound ─▶ the first batch_size: trained
                             │                                   └▶ the others: stay pending
                             └───▶ rejected, failed, cancelled, over the bound: done with, each with its reason

With `rollout.schedule = "fixed"` the first batch in prompt order is trained, as soon as all prompts before its last one
have ended.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from settings.errors import UserError
from settings.run_file import RunConfig
from storage.log.entries import OUTCOMES, Claim, ClaimedGroup, GroupSummary
from storage.log.run_state import RunState

Versions = TypeVar("Versions", int, np.ndarray)

CANCELLED = "cancelled"
"""Start of the reject reason of a group that was cancelled."""
NOTHING = "nothing"
BY_MOMENT = frozenset({"timeout", "engine_error", "tool_error", "cancelled"})
"""Failing statuses that the policy's tokens do not explain."""
_MOST_PARTS = 16
"""Largest number of parts of a batch: more would be forward passes of too few tokens."""
_ROUNDING = 1e-9  # (1 + 0.16) · 50 is 57.99999999999999


class NothingAccepted(UserError):
    """No group of a step was accepted; the message counts the reasons."""


def updates_behind(versions: Versions, *, live: int, steps_per_update: int) -> Versions:
    """Weight updates between the versions that sampled and the live one: every `steps_per_update`-th is loaded."""
    return live // steps_per_update - versions // steps_per_update


# ── Which policy samples what ───────────────────────────────────────────────────────────────────────────────────────


def num_allowed(version: int, config: RunConfig) -> int:
    """Groups since policy 0 that may be accepted or running while policy `version` is the newest.

    u · k · B + ⌊(1 + max_staleness) · k · B⌋ for batches of B groups, k steps per weight update, and u = ⌊version / k⌋
    updates so far.
    """
    window = config.train.steps_per_update * config.batch_size
    ahead = math.floor((1 + config.max_staleness) * window + _ROUNDING)
    return version // config.train.steps_per_update * window + ahead


def sampling_version(place: int, config: RunConfig) -> int:
    """The policy that samples accepted group `place`, from 0, in a fixed schedule: the first that may."""
    window = config.train.steps_per_update * config.batch_size
    return max(0, (place - num_allowed(0, config)) // window + 1) * config.train.steps_per_update


def oldest_needed(config: RunConfig) -> int:
    """How many of the newest policies a run in a fixed schedule may need again."""
    return math.ceil((1 + config.max_staleness) * config.train.steps_per_update)


def is_fixed(config: RunConfig) -> bool:
    """True if neither the policy that samples a group nor the step that trains it depends on the moment."""
    synchronous = not config.max_staleness and config.train.steps_per_update == 1
    return synchronous or config.rollout.schedule == "fixed"


def num_committed(state: RunState, config: RunConfig) -> int:
    """Groups that count against `num_allowed`: those of steps, and those that a step may still train.

    Of steps, not of versions that an engine serves: between a step and its publication its groups stay counted.
    """
    return state.step * config.batch_size + num_counted(state, config)


def num_needed(state: RunState, config: RunConfig) -> int:
    """Groups of the whole run; its end is as its newest session has it."""
    return ((state.sessions[-1].steps if state.sessions else 0) or config.steps) * config.batch_size


def has_sampled_all(version: int, state: RunState, config: RunConfig) -> bool:
    """True if the log holds all groups that may be sampled before there is a newer policy than `version`."""
    return min(num_allowed(version, config), num_needed(state, config)) <= num_committed(state, config)


def due_version(state: RunState, config: RunConfig) -> int:
    """The policy that engines are to serve now. In a fixed schedule it is the one whose batch is not complete; if
    retention has removed that one, the oldest one after it, which `owed_by` notices."""
    assert state.live is not None, "a run has its base policy before anything is sampled"
    if config.rollout.schedule != "fixed":
        return state.live.version
    due = min(sampling_version(num_committed(state, config), config), state.live.version)
    return next(version for version in range(due, state.live.version + 1) if version not in state.retired_policies)


# ── What a step takes ───────────────────────────────────────────────────────────────────────────────────────────────


Parts = Sequence[Sequence[ClaimedGroup]]
"""Groups of the next step whose gradients the trainer has, or has been given to add up, in that order."""


def next_claim(state: RunState, config: RunConfig, parts: Parts = (), *, whole: bool = True) -> Claim | None:
    """What the next step takes, of which the trainer has `parts`; None if the pending groups do not suffice.

    If not `whole`: what has finished since `parts`, as one more part; None while that is too little. Only for settings
    that `waits_for_batch` has nothing against: what can be trained now is then in the next whole claim, too.

    It trains the first `batch_size` groups that were accepted and are within the staleness bound: those with the oldest
    token, because the next step may be too late for them, and of these the first in prompt order. Pending groups that
    can never be trained get their outcome, too. `strict` drops a group for one token over the bound; `mask` drops it if
    all its tokens are, and the trainer masks the old tokens of the others; `correct` drops none.

    With `dynamic_batch` the step takes the first `batch_size` groups in that order, accepted or not, and trains what it
    can. Otherwise it trains fewer than a batch only if `max_attempts` batches are pending. If it has nothing to train,
    `on_nothing_accepted` decides between `fallback` and `NothingAccepted`.

    In a fixed schedule the order is that of the prompts, and those behind a prompt without an outcome wait for it.
    """
    live = state.live
    assert live is not None, "a run has its base policy before anything is claimed"
    pending = [state.groups[group_id] for group_id in state.pending]
    in_order = config.rollout.schedule == "fixed"
    if in_order:
        pending = [group for group in pending if group.position < state.positions.first_gap]
    pending.sort(key=lambda group: (0 if in_order else group.head_version, group.position))
    if config.rollout.dynamic_batch:
        pending = _first_attempted(pending, config.batch_size)
    reasons = {group.id: _reason(group, live.version, config) for group in pending}
    trainable = [group for group in pending if not reasons[group.id][0]]
    by_id = {group.id: group for group in trainable}
    begun = [group.group_id for part in parts for group in part]
    if is_lost := not by_id.keys() >= set(begun):
        begun, parts = [], ()
    ready = [group for group in trainable if group.id not in begun][: config.batch_size - len(begun)]
    # Groups finish in any order; trained in prompt order, the same groups give bit-identical weights.
    trained = [*(by_id[each] for each in begun), *sorted(ready, key=lambda group: group.position)]
    if whole:
        enough = config.rollout.dynamic_batch or len(pending) >= config.rollout.max_attempts * config.batch_size
        if not pending or (len(trainable) < config.batch_size and not enough):
            return None
    elif is_lost or len(ready) < smallest_part(config):
        return None
    else:
        pending = trained  # the whole claim has the outcomes of the others
    if in_order and len(trained) == config.batch_size:  # what is behind it belongs to the next batch
        pending = [group for group in pending if group.position <= trained[-1].position]
    if not trained and config.rollout.on_nothing_accepted == "fail":
        raise NothingAccepted(_report(state.step + 1, pending, reasons))

    def claimed(groups: Sequence[GroupSummary]) -> list[ClaimedGroup]:
        return [ClaimedGroup(shard_id=state.shard_of[g.id], group_id=g.id, reason=reasons[g.id][1]) for g in groups]

    passed_over = {
        outcome: claimed(sorted((g for g in pending if reasons[g.id][0] == outcome), key=lambda g: (g.position, g.id)))
        for outcome in ("stale", "filtered", "failed", "cancelled")
    }
    return Claim(
        step=state.step + 1,
        base_version=live.version,
        trained=claimed(trained),
        **passed_over,
        fallback="" if trained else config.rollout.on_nothing_accepted,
        parts=[size for size in (*map(len, parts), len(ready)) if size] if parts or not whole else [],
    )


def smallest_part(config: RunConfig) -> int:
    """Groups that are worth a forward and a backward pass of their own."""
    return math.ceil(config.batch_size / _MOST_PARTS)


def waits_for_batch(config: RunConfig) -> str:
    """Why gradients of finished groups cannot be added up before the batch is there; empty if they can."""
    train, rollout = config.train, config.rollout
    advantage = train.advantage
    if config.max_staleness:
        return f"with max_staleness = {config.max_staleness:g} a whole batch is trained while the next is sampled"
    if config.engine.share == "phases":
        return "engine and trainer take turns on one GPU (engine.share)"
    if config.reproducible or rollout.schedule == "fixed":
        return "which groups finish first depends on the moment (reproducible, rollout.schedule)"
    if rollout.dynamic_batch:
        return "which groups the step takes is known when all have ended (rollout.dynamic_batch)"
    if train.steps_per_update > 1:
        return "the groups of several steps are sampled at once (train.steps_per_update)"
    if train.num_minibatches * train.num_epochs > 1:
        return "the groups are shuffled into several updates (train.num_minibatches, train.num_epochs)"
    if advantage.kind in ("reinforce++", "gae") or getattr(advantage, "per_reward", False):
        return f"advantages are relative to the whole batch (train.advantage, {advantage.kind})"
    if getattr(advantage, "scale", "") == "batch":
        return "advantages are divided by the deviation of the whole batch (train.advantage.scale)"
    if train.top_entropy_fraction < 1:
        return "which tokens are trained depends on the whole batch (train.top_entropy_fraction)"
    if train.loss.kind == "custom":
        return "what a loss of your own does with the weights of tokens is not known (train.loss)"
    return ""


def streams(config: RunConfig) -> bool:
    """True if gradients of finished groups are added up before the batch is there."""
    return config.train.stream and not waits_for_batch(config)


def num_counted(state: RunState, config: RunConfig) -> int:
    """Pending groups that count against the quota: those that a step may still train, as the replacement of a stale one
    needs the room; with `dynamic_batch`, all that will not run again."""
    pending = (state.groups[group_id] for group_id in state.pending)
    if config.rollout.dynamic_batch:
        return sum(not group.retried for group in pending)
    assert state.live is not None, "a run has its base policy before anything is pending"
    live = state.live.version
    return sum(not _reason(group, live, config)[0] for group in pending)


def owed_by(state: RunState, claim: Claim, config: RunConfig) -> str:
    """Why a step with this claim does not follow from the run file and the steps before; `nothing` if it does."""
    if not is_fixed(config):
        if config.max_staleness:
            return f"max_staleness = {config.max_staleness:g}: which policy answers a prompt depends on the moment"
        return "train.steps_per_update > 1: which groups of an update's batches come first depends on the moment"
    if state.quarantined:
        return f"shard {next(iter(state.quarantined))} was lost, and its prompts ran again"
    if (
        claim.stale
        or claim.cancelled
        or claim.fallback
        or not (len(claim.trained) == config.batch_size or config.rollout.dynamic_batch)
    ):
        return "it took what had finished by then, which was no whole batch"
    first = sampling_version((claim.step - 1) * config.batch_size, config)
    last = sampling_version(claim.step * config.batch_size - 1, config)
    for group in claim.trained:
        head, tail = state.groups[group.group_id].head_version, state.groups[group.group_id].tail_version
        if not first <= head == tail <= last:
            return f"group {group.group_id!r} was sampled by policy {head} to {tail}, and not by {first}"
    for name in OUTCOMES:
        for group in getattr(claim, name):
            if reason := state.shards[group.shard_id].owes.get(group.group_id):
                return f"group {group.group_id!r}: {reason}"
    return NOTHING


def follows_until(state: RunState) -> tuple[int, str]:
    """How many of a run's steps follow from its run file, and what ended that; the sentence is empty if nothing did."""
    for number, step in enumerate(state.steps):
        if step.owes != NOTHING:
            return number, step.owes or "its step was recorded before this was"
    return state.step, ""


def following(state: RunState, config: dict[str, Any]) -> str:
    """What `follows_until` says, as a sentence; empty before the first step."""
    number, reason = follows_until(state)
    if not state.step:
        return ""
    until = f"all {number}" if not reason else f"the first {number}" if number else "none"
    exact = "" if config.get("reproducible") or not number else ", where log-probabilities have the same bits"
    return f"{until} of {state.step} steps{exact}" + (f"; step {number + 1}: {reason}" if reason else "")


def _first_attempted(pending: Sequence[GroupSummary], count: int) -> list[GroupSummary]:
    """The groups up to the `count`-th that will not run again; an empty list if there are fewer."""
    attempted = list(itertools.accumulate(int(not group.retried) for group in pending))
    return list(pending[: attempted.index(count) + 1]) if count in attempted else []


def _reason(group: GroupSummary, live: int, config: RunConfig) -> tuple[str, str]:
    """Outcome and reason of a group that cannot be trained; two empty strings if it can be."""
    if group.reject_reason.startswith(CANCELLED):
        return "cancelled", group.reject_reason
    if group.usable < config.rollout.min_usable:
        return "failed", group.reject_reason or f"{group.usable} usable of {group.expected}"
    if not group.accepted:
        return "filtered", group.reject_reason
    if config.train.stale_policy != "correct":
        strict = config.train.stale_policy == "strict"
        decisive = group.head_version if strict else group.tail_version
        lag = updates_behind(decisive, live=live, steps_per_update=config.train.steps_per_update)
        if lag > (bound := math.ceil(config.max_staleness)):
            return "stale", f"{'oldest' if strict else 'newest'} token is {lag} updates behind, bound {bound}"
    return "", ""


def _report(step: int, groups: Sequence[GroupSummary], reasons: dict[str, tuple[str, str]]) -> str:
    counts = Counter(f"{outcome}: {reason}" for outcome, reason in (reasons[group.id] for group in groups))
    failures = sum((Counter(group.failures) for group in groups), Counter[str]())
    listed = "; ".join(f"{count} {reason}" for reason, count in counts.most_common(5))
    listed += f"; {len(counts) - 5} more reasons" if len(counts) > 5 else ""
    attempts = ", ".join(f"{count} {status}" for status, count in failures.most_common())
    return (
        f"step {step} has nothing to train: none of {len(groups)} groups was accepted: {listed}"
        + (f" (failed attempts: {attempts})" if attempts else "")
        + ". Mend the workflow or its filters, or let such steps pass: rollout.on_nothing_accepted = 'skip_step'"
    )
