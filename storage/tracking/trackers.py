"""The other places that a run's metrics go to, beside MLflow: TensorBoard, Trackio and Weights & Biases.

    log entry with metrics ─▶ row n ─▶ row n of the same run there

In: a run's log. Out: a row for each step and each evaluation, under MLflow's names. Rows are counted: those that a
place has are not sent again. So a run that was killed, or could not reach the place, goes on where the place stands.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

from settings.errors import InvalidInput, MissingPackage, missing_package
from storage.log.entries import Registration
from storage.log.run_log import RunLog
from storage.log.runs import birth_id, outcome, run_config
from storage.objects.digests import sha256_of_json
from storage.tracking.follower import FollowerUnavailable
from storage.tracking.metrics import charted
from storage.tracking.rows import Place, Row, TrackedRun

TITLES = {"tensorboard": "TensorBoard", "trackio": "Trackio", "wandb": "Weights & Biases"}
"""Word of `tracking.also`, and name of the package and of our extra → what people call it."""


class Tracker:
    """One run's follower in one of the places."""

    def __init__(self, log: RunLog, kind: str) -> None:
        self.name = TITLES[kind]
        self._log = log
        self._kind = kind
        self._place: Place | None = None
        self.num_entries = self._num_rows = 0

    @functools.cached_property
    def _evaluation(self) -> dict[str, Any]:
        """The run's settings of evaluations: a run's configuration is frozen."""
        evaluation: dict[str, Any] = run_config(self._log).get("evaluation", {})
        return evaluation

    def sync(self) -> list[Registration]:
        """Send the rows that the place does not have, and end the run there as its newest session did."""
        log, ended = self._log, outcome(self._log)
        entries = log.entries[self.num_entries :]
        charted_entries = [(entry, *charted(entry, self._evaluation)) for entry in entries]
        rows = [
            Row(number=self._num_rows + index, step=step, at=entry.written_at, metrics=metrics)
            for index, (entry, step, metrics) in enumerate(each for each in charted_entries if each[2])
        ]
        try:
            if rows and self._place is None:
                self._place = _open(self._kind, tracked_run(log))
            if self._place is not None:
                self._place.add([row for row in rows if row.number >= self._place.num_rows])
                if ended != "running":
                    self._place.close(ended)
                    self._place = None
        except Exception as error:  # each library has errors of its own
            raise FollowerUnavailable(f"{type(error).__name__}: {error}") from error
        self.num_entries, self._num_rows = self.num_entries + len(entries), self._num_rows + len(rows)
        return []


def tracked_run(log: RunLog) -> TrackedRun:
    """The run under the identity that it has in every such place."""
    birth = birth_id(log)
    identity = sha256_of_json([birth] if birth else [log.store.uri, log.run_id, log.state.sessions[0].id])
    return TrackedRun(name=log.run_id, id=identity[:8], config=run_config(log))


def check_trackers(kinds: Sequence[str]) -> None:
    """Raise `MissingPackage` or `InvalidInput` unless each place can be written to, as far as this machine can tell."""
    for kind in kinds:
        if importlib.util.find_spec(kind) is None:
            error = missing_package(kind)
            raise MissingPackage(f"tracking.also = [{kind!r}]: {error or f'the package {kind} is not installed'}")
    if "wandb" in kinds:
        from storage.tracking.to_wandb import is_logged_in

        if not is_logged_in():
            raise InvalidInput(
                "tracking.also = ['wandb']: there is no key for Weights & Biases; run `wandb login`, or set "
                "WANDB_API_KEY, or WANDB_MODE=offline"
            )


def _open(kind: str, run: TrackedRun) -> Place:
    match kind:
        case "tensorboard":
            from storage.tracking.to_tensorboard import TensorBoardRun

            return TensorBoardRun(run)
        case "trackio":
            from storage.tracking.to_trackio import TrackioRun

            return TrackioRun(run)
        case _:
            from storage.tracking.to_wandb import WandbRun

            return WandbRun(run)
