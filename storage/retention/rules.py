"""The rules of retention: how users write them, and what they keep of a run.

In: counts, an age and a size; a run's log. Out: `Rules`; the policies that they keep, and the files that these need.

A policy is kept if it is the base model, live, named by an alias, among the newest, one of every `keep_every`, the best
on a split (of those asked alike), or one of the evaluated that the rules name; and if a kept policy is a delta against
it. A kept policy needs what trains it again: its shards, the saved state before its step, and the shards of the steps
in between. With `replay_steps` only the last so many steps can be trained again. What resumes the run, and every shard
with a pending group, is always kept.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from settings.errors import InvalidInput
from storage.log.entries import Evaluation, Policy, Shard, Step
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.log.scores import scores_by_split


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What to keep. Without an age and a size, everything that no kept policy needs is removed."""

    keep_last: int = 5
    """Number of newest policies, including the live one; an engine may still be loading an earlier one."""
    keep_every: int = 0
    """Also keep every version that is a multiple of this; 0: none."""
    older_than_seconds: float = 0.0
    """Remove only what was written at least so long ago."""
    max_bytes: int | None = None
    """Remove the oldest first, until all runs together have at most this size; None: remove everything."""
    keep_evaluated: int | None = 0
    """Also keep the newest so many policies with a score, each with its evaluation's shards; None: all of them."""
    evaluate_every: int = 0
    """Every version that is a multiple of this is to be evaluated: it stays until it, or a later one, has been."""
    replay_steps: int | None = None
    """Keep what trains the last so many steps again; None: what trains each kept policy again."""
    orphan_seconds: float = 3600.0
    """Age at which a file without a log entry is removed: a writer writes the file before the entry."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "older_than_seconds"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} = {getattr(self, name)} is negative; use 0 or more")

    def __str__(self) -> str:
        parts = [f"keep_last {self.keep_last}"]
        parts += [f"keep_every {self.keep_every}"] if self.keep_every else []
        if self.keep_evaluated != 0:
            parts.append(f"keep_evaluated {'all' if self.keep_evaluated is None else self.keep_evaluated}")
        parts += [f"replay_steps {self.replay_steps}"] if self.replay_steps is not None else []
        parts += [f"older than {self.older_than_seconds:.0f} s"] if self.older_than_seconds else []
        parts += [f"at most {self.max_bytes} bytes"] if self.max_bytes is not None else []
        return ", ".join(parts)


@dataclass
class Facts:
    """What a plan needs of the log, collected from each entry once: decoding 10⁵ entries takes seconds.

    Holds names and numbers, not entries, which fill gigabytes in a long run.
    """

    steps: list[tuple[str | None, tuple[str, ...]]] = field(default_factory=list)
    """Per step, which makes the policy version of its number: the folder of its saved state, the shards it read."""
    versions_at: dict[str, list[int]] = field(default_factory=dict)
    """Folder → its policy versions, rising: a skipped step makes a version that shares its parent's files."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Policy version stored as a delta → the version of its anchor."""
    eval_shards: dict[str, int] = field(default_factory=dict)
    """Id of an evaluation shard → the policy version that sampled it."""
    scored_shards: dict[str, int] = field(default_factory=dict)
    """Id of a shard that an evaluation names → its policy version. The others belong to a running or killed one."""
    _seen: int = 0

    def extend(self, log: RunLog) -> None:
        """Add the entries since the last call."""
        for number in range(self._seen, len(log.entries)):
            match log.entries[number].body:
                case Step(policy=policy, state_path=state_path, shard_sha256=shards):
                    self.steps.append((state_path, tuple(shards)))
                    self.versions_at.setdefault(policy.path, []).append(policy.version)
                    if policy.anchor is not None:
                        self.anchors[policy.version] = policy.anchor
                case Policy(path=path, version=version):
                    self.versions_at.setdefault(path, []).append(version)
                case Evaluation() as evaluation:
                    self.scored_shards |= dict.fromkeys(evaluation.shard_ids, evaluation.version)
                case Shard(is_eval=True) as shard:
                    self.eval_shards[shard.id] = shard.head_version
                case _:
                    pass
        self._seen = len(log.entries)


