"""Gaps are what the formulas say, alike on any number of ranks; bad shards and rows are named before any update."""

from __future__ import annotations

import math
import pickle
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.log.promotion import GAP
from trainers.health import FiniteCheck, Gap, GapMeter, GapTooLarge, NonFinite, gap_weights, rows_to_probe


def _alone(values: np.ndarray) -> np.ndarray:
    return values


def _tokens(seed: int, num_tokens: int, *, num_shards: int = 3) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(seed)
    sampled_T = -draw.exponential(2.0, num_tokens)
    logprobs_T = np.minimum(sampled_T + draw.standard_normal(num_tokens) * 0.1, -1e-6)
    return logprobs_T, sampled_T, draw.random(num_tokens) < 0.7, draw.integers(0, num_shards, num_tokens)


def _measure(*arrays_T: np.ndarray, num_shards: int = 3) -> Gap:
    meter = GapMeter()
    meter.add(*map(torch.from_numpy, arrays_T))
    return meter.result(_alone, num_shards=num_shards)


@given(st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 5))
def test_packs_and_ranks_change_nothing_of_the_plain_mean_quantile_and_k3(
    seed: int, num_tokens: int, num_ranks: int
) -> None:
    arrays = _tokens(seed, num_tokens)
    whole = _measure(*arrays)
    owner_T = np.random.default_rng(seed + 1).integers(0, num_ranks, num_tokens)
    sent: list[np.ndarray] = []

    def send(values: np.ndarray) -> np.ndarray:
        sent.append(values)
        return values

    for rank in range(num_ranks):
        meter = GapMeter()
        for pack in np.array_split(np.flatnonzero(owner_T == rank), 2):
            meter.add(*(torch.from_numpy(values[pack]) for values in arrays))
        meter.result(send, num_shards=3)
    together = GapMeter().result(lambda values: values + sum(sent), num_shards=3)  # a rank with nothing to do
    assert (together.num_tokens, together.p99) == (whole.num_tokens, whole.p99)
    assert together.mean == pytest.approx(whole.mean) and together.k3 == pytest.approx(whole.k3)
    np.testing.assert_allclose(together.mean_S, whole.mean_S)
    logprobs_T, sampled_T, counted_T, _ = arrays
    delta = (logprobs_T - sampled_T)[counted_T]
    if not len(delta):
        assert whole.metrics() == {}
        return
    exact = np.quantile(np.abs(delta), 0.99, method="inverted_cdf")
    assert whole.mean == pytest.approx(np.abs(delta).mean())
    assert exact * (1 - 1e-5) <= whole.p99 <= max(1.06 * exact, 1e-9)
    assert whole.k3 == pytest.approx((np.exp(delta) - 1 - delta).mean()) and whole.k3 >= 0


def test_only_the_shard_that_is_too_far_off_is_named() -> None:
    log2, sampled_T = math.log(2.0), np.full(7, -2.0)
    logprobs_T = sampled_T + np.array([log2, -log2, 1.5, -1.6, 0.0, 0.0, 9.0])  # another policy sampled the last
    shards_T = np.array([0, 0, 1, 1, 2, 2, 2])
    gap = _measure(logprobs_T, sampled_T, np.array([1, 1, 1, 1, 1, 1, 0], bool), shards_T)
    np.testing.assert_allclose(gap.mean_S, [log2, 1.55, 0])
    assert gap.num_tokens == 6 and gap.mean == pytest.approx((2 * log2 + 3.1) / 6) and 1.6 <= gap.p99 <= 1.06 * 1.6
    assert gap.tokens_S.tolist() == [2, 2, 2]
    means = {"engine_gap": gap.mean, "engine_gap_p99": gap.p99, "engine_gap_k3": gap.k3}
    assert gap.metrics() == {**means, "engine_gap_tokens": 6.0}
    gap.check(["a", "b", "c"], max_gap=1.6)
    with pytest.raises(GapTooLarge, match=r"shard b: .* 1.55 nats per token, above train.max_gap = 1") as caught:
        gap.check(["a", "b", "c"], max_gap=1.0)
    assert caught.value.reasons.keys() == {"b"} and caught.value.reasons["b"].startswith(GAP)


@pytest.mark.parametrize(
    ("trainer", "engine", "weight", "is_named"),
    [
        (-3.0, -200.0, 1.0, True),
        (-3.0, -34.0, 1.0, True),
        (-3.0, -32.0, 1.0, False),
        (-3.0, -64.0, 0.0, True),  # of an earlier policy
        (-3.0, -62.0, 0.0, False),
        (-45.0, -45.0, 1.0, False),  # a grammar forced it, and both find it as unlikely
        (-60.0, -3.0, 1.0, False),  # what the mean is for
    ],
)
def test_a_single_token_counts_where_the_mean_over_its_shard_hides_it(
    trainer: float, engine: float, weight: float, is_named: bool
) -> None:
    num_tokens = 10_000
    logprobs_T, sampled_T = np.full(num_tokens, -1.0), np.full(num_tokens, -1.0)
    logprobs_T[7], sampled_T[7] = trainer, engine
    weights_T = np.ones(num_tokens)
    weights_T[7] = weight
    gap = _measure(logprobs_T, sampled_T, weights_T, np.arange(num_tokens) % 2)
    assert gap.mean < 0.05 and gap.unlikely_S.tolist() == [0, is_named, 0]
    gap.check(["a", "b"], max_gap=math.inf)  # nothing is judged
    with pytest.raises(GapTooLarge, match="shard b: .* more than 30 nats at 1 token") if is_named else nullcontext():
        gap.check(["a", "b"], max_gap=1.0)


