"""Producers and a trainer that work on one run until they are killed; the storage code is real, the model is not.

Several producers race for the same prompts, repeat a commit now and then as a retried task would, and live on clocks
that are days apart. The trainer claims, reads every shard it was given, and leaves the rows it trained in place of a
policy, so that a test can count them without asking the log.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from types import SimpleNamespace
from typing import Any

import storage.log.run_log
from storage.log.claims import next_claim
from storage.log.entries import Policy, Quarantine, Step
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict, RunState
from storage.log.runs import open_run, trainer_lock
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from storage.shards.shards import DamagedShard, commit_shard, read_shard
from tests.builders import SAMPLING, a_config, a_group, provenance

BATCH = 3
RULES = a_config(batch_size=BATCH, max_staleness=3, stale_policy="strict", min_usable=2, max_attempts=10**6)
LEAD = 8 * BATCH
"""Groups that may wait for the trainer; more than `max_staleness` allows, so that some come too late."""
GIVEN_UP: dict[str, Any] = {"accepted": False, "reject_reason": "cancelled: 4 updates behind, bound 3"}
PACE = 0.01
"""Seconds that generation would take; nothing waits for it to be over."""
ENDING = "ending"
"""Once this key is in the store, prompts stop at its number and all producers work up to there."""


def produce(uri: str, run_id: str, seed: int, environment: dict[str, str]) -> None:
    """Commit groups at positions that are not committed yet."""
    draw, log = _start(uri, run_id, seed, environment)
    for number in itertools.count():
        state = log.refresh()
        end = _end(log.store)
        if not end and len(state.pending) > LEAD:
            time.sleep(PACE)
            continue
        free = _free_positions(state, end, draw)
        if not free:
            return
        groups = [
            a_group(
                position,
                rewards=draw.choices([1.0, 0.0, None], k=3),
                version=state.newest_version,
                accepted=draw.random() < 0.9,
                group_id=f"0.task{position}" + (f".retry{count}" if (count := state.retries[position]) else ""),
            )
            for position in free
        ]
        groups = [dataclasses.replace(group, **GIVEN_UP) if draw.random() < 0.05 else group for group in groups]
        origin = provenance(f"{seed}.{number}", run_id=run_id)
        for _ in range(draw.choice([1, 1, 2])):
            try:
                commit_shard(log, groups, provenance=origin, sampling=SAMPLING)
            except Conflict:
                break


def train(uri: str, run_id: str, seed: int, environment: dict[str, str]) -> None:
    """Claim and "train" until the prompts have ended and too few groups are left."""
    draw, log = _start(uri, run_id, seed, environment)
    with trainer_lock(log):
        while True:
            state = log.refresh()
            claim = next_claim(state, RULES)
            if claim is None:
                end = _end(log.store)
                if end and state.positions >= set(range(end)):
                    return
                time.sleep(PACE)
                continue
            rows = []
            try:
                for group in claim.trained:
                    table = read_shard(log, state.shards[group.shard_id])
                    rows += [
                        [group.shard_id, *key]
                        for key in zip(table["group_id"].to_pylist(), table["attempt"].to_pylist(), strict=True)
                        if key[0] == group.group_id
                    ]
            except DamagedShard as error:
                log.append(Quarantine(shard_id=error.shard_id, reason=error.reason))
                continue
            version = claim.base_version + 1
            path = log.key(f"policies/{version}-{seed}")
            log.store.put(path, json.dumps(rows).encode())
            step = Step(
                claim=claim,
                policy=Policy(version=version, path=path, weights_sha256="", parent=claim.base_version),
                shard_sha256={group.shard_id: state.shards[group.shard_id].sha256 for group in claim.trained},
                metrics={"rows": float(len(rows))},
                state_path=None,
                session_id="storm",
            )
            for _ in range(draw.choice([1, 2])):
                log.append(step)


def _start(uri: str, run_id: str, seed: int, environment: dict[str, str]) -> tuple[random.Random, RunLog]:
    os.environ.update(environment)
    draw = random.Random(seed)
    skew = draw.uniform(-3, 3) * 86400
    storage.log.run_log.time = SimpleNamespace(time=lambda: time.time() + skew)  # type: ignore[assignment]
    return draw, open_run(open_store(uri), run_id)


def _free_positions(state: RunState, end: int, draw: random.Random) -> list[int]:
    """A few of the first prompts that are not committed, not always the very first: producers are not in step."""
    first = next(position for position in range(len(state.positions) + 1) if position not in state.positions)
    window = [position for position in range(first, end or first + 16) if position not in state.positions]
    return sorted(draw.sample(window, min(len(window), draw.randint(1, 4))))


def _end(store: ObjectStore) -> int:
    return int(store.get(ENDING)) if store.exists(ENDING) else 0
