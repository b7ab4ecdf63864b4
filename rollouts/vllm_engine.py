"""vLLM's AsyncLLM behind the `Engine` protocol: the same code on CUDA and on the CPU build.

    load_policy:  pause(keep) ─▶ reload_policy ─▶ checksum ─▶ update_weight_version ─▶ resume (always)

In-flight requests are frozen over the swap and go on; each finished output carries per-token version spans.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rollouts.engine import EngineError, Generation
from storage.digests import sha256_of_json
from storage.records import Sampling


class VllmEngine:
    """One AsyncLLM in this process; its core and workers are child processes of vLLM's own."""

    def __init__(
        self, *, max_model_len: int, seed: int, clear_cache_on_reload: bool, arguments: dict[str, Any]
    ) -> None:
        self._arguments = {
            "max_model_len": max_model_len,
            "seed": seed,
            "skip_tokenizer_init": True,  # we send and receive token ids; text is chat_tokens' business
            "logprobs_mode": "processed_logprobs",  # after temperature, top-k, top-p: what was really sampled from
            "disable_log_stats": True,
            "worker_extension_cls": "rollouts.vllm_worker.ReloadExtension",
            **arguments,
        }
        self._clear_cache = clear_cache_on_reload
        self._llm: Any = None
        self._stop_ids: list[int] = []
        self._checksum = ""
        self._swap = asyncio.Lock()

    async def start(self, folder: Path, version: int) -> str:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._folder, self._stop_ids = folder, _end_token_ids(folder)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **self._arguments))
        await self._llm.update_weight_version(str(version))
        self._checksum = await self._read_checksum()
        return self._checksum

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, request_id: str) -> Generation:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        parameters = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            logprobs=0,  # the sampled token's own
            stop_token_ids=self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final = None
        try:
            async for output in self._llm.generate(TokensPrompt(prompt_token_ids=prompt_ids), parameters, request_id):
                final = output
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error
        if final is None:
            raise EngineError(f"request {request_id} ended without an output")
        completion = final.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} was ended by the engine: {completion.finish_reason}")
        token_ids = list(completion.token_ids)
        return Generation(
            token_ids=token_ids,
            # processed logprobs of a sampled token may round to a hair above 0
            logprobs=[
                min(0.0, position[token].logprob)
                for position, token in zip(completion.logprobs, token_ids, strict=True)
            ],
            weight_versions=_expand(completion.weight_versions, len(token_ids)),
            finish_reason=completion.finish_reason,
        )

    async def load_policy(self, folder: Path, version: int) -> str:
        async with self._swap:
            await self._llm.pause_generation(mode="keep", clear_cache=self._clear_cache)
            try:
                checksum = await self._reload(folder)
                await self._llm.update_weight_version(str(version))
            except Exception as error:  # whatever vLLM raised, the old weights are put back before anybody hears of it
                await self._reload(self._folder)
                raise EngineError(
                    f"policy {version} from {folder} was not loaded, the old one serves: {error}"
                ) from error
            finally:
                await self._llm.resume_generation()
            self._folder, self._checksum = folder, checksum
            return checksum

    async def stop(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    async def _reload(self, folder: Path) -> str:
        await self._llm.collective_rpc("reload_policy", args=(str(folder),))
        return await self._read_checksum()

    async def _read_checksum(self) -> str:
        """One digest over the per-tensor checksums of every vLLM worker."""
        return sha256_of_json(await self._llm.compute_weight_checksums())


def _expand(spans: Any, length: int) -> list[int]:
    """vLLM's `WeightVersionSpan`s → one version per token."""
    versions = [0] * length
    covered = 0
    for span in spans or []:
        versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        covered += span.end - span.start
    if covered != length:
        raise EngineError(f"the engine stamped {covered} of {length} tokens with a weight version")
    return versions


def _end_token_ids(folder: Path) -> list[int]:
    """End-of-reply token ids of a model folder, from `generation_config.json`, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise EngineError(f"{folder} names no eos_token_id in generation_config.json or config.json")
