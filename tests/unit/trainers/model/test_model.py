"""A packed forward pass gives every sequence the log-probabilities, and the gradients, it has alone."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.unit.trainers.builders import load_causal_lm, logprobs_alone, tiny_model
from trainers.data.packing import position_ids, shared_tokens
from trainers.model import distributed
from trainers.model.distributed import full, shard, start_process_group
from trainers.model.layout import Layout
from trainers.model.model import PolicyModel, load_model

_SEQUENCES = [[4, 5, 6, 7, 8], [9], [10, 4], [11, 12, 13, 14, 15, 4, 5]]


def _packed(
    model: PolicyModel,
    *,
    temperature: float = 1.0,
    sequences: Sequence[list[int]] = _SEQUENCES,
    computed_T: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    targets = torch.cat([torch.tensor([*sequence[1:], 0]) for sequence in sequences])
    positions = position_ids([len(sequence) for sequence in sequences])
    layout = Layout([len(sequence) for sequence in sequences], device=torch.device("cpu"), computed_T=computed_T)
    logprobs, entropy = model(ids, targets, positions, layout, temperature, **options)
    assert logprobs.shape == entropy.shape == ids.shape
    return logprobs, entropy


def _after_the_first(values_T: torch.Tensor) -> torch.Tensor:
    """Values of each sequence's tokens after the first."""
    return torch.cat([part[:-1] for part in values_T.split([len(sequence) for sequence in _SEQUENCES])])


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter name; backward is called."""
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {name.removeprefix("causal_lm."): full(p.grad).clone() for name, p in named if p.grad is not None}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float) -> None:
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=atol, rtol=1e-5, msg=name)


_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_CONFIGS = [
    Qwen2Config(**_SIZES, tie_word_embeddings=True),
    Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    Qwen3Config(**_SIZES, head_dim=10),
    LlamaConfig(**_SIZES, attention_bias=True),
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", _CONFIGS, ids=["qwen2", "sliding-window", "qwen3", "llama"])
def test_packed_equals_alone_in_transformers_own_attention(
    tmp_path: Path, config: PreTrainedConfig, temperature: float
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float64)
    model = load_model(tmp_path, dtype=torch.float64)
    logprobs = _after_the_first(_packed(model, temperature=temperature)[0])
    alone = torch.cat([logprobs_alone(reference, sequence, temperature=temperature) for sequence in _SEQUENCES])
    torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0)  # transformers' norms and softmax are in float32
    weights = torch.linspace(-1, 2, 15, dtype=torch.float64)[:11]
    found, expected = (_gradients(*pair) for pair in ((model, logprobs @ weights), (reference, alone @ weights)))
    _assert_equal(found, expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_equals_alone_in_float32_and_is_as_close_in_bfloat16_as_transformers(tmp_path: Path, tied: bool) -> None:
    folder = tiny_model(tmp_path / "model", tied=tied)
    exact, rounded = load_causal_lm(folder), load_causal_lm(folder).to(torch.bfloat16)
    with torch.no_grad():
        truth, theirs = (
            torch.cat([logprobs_alone(causal_lm, sequence).float() for sequence in _SEQUENCES])
            for causal_lm in (exact, rounded)
        )
        mine, rough = (
            _after_the_first(_packed(load_model(folder, dtype=dtype))[0]) for dtype in (torch.float32, torch.bfloat16)
        )
    torch.testing.assert_close(mine, truth, atol=1e-5, rtol=0)
    assert rough.dtype == torch.float32
    assert (rough - truth).abs().mean() < max(0.02, 1.5 * float((theirs - truth).abs().mean()))


@pytest.mark.parametrize("wanted", [None, torch.tensor([2, 3, 6, 12])])
def test_computing_only_wanted_positions_and_a_shared_beginning_once_changes_no_result_and_no_gradient(
    tiny_folder: Path, wanted: torch.Tensor | None
) -> None:
    sequences = [[4, 5, 6, 7, 8], [4, 5, 6, 9], [4, 5, 6, 9, 10, 11], [12, 5]]
    ids = np.array([token for sequence in sequences for token in sequence])
    computed = shared_tokens(ids, [len(sequence) for sequence in sequences])
    assert computed is not None and int(computed.max()) + 1 == 5 + 1 + 2 + 2
    model = load_model(tiny_folder, dtype=torch.float64)
    num_rows: list[int] = []
    model.layers[0].mlp.register_forward_hook(lambda *call: num_rows.append(call[-1].shape[1]))
    found = _packed(model, sequences=sequences, computed_T=computed, positions_N=wanted)
    is_wanted = torch.ones(17) if wanted is None else torch.zeros(17).index_fill(0, wanted, 1)
    expected = [values * is_wanted for values in _packed(model, sequences=sequences)]
    assert num_rows == [10, 17]
    weights = torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    gradients = [_gradients(model, (logprobs * weights).sum()) for logprobs, _ in (found, expected)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    _assert_equal(*gradients, atol=1e-6)  # transformers' norms are in float32


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"activation_checkpointing": True}, {"activation_checkpointing": True, "offload_activations": True}]
    + [{"compile": True}, {"offload_activations": True}],
    ids=["again", "again offloaded", "compiled", "offloaded"],
)
def test_recomputing_compiling_and_offloading_change_no_gradient(
    tiny_folder: Path, options: dict[str, bool], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of torch.compile but the C++ compiler, which takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    plain, other = load_model(tiny_folder), load_model(tiny_folder, **options)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in other.named_parameters()]
    runs: list[None] = []
    other.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(None))
    if sharded:
        shard(other, other.layers, mesh=start_process_group(torch.device("cpu")), dtype=torch.float32)
    gradients = []
    for model in (plain, other):
        logprobs, _ = _packed(model, temperature=0.9)
        gradients.append(_gradients(model, (logprobs * torch.linspace(-1, 2, len(logprobs))).sum()))
    _assert_equal(*gradients, atol=1e-5)
    assert len(runs) == 2 or "activation_checkpointing" not in options, "once more in the backward pass"


@pytest.mark.parametrize("again", [False, True])
def test_what_is_offloaded_is_what_layers_keep_but_for_weights(
    tiny_folder: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[torch.Tensor] = []

    def host(*, pin_memory: bool) -> Any:
        hooks: Any = torch.autograd.graph.save_on_cpu(pin_memory)
        pack = hooks.pack_hook
        hooks.pack_hook = lambda tensor: moved.append(tensor) or pack(tensor)
        return hooks

    monkeypatch.setattr(distributed, "save_on_cpu", host)
    model = load_model(tiny_folder, offload_activations=True, activation_checkpointing=again)
    shard(model, model.layers, mesh=start_process_group(torch.device("cpu")), dtype=torch.float32)
    _packed(model, temperature=0.9)[0].sum().backward()
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    assert moved and not shapes.intersection(tuple(tensor.shape) for tensor in moved)
    inputs = [tensor for tensor in moved if tensor.dim() == 3 and tensor.shape[2] == 32]
    assert len(moved) < 20 if again else len(moved) > 40, "with recomputing, inputs of layers alone"
    assert inputs


_ROPE = {"rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (GPT2Config(vocab_size=16, n_embd=32, n_layer=1, n_head=2), "no decoder layers"),
        (LlamaConfig(**_SIZES, rope_parameters={"rope_type": "dynamic", **_ROPE}), "dynamic"),
    ],
    ids=["no layers", "dynamic"],
)
def test_a_model_that_packing_would_train_wrongly_is_refused_with_what_to_use(
    tmp_path: Path, config: PreTrainedConfig, what: str
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    way_out = "" if "layers" in what else ".* use a model of an architecture that docs/models.md lists"
    with pytest.raises(ValueError, match=what + way_out):
        load_model(tmp_path)
