"""Losses of routers are those of the formulas, whatever stands in one pack; loads are counts of trained tokens; and
routers that replay take the experts they are given, and nothing else from them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from settings.errors import InvalidInput
from storage.policies.model_config import EXPERTS
from tests.architectures import SEQUENCES, tiny_config, tiny_folder
from tests.conftest import PROJECT
from tests.unit.trainers.builders import (
    gradients,
    largest_difference,
    random_rows,
    routed,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from trainers.data.packing import position_ids
from trainers.model.experts import Routed, load_metrics, router_terms
from trainers.model.kinds import replay_refusal
from trainers.model.layout import Layout
from trainers.model.model import PolicyModel, load_model

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


_LENGTHS = [len(sequence) for sequence in SEQUENCES]
_IDS = torch.tensor([token for sequence in SEQUENCES for token in sequence])
_REPLAYED = ["qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "mixtral", "granitemoe", "gemma4_text", "lfm2_moe"]
"""Probabilities that are made to sum to 1 or not, chosen logits, groups of experts, weights before and after."""


def _hidden(model: PolicyModel, routes_TLC: torch.Tensor | None = None) -> torch.Tensor:
    layout = Layout(_LENGTHS, device=torch.device("cpu"))
    if routes_TLC is not None:
        layout.replay(routes_TLC)
    return model.hidden(_IDS, position_ids(_LENGTHS), layout)


def _chosen(model: PolicyModel) -> torch.Tensor:
    """By layer of the model; −1 in one without experts. Shape [T, L, C]."""
    layers = [layer for layer, _ in model.routers._routers]
    chosen = torch.full((len(_IDS), len(model.layers), model.routers.seen[0].chosen.shape[1]), -1)
    for layer, seen in zip(layers, model.routers.seen, strict=True):
        chosen[:, layer] = seen.chosen
    return chosen


@pytest.mark.parametrize("model_type", _REPLAYED)
def test_routers_take_the_experts_they_are_given_and_weigh_them_as_ever(tmp_path: Path, model_type: str) -> None:
    tiny_folder(tmp_path, tiny_config(model_type, **({"n_group": 2} if model_type == "deepseek_v3" else {})))
    model = load_model(tmp_path)
    own = _hidden(model)
    chosen = _chosen(model)
    model.routers.replay(model.causal_lm)
    assert torch.equal(_hidden(model), own), "nothing is given"
    assert torch.equal(_hidden(model, chosen), own), "their own choice is given"
    assert torch.equal(_hidden(model, torch.full_like(chosen, -1)), own), "for no token something is given"
    given = torch.where(chosen < 0, chosen, (chosen + 1) % 4)
    given[::3] = -1
    other = _hidden(model, given)
    now = _chosen(model)
    assert torch.equal(now[given >= 0], given[given >= 0]) and not torch.allclose(other, own)
    with model.routers.by_themselves():
        assert torch.equal(_hidden(model, given), own)
    other.square().sum().backward()
    routers = [module.weight.grad for _, module in model.routers._routers if hasattr(module, "weight")]
    assert all(gradient is not None and gradient.norm() > 0 for gradient in routers)


def test_preflight_knows_which_of_all_architectures_take_experts(tmp_path: Path) -> None:
    rows = json.loads((PROJECT / "docs" / "models.json").read_text())
    found = {}
    for model_type in (name for name, row in rows.items() if not row["packed"].startswith("no")):
        about = (config := tiny_config(model_type)).get_text_config().to_dict()
        if any(about.get(name) for name in EXPERTS):
            tiny_folder(tmp_path / model_type, config)
            model = load_model(tmp_path / model_type)
            try:
                model.routers.replay(model.causal_lm)
            except InvalidInput:
                found[model_type] = "do not take experts that are given to them" in replay_refusal(about)
            else:
                found[model_type] = not replay_refusal(about)
    assert len(found) > 35 and [name for name, is_right in found.items() if not is_right] == []


def test_given_experts_are_weighed_by_the_routers_own_logits(tmp_path: Path) -> None:
    """Worked out here for two architectures: probabilities made to sum to 1 (Qwen3), a softmax of chosen logits."""
    for model_type in ("qwen3_moe", "gpt_oss"):
        folder = tmp_path / model_type
        tiny_folder(folder, tiny_config(model_type, **({"norm_topk_prob": True} if model_type == "qwen3_moe" else {})))
        model = load_model(folder)
        model.routers.replay(model.causal_lm)
        weighed: list[torch.Tensor] = []
        for _, module in model.routers._routers:
            module.register_forward_hook(lambda _, __, output, to=weighed: to.append(output[1]))
        given = (torch.arange(len(_IDS))[:, None, None] + torch.tensor([0, 1])).expand(-1, 4, -1) % 4
        _hidden(model, given)
        for layer, (seen, weights_TC) in enumerate(zip(model.routers.seen, weighed, strict=True)):
            expected = seen.logits.gather(1, given[:, layer]).softmax(-1)
            torch.testing.assert_close(weights_TC, expected)


@pytest.mark.parametrize("model_type", ["phimoe", "llama4_text", "jamba", "jetmoe", "qwen3"])
def test_models_whose_routers_take_nothing_are_refused_by_name(tmp_path: Path, model_type: str) -> None:
    tiny_folder(tmp_path, tiny_config(model_type))
    with pytest.raises(InvalidInput, match=r"train.router_replay: .*(no experts|do not take experts).*; leave it out"):
        trainer_of(tmp_path, router_replay=True)


def test_a_step_takes_the_experts_of_its_samples_whatever_fits_into_a_pack(tmp_path: Path) -> None:
    tiny_folder(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=2))
    samples = routed(samples_of(random_rows(tmp_path, num_groups=2)), layers=2)
    ways: dict[str, dict[str, Any]] = {
        "one pack": {},
        "small packs": {"tokens_per_microbatch": 16},
        "layers computed again": {"activation_checkpointing": True},
    }
    found = {}
    for name, settings in ways.items():
        trainer = trainer_of(tmp_path, router_replay=True, **settings)
        found[name] = take_step(trainer, samples), gradients(trainer)
        assert found[name][0].pop("train_flops") > 0  # small packs compute prompts more than once
    metrics, expected = found["one pack"]
    assert metrics["routes_replayed"] == 1.0 and 0.5 < metrics["routes_changed"] < 1
    for others, its in found.values():
        assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert largest_difference(its, expected) < 1e-5
    ignoring = trainer_of(tmp_path)
    assert take_step(ignoring, samples_of(random_rows(tmp_path, num_groups=2)))["loss"] != metrics["loss"]
    assert largest_difference(gradients(ignoring), expected) > 1e-3


def test_tokens_that_are_the_same_with_other_experts_are_computed_apart(tmp_path: Path) -> None:
    """Attempts of a group begin alike: what they share is computed once, if its experts are the same too."""
    tiny_folder(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=2))
    samples = routed(samples_of(random_rows(tmp_path, num_groups=1, attempts=2)), layers=2)
    assert samples.routes_T is not None
    second = samples.offsets[1]
    found = {}
    for name, changed in (("alike", 0), ("other experts", 1)):
        samples.routes_T[second + 1, :] = (samples.routes_T[1] + changed) % 4
        for by_one in (False, True):
            settings = {"tokens_per_microbatch": 16} if by_one else {}
            trainer = trainer_of(tmp_path, router_replay=True, **settings)
            found[name, by_one] = take_step(trainer, samples)["loss"]
        assert found[name, True] == pytest.approx(found[name, False], abs=1e-6)
    assert found["alike", False] != pytest.approx(found["other experts", False], abs=1e-4)


def test_samples_without_routes_are_trained_bit_for_bit_as_without_replay(tmp_path: Path) -> None:
    tiny_folder(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=2))
    samples = samples_of(random_rows(tmp_path, num_groups=2))
    plain, replaying, partly = trainer_of(tmp_path), trainer_of(tmp_path, router_replay=True), routed(samples, layers=2)
    metrics = take_step(plain, samples)
    assert take_step(replaying, samples) == metrics and "routes_replayed" not in metrics
    assert largest_difference(weights(replaying), weights(plain)) == 0
    routed_T = np.zeros_like(samples.mask_T)
    unrouted = trainer_of(tmp_path, router_replay=True)
    found = take_step(unrouted, dataclasses.replace(partly, routed_T=routed_T))
    assert found["routes_replayed"] == found["routes_changed"] == 0.0 and found["loss"] == metrics["loss"]
    assert largest_difference(weights(unrouted), weights(plain)) == 0


def test_a_reference_chooses_its_experts_itself(tmp_path: Path) -> None:
    """Also where it is the policy without its adapters."""
    tiny_folder(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=2))
    samples = samples_of(random_rows(tmp_path, num_groups=2))
    found = []
    for reference in ("base", "lora_off"):
        lora = {"lora": {"rank": 2, "alpha": 4}} if reference == "lora_off" else {}
        for each in (samples, routed(samples, layers=2)):
            trainer = trainer_of(tmp_path, router_replay=True, reference={"kind": reference}, **lora)
            looked = trainer._look(each, np.arange(each.num_rows), {"logprobs", "reference"})
            found.append(looked)
    first = found[0].reference_T
    assert all(np.allclose(looked.reference_T, first, atol=1e-5) for looked in found)
    assert not np.allclose(found[1].logprobs_T, found[0].logprobs_T)
    assert not np.allclose(found[3].logprobs_T, found[2].logprobs_T)
