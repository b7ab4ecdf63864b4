"""An engine whose numbers depend on the batch is refused, with the layer that differs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollouts.engines.engine import Generation
from rollouts.engines.vllm.batch_probe import check_batches, check_drafts, first_difference
from settings.errors import InvalidInput


class _Engine:
    """Its log-probabilities grow by `slope` with every other request, and by `seam` in a reply that is continued."""

    def __init__(self, *, slope: float = 0.0, seam: float = 0.0) -> None:
        self.slope, self.seam = slope, seam
        self.running = 0
        self.lengths: list[int] = []

    async def generate(self, prompt_ids: list[int], *, sampling: Any, request_id: str) -> Generation:
        self.running += 1
        await asyncio.sleep(0)
        beside, count = self.running - 1, sampling.max_tokens
        await asyncio.sleep(0)
        self.running -= 1
        self.lengths.append(len(prompt_ids) + count)
        logprob = -1 - self.slope * beside - self.seam * (count < 12)
        return Generation(
            token_ids=[5] * count, logprobs=[logprob] * count, weight_versions=[0] * count, finish_reason="length"
        )

    async def layers_of(self, request_id: str) -> list[tuple[int, str, str]]:
        other = "a" if "alone" in request_id else "b"
        return [(0, "embed", "x"), (0, "fc", "x"), (1, "embed", "x"), (1, "fc", other), (1, "head", other)]


def _check(engine: _Engine, max_model_len: int = 256) -> None:
    asyncio.run(check_batches(engine.generate, engine.layers_of, max_model_len=max_model_len))


@pytest.mark.parametrize("max_model_len", [16, 64, 256])
def test_an_engine_that_computes_the_same_bits_passes_at_any_length(max_model_len: int) -> None:
    engine = _Engine()
    _check(engine, max_model_len)
    assert max(engine.lengths) < max_model_len


@pytest.mark.parametrize("fault", [{"slope": 1e-7}, {"seam": 1e-7}])
def test_one_bit_that_depends_on_the_batch_is_refused_by_the_name_of_its_layer(fault: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="does not hold on this machine: fc computes other bits"):
        _check(_Engine(**fault))


def test_the_first_difference_is_by_position_and_then_by_layer() -> None:
    one = [(4, "a", "1"), (4, "b", "1"), (5, "a", "1"), (5, "b", "1")]
    assert first_difference(one, one) == "the sampler"
    assert first_difference(one, [(5, "a", "2"), (4, "a", "1"), (4, "b", "2")]) == "b"
    assert first_difference(one[:2], [(7, "a", "2"), (4, "b", "2")]) == "b", (
        "what only one of them computed says nothing"
    )


@pytest.mark.parametrize(("off", "width", "is_refused"), [(0.0, 4, False), (0.05, 4, True), (0.05, 2, False)])
@pytest.mark.parametrize("is_number", [True, False])
def test_drafted_tokens_with_other_logprobs_than_the_policys_are_refused(
    tmp_path: Path, off: float, width: int, is_refused: bool, is_number: bool
) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    arguments = {"max_model_len": 64, "dtype": {4: "float32", 2: "auto"}[width]}

    async def replayed(ids: list[int], name: str) -> list[float]:
        return [-1 + (off if is_number else float("nan"))] * (len(ids) - 1)

    checking = check_drafts(_Engine().generate, replayed, arguments, tmp_path)
    if not is_refused and is_number:
        asyncio.run(checking)
        return
    with pytest.raises(InvalidInput, match=r"speculative_config: .* they are (0.05|nan) nats per token off"):
        asyncio.run(checking)


def test_an_engine_whose_drafts_have_nan_for_a_logprob_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')

    async def generate(prompt_ids: list[int], **_: Any) -> Generation:
        return Generation(token_ids=[5], logprobs=[float("nan")], weight_versions=[0], finish_reason="length")

    with pytest.raises(InvalidInput, match="speculative_config: the engine's log-probability of token .* is nan"):
        asyncio.run(check_drafts(generate, generate, {"max_model_len": 64}, tmp_path))  # type: ignore[arg-type]
