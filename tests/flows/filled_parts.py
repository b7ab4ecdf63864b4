"""What a run writes, part by part, on a disk that fills meanwhile, and again once there is room.

    unshare --map-root-user --mount python -m tests.flows.filled_parts FOLDER LEFT

In: an empty folder, and the bytes that are left on the disk; what each part writes is larger. Out: on stdout, JSON with
a row per part. The disk is in memory, and only this process sees it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from settings.errors import UserError, disk_full
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE
from storage.objects.object_store import LocalStore
from storage.objects.staging import staging_folder
from storage.policies.policies import PolicyWriter
from storage.records import Message
from storage.views.search_index import SearchIndex
from tests.builders import a_group, a_log, a_policy_folder, a_trajectory, a_turn, commit
from tests.flows.small_disk import fill, mount

WEIGHTS = np.random.default_rng(0).bytes(16_000_000)


@dataclass
class Part:
    """Something that writes, and how to see that it is whole or not there at all."""

    write: Callable[[], object]
    is_there: Callable[[], bool]


def parts(disk: Path, other: Path) -> dict[str, Part]:
    """Everything that is written is on `disk`; what it is made of is on another one."""
    shards, policies, indexed = a_log(LocalStore(disk / "a")), a_log(LocalStore(disk / "b")), a_log(LocalStore(other))
    draw = np.random.default_rng(1)
    turn = a_turn(draw.integers(0, 2**31, 2_000_000).tolist())
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=[turn])])
    text = "".join(map(chr, draw.integers(97, 123, 12_000_000)))
    said = [Message(role="assistant", content=text, is_completion=True)]
    commit(indexed, "s0", a_group(0, trajectories=[a_trajectory(1.0, messages=said)]))
    a_policy_folder(other / "policy", weights=WEIGHTS)
    index = SearchIndex(indexed, disk / "index", load_embedding=lambda name: lambda texts: [])
    writer = PolicyWriter(policies, disk / "cache", anchor_every=4)

    def stage() -> None:
        with staging_folder(disk / "cache") as folder:
            (folder / "weights").write_bytes(WEIGHTS)

    return {
        "committing": Part(
            lambda: commit(shards, "s0", group), lambda: bool(RunLog(shards.store, "run").refresh().shards)
        ),
        "publishing": Part(
            lambda: writer.put(other / "policy", "p", version=1), lambda: policies.store.exists(f"p/{DIGEST_FILE}")
        ),
        "staging": Part(stage, lambda: bool(list((disk / "cache/staging").iterdir()))),  # it removes what it made
        "indexing": Part(index.update, lambda: index.exists and not index.behind()),
    }


def main(folder: Path, left: int) -> None:
    disk, filler = folder / "disk", folder / "disk/filler"
    disk.mkdir()
    mount(disk)
    rows = {}
    for name, part in parts(disk, folder / "other").items():
        fill(filler, left)
        sentence = ""
        try:
            part.write()
        except (UserError, OSError, RuntimeError) as error:
            sentence = str(disk_full(error, {"the disk": disk}))
        is_half_there = part.is_there()
        filler.unlink()
        part.write()
        rows[name] = {"sentence": sentence, "is_half_there": is_half_there, "is_there": part.is_there()}
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
