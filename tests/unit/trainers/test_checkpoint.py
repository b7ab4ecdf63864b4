"""What is saved loads elsewhere, and a resumed optimizer takes the very step an uninterrupted one takes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from storage.objects.digests import DIGEST_FILE, DigestMismatch, seal_folder, verify_folder
from tests.unit.trainers.builders import (
    largest_difference,
    load_causal_lm,
    logprobs_alone,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from tests.unit.trainers.naive import everything
from trainers.checkpoint import load_state, load_weights, refuse_other_names, save_average, save_policy, save_state
from trainers.data.packing import position_ids
from trainers.data.samples import Samples
from trainers.model.attention import Layout
from trainers.model.model import load_model

_SEQUENCE = [2, 7, 8, 4, 9, 3, 5]


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_folder_loads_in_transformers_with_the_same_logprobs(
    tmp_path: Path, tied: bool, samples: Samples
) -> None:
    base = tiny_model(tmp_path / "base", tied=tied)
    trainer = trainer_of(base)
    take_step(trainer, samples)
    digest = save_policy(trainer.model, base, tmp_path / "policy", dtype=torch.float32)
    assert verify_folder(tmp_path / "policy") == digest != verify_folder(base)

    ids, length = torch.tensor(_SEQUENCE), [len(_SEQUENCE)]
    with torch.no_grad():
        layout = Layout(length, device=trainer.device)
        expected, _ = trainer.model(ids, ids.roll(-1), position_ids(length), layout, 1.0)
        found, before = (logprobs_alone(load_causal_lm(f), _SEQUENCE) for f in (tmp_path / "policy", base))
    torch.testing.assert_close(found, expected[:-1], atol=1e-6, rtol=0)
    assert (found - before).abs().max() > 1e-4
    one, other = (AutoTokenizer.from_pretrained(folder).encode("1+2=") for folder in (tmp_path / "policy", base))
    assert one == other
    # Without a step it is the base model's tensors, in the type it is asked to have.
    save_policy(trainer_of(base).model, base, tmp_path / "untrained", dtype=torch.bfloat16)
    saved, of_base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "untrained", base))
    assert largest_difference(saved, {name: tensor.bfloat16() for name, tensor in of_base.items()}) == 0


def test_a_base_model_in_several_files_is_trained_averaged_and_gone_back_to(
    tmp_path: Path, tiny_folder: Path, samples: Samples
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", DIGEST_FILE))
    load_causal_lm(tiny_folder).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    seal_folder(tmp_path / "base")
    trainer = trainer_of(tmp_path / "base", ema=0.5)
    refuse_other_names(trainer.model, tmp_path / "base")
    before = weights(trainer)
    take_step(trainer, samples)
    save_state(trainer, tmp_path / "state", step=1)
    load_weights(trainer.model, tmp_path / "base")
    assert largest_difference(before, weights(trainer)) == 0
    digest = save_average(tmp_path / "state", tmp_path / "base", tmp_path / "average")
    assert verify_folder(tmp_path / "average") == digest
    averaged, base = load_causal_lm(tmp_path / "average").state_dict(), load_causal_lm(tiny_folder).state_dict()
    assert averaged.keys() == base.keys() and largest_difference(averaged, base) > 0


def test_a_model_whose_policies_would_have_other_tensors_than_its_files_is_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 6, "vocab_size": 40}
    config = Qwen3MoeConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM stores its weights under other names .*experts"):
        refuse_other_names(load_model(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "settings", [{}, {"lora": {"rank": 4}}, {"lora": {"rank": 4}, "activation_checkpointing": True}], ids=str
)
def test_equal_weights_have_equal_digests_and_others_do_not(
    tmp_path: Path, tiny_folder: Path, samples: Samples, settings: dict[str, Any]
) -> None:
    def digest_after(num_steps: int, name: str, **settings: Any) -> str:
        trainer = trainer_of(tiny_folder, **settings)
        for step in range(1, num_steps + 1):
            take_step(trainer, samples, step=step)
        return save_policy(trainer.model, tiny_folder, tmp_path / name, dtype=torch.float32)

    plain = {name: value for name, value in settings.items() if name == "lora"}
    assert digest_after(1, "a", **settings) == digest_after(1, "b", **plain) != digest_after(2, "c", **settings)


@pytest.mark.parametrize("save_after", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1, "num_minibatches": 2},
        {"ema": 0.75},
        {"advantage": "gae", "critic": {"learning_rate": 1e-3}},
        {"lora": {"rank": 3}},
    ],
    ids=str,
)
def test_a_resumed_step_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, tiny_folder: Path, samples: Samples, settings: dict[str, Any], save_after: int
) -> None:
    steady = trainer_of(tiny_folder, **settings)
    for step in range(1, save_after + 1):
        take_step(steady, samples, step=step, max_staleness=9)
    save_state(steady, tmp_path / "state", step=save_after)
    drawn = torch.rand(4)
    resumed = trainer_of(tiny_folder, **settings)
    assert load_state(resumed, tmp_path / "state") == save_after
    assert torch.equal(torch.rand(4), drawn)
    assert largest_difference(everything(steady), everything(resumed)) == 0
    # Also where the next step trains nothing: the resumed trainer has no gradient of the step before.
    metrics: list[dict[str, float]] = []
    for each in (steady, resumed):
        each.step_without_gradient(step=save_after + 1)
        metrics += [take_step(each, samples, step=save_after + i, max_staleness=9) for i in (2, 3)]
    assert metrics[:2] == metrics[2:]
    assert largest_difference(everything(steady), everything(resumed)) == 0


@pytest.mark.parametrize(
    ("file", "content"),
    [(DIGEST_FILE, None), ("state.safetensors", b"cut off"), ("state.json", None), ("state.json", b'{"step": 7}')],
)
def test_a_half_written_or_altered_state_is_refused_and_nothing_changes(
    tmp_path: Path, tiny_folder: Path, file: str, content: bytes | None
) -> None:
    trainer = trainer_of(tiny_folder)
    save_state(trainer, tmp_path / "state", step=1)
    (tmp_path / "state" / file).unlink()
    if content is not None:
        (tmp_path / "state" / file).write_bytes(content)
    before = everything(trainer)
    with pytest.raises(DigestMismatch):
        load_state(trainer, tmp_path / "state")
    assert largest_difference(everything(trainer), before) == 0
