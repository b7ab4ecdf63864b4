"""A run in Weights & Biases, or with WANDB_MODE=offline in `wandb` of the state folder; `wandb sync` uploads that.

In: rows. Out: a row of the history each: its `_step` is the row's number, and charts are drawn over `global_step`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from storage.tracking.rows import PROJECT, Row, TrackedRun

_SECONDS_TO_START, _SECONDS_TO_END = 20.0, 120.0
_EXIT_CODES = {"finished": 0, "stopped": 255}
_MAGIC_BYTES, _HEADER, _BLOCK, _WHOLE, _LAST = 7, struct.Struct("<IHB"), 32768, 1, 4
"""Layout of a `.wandb` file, a log in LevelDB's format: records are cut into pieces that do not cross blocks."""


class WandbRun:
    """A run of the project `$WANDB_PROJECT`, or `millrace`; where W&B has its id, it goes on."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.id,
            name=run.name,
            config=dict(run.config),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                x_disable_stats=True,  # the machine's metrics are in the log
                init_timeout=_SECONDS_TO_START,
                finish_timeout=_SECONDS_TO_END,
                finish_timeout_raises=True,
            ),
        )
        self._run.define_metric("*", step_metric="global_step")
        offline = Path(self._run.settings.wandb_dir).glob(f"offline-run-*/run-{run.id}.wandb")
        self.num_rows = max(self._run.step, sum(_num_rows(file) for file in offline))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({**row.metrics, "global_step": row.step, "_timestamp": row.at}, step=row.number)

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES.get(outcome, 1))


def is_logged_in() -> bool:
    """True if there is a key, or if none is needed; sends no request."""
    offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    return offline or wandb.login(prompt=False, verify=False)


def _num_rows(file: Path) -> int:
    return sum(Record.FromString(record).HasField("history") for record in _records(file.read_bytes()))


def _records(data: bytes) -> Iterator[bytes]:
    """The records of such a file, up to where the process that wrote it was killed."""
    at, record = _MAGIC_BYTES, b""
    while at + _HEADER.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size + size
        if not kind or at > len(data):
            return
        record += data[at - size : at]
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
