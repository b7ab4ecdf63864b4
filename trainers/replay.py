"""Recorded steps trained again from their recorded shards: what a resume and a replay have in common, and the replay.

    saved state, or base policy ─▶ steps as recorded ─▶ the weights the log names     Retrainer, also for a resume
                                          └─▶ the span of a replay, perhaps with a change ─▶ compared with the record

Nothing is generated and nothing is committed. `infra/` hosts a `ReplayWorker` as it hosts the trainer, because equal
weights need equal threads.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from storage.digests import DigestMismatch, verify_folder
from storage.log_entries import Claim, Policy, Step
from storage.object_store import open_store
from storage.replay import CannotReplay, ReplayedStep, ReplayPlan, later_start, saved_steps
from storage.rewards import read_rewards, with_rewards
from storage.run_log import RunLog
from storage.runs import open_run
from storage.shards import DamagedShard, read_shard
from storage.turn_metrics import turn_metrics
from trainers.checkpoint import load_state, load_weights, save_policy, save_state
from trainers.config import Recipe
from trainers.samples import COLUMNS, Samples, gather_samples
from trainers.trainer import Trainer

logger = logging.getLogger("millrace.trainer")


class Retrainer:
    """A run's trainer, fed with the groups its log says were claimed."""

    def __init__(self, log: RunLog, recipe: Recipe, *, cache: Path) -> None:
        """Start from the base policy. Raises `storage.digests.DigestMismatch` where its folder is altered."""
        torch.manual_seed(recipe.seed)
        self._log = log
        self._recipe = recipe
        self._cache = cache
        self._base_folder = self._fetch(log.state.policies[0].path)
        verify_folder(self._base_folder)
        self.trainer = Trainer(
            self._base_folder,
            recipe.settings,
            learning_rate=recipe.learning_rate,
            temperature=recipe.temperature,
            seed=recipe.seed,
        )
        self._dtype = _stored_dtype(self._base_folder)

    def load_nearest_state(self, at_most: int) -> int:
        """Load the newest saved state of the steps up to `at_most`; returns its step, 0 for the base policy.

        Raises `ValueError` for a state of another step than the log says.
        """
        for step in saved_steps(self._log.state, at_most=at_most):
            assert step.state_path is not None
            try:
                loaded = self.load_state(self._fetch(step.state_path))
            except (DigestMismatch, FileNotFoundError) as error:
                logger.warning(
                    "the state of step %d cannot be loaded, an earlier one will do: %s", step.claim.step, error
                )
                continue
            if loaded != step.claim.step:
                raise ValueError(
                    f"{self._log.store.uri}/{step.state_path} holds the state of step {loaded}, the log says of step "
                    f"{step.claim.step}; put the right folder back, or remove it and an earlier one will do"
                )
            return loaded
        return 0

    def samples(self, claim: Claim, *, rewards: str = "") -> Samples | None:
        """A claim's rows, read from its shards, with the recorded rewards or those of a rescore; null where it trains
        nothing.

        Raises `storage.shards.DamagedShard` and `storage.rewards.DamagedRewards`.
        """
        if claim.fallback:
            return None
        shards = [self._log.state.shards[name] for name in dict.fromkeys(group.shard_id for group in claim.trained)]
        tables = {shard.id: read_shard(self._log, shard, columns=(*COLUMNS, "turns")) for shard in shards}
        if rewards:
            tables = {s.id: with_rewards(tables[s.id], read_rewards(self._log, s, rewards)) for s in shards}
        samples = gather_samples(claim.trained, tables)
        return dataclasses.replace(samples, turn_metrics=turn_metrics(claim.trained, tables))

    def train(self, claim: Claim, samples: Samples | None) -> dict[str, float]:
        """One optimizer step, or what the claim does instead of one; returns its metrics."""
        if samples is not None:
            metrics = self.trainer.step(
                samples, step=claim.step, base_version=claim.base_version, max_staleness=self._recipe.max_staleness
            )
            return {**metrics, **samples.turn_metrics}
        nothing = {"trained_tokens": 0.0, "trained_rows": 0.0, "trained_groups": 0.0}
        if claim.fallback == "skip_step":
            return {**nothing, "skipped": 1.0}
        return {**nothing, **self.trainer.step_without_gradient(step=claim.step)}

    def restore(self, steps: Sequence[Step]) -> None:
        """Train recorded steps again; without the weights they made, take the recorded ones."""
        try:
            for step in steps:
                self.train(step.claim, self.samples(step.claim))
        except DamagedShard as error:
            logger.warning("step %d cannot be trained again: %s", step.claim.step, error)
        self.settle(steps[-1])

    def settle(self, step: Step) -> bool:
        """True when the weights are those `step` made; if not, take the recorded ones.

        Raises `FileNotFoundError` where those are gone, `storage.digests.DigestMismatch` where they are altered.
        """
        with tempfile.TemporaryDirectory() as scratch:
            digest = self.save_policy(Path(scratch) / "policy")
        if digest == step.policy.weights_sha256 or self.is_base(step.policy):
            return True
        logger.warning(
            "re-training up to step %d gave other weights than recorded (hardware, threads, or a lost shard); "
            "going on from the recorded weights with the optimizer as it is",
            step.claim.step,
        )
        load_weights(self.trainer.model, self.fetch_policy(step.policy))
        return False

    def is_base(self, policy: Policy) -> bool:
        """True where every step up to this policy was skipped. Its files are the base model's own, and the same weights
        written by the trainer may be other bytes."""
        return policy.path == self._log.state.policies[0].path

    def fetch_policy(self, policy: Policy) -> Path:
        """A local folder with a recorded policy."""
        return self._fetch(policy.path)

    def save_policy(self, folder: Path) -> str:
        """Write the weights as a sealed folder in HF layout; returns their digest."""
        return save_policy(self.trainer.model, self._base_folder, folder, dtype=self._dtype)

    def save_state(self, folder: Path, *, step: int) -> None:
        """Write everything the next step depends on."""
        save_state(self.trainer.model, self.trainer.optimizer, folder, step=step)

    def load_state(self, folder: Path) -> int:
        """Take over what `save_state` wrote, perhaps under another recipe; returns its step."""
        return load_state(self.trainer.model, self.trainer.optimizer, folder)

    def _fetch(self, path: str) -> Path:
        return self._log.store.fetch_folder(path, self._cache)


