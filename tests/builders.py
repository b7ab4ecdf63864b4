"""Small records for tests: `a_group(rewards=[1, 0])`, `a_step(state, trained=…)`, and a store in memory.

In: the few values a test is about. Out: complete records, everything else plausible and fixed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from infra.ports import free_port
from infra.weight_broadcast import Broadcast
from rollouts.production.executor import Executor
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.quota import Quota
from settings.run_file import RunConfig, make_config
from storage.log.entries import Claim, ClaimedGroup, GroupSummary, Policy, Session, Shard, Step
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.log.runs import create_run
from storage.objects.digests import seal_folder
from storage.objects.object_store import LocalStore, StoredFile
from storage.records import Message, RolloutGroup, Sampling, Task, Trajectory, Turn
from storage.shards.codec import Provenance, summarise
from storage.shards.shards import commit_shard

if TYPE_CHECKING:
    from tasks.session import RunSession


class Panic(BaseException):
    """As a library in Rust raises it: no `Exception`."""


class Wordless(Exception):
    """Cannot say what happened."""

    def __str__(self) -> str:
        raise KeyError("words")


def a_config(**values: Any) -> RunConfig:
    """Settings of a run: `a_config(batch_size=2, stale_policy="strict")`; a name finds its table by itself."""
    if "max_model_len" in values:
        values = {"max_tokens": min(256, values["max_model_len"] // 2)} | values
    document: dict[str, Any] = {"workflow": "tests:none", "rollout": {"attempt_timeout": 10.0}}
    for name, value in values.items():
        if name in RunConfig.model_fields:
            document[name] = {**document.get(name, {}), **value} if isinstance(value, dict) else value
            continue
        blocks = RunConfig.model_fields.items()
        table = next(key for key, field in blocks if name in getattr(field.annotation, "model_fields", ()))
        document.setdefault(table, {})[name] = value
    return make_config(document, source="test")


BASE = Policy(version=0, path="models/base", weights_sha256="0" * 64, parent=None)


def a_session(log: RunLog | None = None, *, id: str = "s", cluster: Any = None, **values: Any) -> RunSession:
    """A session without processes, on a log in memory; `values` as in `a_config`."""
    from tasks.session import RunSession  # Prefect, a second to import

    log = a_log() if log is None else log
    memory: Any = SimpleNamespace(peak_bytes=0)
    return RunSession(log, cluster, a_config(**values), memory=memory, id=id)


class FreePrompts:
    """Leases prompts to an executor as a log would: the first ones that are free."""

    def __init__(self, tasks: Sequence[Task], quota: Quota, *, committed: Collection[int] = ()) -> None:
        self._order = PromptOrder(tasks, seed=0)
        self._quota = quota
        self._leased = set(committed)

    async def __call__(self) -> list[Prompt]:
        free = (position for position in itertools.count() if position not in self._leased)
        positions = list(itertools.islice(free, self._quota.wanted))
        self._leased.update(positions)
        return [self._order.at(position) for position in positions]


async def wait_for_work(executor: Executor) -> None:
    """Return once there is something to collect or room to start something, as a rollout worker does."""
    while not executor.has_work:
        await executor.wait_for_change()


class MemoryStore:
    """An object store without a disk, for tests that write thousands of entries."""

    def __init__(self) -> None:
        self.uri = "memory:"
        self.files: dict[str, bytes] = {}

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if key in self.files:
            return False
        self.files[key] = data
        return True

    def put(self, key: str, data: bytes) -> None:
        self.files[key] = data

    def get(self, key: str) -> bytes:
        if key not in self.files:
            raise FileNotFoundError(key)
        return self.files[key]

    def get_buffer(self, key: str) -> pa.Buffer:
        return pa.py_buffer(self.get(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.files.get(key) for key in keys]

    def exists(self, key: str) -> bool:
        return key in self.files

    def modified_at(self, key: str) -> float:
        self.get(key)
        return time.time()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.files.pop(key, None)

    def walk(self, prefix: str) -> list[StoredFile]:
        inside = sorted(key for key in self.files if key.startswith(f"{prefix}/"))
        return [StoredFile(key=key, num_bytes=len(self.files[key]), modified_at=0.0) for key in inside]

    def open_input(self, key: str) -> pa.NativeFile:
        return pa.BufferReader(self.get(key))

    def names(self, prefix: str) -> list[str]:
        inside = [key.removeprefix(f"{prefix}/") for key in self.files if key.startswith(f"{prefix}/")]
        return sorted({key.split("/")[0] for key in inside})

    def put_folder(self, folder: Path, prefix: str, *, last: str, given: bool = False) -> None:
        raise NotImplementedError

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        raise NotImplementedError


def a_turn(
    sampled: Sequence[int] = (12, 1),
    *,
    context: Sequence[int] = (2, 8, 3),
    versions: Sequence[int] | int = 0,
    sequence_idx: int = 0,
    **fields: Any,
) -> Turn:
    """One turn; `versions` is one version for all tokens, or one per token."""
    return Turn(
        context_ids=list(context),
        sampled_ids=list(sampled),
        weight_versions=[versions] * len(sampled) if isinstance(versions, int) else list(versions),
        sequence_idx=sequence_idx,
        **{"finish_reason": "stop", "logprobs": [-0.5] * len(sampled), **fields},
    )


def a_trajectory(
    reward: float | None = 1.0, *, attempt: int = 0, turns: Sequence[Turn] | None = None, **fields: Any
) -> Trajectory:
    """One attempt that said `7`."""
    said = [Message(role="user", content="3"), Message(role="assistant", content="7", is_completion=True)]
    return Trajectory(
        attempt=attempt,
        reward=reward,
        turns=[a_turn()] if turns is None else list(turns),
        **{"messages": said, "status": "ok", **fields},
    )


def a_group(
    position: int = 0,
    *,
    rewards: Sequence[float | None] = (1.0, 0.0),
    version: int = 0,
    accepted: bool = True,
    group_id: str = "",
    trajectories: Sequence[Trajectory] | None = None,
    expected: int | None = None,
) -> RolloutGroup:
    """The group at a prompt position; a reward of None is an attempt that failed with `env_error`."""
    if trajectories is None:
        trajectories = [
            a_trajectory(
                reward,
                attempt=attempt,
                turns=[a_turn(versions=version)],
                status="ok" if reward is not None else "env_error",
            )
            for attempt, reward in enumerate(rewards)
        ]
    return RolloutGroup(
        id=group_id or f"0.task{position}",
        task=Task(id=f"task{position}", prompt="3"),
        position=position,
        epoch=0,
        expected=len(trajectories) if expected is None else expected,
        trajectories=list(trajectories),
        accepted=accepted,
        reject_reason="" if accepted else "uniform reward 1",
    )


def a_summary(position: int = 0, **fields: Any) -> GroupSummary:
    """What the log keeps of `a_group(position, …)`."""
    own = {name: fields.pop(name) for name in ("out_of_room",) if name in fields}
    return dataclasses.replace(summarise(a_group(position, **fields)), **own)


def a_shard(shard_id: str, groups: Sequence[GroupSummary], *, is_eval: bool = False) -> Shard:
    """A shard's log record; no file belongs to it."""
    return Shard(
        id=shard_id,
        sha256="f" * 64,
        num_rows=sum(group.rows for group in groups),
        num_tokens=2,
        num_bytes=100,
        head_version=0,
        tail_version=0,
        is_eval=is_eval,
        groups=list(groups),
        producer="rollout-0",
        seconds={"generate": 1.0},
    )


