"""A GGUF file is a base model like a folder: its weights, its tokenizer and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from settings.errors import InvalidInput
from storage.objects.digests import sha256_of_file
from storage.objects.object_store import LocalStore
from tasks.base_model import store_model
from tasks.checks.preflight import check_model
from trainers.model.fetch import fetch_model, folder_of_gguf, local_folder

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False, initializer_range=0.2)).eval()


def _write(file: Path, model: Qwen2ForCausalLM, *, quantize: Any = None, template: str = _TEMPLATE) -> Path:
    """As llama.cpp's `convert_hf_to_gguf.py` does: a tokenizer of bytes, and tensors under llama.cpp's names."""
    writer, config = gguf.GGUFWriter(file, "qwen2"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    printable = [chr(n) for n in range(33, 127)] + [chr(n) for n in range(161, 324) if n != 173]
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *printable, "ab"])
    writer.add_token_types([3] * 3 + [1] * (len(printable) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template:
        writer.add_chat_template(template)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {f"model.layers.{n}.{hf}": f"blk.{n}.{its}" for n in range(2) for hf, its in _TENSORS.items()}
    for name, tensor in model.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if quantize and tensor.ndim == 2:
            array = gguf.quants.quantize(tensor.numpy(), quantize)
            writer.add_tensor(f"{names[prefix]}.{kind}", array, raw_dtype=quantize)
        else:
            writer.add_tensor(f"{names[prefix]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.server
def test_a_gguf_file_is_converted_once_and_is_the_model_it_was_made_of(home: Path) -> None:
    model, file = _tiny(), home / "tiny.gguf"
    _write(file, model)
    folder = folder_of_gguf(file)
    ids = torch.arange(3, 40)[None]
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)  # all of it is stored in float32, and so kept
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "7 + 5"}]
    chat = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(chat) == "<|im_start|>user\n7 + 5<|im_end|>\n<|im_start|>assistant\n"
    assert chat[0] == 1 and chat[-1] != 2 and chat.count(2) == 1
    made_of = json.loads((folder / "gguf.json").read_text())
    assert (made_of["file"], made_of["sha256"]) == ("tiny.gguf", sha256_of_file(file))

    written = (folder / "model.safetensors").stat().st_mtime_ns
    moved = file.rename(home / "elsewhere.gguf")  # known by its content
    check_model(str(moved))
    assert local_folder(str(moved)) == folder and (folder / "model.safetensors").stat().st_mtime_ns == written
    store = LocalStore(home / "store")
    key = store_model(str(moved), store)
    assert key.startswith("models/elsewhere-") and store.exists(f"{key}/gguf.json")

    quantized = folder_of_gguf(_write(home / "q8.gguf", model, quantize=gguf.GGMLQuantizationType.Q8_0))
    weights = AutoModelForCausalLM.from_pretrained(quantized, dtype="auto").state_dict()
    assert {each.dtype for each in weights.values()} == {torch.bfloat16}
    for name, exact in model.state_dict().items():
        assert (weights[name].float() - exact).abs().max() <= exact.abs().max() * (1 / 127 / 2 + 1 / 256), name


@pytest.mark.server
def test_a_gguf_file_that_cannot_be_a_base_model_is_refused_and_leaves_nothing(home: Path) -> None:
    (home / "half.gguf").write_bytes(_write(home / "whole.gguf", _tiny()).read_bytes()[:20_000])
    with pytest.raises(InvalidInput, match=r"half.gguf': transformers cannot read this GGUF file: \w+: "):
        check_model(str(home / "half.gguf"))
    assert not (home / "home" / "cache" / "gguf").exists() and not list(home.glob("home/cache/staging/*"))
    with pytest.raises(InvalidInput, match="no such folder or GGUF file, and not a Hugging Face id"):
        check_model(str(home / "nowhere.gguf"))
    (home / "text.txt").write_text("model")
    with pytest.raises(InvalidInput, match="text.txt': a file is a base model if it is GGUF; use a folder"):
        fetch_model(str(home / "text.txt"), home / "links")
