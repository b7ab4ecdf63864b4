"""A wrong value under `engine.vllm` is refused before anything starts, in vLLM's own words."""

from __future__ import annotations

import contextlib
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rollouts.production.engine_arguments import check_engine_arguments, check_token_limits, has_plugins
from settings.errors import InvalidInput


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0: .* greater than or equal to 1"),  # a bound of SchedulerConfig's
        ({"max_num_batched_tokens": -1}, "greater than or equal to 1"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),  # of the class that the default is taken from
        ({"gpu_memory_utilization": "0.5"}, "valid number"),
        ({"block_size": 0}, "greater than 0"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"max_logprobs": -2}, "greater than or equal to -1"),
        ({"cpu_offload_gb": -1}, "greater than or equal to 0"),
        ({"kv_cache_metrics_sample": 0}, "greater than 0"),  # through get_field
        ({"max_lora_rank": 7}, "Input should be 1, 8, 16"),
        ({"enforce_eager": "yes"}, "valid boolean"),
        ({"attention_backend": "FLASH_ATN"}, r"one of \d+ names, such as 'FLASH_ATTN'"),
        ({"compilation_config": 3}, "valid dictionary"),
        ({"compilation_config": {"cudagraf_mode": "full"}}, "compilation_config.cudagraf_mode: .* 'cudagraph_mode'"),
        ({"compilation_config": {"mode": 99}}, "compilation_config.mode = 99: .* 'VLLM_COMPILE', 0, 1, 2, 3"),
        ({"eplb_config": {"window_size": 0}}, "eplb_config.window_size = 0: .* greater than 0"),
        ({"load_format": "x"}, "load_format = 'x': .* one of 'auto', 'hf', 'dummy'"),  # names, and any string
        ({"tokenizer_mode": "x"}, "one of 'auto', 'hf', 'mistral'"),
        ({"model_impl": "x"}, "one of 'auto', 'vllm', 'transformers'"),  # of the class that the default is taken from
        ({"config_format": "x"}, "one of 'auto', 'hf', 'mistral'"),
        ({"quantization": "fp9"}, r"one of \d+ names, such as 'fp8'"),
        ({"distributed_executor_backend": "rya"}, "one of 'ray', 'mp', 'uni'"),
        ({"offload_backend": "x"}, "one of 'auto', 'uva', 'prefetch'"),
        ({"mm_encoder_attn_backend": "FLASH_ATN"}, r"one of \d+ names, such as 'FLASH_ATTN'"),
        ({"weight_transfer_config": {"backend": "x"}}, "weight_transfer_config.backend = 'x': .* one of 'nccl'"),
    ],
)
def test_a_wrong_value_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        check_engine_arguments(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 1, "gpu_memory_utilization": 1, "block_size": 32, "max_logprobs": -1},
        {"cpu_offload_params": ["a"], "cudagraph_capture_sizes": [1, 2], "limit_mm_per_prompt": {"image": 0}},
        {"compilation_config": {"mode": 3, "cudagraph_mode": "full", "compile_sizes": [1, "cudagraph_capture_sizes"]}},
        {"attention_backend": "flash_attn", "hf_overrides": {"rope_theta": 1.0}, "quantization_config": {}},
        {"load_format": "dummy", "dtype": "half", "kv_cache_dtype": "fp8", "distributed_executor_backend": "mp"},
        {"logits_processors": ["my.module:Class"]},  # a name of a package
        {"load_format": "Dummy", "model_impl": "vllm", "tokenizer_mode": "auto", "quantization": "fp8_per_channel"},
        {"distributed_executor_backend": "my.module.Executor", "quantization": None, "mm_encoder_attn_dtype": None},
        {"max_num_seqs": None, "kv_cache_memory_bytes": 2**30, "num_gpu_blocks_override": 100},
    ],
)
def test_what_vllm_takes_passes(arguments: dict[str, Any]) -> None:
    check_engine_arguments(arguments)


def test_a_name_that_only_a_plugin_can_know_passes_beside_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(group: str) -> list[EntryPoint]:
        return [EntryPoint("loader", "my_loader:register", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", points)
    has_plugins.cache_clear()
    try:
        check_engine_arguments({"load_format": "my_loader"})
    finally:
        has_plugins.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 17}, "max_num_batched_tokens = 16 is less than .*seqs = 17"),
        ({"max_num_batched_tokens": 63, "enable_chunked_prefill": False}, "= 63 is less than .*max_model_len = 64"),
        ({"long_prefill_token_threshold": 65}, "threshold = 65 is more than engine.max_model_len = 64"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 64, "enable_chunked_prefill": False}, ""),
        ({"max_num_batched_tokens": 16, "max_num_seqs": None, "long_prefill_token_threshold": 64}, ""),
    ],
)
def test_numbers_of_tokens_that_vllm_refuses_together_are_refused_by_both_names(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) if sentence else contextlib.nullcontext():
        check_token_limits(arguments, longest=64)
