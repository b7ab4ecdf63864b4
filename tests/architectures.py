"""Tiny random models of every architecture, and what must be true of each: the proofs behind `docs/models.md`.

In: a model type of transformers. Out: a folder with its configuration and weights, and functions that compare it with
transformers' own forward pass. All sizes are ones that vLLM's CPU kernels take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from storage.objects.digests import seal_folder
from tests.unit.trainers.builders import logprobs_alone
from trainers.data.packing import position_ids
from trainers.model.layout import Layout
from trainers.model.model import PolicyModel, load_model
from trainers.model.teams import Team

_SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "initializer_range": 0.1},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size_per_layer_input": 96},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 64},
    **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "lru_width": 128},
    **{"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 32},
    **{"mamba_d_ssm": 256, "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 16, "hidden_size_per_layer_input": 32},
}
_CHANGES: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    "granitemoe": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "phimoe": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 32, "num_experts_per_tok": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    # As published models have them: vLLM reads what transformers does not.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 128, "block_dim": 128},
    "deepseek_v3": {
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "max_position_embeddings": 163840},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid"},
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32},
    "glm4_moe": {"head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "phi3": {
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096},
            **{"short_factor": [1 + k / 8 for k in range(16)], "long_factor": [2 + k / 2 for k in range(16)]},
        }
    },
    "youtu": {"pad_token_id": None},  # transformers makes the padding token's row 0 whenever it loads one
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "glm4": {"partial_rotary_factor": 0.5},
}
SEQUENCES = [[4, 5, 6, 7, 8], [9], [10, 4], [11, 12, 13, 14, 15, 4, 5, 20, 21, 22, 23], [4, 5, 6, 30]]
SEQUENCES.append([4 + 7 * place % 89 for place in range(40)])  # longer than every window and chunk


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Four layers, of every kind that the architecture has."""
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    sizes |= {**_CHANGES.get(model_type, {}), **changes}
    if "qk_rope_head_dim" in known:  # heads of two parts, all of them of their own
        sizes |= {"num_key_value_heads": 4, "head_dim": 64}
    return AutoConfig.for_model(model_type, **sizes)


def tiny_folder(folder: Path, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """A random model's folder, sealed; returns what it stores. Norms and biases are not 1 and 0 either."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    seal_folder(folder)
    return load_file(folder / "model.safetensors")


class InFloat64(TorchFunctionMode):
    """Inside, what transformers computes in float32, norms and routers for example, is computed in float64. Otherwise
    large weights blow its rounding up, and a comparison shows nothing."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        def widened(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(widened, arguments), **{name: widened(value) for name, value in (named or {}).items()})


def packed_and_alone(folder: Path, *, scale: float) -> tuple[float, float]:
    """The largest difference of a log-probability, and of a parameter's gradient relative to it, between one pack and
    transformers' own forward pass of each sequence; with all matrices `scale` times as large."""
    alone: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    alone.config.use_cache = False
    model = load_model(folder, dtype=torch.float64)
    with torch.no_grad():
        for causal_lm in (alone, model.causal_lm):
            causal_lm.set_experts_implementation("eager")  # the others have no float64
            for parameter in causal_lm.parameters():
                parameter *= scale if parameter.ndim > 1 else 1
    weights = torch.linspace(-1, 2, sum(map(len, SEQUENCES)) - len(SEQUENCES), dtype=torch.float64)
    with InFloat64():
        expected = torch.cat([logprobs_alone(alone, sequence, temperature=0.7) for sequence in SEQUENCES])
        (expected @ weights).backward()
        found = packed_logprobs(model, SEQUENCES, temperature=0.7)
        (found @ weights).backward()
    theirs = {name: its.grad for name, its in alone.named_parameters() if its.grad is not None}
    mine = {name: its.grad for name, its in model.causal_lm.named_parameters() if its.grad is not None}
    assert mine.keys() == theirs.keys() and mine
    floor = 1e-6 * max(float(gradient.norm()) for gradient in theirs.values())  # saturated
    off = max(float((mine[name] - theirs[name]).norm() / (theirs[name].norm() + floor)) for name in mine)
    return float((found - expected).detach().abs().max()), off


def packed_logprobs(
    model: PolicyModel, sequences: list[list[int]], *, temperature: float = 1.0, team: Team | None = None
) -> torch.Tensor:
    """Log-probability of every token after the first of each sequence, all of them from one pack, of one rank or of a
    team."""
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    targets = torch.cat([torch.tensor([*sequence[1:], 0]) for sequence in sequences])
    layout = Layout(lengths, device=torch.device("cpu"), team=team)
    logprobs, _ = model(ids, targets, position_ids(lengths), layout, temperature)
    return torch.cat([part[:-1] for part in logprobs.split(lengths)])
