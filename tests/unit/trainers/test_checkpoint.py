"""What is saved loads elsewhere, and a resumed optimizer takes the very step an uninterrupted one takes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from settings.errors import InvalidInput
from storage.objects.digests import DIGEST_FILE, DigestMismatch, seal_folder, verify_folder
from tests.unit.trainers.builders import (
    full_model,
    largest_difference,
    load_causal_lm,
    logprobs_alone,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from tests.unit.trainers.naive import everything
from trainers.checkpoint import load_state, load_weights, save_average, save_policy, save_state
from trainers.data.packing import position_ids
from trainers.data.samples import Samples
from trainers.model.layout import Layout
from trainers.model.lora import merge_adapter, saved_name
from trainers.model.model import load_model
from trainers.model.stored import refuse_unstored
from trainers.model.weight_index import stored_in

_SEQUENCE = [2, 7, 8, 4, 9, 3, 5]


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_folder_loads_in_transformers_with_the_same_logprobs(
    tmp_path: Path, tied: bool, samples: Samples
) -> None:
    base = tiny_model(tmp_path / "base", tied=tied)
    trainer = trainer_of(base)
    take_step(trainer, samples)
    digest = save_policy(trainer.model, base, tmp_path / "policy")
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


_IS_TRAINED = re.compile(r"model\.|lm_head")


def _assert_written(file: Path, base: dict[str, torch.Tensor], *, but: str = "") -> None:
    """Every tensor of the base is there in its type; what is not trained, or whose name has `but`, bit for bit."""
    policy = load_file(file)
    assert {name: tensor.dtype for name, tensor in policy.items()} == {name: t.dtype for name, t in base.items()}
    same = {name for name, t in base.items() if torch.equal(policy[name].view(torch.uint8), t.view(torch.uint8))}
    assert {name for name in base if not _IS_TRAINED.match(name)} <= same
    changed = {name for name in base if _IS_TRAINED.match(name) and (not but or but in name)}
    assert changed and not changed & same
    assert torch.equal(policy["lm_head.weight"], policy["model.embed_tokens.weight"])
    assert (policy["model.norm.weight"] != policy["model.norm.weight"].bfloat16()).any()


def test_a_policy_is_its_base_s_stored_tensors_with_the_trained_ones_in_their_place(
    tmp_path: Path, samples: Samples
) -> None:
    base = full_model(tmp_path / "base")
    trainer = trainer_of(tmp_path / "base", ema=0.5, learning_rate=0.1)
    refuse_unstored(trainer.model.causal_lm, tmp_path / "base")
    save_policy(trainer.model, tmp_path / "base", tmp_path / "untrained")
    untrained = load_file(tmp_path / "untrained/model.safetensors")
    assert all(torch.equal(untrained[n].view(torch.uint8), t.view(torch.uint8)) for n, t in base.items())
    take_step(trainer, samples)
    save_policy(trainer.model, tmp_path / "base", tmp_path / "policy")
    _assert_written(tmp_path / "policy/model.safetensors", base)
    assert [file.name for file in (tmp_path / "policy").glob("*.safetensors*")] == ["model.safetensors"]

    save_state(trainer, tmp_path / "state", step=1)
    save_average(tmp_path / "state", tmp_path / "policy", tmp_path / "average")
    _assert_written(tmp_path / "average/model.safetensors", base)
    trained = weights(trainer)
    load_weights(trainer.model, tmp_path / "policy")
    stored = load_file(tmp_path / "policy/model.safetensors")
    assert largest_difference(weights(trainer), {n: stored[saved_name(n)].float() for n in trained}) == 0

    adapted = trainer_of(tmp_path / "base", lora={"rank": 2}, learning_rate=0.1)
    for step in (1, 2):
        take_step(adapted, samples, step=step, max_staleness=2)
    save_policy(adapted.model, tmp_path / "base", tmp_path / "adapter")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    _assert_written(tmp_path / "merged/model.safetensors", base, but="_proj.weight")


def test_a_policy_may_keep_the_names_and_types_of_a_run_that_began_before(tmp_path: Path) -> None:
    base = full_model(tmp_path / "base")
    model = trainer_of(tmp_path / "base").model
    dtypes = {name: torch.bfloat16 for name, _ in model.causal_lm.named_parameters()}
    save_policy(model, tmp_path / "base", tmp_path / "policy", dtypes=dtypes)
    saved = load_file(tmp_path / "policy/model.safetensors")
    assert largest_difference(saved, {name: base[name].bfloat16() for name in dtypes}) == 0


def test_a_base_model_in_several_files_is_trained_averaged_and_gone_back_to(
    tmp_path: Path, tiny_folder: Path, samples: Samples
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors", DIGEST_FILE))
    load_causal_lm(tiny_folder).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    seal_folder(tmp_path / "base")
    trainer = trainer_of(tmp_path / "base", ema=0.5)
    before = weights(trainer)
    take_step(trainer, samples)
    save_state(trainer, tmp_path / "state", step=1)
    load_weights(trainer.model, tmp_path / "base")
    assert largest_difference(before, weights(trainer)) == 0
    digest = save_average(tmp_path / "state", tmp_path / "base", tmp_path / "average")
    assert verify_folder(tmp_path / "average") == digest
    averaged, base = load_causal_lm(tmp_path / "average").state_dict(), load_causal_lm(tiny_folder).state_dict()
    assert averaged.keys() == base.keys() and largest_difference(averaged, base) > 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model.norm.weight": None}, "lacks model.norm.weight, which Qwen2ForCausalLM would draw at random"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "stores model.norm.weight as float8_e4m3fn"),
        (
            {"lm_head.weight": torch.ones(16, 32)},
            "an output matrix of its own in its files, while",
        ),
        ({"model.norm.weight": torch.ones(16)}, r"is of shape \[16\] in its files and \[32\] by its config"),
        ({"model.norm.weight": torch.full((32,), torch.nan)}, "gives NaN, so its weights are damaged"),
        ({"model.norm.weight": None, "norm.weight": torch.ones(32)}, "save it anew with"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.ones(1)},
            "config.json has 2 layers, and the weights have a layer 2",
        ),
    ],
    ids=["missing", "too narrow", "tied to another", "of another shape", "NaN", "under another name", "one layer more"],
)
def test_a_base_that_could_not_be_written_as_it_is_read_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], what: str
) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    stored = {**load_file(file), **change}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=what):
        refuse_unstored(load_model(tmp_path).causal_lm, tmp_path)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ({"a": "gone.safetensors"}, "lacks gone.safetensors, which model.safetensors.index.json names"),
        ({"b": "other.safetensors"}, "other.safetensors lacks b, which"),
        ({"a": "../other.safetensors"}, r"names \.\./other.safetensors, which is not beside it"),
        (None, "has model.safetensors and an index of other files"),
        ("{", "is no index of weights"),
        ({"a": "other.safetensors", "c": "third.safetensors"}, "a is in other.safetensors and in third.safetensors"),
    ],
    ids=["no such file", "not in it", "elsewhere", "both", "no JSON", "twice"],
)
def test_only_what_the_index_names_is_a_model_and_a_wrong_index_is_named(
    tmp_path: Path, index: dict[str, str] | str | None, what: str
) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    save_file({"a": torch.ones(3), "c": torch.ones(3)}, tmp_path / "third.safetensors")
    if index is None:
        save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
        index = {"a": "other.safetensors"}
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises((InvalidInput, FileNotFoundError), match=what):
        stored_in(tmp_path)


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
        return save_policy(trainer.model, tiny_folder, tmp_path / name)

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
