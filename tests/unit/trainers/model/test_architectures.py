"""Every architecture that loads: packs are exact, and a policy has what its base stores. Others: why they do not."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from settings.errors import InvalidInput
from tests.architectures import packed_and_alone, tiny_config, tiny_folder
from trainers.checkpoint import load_weights, save_policy
from trainers.model import layout
from trainers.model.kinds import parts_with_state, refuse_team, team_refusal
from trainers.model.model import load_model
from trainers.model.stored import as_stored, refuse_unstored

_BY_KIND = """
    qwen3 gemma2 gemma3_text gpt_oss granite llama4_text phi cohere2 qwen3_next qwen3_5_text falcon_h1 lfm2 nemotron_h
    qwen3_moe olmoe deepseek_v3 smollm3
"""
"""One of each kind of layer, head and name."""
_OTHERS = """
    afmoe apertus arcee aria_text axk1 bamba biogpt bitnet cohere cohere2_moe cwm deepseek_v2 diffllama dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon_mamba flex_olmo gemma gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite gpt_neox granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
    hunyuan_v1_dense hy_v3 hyperclovax jais2 jamba jetmoe laguna lfm2_moe llama mamba mellum mimo_v2_flash minicpm3
    minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moshi nanochat nemotron olmo olmo2 olmo3
    olmo_hybrid persimmon phi3 phimoe qwen2 qwen2_moe qwen3_5_moe_text seed_oss solar_open stablelm starcoder2
    vaultgemma youtu
"""
_EACH = [*_BY_KIND.split(), *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS.split())]


@pytest.mark.parametrize("scale", [1, 16])
@pytest.mark.parametrize("model_type", _EACH)
def test_a_pack_gives_each_sequence_the_logprobs_and_gradients_that_it_has_alone(
    tmp_path: Path, model_type: str, scale: float
) -> None:
    tiny_folder(tmp_path, tiny_config(model_type))
    logprob_gap, gradient_gap = packed_and_alone(tmp_path, scale=scale)
    assert logprob_gap < 1e-5 and gradient_gap < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("model_type", _EACH)
def test_a_policy_has_every_tensor_of_its_base_and_goes_back_into_the_model(tmp_path: Path, model_type: str) -> None:
    stored = tiny_folder(tmp_path / "base", tiny_config(model_type))
    model = load_model(tmp_path / "base")
    refuse_unstored(model.causal_lm, tmp_path / "base")
    save_policy(model, tmp_path / "base", tmp_path / "untrained")
    untrained = load_file(tmp_path / "untrained/model.safetensors")
    assert untrained.keys() == stored.keys()
    assert all(torch.equal(untrained[name], tensor) for name, tensor in stored.items())

    for parameter in model.causal_lm.parameters():
        parameter += 1
    trained = {name: parameter.clone() for name, parameter in model.causal_lm.named_parameters()}
    buffers = stored.keys() - as_stored(model.causal_lm, trained).keys()
    save_policy(model, tmp_path / "base", tmp_path / "policy")
    policy = load_file(tmp_path / "policy/model.safetensors")
    assert {name for name, tensor in stored.items() if torch.equal(policy[name], tensor)} == buffers
    load_weights(model, tmp_path / "base")
    assert not any(torch.equal(trained[name], now) for name, now in model.causal_lm.named_parameters())
    load_weights(model, tmp_path / "policy")
    assert all(torch.equal(trained[name], now) for name, now in model.causal_lm.named_parameters())


_REFUSED = [
    ("gpt2", {}, "has no decoder layers in a list"),
    ("deepseek_v32", {}, "has layers that choose the tokens they attend to"),
    ("deepseek_v4", {}, "has layers that choose the tokens they attend to"),
    ("doge", {}, "has attention that a pack cannot take over"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'dynamic'"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), _REFUSED, ids=[each[0] for each in _REFUSED])
def test_what_is_in_no_row_of_the_table_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    tiny_folder(tmp_path, tiny_config(model_type, **changes))
    with pytest.raises(InvalidInput, match=f"(ForCausalLM|LMHeadModel).*{reason}"):
        load_model(tmp_path)


@pytest.mark.parametrize("model_type", _EACH)
def test_a_configuration_says_whether_a_row_can_be_divided_among_ranks(model_type: str) -> None:
    config = tiny_config(model_type)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    keeps_state = bool(parts_with_state(causal_lm))
    with pytest.raises(InvalidInput, match="carry a state") if keeps_state else contextlib.nullcontext():
        refuse_team(causal_lm, 2)
    assert ("carry a state" in team_refusal(config.to_dict(), 2)) == keeps_state
    assert keeps_state or "does not divide the model's 4 attention heads" in team_refusal(config.to_dict(), 3)


_STATEFUL = ["qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "nemotron_h"]


@pytest.mark.parametrize("model_type", _STATEFUL)
@pytest.mark.parametrize("scale", [0.2, 0.002, 0.0])
def test_the_trial_sees_a_state_that_crosses_sequences_however_small_the_weights(
    tmp_path: Path, model_type: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If such layers were packed like others. Weights of zero do not hide them."""
    monkeypatch.setattr(layout, "run_side_by_side", lambda forward, *arguments, **named: forward(*arguments, **named))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, initializer_range=scale or 0.2))
    if not scale:
        for name, parameter in model.named_parameters():
            torch.nn.init.zeros_(parameter) if any(part in name for part in ("linear_attn", "conv.", "mamba")) else None
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="nats off|is given other values in a pack|reaches the next"):
        load_model(tmp_path)


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma3_text", "starcoder2", "exaone4"])
@pytest.mark.parametrize("scale", [0.2, 0.002])
def test_windows_are_as_long_after_the_trial_as_before(tmp_path: Path, model_type: str, scale: float) -> None:
    tiny_folder(tmp_path, tiny_config(model_type, sliding_window=4096, initializer_range=scale))
    model = load_model(tmp_path)
    windows = {getattr(module, "sliding_window", None) for module in model.modules()} - {None}
    assert model.causal_lm.config.sliding_window == 4096 and windows <= {4096}


@pytest.mark.slow
def test_these_are_all_that_load(tmp_path: Path) -> None:
    loads = set()
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        folder, name = tmp_path / config.model_type, config.model_type
        try:
            with torch.device("meta"):
                made = AutoModelForCausalLM.from_config(tiny_config(name))
            if sum(parameter.numel() for parameter in made.parameters()) < 2e7:
                tiny_folder(folder, tiny_config(name))
                load_model(folder)
                loads.add(name)
        except Exception:  # noqa: BLE001 - no tiny model can be made in this way, or it is refused
            continue
    loads -= {"fuyu", "whisper"}  # they see images and hear, and their encoders are not trained
    loads -= {"hunyuan_v1_moe"}  # its router is in float32 in any case, so nothing is proven of it in float64
    assert loads == {*_BY_KIND.split(), *_OTHERS.split()}
