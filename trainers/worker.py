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
        max_staleness: float,
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
        self._policy_path: str | None = None  # of the policy in the weights; null while the log knows none like them

    def start(self) -> int:
        """Load the run's base policy, resume its optimizer, and return the number of steps re-trained on the way."""
        self._log: RunLog = open_run(open_store(self._store_uri), self._run_id)
        self._retrainer = Retrainer(self._log, self._recipe, cache=self._cache)
        steps = self._log.state.steps
        since = steps[self._retrainer.load_nearest_state(len(steps)) :]
        if since:
            self._retrainer.restore(since)
        self._unsaved, self._policy_path = None, self._live().path
        return len(since)

    def train_step(
        self, claim: Claim, *, extra_metrics: dict[str, float], round_started: float, session_id: str
    ) -> Step:
        """Train on a claim, publish the policy's files and commit the step.

        Raises `storage.shards.DamagedShard` before any weight changes, `storage.run_state.Conflict` when another
        trainer committed this step, or one before it, first. Called again for a step this session has committed, it
        returns that step.
        """
        steps = self._log.refresh().steps
        if claim.step <= len(steps):
            done = steps[claim.step - 1]
            # Two trainers build equal claims from one log: what tells them apart is the session.
            if (done.claim, done.session_id) != (claim, session_id):
                raise Conflict(
                    f"step {claim.step} is committed: another trainer is working on this run; stop one of them, or "
                    "use another `run` id"
                )
            self._took(done)  # its commit may have succeeded without an answer
            return done
        started = time.perf_counter()
        if self._unsaved is None or self._unsaved[0] != claim:
            if self._policy_path != self._live().path:
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
        if claim.fallback == "skip_step":  # the weights are those of the version before: so are their files
            live = self._live()
            policy_path, digest = live.path, live.weights_sha256
        else:
            policy_path = self._log.key(f"policies/{version}-{attempt}")
            with self._writing(policy_path) as folder:
                digest = self._retrainer.save_policy(folder)
        if state_path is not None:
            with self._writing(state_path) as folder:
                self._retrainer.save_state(folder, step=claim.step)
        finished = time.perf_counter()
        phases = {**extra_metrics, "train_seconds": trained - started, "save_seconds": finished - trained}
        # The round may have started by another machine's clock; it took no less than was measured here.
        round_seconds = max(time.time() - round_started, finished - started)
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
        self._took(step)
        return step

    def close(self) -> None:
        """Nothing to release: what matters is in the store."""

    def _train(self, claim: Claim) -> dict[str, float]:
        samples = self._retrainer.samples(claim)
        if claim.fallback != "skip_step":
            self._policy_path = None
        return self._retrainer.train(claim, samples)

    def _took(self, step: Step) -> None:
        """Note that the weights trained on the step's claim are the policy it names."""
        if self._unsaved is not None and self._unsaved[0] == step.claim:
            self._unsaved, self._policy_path = None, step.policy.path

    def _live(self) -> Policy:
        live = self._log.state.live
        assert live is not None, "a run has a base policy before it has a trainer"
        return live

    @contextlib.contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        """A temporary folder whose files go to the store when the block ends well, the seal last."""
        with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
            yield Path(scratch) / "content"
            self._log.store.put_folder(Path(scratch) / "content", path, last=DIGEST_FILE)
