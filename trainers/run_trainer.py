"""A run's model, optimizer and state, trained step by step on recorded claims: what a training run and a replay share.

    saved state, or base policy ─▶ claim ─▶ read shards (digests checked) ─▶ Samples ─▶ Trainer.step ─▶ the next weights

In: a run's log and its settings. Out: metrics, and the weights as a policy folder. On several ranks all do everything,
and rank 0 alone writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from infra.environment import give_back_beside_large
from settings.errors import InvalidInput, counted
from settings.run_file import RunConfig
from storage.log.entries import Claim, Policy, Step
from storage.log.history import to_json
from storage.log.replay_plan import saved_steps, version_of
from storage.log.run_log import RunLog
from storage.log.runs import model_key, run_config
from storage.objects.digests import WEIGHTS_FILE, DigestMismatch, sha256_of, verify_folder
from storage.objects.staging import staging_folder
from storage.policies.adapters import check_adapters
from storage.policies.model_config import num_positions, text_part
from storage.policies.policies import PolicyReader
from storage.shards.reward_sets import read_rewards, with_rewards
from storage.shards.schema import ROUTES
from storage.shards.shards import DamagedShard, read_shard
from storage.shards.turn_metrics import turn_metrics
from trainers.checkpoint import load_state, load_weights, save_policy, save_state
from trainers.data.samples import ARITHMETIC, COLUMNS, Samples, gather_samples
from trainers.model.distributed import agreed, num_ranks, on_every_rank, on_first_rank, rank
from trainers.model.stored import dtypes_in, refuse_unstored
from trainers.refusals import refuse_long_rows, refuse_routes, refuse_shards, tokenizer_sha256
from trainers.trainer import Trainer

logger = logging.getLogger("millrace.trainer")

_OTHER_SUMS = ("tokens_per_microbatch", "logits_gib", "activation_checkpointing")
"""Settings that a run may be continued with other values of, though its numbers are then added up in other parts."""


class RunTrainer:
    """A run's trainer, fed with the groups its log says were claimed."""

    def __init__(self, log: RunLog, config: RunConfig, *, cache: Path, reference: str = "") -> None:
        """Start from the base policy. `reference` is the store's folder of another reference model than the one that
        the run began with. Raises `storage.objects.digests.DigestMismatch` if its folder is altered, and
        `ValueError` for a model that cannot be trained or written."""
        torch.manual_seed(config.seed)
        if config.reproducible and torch.cuda.is_available():  # a kernel without a fixed order raises instead
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.log = log
        self.config = config
        self.cache = cache
        self.policies = PolicyReader(log, cache)
        self._base_folder = self.policies.fetch(log.state.policies[0])
        self.policy_bytes = sum(file.stat().st_size for file in self._base_folder.iterdir())
        """About the size of every policy written whole."""
        self._base_tokenizer = tokenizer_sha256(self._base_folder)
        self.trainer = Trainer(self._base_folder, config, reference=self._reference(reference))
        self._begun: Claim | None = None  # of the next step, as far as the gradients of its parts are in
        give_back_beside_large(self.policy_bytes)  # what reading the model took for a moment
        if config.train.lora is None:
            refuse_unstored(self.trainer.model.causal_lm, self._base_folder)
        self._dtypes = self._published_dtypes()

    def _reference(self, path: str) -> Path | None:
        """The folder of the policy that `train.reference` names; None for none, and for the base under adapters. Raises
        `ValueError` for another tokenizer, `storage.objects.digests.DigestMismatch` for an altered folder."""
        reference = self.config.train.reference
        if reference.kind != "model":
            return self._base_folder if reference.kind == "base" else None
        folder = self._fetch(path or self.log.state.policies[0].reference or model_key(reference.model))
        verify_folder(folder)
        if tokenizer_sha256(folder) != self._base_tokenizer:
            raise InvalidInput(
                f"train.reference.model = {reference.model!r} has another vocabulary than the run's base policy, so "
                "it cannot judge the same tokens; name a model of the same family"
            )
        return folder

    def _published_dtypes(self) -> dict[str, torch.dtype] | None:
        """The tensors and types that the run's policies have; None if it has none yet. Runs that began with an earlier
        version wrote all in one type, and not all that the base stores: so they go on, and are replayed bit for bit."""
        state = self.log.state
        for version, policy in sorted(state.policies.items(), reverse=True):
            if policy.anchor is None and not self.is_base(policy) and version not in state.retired_policies:
                with (
                    contextlib.suppress(FileNotFoundError),
                    self.log.store.open_input(f"{policy.path}/{WEIGHTS_FILE}") as file,
                ):
                    return dtypes_in(file)
        return None

    def _version(self, step: int) -> int:
        """The version of a step's arithmetic: the recorded one, and for a new step that of the step before."""
        steps = self.log.state.steps
        return version_of(steps[min(step, len(steps)) - 1].arithmetic) if steps else ARITHMETIC

    def arithmetic(self, step: int) -> str:
        """What this process adds up a step's numbers with: `storage.log.entries.Step.arithmetic`."""
        device = self.trainer.device
        if device.type == "cuda":
            where = torch.cuda.get_device_name(device)
        else:
            where = f"{torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"
        ranks, settings = counted(num_ranks(), "rank"), self.config.train
        if settings.sequence_parallel > 1:
            ranks += f", {settings.sequence_parallel} to a pack"
        if settings.num_replicas > 1:
            ranks += f", {settings.num_replicas} replicas"
        return ", ".join([f"{self._version(step)}, torch {torch.__version__}, {where}, {ranks}", *self._other_sums])

    @functools.cached_property
    def _other_sums(self) -> list[str]:
        """Those of `_OTHER_SUMS` that are not as the run has recorded them. Read once: each step asks."""
        recorded, settings = run_config(self.log).get("train", {}), self.config.train
        others = (key for key in _OTHER_SUMS if key in recorded and getattr(settings, key) != recorded[key])
        return [f"{key} = {getattr(settings, key)}" for key in others]

    def load_nearest_state(self, at_most: int) -> int:
        """Load the newest saved state of the steps up to `at_most`; returns its step, 0 for the base policy. Raises
        `ValueError` for a state of another step than the log says."""
        for step in saved_steps(self.log.state, at_most=at_most):
            problems = on_every_rank(functools.partial(self._load_state_of, step))
            if not any(problems):
                return step.claim.step
            what = next(filter(None, problems))
            logger.warning("the state of step %d cannot be loaded, an earlier one will do: %s", step.claim.step, what)
        return 0

    def samples(self, claim: Claim, *, rewards: str = "", judge: bool = False) -> Samples | None:
        """A claim's rows, read from its shards, with the recorded rewards or those of a rescore; None for a claim that
        trains nothing.

        With `judge`, for a claim that is not in the log, raises `trainers.refusals.RefusedShards` for shards that this
        run's policy cannot have sampled, and `ValueError` for a row that does not fit into a forward pass. Raises
        `storage.shards.shards.DamagedShard` and `storage.shards.reward_sets.DamagedRewards`, and on several ranks
        `trainers.model.distributed.RanksDiffer` where they have read different rows.
        """
        if claim.fallback:
            return None
        read: list[Samples] = []

        def read_them() -> list[str]:
            try:
                read.append(self._read(claim, rewards=rewards, judge=judge))
            except DamagedShard as error:
                return [error.shard_id, error.reason, error.file]
            return [batch_sha256(claim, read[0]) if num_ranks() > 1 else ""]

        results = on_every_rank(read_them)
        if damaged := next((result for result in results if len(result) > 1), None):
            raise DamagedShard(*damaged)  # on every rank, also if its file is fine
        agreed(results, what=f"batch for step {claim.step}")
        return read[0]

    def _read(self, claim: Claim, *, rewards: str, judge: bool) -> Samples:
        shards = [self.log.state.shards[name] for name in dict.fromkeys(group.shard_id for group in claim.trained)]
        sizes = self.trainer.model.routers.sizes
        columns = (*COLUMNS, "reward_parts", "turns", "adapters", "requests", *([] if sizes is None else [ROUTES]))
        tables = {shard.id: read_shard(self.log, shard, columns=columns) for shard in shards}
        if sizes is not None:
            refuse_routes(tables, **sizes._asdict())
        if self.config.train.lora is not None:
            for shard_id, table in tables.items():
                check_adapters(table, shard_id=shard_id, policies=self.log.state.policies)
        if rewards:
            tables = {s.id: with_rewards(tables[s.id], read_rewards(self.log, s, rewards)) for s in shards}
        samples = gather_samples(claim.trained, tables)
        steps = self.log.state.steps
        if claim.step <= len(steps):
            samples = dataclasses.replace(samples, by_attempt=steps[claim.step - 1].by_attempt)
        samples = dataclasses.replace(samples, arithmetic=self._version(claim.step))
        if judge:
            model = self.trainer.model.causal_lm.config
            digests = {name: (t.schema.metadata or {}).get(b"tokenizer_sha256", b"") for name, t in tables.items()}
            refuse_shards(
                samples,
                vocab_size=model.vocab_size,
                max_positions=num_positions(text_part(model.to_dict())),
                base_version=claim.base_version,
                tokenizers={name: digest.decode() for name, digest in digests.items()},
                base_tokenizer=self._base_tokenizer,
            )
            refuse_long_rows(samples, self.config.train)
        return dataclasses.replace(samples, turn_metrics=turn_metrics(claim.trained, tables))

    def begin(self, claim: Claim) -> None:
        """Add up the gradients of those parts of a claim, which more will follow, that are not in yet. Raises as
        `samples`."""
        for number in range(self._num_parts_in(claim), len(claim.parts)):
            start, stop = sum(claim.parts[:number]), sum(claim.parts[: number + 1])
            samples = self.samples(dataclasses.replace(claim, trained=claim.trained[start:stop], parts=[]), judge=True)
            assert samples is not None, "a claim with parts trains them"
            # As the samples of the whole claim number them: a shard may have groups of several parts.
            order = list(dict.fromkeys(group.shard_id for group in claim.trained[:stop]))
            numbers = np.array([order.index(shard_id) for shard_id in samples.shard_ids])
            samples = dataclasses.replace(samples, shards_B=numbers[samples.shards_B], shard_ids=order)
            self._add_part(claim, number, samples)

    def num_begun(self, claim: Claim) -> int:
        """Groups of a claim whose gradients are in."""
        return sum(claim.parts[: self._num_parts_in(claim)])

    def _num_parts_in(self, claim: Claim) -> int:
        """Parts of a claim whose gradients are in; those of another one are dropped."""
        begun = self._begun
        if begun is not None:
            number, is_same = len(begun.parts), (begun.step, begun.base_version) == (claim.step, claim.base_version)
            groups = claim.trained[: len(begun.trained)]
            if is_same and (claim.parts[:number], groups) == (begun.parts, begun.trained):
                return number
        self._begun = self.trainer.begun = None
        return 0

    def _add_part(self, claim: Claim, number: int, samples: Samples) -> None:
        self._begun = None  # an error halfway leaves gradients of half a part
        self.trainer.accumulate(samples, step=claim.step, base_version=claim.base_version)
        stop = sum(claim.parts[: number + 1])
        self._begun = dataclasses.replace(claim, trained=claim.trained[:stop], parts=claim.parts[: number + 1])

    def train(self, claim: Claim, samples: Samples | None, *, judge: bool = False) -> dict[str, float]:
        """One optimizer step, or what the claim does instead of one; returns its metrics. With `judge`, raises
        `trainers.health.GapTooLarge` for shards too far from the policy that sampled them."""
        if samples is not None:
            for number in range(self._num_parts_in(claim), len(claim.parts)):
                start = sum(claim.parts[:number])
                self._add_part(claim, number, samples.part(start, start + claim.parts[number]))
            self._begun = None
            # The scripted engine draws at random, whatever the weights say.
            is_judged = judge and self.config.engine.kind != "scripted"
            metrics = self.trainer.step(
                samples,
                step=claim.step,
                base_version=claim.base_version,
                max_staleness=self.config.max_staleness,
                max_gap=self.config.train.max_gap if is_judged else math.inf,
            )
            self.trainer.free_gradients()
            give_back_beside_large(self.policy_bytes)
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
        """True when the weights are those `step` made; if not, take the recorded ones. Raises `FileNotFoundError` if
        those are gone, `storage.objects.digests.DigestMismatch` if they are altered."""
        with staging_folder(self.cache, self.policy_bytes) as scratch:
            digest = self.save_policy(scratch / "policy")
        if digest == step.policy.weights_sha256 or self.is_base(step.policy):
            return True
        logger.warning(
            "re-training up to step %d gave other weights than recorded (hardware, threads, or a lost shard); "
            "going on from the recorded weights with the optimizer as it is",
            step.claim.step,
        )
        on_every_rank(lambda: load_weights(self.trainer.model, self.policies.fetch(step.policy)))
        self.trainer.kept.forget()  # it is of the steps that came out differently
        return False

    def is_base(self, policy: Policy) -> bool:
        """True if every step up to this policy was skipped. Its files are the base model's own, and the same weights
        written by the trainer may be other bytes."""
        return policy.path == self.log.state.policies[0].path

    def save_policy(self, folder: Path) -> str:
        """Write the weights as a sealed folder in HF layout, that of rank 0; returns their digest on every rank."""
        of_all = Path(on_first_rank(lambda: str(folder)))
        return save_policy(self.trainer.model, self._base_folder, of_all, dtypes=self._dtypes)

    def save_state(self, folder: Path, *, step: int, on_all: bool = False) -> None:
        """Write everything the next step depends on: rank 0 does, or `on_all` ranks do, each its own copy."""
        target = None if rank() and not on_all else folder
        on_every_rank(lambda: save_state(self.trainer, target, step=step))

    def _load_state_of(self, step: Step) -> str:
        """Load the state saved at a step; returns what is wrong with its files, or nothing."""
        assert step.state_path is not None
        try:
            loaded = load_state(self.trainer, self._fetch(step.state_path))
        except (DigestMismatch, FileNotFoundError) as error:
            return str(error)
        if loaded != step.claim.step:
            raise InvalidInput(
                f"{self.log.store.uri}/{step.state_path} holds the state of step {loaded}, the log says of step "
                f"{step.claim.step}; put the right folder back, or remove it and an earlier one will do"
            )
        return ""

    def _fetch(self, path: str) -> Path:
        return self.log.store.fetch_folder(path, self.cache)


def batch_sha256(claim: Claim, samples: Samples) -> str:
    """Digest of a claim and of every value in its samples: ranks that compare it know that they train on the same."""

    def digest_of(array: np.ndarray) -> str:
        return f"{array.dtype} {array.shape} {sha256_of(np.ascontiguousarray(array).tobytes())}"

    batch = {"claim": to_json(claim), "samples": vars(samples)}
    return sha256_of(json.dumps(batch, sort_keys=True, default=digest_of).encode())
