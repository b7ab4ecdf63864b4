"""`[engine]`: the inference engine inside the rollout worker."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from settings.block import Block

Share = Literal["auto", "phases", "split"]
WeightTransfer = Literal["store", "gloo", "nccl"]

_FIXED = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Arguments of `apply_chat_template` that are no settings of a template."""
_SET_ELSEWHERE = {
    "model": "set model",
    "max_model_len": "set engine.max_model_len",
    "reasoning_parser": "set engine.reasoning_parser",
    "worker_extension_cls": "leave it out",
}
"""Arguments of vLLM that follow from other settings."""


def num_parts(arguments: dict[str, Any]) -> int:
    """Processes of one engine with these arguments of vLLM; each has a device of its own, if there are any."""
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


class EngineSettings(Block):
    """The inference engine inside the rollout worker."""

    kind: Literal["vllm", "scripted"] = "vllm"
    """`vllm`, on GPU and CPU alike; `scripted` answers at random, for trying a pipeline without a model server."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt plus replies of one trajectory, in tokens; a model with fewer positions has as many as it has."""
    update_mode: Literal["keep", "wait", "abort"] = "keep"
    """New weights and running requests: `keep` freezes them over the swap, `wait` lets them finish first, `abort`
    stops them and continues each from the tokens it has."""
    clear_cache_on_reload: bool = True
    """Drop every key and value that the old weights computed when new ones are loaded, those of running requests too,
    which are computed anew; false goes on with them."""
    weight_transfer: WeightTransfer = "store"
    """How new weights come to the engines of the training run: read from the `store`, or by a broadcast of the trainer,
    `nccl` between GPUs or `gloo` between CPUs. The store has them in any case, and is read if a broadcast fails."""
    share: Share = "auto"
    """How an engine and the trainer use one GPU: by turns (`phases`: the engine sleeps while the trainer computes), or
    each a part of its memory all the time (`split`). `auto` takes turns if `max_staleness` is 0, so one waits for the
    other anyway. Without such a GPU there is nothing to set."""
    tool_parser: str = "hermes"
    """vLLM's parser for the tool calls of this model family: hermes (Qwen), llama3_json, mistral, …"""
    reasoning_parser: str = "auto"
    """How thoughts are found in a reply; only what follows them is scored and calls tools. `auto` knows `<think>` and
    the marks of Mistral, Kimi, Seed, Gemma and gpt-oss; `none` finds no thoughts; any other value is the name of vLLM's
    parser for the model family: qwen3, deepseek_r1, granite, …"""
    guided_decoding: bool = False
    """Let agents force tokens: `tool_choice` with `required` or a name, `response_format`. vLLM then loads the
    tokenizer, and the logprobs of such a reply are those of the tokens that the grammar leaves."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model's chat template, for example {"enable_thinking": false} or {"reasoning_effort": "low"}."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Passed on as vLLM's engine arguments, for example {"tensor_parallel_size": 2}. Names, types and bounds are
    checked before anything starts; what vLLM asks between arguments, it says when an engine starts."""

    @field_validator("vllm")
    @classmethod
    def _is_one_engine(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if "data_parallel_size" in arguments:
            raise ValueError("each worker has one engine; set rollout.num_workers for more of them")
        for name, instead in _SET_ELSEWHERE.items():
            if name in arguments:
                raise ValueError(f"{name} Millrace gives to vLLM itself; {instead}")
        return arguments

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_settings(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if fixed := _FIXED & arguments.keys():
            raise ValueError(f"{', '.join(sorted(fixed))}: these Millrace gives to the template itself; leave them out")
        return arguments

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, if there are any."""
        return num_parts(self.vllm)