def a_claim(state: RunState, **outcomes: Sequence[str]) -> Claim:
    """The next step's claim of groups by id: `a_claim(state, trained=["0.task0"], stale=["0.task1"])`."""
    assert state.live is not None
    claimed = {
        outcome: [ClaimedGroup(shard_id=state.shard_of.get(group_id, "?"), group_id=group_id) for group_id in ids]
        for outcome, ids in {"trained": (), "stale": (), "filtered": (), "failed": (), **outcomes}.items()
    }
    return Claim(step=state.step + 1, base_version=state.live.version, **claimed)


def a_step(state: RunState, claim: Claim | None = None, *, attempt: str = "a", **outcomes: Sequence[str]) -> Step:
    """The step that trains `claim`, or one made of group ids by outcome."""
    claim = claim or a_claim(state, **outcomes)
    version = claim.base_version + 1
    return Step(
        claim=claim,
        policy=Policy(
            version=version,
            path=f"runs/run/policies/{version}-{attempt}",
            weights_sha256=f"{version:064x}",
            parent=claim.base_version,
        ),
        shard_sha256={group.shard_id: state.shards[group.shard_id].sha256 for group in claim.trained},
        metrics={"loss": 0.5},
        state_path=None,
        session_id=state.sessions[-1].id if state.sessions else "",
    )


def a_log(store: Any = None, *, run_id: str = "run", base: Policy = BASE) -> RunLog:
    """A run with a session and its base policy: two entries."""
    log = create_run(store or MemoryStore(), run_id, {"seed": 0})
    log.append(Session(id="first", code_version="c0de"))
    log.append(base)
    return log


def provenance(shard_id: str = "s0", *, run_id: str = "run") -> Provenance:
    return Provenance(
        run_id=run_id,
        shard_id=shard_id,
        producer="rollout-0",
        tokenizer_sha256="t" * 64,
        chat_template_sha256="c" * 64,
        config_sha256="a" * 64,
        code_version="c0de",
    )


SAMPLING = Sampling(max_tokens=8)


def commit(log: RunLog, shard_id: str, *groups: RolloutGroup, is_eval: bool = False) -> Shard:
    """Commit groups as a shard of the run, with its file."""
    made_by = provenance(shard_id, run_id=log.run_id)
    return commit_shard(log, groups, provenance=made_by, sampling=SAMPLING, is_eval=is_eval)


def a_policy_folder(folder: Path, *, weights: bytes = b"weights", tokenizer: Path | None = None) -> str:
    """A sealed folder with stand-in weights, beside a copy of a tokenizer; returns the weights digest."""
    folder.mkdir(parents=True)
    for file in sorted(tokenizer.iterdir()) if tokenizer else []:
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_bytes(weights)
    return seal_folder(folder)


def local_store(folder: Path) -> LocalStore:
    return LocalStore(folder / "store")


def a_broadcast(policy: Policy, *, num_receivers: int = 1) -> Broadcast:
    """By gloo, within this machine."""
    return Broadcast(
        host="127.0.0.1",
        port=free_port(),
        backend="gloo",
        version=policy.version,
        weights_sha256=policy.weights_sha256,
        num_receivers=num_receivers,
    )
