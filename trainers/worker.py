"""The trainer worker: claimed shards in, the next policy and a committed step out.

    Claim ─▶ read shards (digests checked) ─▶ Samples ─▶ Trainer.step ─▶ policies/<v>-<attempt>/ ─▶ `Step` log entry

A plain class: `infra/` may host it in another process, tests call it directly. Starting it resumes the run: the last
saved state, then the recorded steps since then, from their recorded shards.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from storage.digests import DIGEST_FILE
from storage.log_entries import Claim, Policy, Step
from storage.object_store import open_store
from storage.run_log import RunLog
from storage.run_state import Conflict
from storage.runs import open_run
from trainers.config import Recipe, TrainSettings
from trainers.replay import Retrainer

PHASES = ("generate", "reward", "commit", "train", "save", "publish")
"""What a round's wall-clock is spent on; each is a metric `<phase>_seconds` of the step."""


class TrainerWorker:
    """Trains one run. Call `start` first."""

    def __init__(
        self,
        *,
        store_uri: str,
        run_id: str,
        settings: TrainSettings,
        learning_rate: float,
        temperature: float,
        max_staleness: int,
        seed: int,
        cache: str,
    ) -> None:
        self._store_uri = store_uri
        self._run_id = run_id
        self._recipe = Recipe(
            settings=settings,
            learning_rate=learning_rate,
            temperature=temperature,
            max_staleness=max_staleness,
            seed=seed,
        )
        self._cache = Path(cache)
        self._unsaved: tuple[Claim, dict[str, float]] | None = None
        self._newest: Claim | None = None  # in the weights; null for the base policy's
        self._halfway = False  # an update was begun and not finished

    def start(self) -> int:
        """Load the run's base policy, resume its optimizer, and return the number of steps re-trained on the way."""
        self._log: RunLog = open_run(open_store(self._store_uri), self._run_id)
        self._retrainer = Retrainer(self._log, self._recipe, cache=self._cache)
        steps = self._log.state.steps
        since = steps[self._retrainer.load_nearest_state(len(steps)) :]
        if since:
            self._retrainer.restore(since)
        self._newest = steps[-1].claim if steps else None
        return len(since)

    def train_step(
        self, claim: Claim, *, extra_metrics: dict[str, float], round_started: float, session_id: str
    ) -> Step:
        """Train on a claim, publish the policy's files and commit the step.

        Raises `storage.shards.DamagedShard` before any weight changes, `storage.run_state.Conflict` when another
        trainer committed this step, or one before it, first. Called again for a step it has committed, it returns
        that step.
        """
        steps = self._log.refresh().steps
        if claim.step <= len(steps) and (done := steps[claim.step - 1]).claim == claim:
            return done
        started = time.perf_counter()
        if self._unsaved is None or self._unsaved[0] != claim:
            if self._halfway or self._newest != (steps[-1].claim if steps else None):
                raise Conflict(
                    f"step {claim.step}: the trainer's weights are not policy version {claim.base_version}; an update "
                    "broke off, or another trainer is working on this run. Stop the other one and start this run again"
                )
            self._unsaved = (claim, self._train(claim))
        # A retry after a failed save must not train the same claim a second time.
        metrics = self._unsaved[1]
        trained = time.perf_counter()
        version, attempt = claim.base_version + 1, uuid.uuid4().hex[:8]
        keep_state = claim.step % self._recipe.settings.checkpoint_every == 0
        state_path = self._log.key(f"state/{claim.step}-{attempt}") if keep_state else None
        policy_path = self._log.key(f"policies/{version}-{attempt}")
        with self._writing(policy_path) as folder:
            digest = self._retrainer.save_policy(folder)
        if state_path is not None:
            with self._writing(state_path) as folder:
                self._retrainer.save_state(folder, step=claim.step)
        finished = time.perf_counter()
        phases = {**extra_metrics, "train_seconds": trained - started, "save_seconds": finished - trained}
        round_seconds = time.time() - round_started
        busy_seconds = sum(phases[f"{phase}_seconds"] for phase in PHASES)
        step = Step(
            claim=claim,
            policy=Policy(version=version, path=policy_path, weights_sha256=digest, parent=claim.base_version),
            shard_sha256={g.shard_id: self._log.state.shards[g.shard_id].sha256 for g in claim.trained},
            metrics={
                **metrics,
                **phases,
                "round_seconds": round_seconds,
                # Generation may run beside training; then the phases overlap and nothing is idle.
                "idle_seconds": max(0.0, round_seconds - busy_seconds),
                "tokens_per_second": metrics["trained_tokens"] / round_seconds,
            },
            state_path=state_path,
            session_id=session_id,
        )
        self._log.append(step)
        self._unsaved = None
        return step

    def close(self) -> None:
        """Nothing to release: what matters is in the store."""

    def _train(self, claim: Claim) -> dict[str, float]:
        samples = self._retrainer.samples(claim)
        self._halfway = True
        metrics = self._retrainer.train(claim, samples)
        self._halfway, self._newest = False, claim
        return metrics

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        """A temporary folder whose files go to the store when the block ends well, the seal last."""
        with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
            yield Path(scratch) / "content"
            self._log.store.put_folder(Path(scratch) / "content", path, last=DIGEST_FILE)
