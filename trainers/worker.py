"""The trainer worker: claimed shards in, the next policy and a committed step out.

    Claim ─▶ read shards (digests checked) ─▶ Samples ─▶ Trainer.step ─▶ policies/<v>-<attempt>/ ─▶ `Step` log entry

A plain class: `infra/` may host it in another process, or in several as the ranks of one trainer; tests call it
directly. All ranks read the log and the shards, and train their share; rank 0 alone writes. Opening it resumes the
run: the last saved state, then the recorded steps since then, from their recorded shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from infra.weight_broadcast import Broadcast, send
from settings.errors import failure_text
from settings.run_file import RunConfig
from storage.log.claims import owed_by
from storage.log.entries import Claim, Policy, Step
from storage.log.run_state import Conflict
from storage.log.runs import open_run
from storage.objects.digests import DIGEST_FILE, WEIGHTS_FILE
from storage.objects.opening import open_store
from storage.objects.staging import staging_folder
from storage.policies.policies import DELTA_FILE, DamagedDelta, PolicyWriter
from trainers.model.distributed import (
    agreed,
    device_bytes,
    num_ranks,
    on_every_rank,
    on_first_rank,
    peak_flops,
    rank,
)
from trainers.refusals import RefusedShards
from trainers.run_trainer import RunTrainer
from trainers.timing import time_budget

logger = logging.getLogger("millrace.trainer")


class TrainerWorker:
    """Trains one run. Made by `open`."""

    def __init__(self, trainer: RunTrainer, *, opened: int, sends: bool) -> None:
        self._trainer = trainer
        self._log = trainer.log
        self.opened = opened
        """How many recorded steps were trained again to restore the optimizer."""
        self._unsaved: tuple[Claim, dict[str, float]] | None = None
        self._policy_path: str | None = self._live().path  # of the weights' policy; None while the log knows none
        self._begun_seconds = 0.0  # of the next step
        self._broken_off = ""  # what ended the update that left them so
        self._held = contextlib.ExitStack()
        self._outbox = self._held.enter_context(staging_folder(trainer.cache)) if sends and rank() == 0 else None
        self._sendable = -1  # version of the weights in there
        self._policies = PolicyWriter(self._log, trainer.cache, anchor_every=trainer.config.train.anchor_every)

    @classmethod
    async def open(
        cls, *, store_uri: str, run_id: str, config: RunConfig, cache: str, sends: bool = False
    ) -> TrainerWorker:
        """Load the run's base policy and resume its optimizer. With `sends` the newest weights are kept to
        broadcast."""
        trainer = RunTrainer(open_run(open_store(store_uri), run_id), config, cache=Path(cache))
        num_steps = agreed(on_every_rank(lambda: len(trainer.log.refresh().steps)), what="number of committed steps")
        since = trainer.log.state.steps[trainer.load_nearest_state(num_steps) :]
        if since:
            trainer.restore(since)
        worker = cls(trainer, opened=len(since), sends=sends)
        worker._mend_newest()
        return worker

    def train_step(
        self, claim: Claim, *, extra_metrics: dict[str, float], round_seconds: float, session_id: str
    ) -> Step:
        """Train on a claim, publish the policy's files and commit the step; the round took `round_seconds` until here.

        Raises `storage.shards.shards.DamagedShard` and `trainers.refusals.RefusedShards` before any weight changes,
        `storage.log.run_state.Conflict` when another trainer committed this step, or one before it, first. Called again
        for a step this session has committed, it returns that step.
        """
        started = time.perf_counter()
        to_do = agreed(on_every_rank(lambda: self._to_do(claim, session_id)), what=f"work to do for step {claim.step}")
        if to_do == "nothing":
            return self._took(claim)  # its commit may have succeeded without an answer
        load_seconds = 0.0
        if to_do == "train":
            metrics, load_seconds = self._train(claim)
            self._unsaved = (claim, metrics)
        # A retry after a failed save must not train the same claim a second time.
        train_seconds = time.perf_counter() - started - load_seconds
        phases = {**extra_metrics, "load_seconds": load_seconds, "train_seconds": train_seconds}
        with staging_folder(self._trainer.cache, self._trainer.policy_bytes) as folder:
            # All ranks write the policy; the rest is up to rank 0.
            digest = "" if claim.fallback == "skip_step" else self._trainer.save_policy(folder / "policy")
            if claim.step % self._trainer.config.train.checkpoint_every == 0:
                self._trainer.save_state(folder / "state", step=claim.step)
            clocks = {"round_seconds": round_seconds, "started": started}
            on_first_rank(lambda: self._commit(claim, folder, digest, phases, session_id=session_id, **clocks))
            if self._outbox is not None and digest:
                for name in (WEIGHTS_FILE, DIGEST_FILE):
                    os.replace(folder / "policy" / name, self._outbox / name)
                self._sendable = claim.base_version + 1
        on_every_rank(self._catch_up)
        return self._took(claim)

    def begin_step(self, claim: Claim) -> None:
        """Add up gradients of the parts of a claim, while what else it will take is still being sampled. What is wrong
        with them is left to `train_step`, which takes the rest, and those again that did not succeed."""
        started = time.perf_counter()
        mine = on_every_rank(lambda: (len(self._log.refresh().steps), self._policy_path == self._live().path))
        if agreed(mine, what=f"work to do for step {claim.step}") == (claim.step - 1, True):
            self._trainer.begin(claim)
        self._begun_seconds += time.perf_counter() - started

    def leave_device(self) -> None:
        """Give the GPU's memory back until `take_device`: an engine has it meanwhile."""
        self._trainer.trainer.free_gradients()
        self._trainer.trainer.move(torch.device("cpu"))

    def take_device(self) -> None:
        """Come back to the GPU, to train."""
        self._trainer.trainer.move(self._trainer.trainer.device)

    def can_send(self, version: int) -> bool:
        """True on rank 0 if `send_policy` has the weights of that version."""
        return self._sendable == version

    def send_policy(self, broadcast: Broadcast) -> None:
        """From rank 0 to all receivers. If it fails the receivers know it too, and there is the store."""
        if self._outbox is None:
            return
        try:
            send(self._outbox / WEIGHTS_FILE, broadcast)
        except Exception as error:  # noqa: BLE001 - whatever torch raises; alone it must not end the ranks
            logger.warning("policy %d was not broadcast: %s: %s", broadcast.version, type(error).__name__, error)

    def close(self) -> None:
        """Remove what was kept to be sent. What matters is in the store."""
        self._held.close()

    def _mend_newest(self) -> None:
        """Write the newest policy whole if it is a damaged delta: its weights are here, made anew. Raises
        `storage.policies.policies.DamagedDelta` if they are not the recorded ones."""
        live = self._live()
        damage = on_first_rank(lambda: self._trainer.policies.damage_of(live))
        if not damage:
            return
        with staging_folder(self._trainer.cache, self._trainer.policy_bytes) as scratch:
            folder = scratch / "policy"
            if self._trainer.save_policy(folder) != live.weights_sha256:
                raise DamagedDelta(damage)
            on_first_rank(lambda: self._log.store.put_folder(folder, live.path, last=DIGEST_FILE, given=True))
        on_first_rank(lambda: self._log.store.delete([f"{live.path}/{DELTA_FILE}"]))
        logger.warning("policy %d is written again, whole: %s", live.version, damage)

    def _to_do(self, claim: Claim, session_id: str) -> Literal["train", "save", "nothing"]:
        """What is left of a step. Raises `Conflict` if another trainer took it, or other weights are here."""
        steps = self._log.refresh().steps
        if claim.step <= len(steps):
            done = steps[claim.step - 1]
            # Two trainers build equal claims from one log: what tells them apart is the session.
            if (done.claim, done.session_id) != (claim, session_id):
                raise Conflict(
                    f"step {claim.step} is committed: another trainer is working on this run; stop one of them, or "
                    "use another `run` id"
                )
            return "nothing"
        if self._unsaved is not None and self._unsaved[0] == claim:
            return "save"
        if self._policy_path != self._live().path:
            if self._broken_off:
                raise Conflict(f"step {claim.step}: an update broke off, so start this run again: {self._broken_off}")
            raise Conflict(
                f"step {claim.step}: the trainer's weights are not policy version {claim.base_version}; another "
                "trainer is working on this run. Stop the other one and start this run again"
            )
        return "train"

    def _train(self, claim: Claim) -> tuple[dict[str, float], float]:
        """Metrics, and the seconds that reading the shards took."""
        started = time.perf_counter()
        samples = self._trainer.samples(claim, judge=True)
        load_seconds = time.perf_counter() - started
        before, begun = self._policy_path, {}
        if claim.parts:
            share = self._trainer.num_begun(claim) / len(claim.trained)
            begun = {"streamed_fraction": share, "streamed_seconds": self._begun_seconds}
        self._begun_seconds = 0.0
        if claim.fallback != "skip_step":
            self._policy_path = None
        try:
            metrics = self._trainer.train(claim, samples, judge=True)
        except RefusedShards:
            self._policy_path = before  # no weight has changed
            raise
        except Exception as error:
            self._broken_off = failure_text(error)
            raise
        cost = device_bytes(self._trainer.trainer.device)
        if samples is not None:
            cost["engine_gap_seconds"] = self._trainer.trainer.probes.seconds
        return {**metrics, **cost, **begun}, load_seconds

    def _commit(
        self,
        claim: Claim,
        folder: Path,
        digest: str,
        phases: dict[str, float],
        *,
        started: float,
        round_seconds: float,
        session_id: str,
    ) -> None:
        """Put the folders `policy` and `state`, if they are there, into the store, and the step into the log."""
        assert self._unsaved is not None
        metrics, attempt = self._unsaved[1], uuid.uuid4().hex[:8]
        # If a step trains nothing the weights are those of the version before: so are their files.
        policy = dataclasses.replace(self._live(), version=claim.base_version + 1, parent=claim.base_version)
        if digest:
            path = self._log.key(f"policies/{policy.version}-{attempt}")
            anchor, written = self._policies.put(folder / "policy", path, version=policy.version)
            policy = dataclasses.replace(policy, path=path, weights_sha256=digest, anchor=anchor)
            metrics = {**metrics, **written}
        state_path = None
        if (folder / "state").exists():
            state_path = self._log.key(f"state/{claim.step}-{attempt}")
            self._log.store.put_folder(folder / "state", state_path, last=DIGEST_FILE, given=True)
        measured = time.perf_counter() - started
        phases = {**phases, "save_seconds": measured - phases["load_seconds"] - phases["train_seconds"]}
        budget = time_budget({**metrics, **phases}, wall_seconds=round_seconds + measured)
        speed = {"tokens_per_second": metrics["trained_tokens"] / budget["round_seconds"]}
        speed |= self._rate({**metrics, **phases})
        self._log.append(
            Step(
                claim=claim,
                policy=policy,
                shard_sha256={g.shard_id: self._log.state.shards[g.shard_id].sha256 for g in claim.trained},
                # A value that is no number is none in the log: JSON has no NaN, and a mean with it would be NaN.
                metrics={n: v for n, v in {**metrics, **phases, **budget, **speed}.items() if math.isfinite(v)},
                state_path=state_path,
                session_id=session_id,
                arithmetic=self._trainer.arithmetic(claim.step),
                by_attempt=True,
                owes=owed_by(self._log.state, claim, self._trainer.config),
            )
        )

    def _rate(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What a rank has computed in a second, and its share of what its GPU can, if that is known (Chowdhery et al.
        2022, appendix B, https://arxiv.org/abs/2204.02311). Nothing of a step without a gradient."""
        seconds = metrics["train_seconds"] + metrics.get("streamed_seconds", 0.0)
        if "train_flops" not in metrics or seconds <= 0:
            return {}
        rate, peak = metrics["train_flops"] / num_ranks() / seconds, peak_flops(self._trainer.trainer.device)
        if peak is None or self._trainer.config.train.computes_in != "bfloat16":
            return {"train_flops_per_second": rate}
        return {"train_flops_per_second": rate, "mfu": rate / peak}

    def _catch_up(self) -> None:
        """Read what rank 0 has committed."""
        if rank():
            self._log.refresh()

    def _took(self, claim: Claim) -> Step:
        """The committed step of a claim; the weights trained on the claim are the policy it names."""
        step = self._log.state.steps[claim.step - 1]
        if self._unsaved is not None and self._unsaved[0] == step.claim:
            self._unsaved, self._policy_path = None, step.policy.path
        return step

    def _live(self) -> Policy:
        live = self._log.state.live
        assert live is not None, "a run has a base policy before it has a trainer"
        return live
