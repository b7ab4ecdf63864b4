"""May a record be appended to a log? It may be there already (`holds`), or contradict the log (`check_fits`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from storage.log import entries
from storage.log.entries import Entry, claimed_groups
from storage.log.run_state import Conflict, RunState


def holds(state: RunState, body: Entry) -> bool:
    """True if the log has this record already; appending it again is a no-op."""
    match body:
        case entries.Session():
            return any(session.id == body.id for session in state.sessions)
        case entries.End(session_id=session_id):
            newest = state.sessions[-1].id if state.sessions else session_id
            return state.ended is not None or newest != session_id
        case entries.Lease():
            return all(state.leased.get(position) == body.holder for position in body.positions)
        case entries.Join():
            return state.producers.get(body.holder) == body
        case entries.Release(holder=holder):
            return holder not in state.producers and holder not in state.leased.values()
        case entries.Shard():
            return body.id in state.shards
        case entries.Step(claim=claim, policy=policy):
            return claim.step <= state.step and state.steps[claim.step - 1].policy.path == policy.path
        case entries.Policy():
            return state.policies.get(body.version) == body
        case entries.Evaluation():
            return body.shard_id in state.evaluation_shards
        case entries.Alias():
            return state.aliases.get(body.name) == body
        case entries.Registration():
            return state.registrations.get(body.version) == body
        case entries.Quarantine():
            return body.shard_id in state.quarantined
        case entries.Rescore():
            earlier = state.rescored.get(body.name)
            return earlier is not None and earlier.files.items() >= body.files.items()
        case entries.Retire():
            return (
                state.retired_shards.issuperset(body.shard_ids)
                and state.retired_policies.issuperset(body.policy_versions)
                and state.retired_states.issuperset(body.state_paths)
            )
        case entries.Pause():
            return bool(state.paused)
        case entries.Resume():
            return not state.paused
        case _:
            return False


def check_fits(state: RunState, body: Entry) -> None:
    """Raise `Conflict` if `body` contradicts what is committed."""
    match body:
        case entries.Lease() if body.number != state.num_leases:
            raise Conflict(f"{body.holder} chose its lease before another worker's was committed")
        case entries.Lease(positions=positions):
            if repeated := _repeated(positions, state.positions) or _repeated(positions, state.leased):
                raise Conflict(f"prompt positions {repeated[:5]} are not free for {body.holder}")
        case entries.Shard() if body.id in state.retired_shards:
            raise Conflict(f"shard {body.id} came so late that its file was removed; write it again under a new id")
        case entries.Shard(is_eval=False, groups=groups):
            first_tries = [group.position for group in groups if not group.retried]
            retried = [group.position for group in groups if group.retried]
            if repeated := _repeated(first_tries, state.positions) or _repeated(set(retried), state.positions):
                raise Conflict(f"shard {body.id}: prompt positions {repeated} are already committed")
            if repeated := _repeated([group.id for group in groups], state.groups):
                raise Conflict(
                    f"shard {body.id}: groups {repeated[:5]} are already committed at other positions; "
                    "the data set has changed under this run"
                )
        case entries.Step(claim=claim, policy=policy):
            if claim.step != state.step + 1:
                raise Conflict(
                    f"step {claim.step} does not follow step {state.step}: another trainer is working on this run; "
                    "stop one of them, or use another `run` id"
                )
            if policy.anchor in state.retired_policies or state.retired_states & {policy.path, body.state_path}:
                raise Conflict(f"step {claim.step} came so late that its files were removed; start this run again")
            if policy.version != claim.step:
                raise Conflict(f"step {claim.step} makes policy version {claim.step}, and not {policy.version}")
            if not claim.base_version == policy.parent == state.newest_version:
                raise Conflict(f"step {claim.step} does not train the newest policy, version {state.newest_version}")
            counts = Counter(group.group_id for _, group in claimed_groups(body))
            lost = [group_id for group_id, count in counts.items() if count > 1 or group_id not in state.pending]
            if lost:
                raise Conflict(f"step {claim.step} claims groups twice, or that are not pending: {lost[:5]}")
        case entries.Policy() if body.version in state.policies:
            raise Conflict(f"policy version {body.version} is already published")
        case entries.Policy() if body.version:
            raise Conflict(f"policy version {body.version} has no step; only version 0 is there before the first one")
        case entries.Quarantine() if body.shard_id not in state.shards:
            raise Conflict(f"shard {body.shard_id} is not in this log")
        case entries.Alias(version=version) if version not in state.policies:
            raise Conflict(f"policy version {version} is not in this log")
        case entries.Alias(version=version) if version in state.retired_policies:
            raise Conflict(f"policy version {version} was retired: its weights are gone")
        case entries.Rescore(name=name, reward_sha256=digest):
            if unknown := body.files.keys() - state.shards.keys():
                raise Conflict(f"rewards {name!r} name shards that are not in this log: {sorted(unknown)[:5]}")
            earlier = state.rescored.get(name)
            if earlier is not None and earlier.reward_sha256 != digest:
                raise Conflict(f"rewards {name!r} were made by another version of {earlier.reward}; choose a new name")
        case entries.Retire():
            needed = {state.shard_of[group_id] for group_id in state.pending}.intersection(body.shard_ids)
            if needed:
                raise Conflict(f"shards {sorted(needed)[:5]} hold groups no step has taken")
            named = {alias.version for alias in state.aliases.values()} | {state.newest_version}
            if kept := named.intersection(body.policy_versions):
                raise Conflict(f"policy versions {sorted(kept)} are live or have an alias")
            anchors = {state.policies[version].anchor for version in named if version in state.policies}
            if kept_anchors := [version for version in body.policy_versions if version in anchors]:
                raise Conflict(f"policy versions {kept_anchors} are anchors of what is live or has an alias")
            # A plan may take these for files that no step committed.
            newest = {state.live.path, state.steps[-1].state_path} if state.live and state.steps else set()
            if kept_paths := newest.intersection(body.state_paths):
                raise Conflict(f"{', '.join(sorted(map(str, kept_paths)))} is the newest step's")
        case _:
            pass


def _repeated(values: Iterable[Any], committed: Container[Any]) -> list[Any]:
    """The values that are committed already, or in there twice."""
    return sorted(value for value, count in Counter(values).items() if count > 1 or value in committed)