def kept_policies(state: RunState, rules: Rules, settings: dict[str, Any]) -> dict[int, str]:
    """Policy versions to keep, and why. A retired version is never kept. `settings` are the run's `evaluation`."""
    left = {
        split: [(each.score, each.version) for each in scores if each.version not in state.retired_policies]
        for split, scores in scores_by_split(state, settings).items()
    }
    best = {split: max(scored)[1] for split, scored in left.items() if scored}
    tried = max((each.version for each in state.evaluations), default=0)
    evaluated = {each.version for each in state.evaluations if not each.failed} - state.retired_policies
    if rules.keep_evaluated is not None:
        evaluated = set(sorted(evaluated)[max(0, len(evaluated) - rules.keep_evaluated) :])
    kept: dict[int, str] = {}
    for version in state.policies:
        reasons = ["base model"] if version == 0 else []
        reasons += ["live"] if version == state.newest_version else []
        reasons += [f"alias {name}" for name, alias in state.aliases.items() if alias.version == version]
        reasons += [f"best on {split}" for split, scored in best.items() if scored == version]
        reasons += ["evaluated"] if version in evaluated else []
        due = rules.evaluate_every and version > tried and version % rules.evaluate_every == 0
        reasons += ["to be evaluated"] if due else []
        reasons += ["among the newest"] if version > state.newest_version - rules.keep_last else []
        reasons += [f"every {rules.keep_every}"] if rules.keep_every and version % rules.keep_every == 0 else []
        if reasons and version not in state.retired_policies:
            kept[version] = ", ".join(reasons)
    return dict(sorted(kept.items()))


def with_anchors(kept: dict[int, str], anchors: Mapping[int, int]) -> dict[int, str]:
    """Kept versions and the anchors of their deltas; `anchors` by version."""
    needed = {anchors[version]: version for version in reversed(kept) if version in anchors}
    reasons = {anchor: f"anchor of {version}" for anchor, version in needed.items()}
    return dict(sorted({**reasons, **kept}.items()))


NEWEST_STATES = 3
"""Saved states that stay beside a training, however many steps there may be replayed."""


def reach(
    state: RunState, facts: Facts, kept: Iterable[int], *, replay_steps: int | None = None
) -> tuple[set[str], set[str]]:
    """Shards and state folders that the kept policies, a resume and the queue need; see `Rules.replay_steps`. `facts`
    must be up to `state`.

    To replay N steps needs a state before them, and later ones to take its place: one per N steps, so that N to 2 N
    steps can be replayed; and the newest few, so that the last steps are soon trained again.
    """
    kept = set(kept)
    targets = kept - {0} | {state.step + 1}
    if replay_steps is not None:
        targets = {state.step + 1}
        oldest = max(0, state.step - replay_steps) // max(1, replay_steps) * replay_steps
        stones = range(oldest, state.step, replay_steps) if replay_steps else ()
        targets.update(stone + 1 for stone in stones)
    shards = {state.shard_of[group_id] for group_id in state.pending}
    shards |= {shard_id for shard_id, version in facts.scored_shards.items() if version in kept}
    states: set[str] = set()
    saved = {
        number: path
        for number, (path, _) in enumerate(facts.steps, start=1)
        if path is not None and path not in state.retired_states
    }
    numbers = list(saved)
    states.update(saved[number] for number in numbers[-NEWEST_STATES:] if replay_steps)
    # Training a step again starts from the newest state before it; a resume trains the next step.
    first = state.step
    for target in targets:
        before = bisect.bisect_left(numbers, target)
        start = numbers[before - 1] if before else 0
        if start:
            states.add(saved[start])
        first = min(first, start)
        for _, read in facts.steps[start:target]:
            shards.update(read)
    for _, read in facts.steps[first:] if replay_steps is not None else ():
        shards.update(read)
    return shards, states


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def make_rules(*, keep_last: int, keep_every: int, older_than: str, max_size: str) -> Rules:
    """Rules from text such as `older_than="30d", max_size="50GB"`, empty for none.

    Raises `ValueError` for text that cannot be read.
    """
    return Rules(
        keep_last=keep_last,
        keep_every=keep_every,
        older_than_seconds=_number("older_than", older_than, _SECONDS, example="30d") if older_than else 0.0,
        max_bytes=int(_number("max_size", max_size, _BYTES, example="50GB")) if max_size else None,
    )


def _number(name: str, text: str, units: dict[str, float], *, example: str) -> float:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in units:
        raise InvalidInput(
            f"{name} = {text!r}: write a number and a unit, for example {example}; units: {', '.join(units)}"
        )
    return float(match[1]) * units[match[2]]
