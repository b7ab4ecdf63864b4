"""What cannot be trained is refused before anything changes, and the error says what to change."""

from __future__ import annotations

import dataclasses
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from rollouts.chat.chat_tokens import ChatTokens
from settings.train import TrainSettings
from storage.shards.schema import routes_type
from tests.unit.trainers.builders import row_of, samples_of, tiny_model
from trainers.data.samples import Samples
from trainers.refusals import (
    RefusedShards,
    refuse_long_rows,
    refuse_options,
    refuse_routes,
    refuse_shards,
    tokenizer_sha256,
)


@pytest.mark.parametrize(
    ("machine", "settings", "sentence"),
    [
        ("", {}, ""),
        ("gpu bfloat16", {}, ""),
        ("gpu", {"dtype": "bfloat16", "device": "cpu"}, ""),
        ("g++", {"compile": True}, ""),
        ("gpu", {"compile": True}, ""),
        ("", {"device": "cuda"}, "torch sees no GPU; use 'auto' or 'cpu'"),
        ("", {"offload_optimizer": True}, "offload_optimizer is for GPUs"),
        ("gpu", {"offload_optimizer": True, "device": "cpu"}, "offload_optimizer is for GPUs"),
        ("", {"offload_activations": True}, "offload_activations is for GPUs"),
        ("gpu", {"dtype": "bfloat16"}, "has no bfloat16; use 'float32'"),
        ("", {"device": "cuda", "offload_optimizer": True}, r"(?s)sees no GPU.*offload_optimizer"),
        ("", {"compile": True}, r"needs a C\+\+ compiler"),
    ],
)
def test_options_that_this_machine_cannot_honour_are_named_all_at_once(
    monkeypatch: pytest.MonkeyPatch, machine: str, settings: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name in machine else None)
    has = {"has_cuda": "gpu" in machine, "has_bfloat16": "bfloat16" in machine}
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        refuse_options(TrainSettings.model_validate(settings), **has)


_LOGPROBS = np.tile([0.0, -1.0, -0.5], 4).astype(np.float32)


def _shards(
    *,
    vocab_size: int = 12,
    max_positions: int | None = 3,
    tokenizers: dict[str, str] | None = None,
    base_tokenizer: str = "t" * 64,
    **changed: Any,
) -> None:
    """Two shards of two rows of three tokens; the first token of each row is the prompt."""
    arrays: dict[str, Any] = {
        "input_ids_T": np.arange(12, dtype=np.int32),
        "mask_T": np.tile([False, True, True], 4),
        "logprobs_T": _LOGPROBS,
        "versions_T": np.tile([-1, 2, 3], 4),
        "offsets": np.array([0, 3, 6, 9, 12]),
    }
    of_row = {"attempts_B": np.arange(4), "groups_B": np.array([0, 0, 1, 1]), "rewards_B": np.zeros(4, np.float32)}
    samples = Samples(**{**arrays, **changed}, **of_row, shard_ids=["a", "b"], shards_B=np.array([0, 0, 1, 1]))
    refuse_shards(
        samples,
        vocab_size=vocab_size,
        max_positions=max_positions,
        base_version=3,
        tokenizers=tokenizers or {"a": "t" * 64, "b": ""},
        base_tokenizer=base_tokenizer,
    )


def _with(values: np.ndarray, index: int, value: float) -> np.ndarray:
    changed = values.copy()
    changed[index] = value
    return changed


def test_good_shards_pass_whatever_stands_where_nothing_was_sampled() -> None:
    _shards()
    _shards(base_tokenizer="", max_positions=None, logprobs_T=_with(_LOGPROBS, 0, np.nan))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tokenizers": {"b": "u" * 64}}, "tokenizer uuuuuuuuuuuu is not tttttttttttt, that of the run's base policy"),
        ({"vocab_size": 11}, "token ids outside the model's vocabulary of 11"),
        ({"input_ids_T": _with(np.arange(12), 9, -1)}, "token ids outside"),
        ({"logprobs_T": _with(_LOGPROBS, 7, np.nan)}, "lack their log-probability"),
        ({"logprobs_T": _with(_LOGPROBS, 8, -np.inf)}, "lack their log-probability"),
        ({"logprobs_T": _with(_LOGPROBS, 10, 0.5)}, "lack their log-probability"),
        ({"logprobs_T": _with(_LOGPROBS, 8, -200.0)}, "log-probability below -87, which no engine can have sampled"),
        ({"versions_T": _with(np.tile([-1, 2, 3], 4), 11, 4)}, "a policy newer than version 3"),
        ({"offsets": np.array([0, 3, 6, 8, 12])}, "rows above the model's 3 positions"),
    ],
)
def test_the_bad_shard_is_named_and_the_other_is_not(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedShards, match=sentence) as caught:
        _shards(**changed)
    assert caught.value.reasons.keys() == {"b"}


def test_each_bad_shard_has_its_own_reason_also_in_another_process() -> None:
    with pytest.raises(RefusedShards) as caught:
        _shards(tokenizers={"a": "u" * 64}, vocab_size=11)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.reasons.keys() == {"a", "b"} and "tokenizer" in error.reasons["a"] and "ids" in error.reasons["b"]
    assert str(error).startswith("shard a: its tokenizer")


def test_routes_of_another_model_are_refused_before_they_choose_experts() -> None:
    kind = routes_type(layers=2, choices=1, id_bytes=1)
    ids = pa.array([[4, 5, 6]], pa.list_(pa.int32()))
    right = pa.table({"input_ids": ids, "routes": pa.array([[[[3], [0]], [[1], [2]], None]], kind)})
    tables = {"a": right, "b": pa.table({"input_ids": ids}), "c": right}
    refuse_routes(tables, layers=2, choices=1, experts=4)
    for sizes in ({"layers": 2, "choices": 1, "experts": 3}, {"layers": 1, "choices": 2, "experts": 4}):
        with pytest.raises(RefusedShards, match="1 experts in each of 2 layers, up to number 3, and this") as caught:
            refuse_routes(tables, **sizes)
        assert caught.value.reasons.keys() == {"a", "c"}


def test_a_row_that_does_not_fit_into_a_forward_pass_is_named() -> None:
    rows = [row_of([2] * 99, group=group) for group in (0, 1)]
    samples = dataclasses.replace(samples_of(rows), group_ids=["0.x", "0.y"])
    settings = TrainSettings(tokens_per_microbatch=100)
    refuse_long_rows(samples, settings)
    longer = dataclasses.replace(samples, offsets=np.array([0, 99, 200]))
    with pytest.raises(ValueError, match=r"group 0.y has a row of 101 tokens, above train.tokens_per_microbatch = 100"):
        refuse_long_rows(longer, settings)
    together = TrainSettings(tokens_per_microbatch=50, num_ranks=2, sequence_parallel=2)
    refuse_long_rows(samples, together)
    with pytest.raises(ValueError, match=r"= 50 on each of 2 ranks \(train.sequence_parallel\), and a sequence"):
        refuse_long_rows(longer, together)


def test_the_vocabulary_s_digest_is_the_one_rollout_workers_write(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert tokenizer_sha256(folder) == ChatTokens(tokenizer).tokenizer_sha256
