"""A model's folder that cannot be used says what it lacks and what helps, before anything heavy starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from settings.errors import InvalidInput
from tasks.checks.preflight import check_model
from trainers.model.weight_index import INDEX_FILE, check_model_folder

EMBEDDING = {"model.embed_tokens.weight": np.zeros((8, 2), np.float32)}
HEAD = {"lm_head.weight": np.zeros((8, 2), np.float32)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 988097824\n"


def _change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _in_parts(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file(EMBEDDING, folder / "1.safetensors")
    index = {name: f"{number}.safetensors" for number, name in enumerate([*EMBEDDING, *HEAD], start=1)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))


def _with_an_index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX_FILE).write_text('{"weight_map": {}}')
    save_file(EMBEDDING, folder / "1.safetensors")


def _with_a_dead_link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("blobs/gone")


def _without_head(folder: Path) -> None:
    save_file(EMBEDDING, folder / "model.safetensors")


def _without_head_and_key(folder: Path) -> None:
    _without_head(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda f: (f / "model.safetensors").write_bytes(POINTER),
        "model.safetensors is a pointer of git-lfs.*pull",
    ),
    "pointer to a tokenizer": (lambda f: (f / "tokenizer.json").write_bytes(POINTER), "tokenizer.json is a pointer"),
    "pointer to a vocabulary": (lambda f: (f / "tokenizer.model").write_bytes(POINTER), "tokenizer.model is a pointer"),
    "half": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors is damaged.*copy it again",
    ),
    "half a config": (lambda f: (f / "config.json").write_text('{"model_'), "config.json is damaged.*copy it again"),
    **{
        f"{file}: {values}": (
            lambda f, file=file, values=values: (f / file).write_text(values),
            f"{file} is damaged.*copy it again",
        )
        for file, values in [
            ("config.json", "[]"),
            ("config.json", '{"model_type": "llama", "text_config": 7}'),
            ("config.json", '{"model_type": "llama", "quantization_config": "fp8"}'),
            ("config.json", '{"model_type": "llama", "layer_types": 7}'),
            ("config.json", '{"model_type": "llama", "rope_scaling": "dynamic"}'),
            ("tokenizer.json", "null"),
            ("tokenizer.json", '{"model": {"vocab": {"a": "x"}}}'),
            ("tokenizer.json", '{"added_tokens": [{"content": "x"}]}'),
        ]
    },
    "an index of nothing": (_with_an_index_of_nothing, f"{INDEX_FILE} names no weights; copy or download"),
    "no vocabulary": (lambda f: (f / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "a link to no vocabulary": (_with_a_dead_link, "lacks tokenizer.json"),
    "missing part": (_in_parts, f"lacks 2.safetensors, which {INDEX_FILE} names; copy or download"),
    "no head": (_without_head, "no lm_head.*checkpoint of the whole model"),
    "no head, the key left out": (_without_head_and_key, "no lm_head.*checkpoint of the whole model"),
    "longer tokenizer": (
        lambda f: _change(f / "tokenizer.json", added_tokens=[{"id": 8, "content": "<pad>"}]),
        r"a token 8, and the model embeds 8: .*resize_token_embeddings\(9\)",
    ),
    "longer vocabulary": (lambda f: _change(f / "tokenizer.json", model={"vocab": [["a", 0.0]] * 9}), "a token 8, and"),
    "no weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"lacks safetensors weights \(pytorch_model.bin is not read: save_pretrained writes them\)",
    ),
    "code of its own": (
        lambda f: _change(f / "config.json", model_type="kimi_k9", auto_map={"AutoModelForCausalLM": "code.Kimi"}),
        "'kimi_k9' needs code from its own folder.*trust_remote_code is off",
    ),
    "unknown kind": (lambda f: _change(f / "config.json", model_type="kimi_k9"), "'kimi_k9' is no causal language"),
    "not for text": (lambda f: _change(f / "config.json", model_type="vit"), "'vit' is no causal language model"),
    "sparse attention": (
        lambda f: _change(f / "config.json", model_type="llama", layer_types=["indexed_attention"]),
        "LlamaForCausalLM has layers of kind 'indexed_attention'; docs/models.md",
    ),
    "rotary by length": (
        lambda f: _change(f / "config.json", rope_scaling={"type": "dynamic"}),
        "LlamaForCausalLM rotates positions by the longest row.*'dynamic'",
    ),
    "attention of its own": (
        lambda f: _change(f / "config.json", model_type="doge"),
        "DogeForCausalLM has attention that a pack cannot",
    ),
    "quantised": (
        lambda f: _change(f / "config.json", quantization_config={"quant_method": "fp8"}),
        r"quantised \(fp8\).*bfloat16 or float32, or train adapters",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer_config.json").unlink(), "lacks tokenizer_config.json"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "vocab_size": 8, "tie_word_embeddings": False}
    vocabulary = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": None}
    for name, values in (("config", config), ("tokenizer_config", {}), ("tokenizer", vocabulary)):
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    save_file({**EMBEDDING, **HEAD}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("what", DAMAGES)
def test_what_a_model_folder_lacks_is_said_with_what_helps(model: Path, what: str) -> None:
    check_model_folder(model)
    damage, sentence = DAMAGES[what]
    damage(model)
    with pytest.raises(InvalidInput, match=f"^model = '{model}': .*{sentence}"):
        check_model(str(model), trains_weights=True)


def test_preflight_loads_no_torch_to_refuse_a_model(model: Path) -> None:
    _change(model / "config.json", model_type="kimi_k9")
    code = (
        "import sys, pathlib\n"
        "from trainers.model.weight_index import check_model_folder\n"
        "try: check_model_folder(pathlib.Path(sys.argv[1]))\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("docs/models.md lists what can be trained False")


def test_adapters_of_a_quantised_model_are_no_fault(model: Path) -> None:
    _change(model / "config.json", quantization_config={"quant_method": "fp8"})
    check_model_folder(model)


def test_a_head_that_is_the_embedding_and_spare_rows_of_it_are_no_faults(model: Path) -> None:
    _without_head(model)
    _change(model / "config.json", tie_word_embeddings=True, vocab_size=64)
    check_model_folder(model)
    _change(model / "config.json", text_config={"vocab_size": 8})
    check_model_folder(model)
