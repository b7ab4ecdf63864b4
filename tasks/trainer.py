"""The trainer of one session: where it runs, and what became of its claims.

In: a claim. Out: the committed step; or a quarantine of the shards that must not be trained.
"""

from __future__ import annotations

import logging
from typing import Any

from infra.environment import cache_folder
from infra.ray.cluster import Cluster
from infra.ray.hosted import Hosted, HostedGroup
from settings.errors import UserError
from settings.places.hints import command
from settings.train import SUSPICIOUS_GAPS, TrainSettings
from storage.log.entries import Claim, Quarantine, Step
from storage.log.run_log import RunLog
from storage.shards.shards import DamagedShard
from trainers.health import GapTooLarge
from trainers.refusals import RefusedShards

logger = logging.getLogger("millrace.train")

MANY_OUT_OF_ROOM = 0.1
"""Share of attempts that fill the context of which the driver warns."""
REFUSALS = 3
"""Claims in a row that may be refused for their shards, without a step in between, before a run gives up."""


class EveryClaimRefused(UserError):
    """Claim after claim had shards that must not be trained: collecting more of them is of no use."""

    may_pass = False


class TrainerHandle:
    """The trainer's processes, as one. Also hosts a replay, which computes as the trainer does."""

    def __init__(self, log: RunLog, cluster: Cluster) -> None:
        self._log = log
        self._cluster = cluster
        self._hosted: Hosted | HostedGroup
        """Set by `open`."""
        self.is_open = False
        self._suspicious_gap = SUSPICIOUS_GAPS["float32"]
        self._warned_of_gap = False
        self._warned_of_room = False
        self._refusals = 0

    async def open(self, name: str, path: str, *, settings: TrainSettings, **arguments: Any) -> Any:
        """Host an object of `path` on `train.num_ranks` processes of `train.num_threads`, and open it there."""
        self.is_open = False
        self._suspicious_gap = SUSPICIOUS_GAPS[settings.computes_in]
        num_gpus = 0.0 if settings.device == "cpu" else self._cluster.gpus_per_worker
        self._hosted = await self._cluster.host_group(name, path, num_ranks=settings.num_ranks, num_gpus=num_gpus)
        if settings.num_threads:
            await self._hosted.prepare({"OMP_NUM_THREADS": str(settings.num_threads)})
        log = {"store_uri": self._log.store.uri, "run_id": self._log.run_id, "cache": str(cache_folder())}
        opened = await self.call("open", **log, **arguments)
        self.is_open = True
        return opened

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await a method of the trainer."""
        return await self._hosted.call(method, *arguments, **keywords)

    def kill(self) -> None:
        """End its process at once; the next step says so, and another takes its place."""
        self.is_open = False
        assert isinstance(self._hosted, Hosted), "the ranks of several GPUs share none with an engine"
        self._hosted.kill()

    async def rendezvous(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there."""
        return await self._hosted.rendezvous()

    async def begin_step(self, claim: Claim) -> bool:
        """Add up gradients of a claim's parts before the rest of it is there; returns whether that went well. What is
        wrong with them is told by `step`."""
        try:
            await self.call("begin_step", claim)
        except Exception as error:  # noqa: BLE001 - whatever it is, `step` meets it again and says what to do
            logger.debug("parts of step %d were not begun: %s", claim.step, error)
            return False
        return True

    async def step(self, claim: Claim, **round_facts: Any) -> Step | None:
        """One optimizer step on a claim.

        None if a claimed shard is damaged or must not be trained: it is quarantined, and its prompts run again. Raises
        `EveryClaimRefused` after `REFUSALS` such claims in a row, `trainers.health.NonFinite`, and `WorkerDied`.
        """
        try:
            step: Step = await self.call("train_step", claim, **round_facts)
        except DamagedShard as damaged:
            self._quarantine({damaged.shard_id: damaged.reason})
            return None
        except RefusedShards as refused:
            self._quarantine(refused.reasons)
            self._refusals += 1
            if self._refusals >= REFUSALS:
                raise EveryClaimRefused(_give_up(claim, refused)) from refused
            return None
        self._refusals = 0
        self._log.refresh()
        gap = step.metrics.get("engine_gap", 0.0)  # absent if no token could be compared
        if gap > self._suspicious_gap and not self._warned_of_gap:
            self._warned_of_gap = True
            tokens = f" of {step.metrics['engine_gap_tokens']:.0f}" if "engine_gap_tokens" in step.metrics else ""
            disagree = f"engine and trainer differ by {gap:.2f} nats per token{tokens} on the same policy"
            logger.warning("step %d: %s; the engine may hold other weights", claim.step, disagree)
        full = step.metrics.get("out_of_room_fraction", 0.0)
        if full > MANY_OUT_OF_ROOM and not self._warned_of_room:
            self._warned_of_room = True
            logger.warning(
                "step %d: %.0f %% of the attempts filled the model's context (engine.max_model_len) before they ended; "
                "rollout.on_out_of_room says what they are worth",
                claim.step,
                100 * full,
            )
        return step

    def _quarantine(self, reasons: dict[str, str]) -> None:
        for shard_id, reason in reasons.items():
            ids = {"shard": shard_id}
            logger.warning("shard %s: %s: quarantined, its prompts run again", shard_id, reason, extra=ids)
            self._log.append(Quarantine(shard_id=shard_id, reason=reason))


def _give_up(claim: Claim, refused: RefusedShards) -> str:
    count = f"step {claim.step}: {REFUSALS} claims in a row were refused, so collecting more is of no use"
    if not isinstance(refused, GapTooLarge) or refused.unlikely:
        return f"{count}; the last one because of {refused}"
    gap = max(refused.gaps.values())
    return (
        f"{count}: engine and trainer disagree by {gap:.3g} nats per token about policy {claim.base_version}, above "
        f"train.max_gap = {refused.max_gap:g}. Check that the engine loads this very policy "
        f"(`{command('lineage', 'RUN', '--policy', claim.base_version, '--verify')}` checks its files), that it runs "
        "the model in the trainer's precision and code, and that top_p, top_k and min_p do not cut its "
        "probabilities short; then start this run again"
    )
