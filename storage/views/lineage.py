"""What made a policy, and which policies a trajectory influenced, from the log of its run.

In: a log, and a policy version, a trajectory or a prompt. Out: plain records.

    policy ─▶ its step ─▶ shards (digests) ─▶ groups, prompts ─▶ the policies that sampled their tokens
    trajectory ─▶ its shard, its row ─▶ its group's outcome ─▶ the step ─▶ its policy and all that descend from it

Nothing here reads all groups or shards, so a million trajectories cost as much as a thousand. Only the groups of a
prompt, and the id nearest to an unknown one, are looked up among the ids of all groups.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from settings.errors import WHOLE_NUMBER, InvalidInput
from settings.places.hints import command
from settings.places.state_folder import home
from storage.log.entries import OUTCOMES, Evaluation, GroupSummary, Policy, Step
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.objects.digests import DigestMismatch, sha256_of_json
from storage.objects.staging import staging_folder
from storage.policies.policies import PolicyReader
from storage.shards.schema import flat
from storage.shards.shards import DamagedShard, read_shard
from storage.tracking.registry import dataset_digest

_PARENTS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ShardUse:
    """A shard as a step read it."""

    id: str
    uri: str
    sha256: str
    """Digest that the step recorded."""
    rows: int
    """Training sequences in the file."""
    groups: int
    """Groups that the step trained on."""
    problem: str
    """Why it cannot be read: retired, quarantined or damaged; else empty."""


@dataclass(frozen=True, kw_only=True)
class PolicyLineage:
    """What made a policy version."""

    run: str
    store: str
    version: int
    registry_model: str | None
    """Registered model in MLflow; None until MLflow has the version."""
    registry_version: str | None
    aliases: list[str]
    live: bool
    retired: bool
    weights: str
    weights_sha256: str
    parents: list[int]
    """Parent, grandparent and so on, at most eight of them."""
    step: int | None
    """The optimizer step that made it; None for the base model."""
    session_id: str
    code_version: str
    """Code of the session that made it."""
    reward_sha256: str
    """Digest of the reward code of that session; empty in runs from before this was recorded."""
    config: str
    config_sha256: str
    outcomes: dict[str, int]
    """Groups the step took out of the queue, by outcome."""
    dataset_digest: str
    """Digest of the groups and files that it was trained on, as in MLflow; empty for the base model."""
    sampled_by: list[int]
    """Policy versions that sampled the trained tokens: oldest and newest per group; with `verify` every one."""
    shards: list[ShardUse]
    groups: list[GroupSummary]
    """The groups trained on, in prompt order."""
    evaluations: list[Evaluation]
    verified: bool
    """True if every shard and the policy's files were compared with their digests; `problems` has the differences."""
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One attempt, as its shard has it."""

    attempt: int
    reward: float | None
    reward_parts: dict[str, float | None]
    status: str
    sequences: int
    """Rows of the attempt, one per training sequence."""
    sampled_tokens: int
    versions: list[int]
    """Policy versions that sampled them."""


@dataclass(frozen=True, kw_only=True)
class GroupLineage:
    """A group of attempts, its outcome and its influence."""

    group: GroupSummary
    shard: ShardUse
    attempt: AttemptFacts | None
    """The attempt, if one was asked for and can be read."""
    outcome: str
    """`pending` or one of `OUTCOMES`."""
    reason: str
    """Why it was not trained."""
    step: int | None
    """The step that took it out of the queue."""
    policy: int | None
    """The version that the step made, if the group was trained."""
    influenced: list[int]
    """That version and every one that descends from it."""
    live: int | None
    """The newest version, if it is in `influenced`."""
    aliases: dict[str, int]
    """Aliases that point at one of `influenced`."""
    registered: list[int]
    """Which of `influenced` are in the model registry."""
    retired: list[int]
    """Which of `influenced` have no weights any more, because retention removed them."""


def find_version(log: RunLog, name: str) -> int | None:
    """The policy version of an alias, or of a version number in MLflow (digits); None if the log has none."""
    aliases, registrations = log.state.aliases, log.state.registrations
    if not re.fullmatch(WHOLE_NUMBER, name):
        return aliases[name].version if name in aliases else None
    # MLflow counts from 1 and a run registers in order, so the first candidate nearly always is the version.
    candidates = (version for version in (int(name) - 1, *registrations) if version in registrations)
    return next((v for v in candidates if registrations[v].registry_version == str(int(name))), None)


def policy_lineage(log: RunLog, version: int, *, verify: bool = False) -> PolicyLineage:
    """What made a policy version. `verify` reads the shards and the policy's files again.

    Raises `InvalidInput` for a version that the run does not have.
    """
    state = log.state
    policy = state.policies.get(version)
    if policy is None:
        raise InvalidInput(f"run {log.run_id!r} has no policy version {version}; it has 0 to {state.newest_version}")
    step = state.steps[version - 1] if version else None  # step k trains version k - 1 and makes version k
    shards = [_shard_use(log, shard_id, step) for shard_id in step.shard_sha256] if step else []
    groups = [state.groups[claimed.group_id] for claimed in step.claim.trained] if step else []
    sampled_by = sorted({v for group in groups if group.rows for v in (group.head_version, group.tail_version)})
    problems: list[str] = []
    if verify:
        shards, seen = _read_again(log, shards, [group.id for group in groups])
        sampled_by = sorted({*sampled_by, *seen})
        problems = [f"shard {shard.id}: {shard.problem}" for shard in shards if shard.problem]
        problems += _weights_problems(log, policy)
    session, registration = state.session_of(version), state.registrations.get(version)
    return PolicyLineage(
        run=log.run_id,
        store=log.store.uri,
        version=version,
        registry_model=registration.model_name if registration else None,
        registry_version=registration.registry_version if registration else None,
        aliases=sorted(name for name, alias in state.aliases.items() if alias.version == version),
        live=version == state.newest_version,
        retired=version in state.retired_policies,
        weights=f"{log.store.uri}/{policy.path}",
        weights_sha256=policy.weights_sha256,
        parents=list(range(version))[::-1][:_PARENTS_SHOWN],
        step=step.claim.step if step else None,
        session_id=session.id if session else step.session_id if step else "",
        code_version=session.code_version if session else "",
        reward_sha256=session.reward_sha256 if session else "",
        config=f"{log.store.uri}/{log.key('run.json')}",
        config_sha256=sha256_of_json(run_config(log)),
        outcomes={outcome: len(getattr(step.claim, outcome)) for outcome in OUTCOMES} if step else {},
        dataset_digest=dataset_digest(step) if step else "",
        sampled_by=sampled_by,
        shards=shards,
        groups=groups,
        evaluations=[evaluation for evaluation in state.evaluations if evaluation.version == version],
        verified=verify,
        problems=problems,
    )


def trajectory_lineage(log: RunLog, trajectory: str) -> GroupLineage:
    """Every policy that one attempt, `<group id>/<attempt>`, influenced.

    Raises `InvalidInput`, which names the nearest id, for an attempt that the run does not have.
    """
    group_id, _, number = trajectory.rpartition("/")
    if not re.fullmatch(WHOLE_NUMBER, number):
        ids = command("traj", "ls", log.run_id, store=log.store.uri)
        raise InvalidInput(f"trajectory {trajectory!r}: write it as GROUP/ATTEMPT; `{ids}` lists them")
    attempt, lineage = int(number), _group_lineage(log, group_id)
    if attempt >= lineage.group.expected:
        raise InvalidInput(f"group {group_id!r} has attempts 0 to {lineage.group.expected - 1}, not {attempt}")
    if lineage.shard.problem:
        return lineage
    try:
        table = read_shard(log, log.state.shards[lineage.shard.id])
    except DamagedShard as error:
        return replace(lineage, shard=replace(lineage.shard, problem=error.reason))
    rows = table.filter(pc.and_(pc.equal(table["group_id"], group_id), pc.equal(table["attempt"], attempt)))
    if not rows.num_rows:
        return lineage  # a failed attempt has no row
    [first] = rows.select(["reward", "reward_parts", "status"]).slice(0, 1).to_pylist()
    facts = AttemptFacts(
        attempt=attempt,
        reward=first["reward"],
        reward_parts=dict(first["reward_parts"]),
        status=first["status"],
        sequences=rows.num_rows,
        sampled_tokens=int(flat(rows["loss_mask"]).sum()),
        versions=_versions(rows),
    )
    return replace(lineage, attempt=facts)


def prompt_lineage(log: RunLog, prompt_id: str) -> list[GroupLineage]:
    """The same for every group of one prompt: one per epoch, and one per time that the prompt ran again.

    Raises `InvalidInput`, which names the nearest id, for a prompt that has no group in the run.
    """
    # Only ids are compared: a group's is `<epoch>.<task id>`, and `.retry<k>` if the prompt ran again.
    candidates = [group_id for group_id in log.state.groups if _prompt_of(group_id) == prompt_id]
    group_ids = [group_id for group_id in candidates if log.state.groups[group_id].prompt_id == prompt_id]
    if not group_ids:
        raise InvalidInput(
            f"run {log.run_id!r} has no group of prompt {prompt_id!r}"
            + _nearest(prompt_id, {_prompt_of(group_id) for group_id in log.state.groups})
        )
    return [_group_lineage(log, group_id) for group_id in group_ids]


def _prompt_of(group_id: str) -> str:
    task = group_id.partition(".")[2]
    return re.sub(r"\.retry\d+$", "", task) if ".retry" in task else task


def _group_lineage(log: RunLog, group_id: str) -> GroupLineage:
    state = log.state
    group = state.groups.get(group_id)
    if group is None:
        if re.match(r"eval\d+\.", group_id):
            raise InvalidInput(f"group {group_id!r} is of a held-out evaluation: it is never trained on")
        raise InvalidInput(f"run {log.run_id!r} has no group {group_id!r}" + _nearest(group_id, state.groups))
    outcome = state.outcomes.get(group_id, "pending")
    number = state.step_of.get(group_id)
    step = state.steps[number - 1] if number is not None else None
    reason = ""
    if step is not None:
        reason = next(claimed.reason for claimed in getattr(step.claim, outcome) if claimed.group_id == group_id)
    policy = step.policy.version if step is not None and outcome == "trained" else None
    # Every step trains the newest policy, so a run is one line.
    influenced = list(range(policy, state.newest_version + 1)) if policy is not None else []
    versions = set(influenced)
    return GroupLineage(
        group=group,
        shard=_shard_use(log, state.shard_of[group_id], step),
        attempt=None,
        outcome=outcome,
        reason=reason,
        step=number,
        policy=policy,
        influenced=influenced,
        live=state.newest_version if state.newest_version in versions else None,
        aliases={name: alias.version for name, alias in state.aliases.items() if alias.version in versions},
        registered=[version for version in influenced if version in state.registrations],
        retired=[version for version in influenced if version in state.retired_policies],
    )


def _shard_use(log: RunLog, shard_id: str, step: Step | None) -> ShardUse:
    state = log.state
    shard = state.shards[shard_id]
    problem = f"quarantined: {state.quarantined[shard_id]}" if shard_id in state.quarantined else ""
    if shard_id in state.retired_shards:
        problem = "retired: retention removed its file"
    return ShardUse(
        id=shard_id,
        uri=f"{log.store.uri}/{log.shard_key(shard_id)}",
        sha256=step.shard_sha256.get(shard_id, shard.sha256) if step else shard.sha256,
        rows=shard.num_rows,
        groups=sum(claimed.shard_id == shard_id for claimed in step.claim.trained) if step else 0,
        problem=problem,
    )


def _read_again(log: RunLog, shards: list[ShardUse], group_ids: list[str]) -> tuple[list[ShardUse], set[int]]:
    """The shards with the problems of their files, and the versions that sampled the groups' tokens."""
    checked, versions = [], set[int]()
    for use in shards:
        recorded = log.state.shards[use.id]
        if use.sha256 != recorded.sha256:
            use = replace(use, problem=f"the step recorded another sha256 than the shard's entry, {recorded.sha256}")
        elif not use.problem:
            try:
                table = read_shard(log, recorded)
                trained = pc.is_in(table["group_id"], value_set=pa.array(group_ids, pa.string()))
                versions.update(_versions(table.filter(trained)))
            except DamagedShard as error:
                use = replace(use, problem=error.reason)
        checked.append(use)
    return checked, versions


