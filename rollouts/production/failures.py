"""Failed attempts, logged once per kind with a count; and `FailsAlike` if a run's first batch fails for one reason."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from settings.errors import UserError, failure_kind, in_one_line
from storage.records import RolloutGroup, Trajectory
from storage.shards.failed_attempts import FailedAttempt, kinds_of

logger = logging.getLogger("millrace.rollout")

REPEAT_SECONDS = 60.0
"""The count of a kind is logged again after so long, if it has grown."""
MOST_KINDS = 20
"""Failures of further kinds are counted together."""
FEWEST_PROMPTS = 4
"""One bad problem must not stop a run whose batches are small."""


class FailsAlike(UserError):
    """Every attempt of a run's first batch failed at one place in one way; the message has the traceback."""


@dataclass
class _Kind:
    text: str
    count: int = 0
    logged_at: float = -math.inf


class Failures:
    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def add(self, attempts: Iterable[FailedAttempt]) -> None:
        """Count these. A new kind is logged at once with its frames, a known one later in one line."""
        for count, attempt in kinds_of(attempts):
            name, text = failure_kind(attempt.error), attempt.error
            if name not in self._kinds and len(self._kinds) >= MOST_KINDS:
                name, text = "others", f"failures of other kinds, the first is {in_one_line(attempt.error)}"
            kind = self._kinds.setdefault(name, _Kind(text))
            is_new, kind.count = not kind.count, kind.count + count
            if time.monotonic() - kind.logged_at >= REPEAT_SECONDS:
                kind.logged_at = time.monotonic()
                frames = kind.text.partition("\n  at ")[1:] if is_new else ()
                counted = f"{kind.count} attempt{'s' * (kind.count > 1)}"
                logger.warning("%s: %s%s", counted, in_one_line(kind.text), "".join(frames))


class FirstBatch:
    """The first groups of a run, for as long as all their attempts fail at one place in one way.

    Those that will not run again are held back meanwhile: if the run stops, their prompts are still free.
    """

    def __init__(self) -> None:
        self._positions: set[int] = set()
        self._text = ""
        self._held: list[RolloutGroup] = []
        self._is_over = False

    def pass_on(self, group: RolloutGroup, *, is_over: bool) -> list[RolloutGroup]:
        """The groups that may be committed now that this one has finished. `is_over`: the run has an accepted group."""
        self._text = self._text or group.trajectories[0].error
        self._is_over = self._is_over or is_over or not all(map(self._fails_alike, group.trajectories))
        if self._is_over:
            held, self._held = self._held, []
            return [*held, group]
        self._positions.add(group.position)
        if group.will_retry:
            return [group]
        self._held.append(group)
        return []

    def failure(self, batch_size: int) -> FailsAlike | None:
        """Why the run stops, once so many prompts have failed, and at least `FEWEST_PROMPTS`."""
        if self._is_over or len(self._positions) < max(batch_size, FEWEST_PROMPTS):
            return None
        return FailsAlike(
            f"all attempts at the first {len(self._positions)} prompts failed in one way:\n{self._text}\n"
            "Mend the workflow, then start this run again: it attempts the same prompts"
        )

    def _fails_alike(self, attempt: Trajectory) -> bool:
        in_user_code = attempt.status in ("env_error", "reward_error")
        return in_user_code and failure_kind(attempt.error) == failure_kind(self._text)
