"""vLLM's AsyncLLM behind the `Engine` protocol: the same code on CUDA and on the CPU build.

    load_policy:  pause(mode) ─▶ reload_policy ─▶ checksum verified ─▶ update_weight_version ─▶ resume (always)
                       │ anything fails: the old weights, checksum and version again, or `EngineUnusable`

What becomes of running requests, by mode:
    keep   frozen over the swap. With their cache cleared they are computed anew under the new weights and go on from
           there; otherwise they go on with the keys and values of the old weights.
    wait   finished first; new ones wait.
    abort  ended by vLLM; `generate` continues each from its prompt and the tokens it has, as a new request.
Every finished output carries per-token version spans, stamped by the engine.

With adapters (LoRA) the base weights stay, and `load_policy` changes what the one adapter slot holds: `vllm_lora.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import EngineError, EngineUnusable, Generation, UpdateMode, WeightUpdate
from rollouts.engines.vllm_arguments import end_token_ids, in_processes_of_its_own, sampling_parameters
from rollouts.engines.vllm_core import CoreStart
from rollouts.engines.vllm_lora import adapter_arguments, check_applied, slot_request
from rollouts.engines.vllm_worker import results
from storage.objects.digests import read_seal, sha256_of_json
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from storage.records import Sampling

logger = logging.getLogger("millrace.engine")

TRIES = 3
"""How often old weights are put back, or the engine told to go on, before it is given up."""
REHEARSAL_SECONDS = 1.0
"""Of an engine that has just started; a large model on a CPU would take longer to answer everybody."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A policy as the engine is asked to hold it."""

    version: int
    digest: str
    """Of the safetensors content."""
    fetch: Callable[[], Path]
    """Its folder; may read it from the store first."""


def _weights_in(folder: Path, version: int) -> _Weights:
    return _Weights(version=version, digest=read_seal(folder).weights_sha256, fetch=lambda: folder)