class ReplayWorker:
    """Trains a plan's steps again, one call each. Call `start` first, `close` at the end."""

    def __init__(
        self,
        *,
        store_uri: str,
        run_id: str,
        plan: ReplayPlan,
        recorded: Recipe,
        changed: Recipe,
        rewards: str,
        cache: str,
    ) -> None:
        """`recorded` trains up to the span and `changed` inside it, where `rewards` names those of a rescore."""
        self._store_uri = store_uri
        self._run_id = run_id
        self._plan = plan
        self._recorded = recorded
        self._changed = changed
        self._rewards = rewards
        self._cache = Path(cache)
        self._scratch = Path(tempfile.mkdtemp(prefix="millrace-replay-"))

    def start(self) -> int:
        """Load the nearest saved state before the span; returns its step, 0 for the base policy."""
        self._log = open_run(open_store(self._store_uri), self._run_id)
        self._retrainer = Retrainer(self._log, self._recorded, cache=self._cache)
        loaded = self._retrainer.load_nearest_state(self._plan.first - 1)
        if loaded == self._plan.first - 1:
            self._enter_span()
        return loaded

    def lead_up(self, step: int) -> bool:
        """Train a step before the span, as it was recorded. The last of them says whether its weights are the
        recorded ones; the others say True.

        Raises `storage.replay.CannotReplay` when its shards are damaged, or when the span needs its recorded weights
        and they are gone.
        """
        recorded = self._log.state.steps[step - 1]
        self._train(recorded, rewards="")
        if step < self._plan.first - 1:
            return True
        try:
            identical = self._retrainer.settle(recorded)
        except (FileNotFoundError, DigestMismatch) as error:
            state, version = self._log.state, recorded.policy.version
            reason = "retention removed them" if version in state.retired_policies else str(error)
            raise CannotReplay(
                f"the steps up to {step} gave other weights than recorded, and step {step + 1} cannot start from the "
                f"recorded ones, policy {version}: {reason}; {later_start(state, step + 1)}"
            ) from error
        self._enter_span()
        return identical

    def retrain(self, step: int) -> ReplayedStep:
        """Train a step of the span and compare its weights with the recorded ones.

        Raises `storage.replay.CannotReplay` when its shards are damaged, `storage.rewards.DamagedRewards`.
        """
        recorded = self._log.state.steps[step - 1]
        metrics = self._train(recorded, rewards=self._rewards)
        folder = self._scratch / str(step)
        digest = self._retrainer.save_policy(folder)
        if self._retrainer.is_base(recorded.policy):
            digest = recorded.policy.weights_sha256
        identical = digest == recorded.policy.weights_sha256
        distance, cosine = (0.0, 1.0) if identical else self._compare(folder, recorded.policy)
        shutil.rmtree(folder)
        return ReplayedStep(
            step=step,
            identical=identical,
            recorded_sha256=recorded.policy.weights_sha256,
            replayed_sha256=digest,
            recorded={key: recorded.metrics[key] for key in metrics if key in recorded.metrics},
            replayed=metrics,
            distance=distance,
            cosine=cosine,
        )

    def save_policy(self, folder: str) -> str:
        """Write the newest replayed policy into a folder that does not exist yet; returns its weights digest."""
        return self._retrainer.save_policy(Path(folder))

    def close(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _enter_span(self) -> None:
        if self._changed != self._recorded:
            # Another recipe may need another optimizer, or another sharding: the state moves into a new trainer.
            self._retrainer.save_state(self._scratch / "state", step=self._plan.first - 1)
            del self._retrainer
            self._retrainer = Retrainer(self._log, self._changed, cache=self._cache)
            self._retrainer.load_state(self._scratch / "state")
            shutil.rmtree(self._scratch / "state")
        self._retrainer.save_policy(self._scratch / "start")

    def _train(self, step: Step, *, rewards: str) -> dict[str, float]:
        try:
            samples = self._retrainer.samples(step.claim, rewards=rewards)
        except DamagedShard as error:
            raise CannotReplay(
                f"step {step.claim.step} cannot be trained again: {error}. Put the file back from a copy; "
                f"else {later_start(self._log.state, step.claim.step)}"
            ) from error
        return self._retrainer.train(step.claim, samples)

    def _compare(self, folder: Path, recorded: Policy) -> tuple[float | None, float | None]:
        if recorded.version in self._log.state.retired_policies:
            return None, None
        return compare_updates(folder, self._retrainer.fetch_policy(recorded), start=self._scratch / "start")


def compare_updates(new: Path, recorded: Path, *, start: Path) -> tuple[float | None, float | None]:
    """(‖new − recorded‖ / ‖recorded − start‖, cosine of new − start and recorded − start), over all weights.

    All three are policy folders with the same tensors; one tensor of each is in memory at a time. Null where an
    update the number divides by is zero.
    """
    from safetensors import safe_open

    opened = [safe_open(str(folder / "model.safetensors"), framework="pt") for folder in (new, recorded, start)]
    apart = new_squares = recorded_squares = product = 0.0
    for name in opened[0].keys():  # noqa: SIM118 - the file is no mapping
        new_V, recorded_V, start_V = (file.get_tensor(name).double().flatten() for file in opened)
        apart += float((new_V - recorded_V).square().sum())
        new_squares += float((new_V - start_V).square().sum())
        recorded_squares += float((recorded_V - start_V).square().sum())
        product += float((new_V - start_V) @ (recorded_V - start_V))
    distance = math.sqrt(apart / recorded_squares) if recorded_squares else None
    both = math.sqrt(new_squares * recorded_squares)
    return distance, product / both if both else None


def _stored_dtype(folder: Path) -> torch.dtype:
    """The type the base model's weights are stored in; later policies keep it."""
    from safetensors import safe_open

    file = next(iter(sorted(folder.glob("*.safetensors"))))
    with safe_open(str(file), framework="pt") as weights:
        dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype
