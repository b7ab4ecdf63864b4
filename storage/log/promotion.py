"""May a policy become the champion? And the entry that makes it the champion.

In: a run's log and a policy version, or an evaluation of it. Out: sentences against it, or the alias `champion`.
"""

from __future__ import annotations

from typing import Any

from settings.errors import InvalidInput
from settings.places.hints import command
from storage.log.entries import Alias, Evaluation
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.log.runs import find_policy

CHAMPION = "champion"
"""Alias of the newest promoted policy."""
GAP = "trainer–engine gap:"
"""Start of a quarantine's reason if engine and trainer disagreed about the policy that sampled the shard."""


_LARGEST_GAP = 1.0
"""The bound of a run that was recorded before the setting existed, in nats per token."""


def gap_of(config: dict[str, Any]) -> float:
    """The largest trainer–engine gap that a run's configuration lets pass."""
    return float(config.get("train", {}).get("max_gap", _LARGEST_GAP))


class NotPromoted(InvalidInput):
    """The log speaks against the policy; the message has a line per problem."""

    def __init__(self, run_id: str, version: int, problems: list[str]) -> None:
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"policy {version} of run {run_id!r} is not promoted:{lines}")
        self.problems = problems


def why_not_promote(state: RunState, version: int, *, max_gap: float) -> list[str]:
    """A sentence for every problem of a policy in the log.

    It looks at the steps since the champion, or since the base model if there is no champion. `max_gap` is the largest
    `engine_gap` of a step, in nats per token, that passes.
    """
    after = state.aliases[CHAMPION].version if CHAMPION in state.aliases else -1
    steps = [step for step in state.steps if after < step.policy.version <= version]
    problems = [
        f"step {step.claim.step}: engine and trainer differed by {step.metrics['engine_gap']:.3g} nats per token on "
        f"the same policy, above {max_gap:g}; what the engine sampled from is not what was trained"
        for step in steps
        if not step.metrics.get("engine_gap", 0.0) <= max_gap
    ]
    problems += [
        f"step {step.claim.step} trained on shard {shard_id}, quarantined since: {state.quarantined[shard_id]}"
        for step in steps
        for shard_id in step.shard_sha256
        if shard_id in state.quarantined
    ]
    problems += [
        f"shard {shard_id}, sampled by policy {state.shards[shard_id].tail_version}, was quarantined: {reason}; no "
        "step since has shown that engine and trainer agree on that policy"
        for shard_id, reason in state.quarantined.items()
        if reason.startswith(GAP)
        and after < state.shards[shard_id].tail_version <= version
        and not _agreed(state, state.shards[shard_id].tail_version, max_gap=max_gap)
    ]
    newest = {e.split: e for e in state.evaluations if e.version == version}
    problems += [
        f"every attempt of its evaluation on split {split!r} failed: {evaluation.last_error or 'no error was kept'}; "
        f"{_evaluate_again(version, split)}"
        for split, evaluation in newest.items()
        if evaluation.failed
    ]
    problems += [
        f"{failed} of {evaluation.num_tasks * evaluation.n_samples} attempts of its evaluation on split {split!r} "
        f"failed in the engine: {evaluation.last_error or 'no error was kept'}; {_evaluate_again(version, split)}"
        for split, evaluation in newest.items()
        if (failed := evaluation.failures.get("engine_error", 0)) and not evaluation.failed
    ]
    return problems


def _evaluate_again(version: int, split: str) -> str:
    return f"evaluate it again with `{command('eval', 'RUN', '--version', version, '--split', split)}`"


def pass_gate(log: RunLog, evaluation: Evaluation, *, min_score: float, max_gap: float) -> Alias:
    """Make a policy that was just evaluated the champion, without a user; returns the alias.

    It goes only forward: a user must promote what is older than the champion or was rolled back. Raises `NotPromoted`,
    also for the champion itself if its new score is too low; it stays the champion.
    """
    state, version = log.refresh(), evaluation.version
    problems = why_not_promote(state, version, max_gap=max_gap)
    if not evaluation.failed and not evaluation.score >= min_score:
        problems.append(f"it scored {evaluation.score:.3f} on split {evaluation.split!r}, below {min_score:g}")
    champion = state.aliases.get(CHAMPION)
    by_hand = f"`{command('promote', log.run_id, '--version', version, store=log.store.uri)}` would do it all the same"
    if champion is not None and version < champion.version:
        problems.append(f"policy {champion.version}, the champion, is newer; {by_hand}")
    elif champion is not None and version > champion.version and version in {a.version for a in _champions(log)}:
        problems.append(f"it was the champion and was rolled back to policy {champion.version}; {by_hand}")
    if problems:
        raise NotPromoted(log.run_id, version, problems)
    return promote(log, version, max_gap=max_gap)


def promote(log: RunLog, version: int | None = None, *, max_gap: float) -> Alias:
    """Put the alias `champion` on a policy, by default the newest. Raises `NotPromoted`, or `InvalidInput`."""
    state = log.refresh()
    policy = find_policy(log, version)
    champion = state.aliases.get(CHAMPION)
    if champion is not None and champion.version == policy.version:
        return champion
    if problems := why_not_promote(state, policy.version, max_gap=max_gap):
        raise NotPromoted(log.run_id, policy.version, problems)
    return log.append(Alias(name=CHAMPION, version=policy.version, checksum=policy.weights_sha256)).aliases[CHAMPION]


def roll_back(log: RunLog) -> Alias:
    """Put the alias `champion` back on the champion before this one, and return it.

    A second call goes back by one more: a champion that was rolled back does not count. Raises `InvalidInput` if no
    earlier champion has weights.
    """
    state = log.refresh()
    line: list[Alias] = []
    for champion in _champions(log):
        place = next((place for place, alias in enumerate(line) if alias.version == champion.version), len(line))
        line[place:] = [champion]
    before = [alias for alias in line[:-1] if alias.version not in state.retired_policies]
    if not before:
        now = f"policy {line[-1].version} is its champion, and " if line else ""
        raise InvalidInput(f"run {log.run_id!r}: {now}there is no earlier champion to go back to")
    return log.append(before[-1]).aliases[CHAMPION]


def _champions(log: RunLog) -> list[Alias]:
    return [entry.body for entry in log.entries if isinstance(entry.body, Alias) and entry.body.name == CHAMPION]


def _agreed(state: RunState, version: int, *, max_gap: float) -> bool:
    """True if a step that trained this very policy measured a small gap."""
    gaps = [step.metrics.get("engine_gap") for step in state.steps if step.claim.base_version == version]
    return any(gap is not None and gap <= max_gap for gap in gaps)
