"""What kinds of layers a model has, and how each is computed in a pack: the one table of it.

    full, sliding, chunked attention      `packed_attention`, under transformers' own rules about what a token may see
    linear attention, Mamba, convolution  on sequences side by side: no state crosses from one to the next
    experts, dense layers                 token by token, as they are
    output matrix                         logits scaled, capped or with a bias, as the model's own forward has them

In: a `config.json`, or a causal LM of transformers. Out: a sentence if a layer is of another kind; else the model,
packed. Importing it loads no torch: what cannot be trained is refused before anything heavy starts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from settings.errors import InvalidInput
from storage.policies.model_config import EXPERTS

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
STATEFUL = {"linear_attention", "conv", "mamba", "mamba2", "hybrid", "recurrent"}
BY_TOKEN = {"moe", "mlp", "dense", "sparse"}
"""What `layer_types` of a configuration may say. Others choose the tokens they attend to, or compress them."""
_NOT_PACKED = {
    "has no decoder layers in a list": (
        "bert bert-generation big_bird bloom camembert codegen cpmant ctrl data2vec-text electra ernie falcon gpt2 "
        "gpt_bigcode gpt_neo gptj hrm_text megatron-bert mpt opt rembert roberta roberta-prelayernorm roformer rwkv "
        "xlm-roberta xlm-roberta-xl xlstm xmod"
    ),
    "has attention that a pack cannot take over": "doge gpt_neox_japanese modernbert-decoder recurrent_gemma",
    "has layers that choose the tokens they attend to, or compress them": (
        "axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4 inkling_text qwen4_exp qwen4_exp_text"
    ),
}
"""Architectures that a trial refuses, by reason: a `config.json` need not say what its layers are."""
_CHOOSES_ELSEWHERE = {"jamba", "jetmoe", "llama4_text", "phimoe"}
"""Architectures with experts whose routers do not choose the best of a row of numbers, or not all of them."""
_BY_LENGTH = {"dynamic"}
"""Kinds of rotary embedding that depend on the longest row. Of `longrope` see `num_positions`."""
_OF_A_STATE = re.compile(r"^(mamba|ssm|conv|linear_conv|lru)_")
"""Keys of a configuration that only models with such layers have."""
_WITHOUT_CONVOLUTION = ("LightningAttention",)
"""Ends of names of classes that keep a state; others have a convolution over tokens among their parts."""


class Head(NamedTuple):
    """How logits come from the last states: cap · tanh(scale · (W h + bias) / cap)."""

    scale: float = 1.0
    cap: float | None = None


def decoder_of(causal_lm: Any) -> Any:
    """The model without its head, and of one that sees and hears the part that reads and writes text."""
    decoder = causal_lm.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(causal_lm, "model", None)


def refusal(config: Mapping[str, Any]) -> str:
    """Why a model with this `config.json` cannot be trained, its architecture named; empty if nothing is known."""
    model_type = str(config.get("model_type", ""))
    name = _causal_lm(model_type)
    if not name and config.get("auto_map"):
        return (
            f"model_type {model_type!r} needs code from its own folder (auto_map), which could read every key and file "
            "that this user can, and is never run here (trust_remote_code is off); use an architecture that "
            f"transformers {version('transformers')} has itself"
        )
    if not name:
        return f"model_type {model_type!r} is no causal language model of transformers {version('transformers')}"
    about = config.get("text_config") or config
    if reason := next((why for why, types in _NOT_PACKED.items() if model_type in types.split()), ""):
        return f"{name} {reason}"
    if unknown := set(about.get("layer_types") or ()) - ATTENTION - STATEFUL - BY_TOKEN:
        return f"{name} has layers of kind {min(unknown)!r}"
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    ropes = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    if by_length := _BY_LENGTH.intersection(each.get("rope_type") or each.get("type") for each in ropes):
        return f"{name} rotates positions by the longest row of a pack (rope_type {by_length.pop()!r})"
    return ""


def replay_refusal(config: Mapping[str, Any]) -> str:
    """Why the routers of a model with this `config.json` take no experts that are given to them; empty if nothing is
    known."""
    model_type = str(config.get("model_type", "dense"))
    if not any(config.get(name) for name in EXPERTS):
        return f"a model of type {model_type!r} has no experts"
    if model_type in _CHOOSES_ELSEWHERE:
        return f"the routers of {model_type!r} do not take experts that are given to them"
    return ""


def _causal_lm(model_type: str) -> str:
    """The class that transformers makes of it, read from its source: to import it takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "models/auto/modeling_auto.py").read_text(encoding="utf-8")
    table = source.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = ")[2].partition("\n)\n")[0]
    return dict(re.findall(r'\("([^"]+)", "([^"]+)"\)', table)).get(model_type, "")


