"""Learning rates by hand; norms of module groups add up; averages of what is trained."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.trainers.builders import largest_difference, tiny_model
from trainers.health import NonFinite
from trainers.model.distributed import copy_into, full, shard, start_process_group
from trainers.model.model import load_model
from trainers.optimizer import Ema, Schedule, clip_gradient, learning_rate, make_optimizer, module_group


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
    assert learning_rate(1, **{**settings, "warmup_steps": 0, "schedule": "constant"}) == 2.0  # type: ignore[arg-type]


def test_every_parameter_is_in_one_module_group() -> None:
    names = {
        "embed": ["causal_lm.model.embed_tokens.weight"],
        "attention": [
            "causal_lm.model.layers.3.self_attn.k_proj.bias",
            "causal_lm.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        ],
        "norm": [
            "causal_lm.model.layers.3.self_attn.q_norm.weight",
            "causal_lm.model.layers.3.input_layernorm.weight",
            "causal_lm.model.norm.weight",
        ],
        "mlp": [
            "causal_lm.model.layers.3.mlp.down_proj.weight",
            "causal_lm.model.layers.3.mlp.experts.7.up_proj.weight",
            "causal_lm.model.layers.3.block_sparse_moe.gate.weight",
            "causal_lm.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        ],
        "lm_head": ["causal_lm.lm_head.weight"],
        "critic": ["critic.weight", "model.score.weight"],
        "other": ["something_else"],
    }
    assert {group: [module_group(name) for name in of_group] for group, of_group in names.items()} == {
        group: [group] * len(of_group) for group, of_group in names.items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_squares_of_the_groups_add_up_to_the_global_norm(tmp_path: Path, tied: bool) -> None:
    model = load_model(tiny_model(tmp_path / "model", tied=tied))
    shard(model, model.layers, mesh=start_process_group(torch.device("cpu")), dtype=torch.float32)
    draw, expected = torch.Generator().manual_seed(0), {"mlp": 0.0}
    for name, parameter in model.named_parameters():
        if (group := module_group(name)) != "mlp":  # which has no gradient
            gradient = torch.randn(parameter.shape, generator=draw)
            parameter.grad = torch.zeros_like(parameter)
            copy_into(parameter.grad, gradient)
            expected[group] = expected.get(group, 0.0) + float(gradient.double().square().sum())
    whole, norms = clip_gradient(model.named_parameters(), max_norm=1e9, sum_over_ranks=lambda sums: sums)
    assert {group: norm**2 for group, norm in norms.items()} == pytest.approx(expected, rel=1e-9)
    assert norms.keys() == {"embed", "attention", "mlp", "norm"} | (set() if tied else {"lm_head"})
    assert whole == pytest.approx(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))), rel=1e-5)


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
                rows=["0.a/1 (shard s)"],
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


def test_only_trained_weights_have_an_average_which_a_state_without_one_starts_from_them(tiny_folder: Path) -> None:
    model = load_model(tiny_folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    ema = Ema(model.named_parameters(), decay=0.8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ema.load({})
    trained = {f"ema/{name}": weight for name, weight in model.named_parameters() if "mlp" in name}
    assert largest_difference(ema.state_tensors(), trained) == 0