class VllmEngine:
    """One AsyncLLM in this process; its core and workers are child processes of vLLM's own."""

    def __init__(
        self,
        *,
        max_model_len: int,
        seed: int,
        update_mode: UpdateMode,
        clear_cache_on_reload: bool,
        arguments: dict[str, Any],
        lora_rank: int = 0,
        base_folder: Path | None = None,
        ends_process: bool = False,
    ) -> None:
        """`lora_rank` above 0 serves adapters of up to that rank on the weights in `base_folder`.

        With `ends_process` the death of vLLM's core ends this process at once, and whoever watches it starts another:
        requests that failed with the core must not be taken for failed attempts.
        `arguments` go to vLLM as they are. Raises `ValueError` for a rank that vLLM cannot serve.
        """
        assert (lora_rank > 0) == (base_folder is not None)
        self._base_folder = base_folder
        self._ends_process = ends_process
        self._arguments = {
            "max_model_len": max_model_len,
            "seed": seed,
            "skip_tokenizer_init": True,  # we send and receive token ids; text is chat_tokens' business
            "logprobs_mode": "processed_logprobs",  # after temperature, top-k, top-p: what was really sampled from
            "disable_log_stats": True,
            "worker_extension_cls": "rollouts.engines.vllm_worker.ReloadExtension",
            **(adapter_arguments(lora_rank) if lora_rank else {}),
            **arguments,
        }
        if self._arguments.get("enforce_eager"):
            # The sampler's one compiled function too: the first replies would wait for its compiler, and others when
            # batches change their shape. The core inherits the environment.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self._core = CoreStart(self._arguments)
        self.update_mode: UpdateMode = update_mode
        """May be changed between updates; so may the next."""
        self.clear_cache_on_reload = clear_cache_on_reload
        self.llm: Any = None
        """vLLM's own engine, null before `start` and after `stop`."""
        self._as_input: Callable[[list[int]], Any]
        self._stop_ids: list[int] = []
        self._served: _Weights
        self._checksums: dict[str, str] = {}
        """Weights digest → the engine's checksum of them."""
        self._slot: Any = None
        """The adapter slot every request names; null where whole weights are served."""
        self._adapters: dict[int, str] = {}
        """Version → weights digest of the adapter that vLLM's workers read and hold under it."""
        self._update = asyncio.Lock()
        self._updating: asyncio.Task[WeightUpdate]
        self._running: set[str] = set()
        self._aborts_begun = 0
        self._aborts_ended = 0
        self._unusable = ""
        self._holds = False
        self._held_until = 0.0  # by `time.perf_counter`

    async def start(self, folder: Path, version: int) -> str:
        from vllm import AsyncEngineArgs
        from vllm.envs import enable_envs_cache
        from vllm.inputs import tokens_input
        from vllm.v1.engine.async_llm import AsyncLLM

        model = self._base_folder or folder
        self._as_input = tokens_input  # imported once: a search in vLLM's package takes as long as all else here
        self._stop_ids = end_token_ids(model)
        self._served = _weights_in(folder, version)
        arguments = in_processes_of_its_own(self._arguments)
        with self._core.starting():
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        enable_envs_cache()  # as the core does: every request would look up a few variables, each of them slowly
        if self._base_folder is not None:
            self._slot = slot_request()
            await check_applied(self.llm)
        else:
            self._checksums[self._served.digest] = await self._read_checksum()
        checksum = await self._install(self._served)  # a first reload, of the same weights: it must give the same
        self.llm.output_handler.add_done_callback(lambda _: self._end_with_core())
        await self._rehearse()
        return checksum

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, request_id: str) -> Generation:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish_reason, num_parts, started = "abort", 0, time.perf_counter()
        while finish_reason == "abort":
            aborts_ended = self._aborts_ended
            # A part that drew with the seed of the one before it would repeat that one's random numbers.
            seed = None if sampling.seed is None else sampling.seed + len(token_ids)
            part = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - len(token_ids), seed=seed)
            name = f"{request_id}.part{num_parts}" if num_parts else request_id
            completion = await self._sample([*prompt_ids, *token_ids], part, name)
            sampled = list(completion.token_ids)
            # processed logprobs of a sampled token may round to a hair above 0
            logprobs += [min(0.0, logprob) for logprob in completion.logprobs.logprobs]
            versions += _expand(completion.weight_versions, len(sampled))
            token_ids += sampled
            finish_reason, num_parts = completion.finish_reason, num_parts + 1
            if finish_reason == "abort" and self._aborts_begun == aborts_ended:
                break  # no weight update ended it
        if finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} was ended by the engine: {finish_reason}")
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            weight_versions=versions,
            finish_reason=finish_reason,
            held_seconds=max(0.0, self._held_until - started),
            adapters={version: self._adapters[version] for version in sorted(set(versions) & self._adapters.keys())},
        )

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        return await self._change(f"policy {version} from {folder}", lambda: _weights_in(folder, version))

    async def receive_policy(self, broadcast: Broadcast, fetch: Callable[[], Path]) -> WeightUpdate:
        weights = _Weights(version=broadcast.version, digest=broadcast.weights_sha256, fetch=fetch)
        return await self._change(f"policy {broadcast.version} from the trainer", lambda: weights, broadcast)

    async def hold(self) -> None:
        async with self._update:
            await self._pause("keep")
            self._holds = True

    async def release(self) -> None:
        async with self._update:
            await self._resume()

    async def stop(self) -> None:
        if self.llm is not None:
            self.llm.shutdown(timeout=0)  # killed: it has nothing to lose, and three seconds of objects to tidy away
            self.llm = None

    async def _rehearse(self) -> None:
        """Answer as many short requests as may run at once, while nobody waits: each size of batch that is new to the
        engine's libraries costs the first replies time, and so does memory that was never touched."""
        sampling = Sampling(max_tokens=4)
        prompt_ids = self._stop_ids[:1] * 4
        requests = (
            self.generate(prompt_ids, sampling=sampling, request_id=f"rehearsal{number}")
            for number in range(self.llm.vllm_config.scheduler_config.max_num_seqs)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REHEARSAL_SECONDS):
                await asyncio.gather(*requests)

    async def _sample(self, prompt_ids: list[int], sampling: Sampling, request_id: str) -> Any:
        """vLLM's completion of one request, whatever ended it."""
        self._refuse_if_unusable()
        self._running.add(request_id)
        final = None
        try:
            parameters = sampling_parameters(sampling, tuple(self._stop_ids))
            prompt = self._as_input(prompt_ids)  # ready for the core; vLLM would hand any other to a thread first
            async for output in self.llm.generate(prompt, parameters, request_id, lora_request=self._slot):
                final = output
        except Exception as error:
            self._end_with_core()
            raise EngineError(f"{type(error).__name__}: {error}") from error
        finally:
            self._running.discard(request_id)
        self._refuse_if_unusable()
        if final is None:
            raise EngineError(f"request {request_id} ended without an output")
        return final.outputs[0]

    def _refuse_if_unusable(self) -> None:
        if self._unusable:
            raise EngineUnusable(self._unusable)

    async def _change(
        self, what: str, weights: Callable[[], _Weights], broadcast: Broadcast | None = None
    ) -> WeightUpdate:
        # A task of its own: a caller that is cancelled must not leave half of the new weights behind.
        self._updating = asyncio.create_task(self._load(what, weights, broadcast))
        return await asyncio.shield(self._updating)

    async def _load(self, what: str, weights: Callable[[], _Weights], broadcast: Broadcast | None) -> WeightUpdate:
        async with self._update:
            old, paused = self._served, False
            started = time.perf_counter()
            try:
                new = weights()
                if not self._holds:
                    await self._pause(self.update_mode)
                paused = True
                checksum = await self._install(new, broadcast)
                self._served, self._unusable = new, ""
            except Exception as error:
                if paused:  # nothing was touched before
                    lost = f"{what} was not loaded, and policy {old.version} could not be put back"
                    await self._insist(lambda: self._install(old), lost)
                    self._unusable = ""
                self._refuse_if_unusable()
                raise EngineError(
                    f"{what} was not loaded, policy {old.version} serves on: {type(error).__name__}: {error}"
                ) from error
            finally:
                await self._resume()
            return WeightUpdate(
                checksum=checksum,
                mode=self.update_mode,
                cache_cleared=self.clear_cache_on_reload,
                paused_seconds=time.perf_counter() - started,
                transfer="store" if broadcast is None else broadcast.backend,
            )

    async def _pause(self, mode: UpdateMode) -> None:
        aborting = mode == "abort"
        self._aborts_begun += aborting
        try:
            # Not `llm.pause_generation`, which also sleeps 20 ms for callers that want every output before it returns.
            core = self.llm.engine_core
            await self._call(core.pause_scheduler_async(mode=mode, clear_cache=self.clear_cache_on_reload))
        finally:
            self._aborts_ended += aborting

    async def _install(self, weights: _Weights, broadcast: Broadcast | None = None) -> str:
        """Load weights into the paused engine and name their version; returns the verified checksum."""
        checksum = await (self._reload(weights, broadcast) if self._slot is None else self._fill_slot(weights))
        known = self._checksums.get(weights.digest)
        if self._slot is None and known is None and checksum == self._checksums[self._served.digest]:
            # Other weights may round to the same numbers in the engine's precision. Zeros tell that from a load
            # that did nothing.
            await self._call(self.llm.collective_rpc("reset_weights"))
            known = checksum
            checksum = await self._reload(weights)
        if known is not None and checksum != known:
            raise EngineError(f"with policy {weights.version} the engine's checksum is {checksum}, not {known}")
        await self._call(self.llm.update_weight_version(str(weights.version)))
        self._checksums[weights.digest] = checksum
        return checksum

    async def _resume(self) -> None:
        await self._insist(
            lambda: self._call(self.llm.resume_generation()), "generation could not be resumed after a weight update"
        )
        if self._holds:
            self._holds, self._held_until = False, time.perf_counter()

    async def _insist(self, work: Callable[[], Awaitable[Any]], complaint: str) -> None:
        """Do `work`, in several tries if need be. Raises `EngineUnusable` where the last one fails too: every request
        is refused from now on and those that run are ended; a later policy that loads makes the engine usable."""
        for attempt in range(1, TRIES + 1):
            try:
                await work()
                return
            except Exception as error:  # noqa: BLE001 - tried again, then named
                logger.warning("%s, try %d/%d: %s", complaint, attempt, TRIES, error)
                reason = f"{complaint}: {type(error).__name__}: {error}"
        self._end_with_core()
        self._unusable = self._unusable or reason
        await self.llm.abort(list(self._running))
        raise EngineUnusable(self._unusable)

    def _end_with_core(self) -> None:
        """Nothing where the core lives, or was stopped by us."""
        if self._ends_process and self.llm is not None and self.llm.errored:
            logger.critical("vLLM's engine core has ended: this process ends too, another takes its place")
            os._exit(1)

    async def _reload(self, weights: _Weights, broadcast: Broadcast | None = None) -> str:
        """Whole weights, by broadcast or from their folder; returns the checksum."""
        if broadcast is None:
            folder = await asyncio.to_thread(weights.fetch)
            results(await self._call(self.llm.collective_rpc("reload_policy", args=(str(folder),))))
        else:
            fields = dataclasses.asdict(broadcast)
            results(await self._call(self.llm.collective_rpc("receive_policy", args=(fields,))))
        return await self._read_checksum()

    async def _fill_slot(self, weights: _Weights) -> str:
        """Change the adapter, compared with its file by the workers; returns a digest of what the engine computes with.

        Raises `EngineError` where a worker read another file than the policy's seal describes.
        """
        path = await asyncio.to_thread(weights.fetch)
        adapted = has_adapter(path)
        folder = str(path) if adapted else ""
        answers = results(await self._call(self.llm.collective_rpc("load_adapter", args=(folder,))))
        for sha256, _ in answers if adapted else []:
            if (read := sha256_of_json({ADAPTER_WEIGHTS: sha256})) != weights.digest:
                raise EngineError(f"the engine read adapter {read[:12]} in {path}, not {weights.digest[:12]}")
        if adapted:
            self._adapters[weights.version] = weights.digest
        return sha256_of_json([await self._read_checksum(), [held for _, held in answers]])

    async def _read_checksum(self) -> str:
        """One digest over the per-tensor checksums of every vLLM worker."""
        return sha256_of_json(await self._call(self.llm.compute_weight_checksums()))

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call to the engine core, or `EngineError` where the core ends before it answers."""
        answer = asyncio.ensure_future(call)
        # vLLM leaves such a call waiting for ever, but the task that reads the core's outputs ends.
        await asyncio.wait({answer, self.llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise EngineError("the engine core has ended")
        return answer.result()


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
