"""What cannot be trained is refused before anything changes: samples that do not fit the model, options without effect.

    settings ─▶ refuse_options (when the trainer starts)   ValueError: the run stops
    samples ─┬▶ refuse_shards, refuse_routes (each step)   RefusedShards: quarantine, their prompts run again
             └▶ refuse_long_rows (each step)               ValueError: the run stops

Elsewhere: models (`model/model.py`), rewards (`objective/advantages.py`), custom losses (`objective/custom_loss.py`),
engines that disagree with the trainer (`health.py`).

In: settings and arrays, no weights. Out: nothing, or an error that names the thing and what to change.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from settings.errors import InvalidInput
from settings.train import TrainSettings
from storage.objects.digests import sha256_of_json
from storage.shards.schema import ROUTES, flat_routes
from trainers.data.samples import Samples

SMALLEST_LOGPROB = float(np.log(np.finfo(np.float32).tiny))
"""−87: of the smallest probability of float32's full precision. Less is 0 where tokens are drawn."""


class RefusedShards(Exception):
    """Shards that must not be trained. Raised before anything changes; quarantine them and go on."""

    def __init__(self, reasons: dict[str, str]) -> None:
        """`reasons` says what is wrong with each shard, by id."""
        super().__init__("; ".join(f"shard {shard_id}: {reason}" for shard_id, reason in reasons.items()))
        self.reasons = reasons

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusedShards, (self.reasons,)


def refuse_options(settings: TrainSettings, *, has_cuda: bool, has_bfloat16: bool) -> None:
    """Raise `ValueError` for options that this machine cannot honour; all of them at once. `has_bfloat16` is about its
    GPU; a CPU always has it."""
    problems = []
    on_gpu = has_cuda and settings.device != "cpu"
    if settings.device == "cuda" and not has_cuda:
        problems.append("train.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if settings.offload_optimizer and not on_gpu:
        problems.append("train.offload_optimizer is for GPUs: here the moments are in host memory anyway; leave it out")
    if settings.offload_activations and not on_gpu:
        problems.append("train.offload_activations is for GPUs: here they are in host memory anyway; leave it out")
    if settings.compile and not on_gpu and shutil.which("g++") is None and shutil.which("clang++") is None:
        problems.append("train.compile on a CPU needs a C++ compiler, and there is none; install g++ or leave it out")
    if settings.computes_in == "bfloat16" and on_gpu and not has_bfloat16:
        problems.append("train.dtype = 'bfloat16', but this GPU has no bfloat16; use 'float32'")
    if problems:
        raise InvalidInput("\n".join(problems))


def refuse_shards(
    samples: Samples,
    *,
    vocab_size: int,
    max_positions: int | None,
    base_version: int,
    tokenizers: Mapping[str, str],
    base_tokenizer: str,
) -> None:
    """Raise `RefusedShards` with the first fault of each shard that this policy cannot have sampled.

    `tokenizers` maps a shard to the digest of its producer's vocabulary, empty if it is unknown; `base_tokenizer` is
    that of the run's base policy.
    """
    shards_B, offsets, mask_T = samples.shards_B, samples.offsets, samples.mask_T
    reasons: dict[str, str] = {}

    def refuse(is_bad_B: np.ndarray, reason: str) -> None:
        for shard in np.unique(shards_B[is_bad_B]).tolist():
            reasons.setdefault(samples.shard_ids[shard], reason)

    def rows_with(is_bad_T: np.ndarray) -> np.ndarray:
        if not is_bad_T.any():  # the usual case, without a sum over rows
            return np.zeros(len(shards_B), bool)
        sums = np.concatenate([[0], np.cumsum(is_bad_T)])
        return sums[offsets[1:]] > sums[offsets[:-1]]

    for shard_id in samples.shard_ids:
        tokenizer = tokenizers.get(shard_id, "")
        if tokenizer and base_tokenizer and tokenizer != base_tokenizer:
            reasons[shard_id] = (
                f"its tokenizer {tokenizer[:12]} is not {base_tokenizer[:12]}, that of the run's base policy; start "
                "its producer with the run's own base model"
            )
    refuse(
        rows_with((samples.input_ids_T < 0) | (samples.input_ids_T >= vocab_size)),
        f"it has token ids outside the model's vocabulary of {vocab_size}; start its producer with the run's own base "
        "model",
    )
    refuse(
        rows_with(mask_T & ~(np.isfinite(samples.logprobs_T) & (samples.logprobs_T <= 0))),
        "sampled tokens lack their log-probability; the producer must ask its engine for the sampled token's logprob",
    )
    refuse(
        rows_with(mask_T & (samples.logprobs_T < SMALLEST_LOGPROB)),
        f"it has sampled tokens with a log-probability below {SMALLEST_LOGPROB:.0f}, which no engine can have sampled; "
        "start its producer again, with another engine if that does not help",
    )
    refuse(
        rows_with(mask_T & (samples.versions_T > base_version)),
        f"it has tokens of a policy newer than version {base_version}, the one being trained; its producer serves "
        "another run's policies",
    )
    if max_positions:
        refuse(
            np.diff(offsets) > max_positions,
            f"it has rows above the model's {max_positions} positions; lower engine.max_model_len of its producer",
        )
    if reasons:
        raise RefusedShards(reasons)


def refuse_routes(tables: Mapping[str, Any], *, layers: int, choices: int, experts: int) -> None:
    """Raise `RefusedShards` for tables, by shard, with routes of a model that has not these layers, experts of a token
    in each, and experts."""
    reasons: dict[str, str] = {}
    for shard_id, table in tables.items():
        ids_TLC = flat_routes(table)[0] if ROUTES in table.column_names else np.zeros((0, layers, choices), np.uint8)
        if ids_TLC.shape[1:] != (layers, choices) or ids_TLC.max(initial=0) >= experts:
            reasons[shard_id] = (
                f"its routes are {ids_TLC.shape[2]} experts in each of {ids_TLC.shape[1]} layers, up to number "
                f"{ids_TLC.max(initial=0)}, and this model has {layers} layers with {choices} of {experts} experts; "
                "start its producer with the run's own base model"
            )
    if reasons:
        raise RefusedShards(reasons)


def refuse_long_rows(samples: Samples, settings: TrainSettings) -> None:
    """Raise `ValueError` for a row that does not fit into a forward pass: a sequence is never cut."""
    lengths = np.diff(samples.offsets)
    row = int(lengths.argmax())
    if lengths[row] > settings.longest_pack:
        ranks = settings.sequence_parallel
        raise InvalidInput(
            f"group {samples.group_ids[samples.groups_B[row]]} has a row of {lengths[row]} tokens, above "
            f"train.tokens_per_microbatch = {settings.tokens_per_microbatch}"
            + (f" on each of {ranks} ranks (train.sequence_parallel)" if ranks > 1 else "")
            + ", and a sequence is never cut; raise it to at least engine.max_model_len"
        )


def tokenizer_sha256(folder: Path) -> str:
    """Digest of a model folder's vocabulary, as the rollout workers write it into every shard."""
    from transformers import AutoTokenizer

    return sha256_of_json(AutoTokenizer.from_pretrained(str(folder)).get_vocab())
