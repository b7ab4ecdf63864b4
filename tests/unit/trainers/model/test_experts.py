"""Losses of routers are those of the formulas, whatever stands in one pack; loads are counts of trained tokens."""

from pathlib import Path

import pytest
import torch

from settings.errors import InvalidInput
from tests.architectures import tiny_config, tiny_folder
from tests.unit.trainers.builders import random_rows, samples_of, take_step, tiny_model, trainer_of, weights
from trainers.model.experts import Routed, load_metrics, router_terms
from trainers.model.layout import Layout

_LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 1.0, 0.0]])
_CHOSEN = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 1]])


def test_balance_and_router_z_are_sums_over_sequences_of_the_formulas() -> None:
    lengths, weights_T = [3, 1], torch.tensor([0.2, 0.3, 0.0, 0.5])
    mask_T = torch.tensor([1.0, 1.0, 0.0, 1.0])
    sequences = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    layout = Layout(lengths, device=torch.device("cpu"))
    balance, router_z, counts = router_terms(
        [Routed(_LOGITS, _CHOSEN)], layout, mask_T=mask_T, weights_T=weights_T, sequences_T=sequences
    )
    p = _LOGITS.softmax(-1)
    first = 3 * (torch.tensor([3, 2, 1]) / 6 * p[:3].mean(0)).sum()
    second = 3 * (torch.tensor([1, 1, 0]) / 2 * p[3]).sum()
    torch.testing.assert_close(balance, 0.5 * first + 0.5 * second)
    torch.testing.assert_close(router_z, (weights_T * _LOGITS.exp().sum(-1).log() ** 2).sum())
    assert load_metrics({**counts, "entropy": 1.0}) == {
        "expert_load_max": 1.5,  # 3 of 6 choices, where 2 are even
        "expert_load_min": 0.0,
        "experts_unused": 1.0,
    }


def test_a_step_adds_the_terms_to_its_loss_whatever_fits_into_a_pack(tmp_path: Path) -> None:
    tiny_folder(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=2))
    samples = samples_of(random_rows(tmp_path, num_groups=2))
    metrics = {}
    for name, settings in {
        "plain": {},
        "one pack": {"router": {"balance": 0.5, "z": 0.25}},
        "small packs": {"router": {"balance": 0.5, "z": 0.25}, "tokens_per_microbatch": 16},
    }.items():
        metrics[name] = take_step(trainer_of(tmp_path, **settings), samples)
    plain, one, small = metrics.values()
    added = 0.5 * plain["router_balance"] + 0.25 * plain["router_z"]
    assert one["loss"] == pytest.approx(plain["loss"] + added, abs=1e-5) and added > 0.5
    assert one["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-2)
    for name in ("loss", "grad_norm", "router_balance", "router_z", "expert_load_max"):
        assert small[name] == pytest.approx(one[name], rel=1e-4)


def test_a_model_without_experts_has_no_terms_and_takes_no_weights_of_them(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    with pytest.raises(InvalidInput, match="this model has none"):
        trainer_of(folder, router={"balance": 0.1})
    assert weights(trainer_of(folder))