def _weights_problems(log: RunLog, policy: Policy) -> list[str]:
    """Problems of the policy's files, which are read from the store itself."""
    if policy.version in log.state.retired_policies:
        return ["weights: retired: retention removed them"]
    with staging_folder(home() / "cache") as scratch:
        try:
            PolicyReader(log, scratch).fetch(policy)
        except FileNotFoundError:
            return [f"weights: {log.store.uri}/{policy.path} is missing"]
        except DigestMismatch as error:
            return [f"weights: {error}"]
    return []


def _versions(rows: pa.Table) -> list[int]:
    """Policy versions that sampled the rows' tokens."""
    return [int(version) for version in np.unique(flat(rows["weight_versions"])[flat(rows["loss_mask"])])]


def _nearest(trajectory_id: str, ids: Iterable[str]) -> str:
    """`; the nearest is …`, among neighbours and equal endings: a comparison with all ids would take long."""
    ordered = sorted(ids)
    at = bisect_left(ordered, trajectory_id)
    ending = trajectory_id.partition(".")[2]
    near = ordered[max(0, at - 5) : at + 5] + [name for name in ordered if ending and name.endswith(ending)][:20]
    match = difflib.get_close_matches(trajectory_id, near, n=1, cutoff=0.0)
    return f"; the nearest is {match[0]!r}" if match else ""
