"""Every architecture that loads: a policy has what its base stores. Every other one: why it does not load."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from settings.errors import InvalidInput
from storage.objects.digests import seal_folder
from trainers.checkpoint import load_weights, save_policy
from trainers.model.model import load_model
from trainers.model.stored import as_stored, refuse_unstored

_SIZES: dict[str, Any] = {
    **{"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size_per_layer_input": 40},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "intermediate_size_mlp": 32},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "lru_width": 32},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_num_heads": 8, "mamba_head_dim": 8},
    **{"mamba_d_ssm": 64, "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 8},
}
_LOADS = """
    afmoe apertus arcee aria_text axk1 bitnet cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe
    exaone4 exaone_moe flex_olmo gemma gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe
    laguna lfm2 llama mellum minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral olmo olmo2 olmo3
    olmoe persimmon phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu
"""


def _tiny(model_type: str, **changes: Any) -> PreTrainedConfig:
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {name: value for name, value in {**_SIZES, **changes}.items() if name in known}
    if "qk_rope_head_dim" in known:  # heads of two parts, all of them of their own
        sizes = {**sizes, "num_key_value_heads": 4, "head_dim": 8}
    if model_type == "youtu":  # transformers makes the padding token's row 0 whenever it loads one
        sizes = {**sizes, "pad_token_id": None}
    return AutoConfig.for_model(model_type, **sizes)


def _made(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """A random model's folder; returns what it stores."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    seal_folder(folder)
    return load_file(folder / "model.safetensors")


@torch.no_grad()
@pytest.mark.parametrize("model_type", _LOADS.split())
def test_a_policy_has_every_tensor_of_its_base_and_goes_back_into_the_model(tmp_path: Path, model_type: str) -> None:
    stored = _made(tmp_path / "base", _tiny(model_type))
    model = load_model(tmp_path / "base")
    is_fused = {name for name, _ in model.causal_lm.named_parameters()} - stored.keys()
    # Such a policy is written and read as any other; the engine cannot take it in.
    with pytest.raises(InvalidInput, match="stores its weights under other names") if is_fused else nullcontext():
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


_BY_KIND = [
    ("qwen3_next", {}, "'linear_attention'"),
    ("qwen3_5_text", {}, "'linear_attention'"),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "'conv'"),
    ("llama4_text", {"attention_chunk_size": 8192}, "'chunked_attention'"),
    ("deepseek_v4", {}, "'compressed_sparse_attention'"),
]
_BY_TRIAL = [
    *_BY_KIND[:-1],
    ("recurrent_gemma", {"logits_soft_cap": 1e6}, ""),
    ("phimoe", {"sliding_window": 2047}, ""),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}, ""),
]


@pytest.mark.parametrize(("model_type", "changes", "kind"), _BY_KIND, ids=[each[0] for each in _BY_KIND])
def test_layers_that_packing_does_not_know_are_refused_by_their_kind(
    tmp_path: Path, model_type: str, changes: dict[str, Any], kind: str
) -> None:
    _made(tmp_path, _tiny(model_type, **changes))
    with pytest.raises(InvalidInput, match=f"has layers of kind {kind}"):
        load_model(tmp_path)


@pytest.mark.parametrize(("model_type", "changes", "_"), _BY_TRIAL, ids=[each[0] for each in _BY_TRIAL])
@pytest.mark.parametrize("scale", [0.2, 0.002])
def test_the_trial_sees_states_and_long_windows_without_being_told_however_small_the_weights(
    tmp_path: Path, model_type: str, changes: dict[str, Any], _: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.model.trial._PACKED_KINDS", set(transformers.configuration_utils.ALLOWED_LAYER_TYPES))
    _made(tmp_path, _tiny(model_type, initializer_range=scale, **changes))
    with pytest.raises(InvalidInput, match="nats off|is given other values in a pack"):
        load_model(tmp_path)


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "gemma3_text", "starcoder2", "exaone4"])
@pytest.mark.parametrize("scale", [0.2, 0.002])
def test_windows_that_packed_attention_knows_load_and_are_as_long_as_before(
    tmp_path: Path, model_type: str, scale: float
) -> None:
    _made(tmp_path, _tiny(model_type, sliding_window=4096, initializer_range=scale))
    model = load_model(tmp_path)
    windows = {getattr(module, "sliding_window", None) for module in model.modules()} - {None}
    assert model.causal_lm.config.sliding_window == 4096 and windows <= {4096}


def test_weights_of_zero_hide_no_state_from_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.model.trial._PACKED_KINDS", {"full_attention", "linear_attention"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_tiny("qwen3_next"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_attn" in name:
                parameter.zero_()
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="what one sequence of a pack says reaches the next"):
        load_model(tmp_path)


@pytest.mark.slow
def test_these_are_all_that_load(tmp_path: Path) -> None:
    loads = set()
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            with torch.device("meta"):
                made = AutoModelForCausalLM.from_config(_tiny(config.model_type))
            if sum(parameter.numel() for parameter in made.parameters()) < 1e7:
                _made(tmp_path / config.model_type, _tiny(config.model_type))
                load_model(tmp_path / config.model_type)
                loads.add(config.model_type)
        except Exception:  # noqa: BLE001 - no tiny model can be made in this way, or it is refused
            continue
    assert loads == set(_LOADS.split())
