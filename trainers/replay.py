"""A replay: recorded steps trained again from their recorded shards, perhaps with a change, and compared.

    saved state, or base policy ─▶ steps as recorded ─▶ the span, perhaps with a change ─▶ compared with the record

Nothing is generated and nothing is committed. `infra/` hosts a `ReplayWorker` as it hosts the trainer, because equal
weights need equal threads and ranks.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path

from settings.run_file import RunConfig
from storage.log.entries import Policy, Step
from storage.log.replay_plan import TOLERANCES, CannotReplay, ReplayedStep, ReplayPlan, later_start
from storage.log.runs import open_run
from storage.objects.digests import WEIGHTS_FILE, DigestMismatch
from storage.objects.opening import open_store
from storage.objects.staging import staging_folder
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from storage.shards.shards import DamagedShard
from trainers.checkpoint import load_state
from trainers.model.distributed import on_first_rank
from trainers.run_trainer import RunTrainer


class ReplayWorker:
    """Trains a plan's steps again, one call each. Made by `open`; call `close` at the end."""

    def __init__(
        self,
        trainer: RunTrainer,
        plan: ReplayPlan,
        *,
        changed: RunConfig,
        rewards: str,
        reference: str,
        opened: int,
    ) -> None:
        self._trainer = trainer
        self._log = trainer.log
        self._plan = plan
        self._changed = changed
        self._rewards = rewards
        self._reference = reference
        self._held = contextlib.ExitStack()
        self._scratch = self._held.enter_context(staging_folder(trainer.cache, trainer.policy_bytes))
        self.opened = opened
        """The step whose saved state was loaded; 0: the base policy."""

    @classmethod
    async def open(
        cls,
        *,
        store_uri: str,
        run_id: str,
        plan: ReplayPlan,
        recorded: RunConfig,
        changed: RunConfig,
        rewards: str,
        cache: str,
        reference: str = "",
    ) -> ReplayWorker:
        """Load the nearest saved state before the span. `recorded` trains up to the span and `changed` inside it, on
        the rescored rewards that `rewards` names, and with the reference model in this folder of the store."""
        trainer = RunTrainer(open_run(open_store(store_uri), run_id), recorded, cache=Path(cache))
        loaded = trainer.load_nearest_state(plan.first - 1)
        worker = cls(trainer, plan, changed=changed, rewards=rewards, reference=reference, opened=loaded)
        if loaded == plan.first - 1:
            worker._enter_span()
        return worker

    def lead_up(self, step: int) -> bool:
        """Train a step before the span, as it was recorded. False if the last of them made other weights.

        Raises `storage.log.replay_plan.CannotReplay` when its shards are damaged, or when the span needs its recorded
        weights and they are gone.
        """
        recorded = self._log.state.steps[step - 1]
        self._train(recorded, rewards="")
        if step < self._plan.first - 1:
            return True
        try:
            identical = self._trainer.settle(recorded)
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
        """Train a step of the span and compare its weights with the recorded ones. Raises
        `storage.log.replay_plan.CannotReplay` when its shards are damaged, `storage.shards.reward_sets.DamagedRewards`.
        """
        recorded = self._log.state.steps[step - 1]
        metrics = self._train(recorded, rewards=self._rewards)
        folder = self._scratch / str(step)
        digest = self._trainer.save_policy(folder)
        if self._trainer.is_base(recorded.policy):
            digest = recorded.policy.weights_sha256
        identical = digest == recorded.policy.weights_sha256
        distance, cosine = (0.0, 1.0) if identical else on_first_rank(lambda: self._compare(folder, recorded.policy))
        shutil.rmtree(folder, ignore_errors=True)
        return ReplayedStep(
            step=step,
            identical=identical,
            recorded_sha256=recorded.policy.weights_sha256,
            replayed_sha256=digest,
            recorded={key: recorded.metrics[key] for key in metrics if key in recorded.metrics},
            replayed=metrics,
            distance=distance,
            cosine=cosine,
            recorded_arithmetic=recorded.arithmetic,
            replayed_arithmetic=self._trainer.arithmetic(step) if recorded.arithmetic else "",
            tolerance=TOLERANCES[self._changed.train.computes_in],
        )

    def save_policy(self, folder: str) -> str:
        """Write the newest replayed policy into a folder that does not exist yet; returns its weights digest."""
        return self._trainer.save_policy(Path(folder))

    def close(self) -> None:
        """Remove the temporary files."""
        self._held.close()

    def _enter_span(self) -> None:
        if self._changed != self._trainer.config:
            # Other settings may need another optimizer, or another sharding: the state moves into a new trainer.
            self._trainer.save_state(self._scratch / "state", step=self._plan.first - 1, on_all=True)
            cache = self._trainer.cache
            del self._trainer  # two at a time may not fit into memory
            self._trainer = RunTrainer(self._log, self._changed, cache=cache, reference=self._reference)
            load_state(self._trainer.trainer, self._scratch / "state")
            shutil.rmtree(self._scratch / "state")
        self._trainer.save_policy(self._scratch / "start")

    def _train(self, step: Step, *, rewards: str) -> dict[str, float]:
        try:
            samples = self._trainer.samples(step.claim, rewards=rewards)
        except DamagedShard as error:
            raise CannotReplay(
                f"step {step.claim.step} cannot be trained again: {error}. Put the file back from a copy; "
                f"else {later_start(self._log.state, step.claim.step)}"
            ) from error
        return self._trainer.train(step.claim, samples)

    def _compare(self, folder: Path, recorded: Policy) -> tuple[float | None, float | None]:
        if recorded.version in self._log.state.retired_policies:
            return None, None
        return compare_updates(folder, self._trainer.policies.fetch(recorded), start=self._scratch / "start")


def compare_updates(new: Path, recorded: Path, *, start: Path) -> tuple[float | None, float | None]:
    """(‖new − recorded‖ / ‖recorded − start‖, cosine of new − start and recorded − start), over all weights.

    All three are policy folders with the same tensors; one tensor of each is in memory at a time. None if an update
    that the number divides by is zero.
    """
    from safetensors import safe_open

    name = ADAPTER_WEIGHTS if has_adapter(new) else WEIGHTS_FILE
    opened = [safe_open(str(folder / name), framework="pt") for folder in (new, recorded, start)]
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