def pack_layers(causal_lm: Any) -> bool:
    """Compute the layers in packs, in place; False for a model that does not let its attention be replaced."""
    from trainers.model.attention import PACKED_ATTENTION
    from trainers.model.layout import run_side_by_side

    causal_lm.set_attn_implementation(PACKED_ATTENTION)
    for module in parts_with_state(causal_lm):
        module.forward = functools.partial(run_side_by_side, module.forward)
    is_replaced: bool = decoder_of(causal_lm).config._attn_implementation == PACKED_ATTENTION
    return is_replaced


def parts_with_state(causal_lm: Any) -> list[Any]:
    """The modules that keep a state from token to token."""
    from torch import nn

    return [
        module
        for module in decoder_of(causal_lm).layers.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
        or type(module).__name__.endswith(_WITHOUT_CONVOLUTION)
    ]


def team_refusal(config: Mapping[str, Any], size: int) -> str:
    """Why a row of a model with this `config.json` cannot be divided among `size` ranks; empty if nothing is known."""
    about = config.get("text_config") or config
    if STATEFUL.intersection(about.get("layer_types") or ()) or any(map(_OF_A_STATE.search, about)):
        return _stateful(f"a model of type {config.get('model_type')!r}", size)
    heads = about.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        return (
            f"train.sequence_parallel = {size} does not divide the model's {heads} attention heads, and each rank "
            "computes some of them; lower it to a divisor"
        )
    return ""


def refuse_team(causal_lm: Any, size: int) -> None:
    """Raise `InvalidInput` for a model whose rows cannot be divided among `size` ranks."""
    if size == 1:
        return
    if parts_with_state(causal_lm):
        raise InvalidInput(_stateful(type(causal_lm).__name__, size))
    if reason := team_refusal(causal_lm.config.to_dict(), size):
        raise InvalidInput(reason)


def _stateful(what: str, size: int) -> str:
    return (
        f"train.sequence_parallel = {size}: {what} has layers that carry a state from token to token (recurrent, or "
        "convolutions), and a row of it cannot be divided among ranks; leave the setting out"
    )


def head_of(causal_lm: Any) -> Head:
    """Read off the model's own forward pass what it does to the states before and after its output matrix: some divide
    by `logits_scaling`, others multiply by it. Whether it is that, `trial` sees."""
    import torch

    seen: dict[str, torch.Tensor] = {}

    def ones(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(output)

    def states_of_one(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = torch.ones_like(output.last_hidden_state)
        return output

    def look(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        seen["states"] = arguments[0]

    output = causal_lm.get_output_embeddings()
    hooks = [
        decoder_of(causal_lm).register_forward_hook(states_of_one),
        output.register_forward_pre_hook(look),
        output.register_forward_hook(ones),
    ]
    cap = getattr(causal_lm.config.get_text_config(), "final_logit_softcapping", None)
    try:
        with torch.no_grad():
            logits = causal_lm(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return Head(float(seen["states"].flatten()[0]) * (1.0 if cap else float(logits.flatten()[0])), cap)
