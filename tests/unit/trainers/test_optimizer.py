"""Learning rates by hand; norms of module groups add up; the average is the recursion, and survives a saved state."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.trainers.builders import tiny_model
from trainers.health import NonFinite
from trainers.model.distributed import full, shard, start_process_group
from trainers.model.model import PolicyModel, load_model
from trainers.optimizer import Ema, Schedule, clip_gradient, grad_norms, learning_rate, make_optimizer, module_group


def _sharded(folder: Path) -> PolicyModel:
    model = load_model(folder)
    shard(model, model.layers, mesh=start_process_group(torch.device("cpu")), dtype=torch.float32)
    return model


def _fill_gradients(model: nn.Module, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Random gradients; returns them whole, by name."""
    draw, whole = np.random.default_rng(seed), {}
    for name, parameter in model.named_parameters():
        whole[name] = draw.standard_normal(parameter.shape).astype(np.float32)
        parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.copy_(torch.from_numpy(whole[name]))  # one rank: its shard is the whole
    return whole


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]),
    ],
)
def test_warm_up_then_decay(schedule: Schedule, expected: list[float]) -> None:
    settings = {"peak": 2.0, "warmup_steps": 2, "schedule": schedule, "decay_steps": 6}
    found = [learning_rate(step, **settings) for step in range(1, 8)]  # type: ignore[arg-type]
    assert found == pytest.approx([2.0 * share for share in expected], abs=1e-15)


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert learning_rate(1, peak=3.0, warmup_steps=0, schedule="constant", decay_steps=0) == 3.0


@given(st.integers(0, 50), st.integers(1, 100), st.sampled_from(["linear", "cosine"]))
def test_a_decay_never_rises_and_ends_at_zero(warmup: int, length: int, schedule: Schedule) -> None:
    settings = {"peak": 1.0, "warmup_steps": warmup, "schedule": schedule, "decay_steps": warmup + length}
    rates = [learning_rate(step, **settings) for step in range(max(1, warmup), warmup + length + 2)]  # type: ignore[arg-type]
    assert all(later <= earlier for earlier, later in zip(rates, rates[1:], strict=False))
    assert rates[-1] == rates[-2] == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("causal_lm.model.embed_tokens.weight", "embed"),
        ("causal_lm.model.layers.3.self_attn.k_proj.bias", "attention"),
        ("causal_lm.model.layers.3.self_attn.q_norm.weight", "norm"),
        ("causal_lm.model.layers.3.mlp.down_proj.weight", "mlp"),
        ("causal_lm.model.layers.3.mlp.experts.7.up_proj.weight", "mlp"),
        ("causal_lm.model.layers.3.block_sparse_moe.gate.weight", "mlp"),
        ("causal_lm.model.layers.3.input_layernorm.weight", "norm"),
        ("causal_lm.model.norm.weight", "norm"),
        ("causal_lm.lm_head.weight", "lm_head"),
        ("causal_lm.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "attention"),
        ("causal_lm.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight", "mlp"),
        ("critic.weight", "critic"),
        ("model.score.weight", "critic"),
        ("something_else", "other"),
    ],
)
def test_every_parameter_is_in_one_module_group(name: str, group: str) -> None:
    assert module_group(name) == group


@pytest.mark.parametrize("tied", [True, False])
def test_squares_of_the_groups_add_up_to_the_global_norm(tmp_path: Path, tied: bool) -> None:
    model = _sharded(tiny_model(tmp_path / "model", tied=tied))
    whole = _fill_gradients(model)
    norms = grad_norms(model.named_parameters(), sum_over_ranks=lambda sums: sums)
    expected: dict[str, float] = {}
    for name, gradient in whole.items():
        expected[module_group(name)] = expected.get(module_group(name), 0.0) + float(
            (gradient.astype(float) ** 2).sum()
        )
    assert {group: norm**2 for group, norm in norms.items()} == pytest.approx(expected, rel=1e-9)
    assert norms.keys() == {"embed", "attention", "mlp", "norm"} | (set() if tied else {"lm_head"})
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert math.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(float(full(total)), rel=1e-5)


def test_a_group_without_a_gradient_has_norm_zero(tiny_folder: Path) -> None:
    model = _sharded(tiny_folder)
    _fill_gradients(model)
    for name, parameter in model.named_parameters():
        if module_group(name) == "mlp":
            parameter.grad = None
    norms = grad_norms(model.named_parameters(), sum_over_ranks=lambda sums: sums)
    assert norms["mlp"] == 0 and norms["attention"] > 0


def test_a_gradient_that_is_no_number_is_refused_with_the_rows() -> None:
    weight = nn.Parameter(torch.ones(2))
    for value in (math.nan, math.inf):
        weight.grad = torch.tensor([1.0, value])
        with pytest.raises(NonFinite, match=r"the critic's gradient is NaN or infinite at 0.a/1 \(shard s\)") as caught:
            clip_gradient(
                [("weight", weight)],
                max_norm=1.0,
                sum_over_ranks=lambda sums: sums,
                what="the critic's gradient",
                rows=lambda: ["0.a/1 (shard s)"],
                num_updates=1,
            )
        assert caught.value.num_updates == 1
        assert "not touched for it, nor are the 1 updates before it in this step committed" in str(caught.value)
        assert float(weight.grad[0]) == 1.0


def test_the_optimizer_decays_every_weight_and_divides_by_its_moments() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer([weight], learning_rate=0.1, weight_decay=0.5)
    weight.grad = torch.tensor([3.0])
    optimizer.step()
    # First step: both moments are bias-corrected to g and g², so the update is the sign of g.
    assert float(weight.detach()) == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_the_average_is_the_recursion_and_leaves_the_weights_alone(tiny_folder: Path) -> None:
    model, decay = _sharded(tiny_folder), 0.9
    expected = {name: full(p).double().numpy().copy() for name, p in model.named_parameters()}
    ema = Ema(model.named_parameters(), decay=decay)
    for step in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * (step + 1))
        ema.update()
        for name, parameter in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * full(parameter).double().numpy()
    for name, tensor in ema.state_tensors().items():
        np.testing.assert_allclose(tensor.numpy(), expected[name.removeprefix("ema/")], rtol=1e-5, atol=1e-6)


def test_an_average_goes_on_bit_for_bit_from_a_saved_state(tiny_folder: Path) -> None:
    def moved(model: nn.Module, ema: Ema) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        ema.update()

    first, second = _sharded(tiny_folder), _sharded(tiny_folder)
    straight, resumed = Ema(first.named_parameters(), decay=0.8), Ema(second.named_parameters(), decay=0.8)
    moved(first, straight)
    moved(second, resumed)
    saved = {name: tensor.clone() for name, tensor in resumed.state_tensors().items()}
    resumed = Ema(second.named_parameters(), decay=0.8)
    resumed.load(saved)
    moved(first, straight)
    moved(second, resumed)
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name])


def test_a_state_without_an_average_starts_one_from_the_weights(tiny_folder: Path) -> None:
    model = _sharded(tiny_folder)
    ema = Ema(model.named_parameters(), decay=0.8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ema.load({})
    for name, parameter in model.named_parameters():
        assert torch.equal(ema.state_tensors()[f"ema/{name}"], full(parameter))


def test_frozen_parameters_have_no_average(tiny_folder: Path) -> None:
    model = load_model(tiny_folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    names = Ema(model.named_parameters(), decay=0.5).state_tensors()
    assert names and all("mlp" in name for name in names)