def test_a_gap_that_is_no_number_does_not_pass_and_a_shard_without_a_counted_token_is_not_judged() -> None:
    gap = _measure(np.array([np.nan]), np.array([-1.0]), np.array([True]), np.array([2]))
    assert gap.p99 == np.inf
    with pytest.raises(NonFinite, match="log-probability by the trainer is NaN or infinite at shard c"):
        gap.check(["a", "b", "c"], max_gap=math.inf)
    gap = _measure(np.array([-9.0]), np.array([-1.0]), np.array([False]), np.array([0]))
    gap.check(["a", "b", "c"], max_gap=0.1)
    assert gap.num_tokens == 0 and gap.p99 == 0


def test_older_tokens_count_where_a_shard_has_no_others_and_less_with_each_step_in_between() -> None:
    versions_T = np.array([3, 2, -1, 2, 0, 2])
    mask_T = np.array([True, True, False, True, True, False])
    shards_T = np.array([0, 0, 0, 1, 1, 1])
    weights_T, kept_T = gap_weights(versions_T, mask_T, shards_T, base_version=3, kept_version=None)
    assert weights_T.tolist() == [1, 0, 0, 0.5, 0.25, 0] and not kept_T.any()
    own_T, kept_T = gap_weights(versions_T, mask_T, shards_T, base_version=3, kept_version=2)
    assert own_T.tolist() == [1, 0, 0, 0, 0, 0] and kept_T.tolist() == [0, 0, 0, 1, 0, 0], "under the kept policy alone"
    gap = _measure(np.full(6, -3.0), np.full(6, -1.0), weights_T, np.array([0, 0, 0, 1, 1, 1]))
    assert gap.num_tokens == 1 and gap.mean == 2.0, "metrics are of the policy's own tokens"
    np.testing.assert_allclose(gap.mean_S, [2.0, (1.0 + 0.5) / 2, np.nan])
    with pytest.raises(GapTooLarge, match="shard b"):
        gap.check(["a", "b", "c"], max_gap=0.7)


def test_one_counted_row_stands_for_each_shard_that_the_first_mini_batch_lacks() -> None:
    shards_B = np.array([0, 0, 1, 1, 1, 2, 3])
    counted_B = np.array([True, True, False, True, True, False, True])
    measured_B = np.array([False, True, True, False, False, False, False])
    assert rows_to_probe(shards_B, counted_B, measured_B).tolist() == [3, 6]
    assert rows_to_probe(shards_B, counted_B, np.ones(7, bool)).tolist() == []
    assert rows_to_probe(np.array([1, 0, 1, 1, 0]), np.ones(5, bool), np.zeros(5, bool), per_shard=2).tolist() == [
        0,
        1,
        2,
        4,
    ]


_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("tokens", "pack", "rows"),
    [
        ([1, 3, 4, 8], {"logprobs": [-1.0] * 4, "advantages": [-1.0] * 4}, []),
        ([1, 3, 4, 8], {"loss": _NAN, "logprobs": [-1, _NAN, -1, -1], "advantages": [-1, -1, -1, -_INF]}, [1, 2]),
        ([1, 4], {"logprobs": [-1.0, _NAN], "mask_T": [1.0, 0.0]}, []),
        ([0, 1, 5], {"loss": _INF, "logprobs": [-1.0] * 3}, [0, 2]),
    ],
    ids=["fine", "whatever it is", "masked", "a loss names its whole pack"],
)
def test_rows_with_nan_or_infinity_are_named(tokens: list[int], pack: dict[str, Any], rows: list[int]) -> None:
    check, tensors = FiniteCheck(), {name: torch.tensor(value) for name, value in {"loss": 0.5, **pack}.items()}
    check.add(np.array(tokens), **tensors)
    offsets = np.array([0, 3, 5, 9])
    assert check.bad_rows(offsets, sum_over_ranks=_alone).tolist() == rows
    on_another_rank = np.array([0, 1, 0])
    assert check.bad_rows(offsets, sum_over_ranks=lambda bad: bad + on_another_rank).tolist() == sorted({1, *rows})


def test_errors_keep_what_they_carry_on_the_way_to_another_process() -> None:
    gap = pickle.loads(pickle.dumps(GapTooLarge({"s1": 2.5}, 1.0, {"s1": 3})))
    assert (gap.gaps, gap.max_gap) == ({"s1": 2.5}, 1.0) and gap.reasons.keys() == {"s1"}
    names = [f"0.task{number}/1 (shard s0)" for number in range(10)]
    error = pickle.loads(pickle.dumps(NonFinite("the loss", names, 2)))
    assert error.num_updates == 2 and error.rows == names
    assert "0.task7/1 (shard s0) and 2 more; the optimizer was not touched" in str(error)
