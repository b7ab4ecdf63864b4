"""Adapters: the base model at first and when off, alone trained, the same from peft, from disk and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from settings.errors import InvalidInput
from storage.objects.digests import seal_folder, verify_folder
from storage.policies.adapters import ADAPTER_WEIGHTS, merged_weights
from tests.architectures import tiny_config
from tests.architectures import tiny_folder as random_folder
from tests.unit.trainers.builders import (
    largest_difference,
    load_causal_lm,
    logprobs_alone,
    take_step,
    tiny_model,
    trainer_of,
)
from trainers.checkpoint import load_state, load_weights, save_state
from trainers.data.samples import Samples
from trainers.model.distributed import full, shard, start_process_group
from trainers.model.lora import (
    adapted_layers,
    adapter_weights,
    add_adapters,
    merge_adapter,
    read_adapter,
    without_adapters,
    write_adapter,
)
from trainers.model.model import PolicyModel

_SEQUENCE = [2, 7, 8, 4, 9, 3, 5]
_RANK, _ALPHA = 3, 7.5
_EVERY_LINEAR = 14  # 2 layers of 4 projections in attention and 3 in the MLP


def _adapted(base: Path, *, seed: int = 0, target_modules: list[str] | str = "all-linear") -> nn.Module:
    causal_lm = load_causal_lm(base)
    add_adapters(causal_lm, rank=_RANK, alpha=_ALPHA, target_modules=target_modules, seed=seed)
    return causal_lm


def _trained(base: Path) -> nn.Module:
    """Adapters that have moved: B is not zero."""
    causal_lm, generator = _adapted(base), torch.Generator().manual_seed(1)
    for weight in adapter_weights(causal_lm).values():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return causal_lm


def _written(causal_lm: nn.Module, folder: Path) -> Path:
    folder.mkdir()
    write_adapter(causal_lm, folder, base="tiny")
    seal_folder(folder)
    return folder


@torch.no_grad()
def _logprobs(causal_lm: nn.Module) -> torch.Tensor:
    return logprobs_alone(causal_lm, _SEQUENCE)


def _sharded(causal_lm: nn.Module, dtype: torch.dtype = torch.float32) -> PolicyModel:
    model = PolicyModel(causal_lm)
    shard(model, model.layers, mesh=start_process_group(torch.device("cpu")), dtype=dtype)
    return model


def _forward(model: PolicyModel) -> torch.Tensor:
    """Log-probabilities through the sharded layers."""
    ids = torch.tensor(_SEQUENCE)
    model.unshard()  # type: ignore[operator]  # the embeddings belong to the whole, whose forward is not called here
    log_p = model.causal_lm(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return log_p[:-1].gather(1, ids[1:, None])[:, 0]


def test_fresh_adapters_leave_the_base_model_as_it_is_and_are_all_that_is_trained(tiny_folder: Path) -> None:
    causal_lm = _adapted(tiny_folder)
    assert torch.equal(_logprobs(causal_lm), _logprobs(load_causal_lm(tiny_folder)))
    trained = {name for name, parameter in causal_lm.named_parameters() if parameter.requires_grad}
    assert len(adapted_layers(causal_lm)) == _EVERY_LINEAR and len(trained) == 2 * _EVERY_LINEAR
    assert trained == {name for name, _ in causal_lm.named_parameters() if "lora_" in name}
    assert all(bool(weight.any()) == (".lora_A." in name) for name, weight in adapter_weights(causal_lm).items())

    found = adapted_layers(_adapted(tiny_folder, target_modules=["q_proj", "down_proj"]))
    names = ("mlp.down_proj", "self_attn.q_proj")
    assert sorted(found) == [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in names]


def test_the_seed_alone_decides_the_adapters_and_no_others_random_numbers(tiny_folder: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = adapter_weights(_adapted(tiny_folder, seed=5))
    assert torch.equal(torch.rand(3), expected)
    again, other = (adapter_weights(_adapted(tiny_folder, seed=seed)) for seed in (5, 6))
    assert largest_difference(first, again) == 0 < largest_difference(first, other)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["q_proj", "qproj"], "'qproj' is the name of no linear layer of this model; choose from down_proj, .*q_proj"),
        (["q_proj", "lm_head"], "'lm_head' is no part of the decoder layers"),
        (["embed_tokens"], "'embed_tokens' is the name of no linear layer"),
    ],
)
def test_a_layer_that_could_not_be_trained_is_refused(tiny_folder: Path, names: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _adapted(tiny_folder, target_modules=names)


def test_of_a_state_space_layer_only_the_input_is_adapted(tmp_path: Path) -> None:
    """Its kernels on GPUs take the other weights by themselves: adapters on them would do nothing there."""
    random_folder(tmp_path, tiny_config("falcon_h1", num_hidden_layers=1))
    names = {name.rsplit(".", 1)[-1] for name in adapted_layers(_adapted(tmp_path)) if "mamba" in name}
    assert names == {"in_proj"}
    with pytest.raises(InvalidInput, match="'out_proj' is .* of a state-space layer .*; choose from .*in_proj"):
        _adapted(tmp_path, target_modules=["out_proj"])


def test_beside_fused_experts_linear_layers_alone_are_adapted_and_merged(tmp_path: Path) -> None:
    """peft would look for `shared_expert.down_proj` among the experts."""
    base = tmp_path / "base"
    random_folder(base, tiny_config("qwen3_next"))
    trained = _trained(base)
    names = {name.split(".", 3)[3] for name in adapted_layers(trained)}
    assert {"mlp.shared_expert.down_proj", "self_attn.q_proj", "linear_attn.out_proj"} <= names
    merge_adapter(base, _written(trained, tmp_path / "policy"), tmp_path / "merged")
    torch.testing.assert_close(_logprobs(load_causal_lm(tmp_path / "merged")), _logprobs(trained), atol=1e-4, rtol=0)
    tensors = load_file(str(tmp_path / "merged" / "model.safetensors"))
    assert largest_difference(dict(merged_weights(base, tmp_path / "policy")), tensors) < 1e-6


def test_switched_off_it_is_the_base_model_bit_for_bit_and_switched_on_it_trains_again(tiny_folder: Path) -> None:
    causal_lm = _trained(tiny_folder)
    with_them = _logprobs(causal_lm)
    with pytest.raises(RuntimeError, match="in between"), without_adapters(causal_lm):
        assert torch.equal(_logprobs(causal_lm), _logprobs(load_causal_lm(tiny_folder)))
        raise RuntimeError("in between")
    assert torch.equal(_logprobs(causal_lm), with_them)
    logprobs_alone(causal_lm, _SEQUENCE).sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in adapter_weights(causal_lm).values())
    assert not any(p.grad is not None for name, p in causal_lm.named_parameters() if "lora_" not in name)
    with pytest.raises(ValueError, match="no adapters"), without_adapters(load_causal_lm(tiny_folder)):
        pass


def test_sharded_they_get_the_gradient_they_get_unsharded(tiny_folder: Path) -> None:
    """The first use after sharding is with the adapters off, as a reference before the first update is."""
    alone, model = _trained(tiny_folder), _sharded(_trained(tiny_folder))
    with torch.no_grad(), without_adapters(model):
        assert torch.equal(_forward(model), _logprobs(load_causal_lm(tiny_folder)))
    _forward(model).sum().backward()
    logprobs_alone(alone, _SEQUENCE).sum().backward()
    for name, weight in adapter_weights(model.causal_lm).items():
        assert weight.grad is not None
        torch.testing.assert_close(full(weight.grad), adapter_weights(alone)[name].grad, atol=1e-5, rtol=1e-5)
    assert not any(p.grad is not None for p in model.parameters() if not p.requires_grad)


def test_a_policys_adapter_goes_back_into_the_model_and_the_base_policy_empties_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    policy, model = _written(_trained(tiny_folder), tmp_path / "policy"), _sharded(_adapted(tiny_folder))
    load_weights(model, policy)
    loaded = {name: full(weight) for name, weight in adapter_weights(model.causal_lm).items()}
    assert largest_difference(loaded, adapter_weights(_trained(tiny_folder))) == 0
    load_weights(model, tiny_folder)
    with torch.no_grad():
        assert torch.equal(_forward(model), _logprobs(load_causal_lm(tiny_folder)))


def test_an_adapter_of_other_layers_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    policy = _written(_adapted(tiny_folder, target_modules=["q_proj"]), tmp_path / "policy")
    with pytest.raises(ValueError, match="other layers or of another rank"):
        read_adapter(_adapted(tiny_folder), policy)


def test_a_state_holds_the_adapters_only_and_is_refused_without_them(
    tiny_folder: Path, tmp_path: Path, samples: Samples
) -> None:
    trainer = trainer_of(tiny_folder, lora={"rank": _RANK})
    take_step(trainer, samples)
    save_state(trainer, tmp_path / "state", step=1)
    saved = load_file(str(tmp_path / "state" / "state.safetensors"))
    held = {name.removeprefix("weight/") for name in saved if name.startswith("weight/")}
    assert len(held) == 2 * _EVERY_LINEAR and all("lora_" in name for name in held)
    with pytest.raises(ValueError, match=r"train\.lora must be as when it was saved"):
        load_state(trainer_of(tiny_folder), tmp_path / "state")


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_merged_it_is_one_model_with_the_same_logprobs_and_types(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    base = tiny_model(tmp_path / "base", tied=tied)
    load_causal_lm(base).to(dtype).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != "dtype"}))
    (base / "digest.json").unlink()
    of_base_digest = seal_folder(base)
    policy = _written(_trained(base), tmp_path / "policy")
    digest = merge_adapter(base, policy, tmp_path / "merged")
    assert digest == verify_folder(tmp_path / "merged") != of_base_digest
    merged = load_causal_lm(tmp_path / "merged")
    atol = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(_logprobs(merged), _logprobs(_trained(base)), atol=atol, rtol=0)
    assert (tmp_path / "merged" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert {file.name for file in base.iterdir()} <= names and ADAPTER_WEIGHTS not in names
    tensors, of_base = (load_file(str(f / "model.safetensors")) for f in (tmp_path / "merged", base))
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        name: (t.shape, t.dtype) for name, t in of_base.items()
    }
    streamed = {name: tensor.to(of_base[name].dtype) for name, tensor in merged_weights(base, policy)}
    assert largest_difference(streamed, tensors) == 0, "as an engine on CPUs loads it"
