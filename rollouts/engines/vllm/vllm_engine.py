"""vLLM's AsyncLLM behind the `Engine` protocol: the same code on CUDA and on the CPU build.

    load_policy:  pause(mode) ─▶ reload_policy ─▶ checksum verified ─▶ update_weight_version ─▶ resume (always)
                       │ on any failure: the old weights, checksum and version again, or `EngineUnusable`

Running requests, by mode:
    keep   are frozen during the change. If the cache is cleared, their tokens are computed anew under the new weights;
           otherwise they go on with the keys and values of the old weights.
    wait   finish first; new requests wait.
    abort  are ended by vLLM; `generate` continues each as a new request, from its prompt and the tokens it has.
vLLM stamps every finished output with the versions of its tokens.

With adapters (LoRA) `load_policy` fills the one adapter slot, or on CPUs merges each with the base: `adapter_slot.py`.

    sleep:        pause(mode) ─▶ vLLM drops weights and cache, or copies the base of adapters to the host
    load_policy:  wake weights ─▶ all zeros ─▶ as above ─▶ no tensor stayed zero ─▶ wake cache ─▶ resume
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import EngineError, EngineUnusable, Generation, Until, UpdateMode, WeightUpdate
from rollouts.engines.vllm.adapter_slot import adapter_arguments, merges, slot_request
from rollouts.engines.vllm.batch_probe import check_batches, check_drafts
from rollouts.engines.vllm.core_start import CoreStart, for_model, in_every_batch, with_routes
from rollouts.engines.vllm.held_weights import HeldWeights, Weights, weights_in
from rollouts.engines.vllm.requests import (
    Draws,
    end_token_ids,
    prompt_logprobs,
    routes_of,
    sampling_parameters,
    with_draws,
)
from rollouts.engines.vllm.worker_extension import results
from settings.engine import EngineSettings
from settings.errors import InvalidInput
from storage.records import Sampling

logger = logging.getLogger("millrace.engine")

TRIES = 3
"""How often restoring old weights, or resuming the engine, is tried."""


class VllmEngine:
    """One AsyncLLM in this process; vLLM runs its core and its workers in child processes."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        seed: int,
        lora_rank: int = 0,
        base_folder: Path | None = None,
        ends_process: bool = False,
        reproducible: bool = False,
        captures_routes: bool = False,
    ) -> None:
        """With `lora_rank` above 0 the engine serves adapters of at most that rank on the weights in `base_folder`.

        With `ends_process` this process ends at once if vLLM's core dies, and the driver starts another: requests that
        failed with the core must not count as failed attempts.
        If `reproducible`, log-probabilities do not depend on the batch, or `start` raises `InvalidInput`.
        With `captures_routes` replies come with the experts of their tokens.
        Raises `InvalidInput` for a rank that vLLM cannot serve.
        """
        assert (lora_rank > 0) == (base_folder is not None)
        self._base_folder = base_folder
        self._has_slot = base_folder is not None and not merges(settings.vllm, base_folder)
        self._ends_process = ends_process
        self._reproducible = reproducible
        self._captures_routes = captures_routes
        self.proof = ""
        # With vLLM's parser, a grammar begins behind the thoughts.
        thinks = settings.guided_decoding and settings.reasoning_parser not in ("auto", "none")
        self._arguments: dict[str, Any] = {
            "max_model_len": settings.max_model_len,
            "seed": seed,
            # Requests and replies are token ids; only a grammar needs the text of tokens.
            "skip_tokenizer_init": not settings.guided_decoding,
            "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
            "disable_log_stats": True,
            "worker_extension_cls": "rollouts.engines.vllm.worker_extension.ReloadExtension",
            **(adapter_arguments(lora_rank) if self._has_slot else {}),
            **({"reasoning_parser": settings.reasoning_parser} if thinks else {}),
            **settings.vllm,
            **(in_every_batch() if reproducible else {}),
            **(with_routes() if captures_routes else {}),
        }
        if self._arguments.get("enforce_eager"):
            # Else the sampler is compiled for each new shape of a batch, and replies wait. The core inherits this.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self._core = CoreStart(self._arguments)
        self.update_mode: UpdateMode = settings.update_mode
        """May be changed between updates, like `clear_cache_on_reload`."""
        self.clear_cache_on_reload = settings.clear_cache_on_reload
        self.llm: Any = None
        """vLLM's own engine; None before `start` and after `stop`."""
        self._as_input: Callable[[list[int]], Any]
        self._refusal: type[Exception]
        """What vLLM raises for a request that it cannot follow."""
        self._draws: Draws
        self._stop_ids: list[int] = []
        self._weights: HeldWeights
        self._served: Weights
        self._slot: Any = None
        """The adapter slot that every request names; None if whole weights are served, or merged ones."""
        self._update = asyncio.Lock()
        self._updating: asyncio.Task[Any]
        self._running: set[str] = set()
        self._aborts_begun = 0
        self._aborts_ended = 0
        self._unusable = ""
        self._holds = False
        self._asleep = False
        self._held_until = 0.0  # by `time.perf_counter`

    async def start(self, folder: Path, version: int, *, stop_ids: Sequence[int] = ()) -> str:
        from vllm import AsyncEngineArgs
        from vllm.envs import enable_envs_cache
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.async_llm import AsyncLLM

        model = self._base_folder or folder
        # Imported once: a lookup in vLLM's package takes as long as all else that uses it.
        self._as_input, self._refusal = tokens_input, VLLMClientError
        self._stop_ids = list(dict.fromkeys([*end_token_ids(model), *stop_ids]))
        self._served = weights_in(model, version)
        arguments = for_model(self._arguments, model)
        with self._core.starting():
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        self._draws = (await self.llm.collective_rpc("own_draws"))[0]
        if self._captures_routes:
            results(await self.llm.collective_rpc("capture_routes"))
        enable_envs_cache()  # as the core does; otherwise every request looks up some variables, slowly
        if self._has_slot:
            self._slot = slot_request()
        self._weights = HeldWeights(self.llm, base=self._base_folder, in_slot=self._has_slot)
        await self._weights.look(self._served)
        if self._reproducible:
            results(await self.llm.collective_rpc("fix_order"))
        checksum = await self._weights.install(policy := weights_in(folder, version))  # of the same weights the same
        self._served = policy
        if self._arguments.get("enable_sleep_mode"):
            await self._rehearse_sleep()
        if self._reproducible:
            longest = self._arguments["max_model_len"]
            self.proof = await check_batches(self.generate, self._layers_of, max_model_len=longest)
        if self._arguments.get("speculative_config"):
            await check_drafts(self.generate, lambda ids, name: prompt_logprobs(self.llm, ids, name), arguments, model)
        self.llm.output_handler.add_done_callback(lambda _: self._end_with_core())
        return checksum

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        sampling: Sampling,
        request_id: str,
        until: Until | None = None,
        constraint: str = "",
        routes_from: int = 0,
    ) -> Generation:
        token_ids: list[int] = []
        routes: list[Any] = []
        logprobs: list[float] = []
        versions: list[int] = []
        started = time.perf_counter()
        for part_idx in itertools.count():
            aborts_ended = self._aborts_ended
            part = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - len(token_ids), seed=None)
            name = f"{request_id}.part{part_idx}" if part_idx else request_id
            parameters = sampling_parameters(part, tuple(self._stop_ids), until is not None, constraint)
            parameters = with_draws(parameters, self._draws, seed=sampling.seed, position=len(token_ids))
            if start := routes_from + sum(map(len, routes)):
                parameters = copy.copy(parameters)
                parameters.routed_experts_prompt_start = start
            completion = await self._sample(prompt_ids, token_ids, parameters, name, until)
            token_ids += completion.token_ids
            if self._captures_routes and completion.routed_experts is not None:
                routes.append(completion.routed_experts)
            logprobs += completion.logprobs.logprobs
            for span in completion.weight_versions or ():
                versions += [int(span.version)] * (span.end - span.start)
            length = until(token_ids) if until is not None else 0
            if length:
                token_ids, logprobs, versions = token_ids[:length], logprobs[:length], versions[:length]
                break
            if completion.finish_reason != "abort" or self._aborts_begun == aborts_ended:
                break  # it was not ended by a weight update
        finish_reason = "stop" if length else completion.finish_reason
        if finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} was ended by the engine: {completion.finish_reason}")
        if len(versions) != len(token_ids):
            raise EngineError(f"the engine stamped {len(versions)} of {len(token_ids)} tokens with a weight version")
        num_routed = len(prompt_ids) + len(token_ids) - 1 - routes_from
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            weight_versions=versions,
            finish_reason=finish_reason,
            held_seconds=max(0.0, self._held_until - started),
            adapters={
                version: self._weights.adapters[version]
                for version in sorted(set(versions) & self._weights.adapters.keys())
            },
            routes=routes_of(routes, num_tokens=num_routed) if self._captures_routes else None,
        )

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        return await self._change(f"policy {version} from {folder}", lambda: weights_in(folder, version))

    async def receive_policy(self, broadcast: Broadcast, fetch: Callable[[], Path]) -> WeightUpdate:
        weights = Weights(version=broadcast.version, digest=broadcast.weights_sha256, fetch=fetch)
        return await self._change(f"policy {broadcast.version} from the trainer", lambda: weights, broadcast)

    async def hold(self) -> None:
        async with self._update:
            await self._pause("keep")
            self._holds = True

    async def release(self) -> None:
        async with self._update:
            await self._resume()

    async def sleep(self) -> None:
        # In a task of its own, as `_change`.
        self._updating = asyncio.create_task(self._sleep())
        await asyncio.shield(self._updating)

    async def wake(self) -> None:
        if self._asleep:
            await self._change(f"policy {self._served.version} after the sleep", lambda: self._served)

    async def stop(self) -> None:
        if self.llm is not None:
            self.llm.shutdown(timeout=0)  # killed: there is nothing to save, and an orderly end takes three seconds
            self.llm = None

    async def _sample(
        self, prompt_ids: list[int], before: list[int], parameters: Any, request_id: str, until: Until | None
    ) -> Any:
        """vLLM's completion of one request, however it ended. `before` are the reply's tokens of earlier parts."""
        self._refuse_if_unusable()
        self._running.add(request_id)
        final, ended = None, False
        try:
            prompt = self._as_input([*prompt_ids, *before])  # in the core's form; vLLM would convert others in a thread
            async for output in self.llm.generate(prompt, parameters, request_id, lora_request=self._slot):
                final = output
                if until is not None and not ended and until([*before, *output.outputs[0].token_ids]):
                    ended = True
                    await self.llm.abort(request_id)  # its last output has the versions of all tokens
        except Exception as error:
            self._end_with_core()
            if parameters.structured_outputs is not None and isinstance(error, self._refusal):
                raise InvalidInput(f"vLLM cannot follow this grammar: {error}") from error
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
        self, what: str, weights: Callable[[], Weights], broadcast: Broadcast | None = None
    ) -> WeightUpdate:
        # In a task of its own: a cancelled caller must not leave half of the new weights behind.
        loading = self._updating = asyncio.create_task(self._load(what, weights, broadcast))
        return await asyncio.shield(loading)

    async def _load(self, what: str, weights: Callable[[], Weights], broadcast: Broadcast | None) -> WeightUpdate:
        async with self._update:
            asleep = self._asleep
            old, paused = self._served, asleep
            started = time.perf_counter()
            try:
                new = weights()
                if not self._holds and not asleep:
                    await self._pause(self.update_mode)
                paused = True
                checksum = await self._weights.install(new, broadcast, asleep=asleep)
                self._served, self._unusable = new, ""
            except Exception as error:
                if paused:  # otherwise nothing has changed
                    complaint = f"{what} was not loaded, and policy {old.version} could not be put back"
                    await self._insist(lambda: self._weights.install(old, asleep=asleep), complaint)
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
                cache_cleared=self.clear_cache_on_reload or asleep,
                paused_seconds=time.perf_counter() - started,
                transfer="store" if broadcast is None else broadcast.backend,
            )

    async def _sleep(self) -> None:
        async with self._update:
            if self._asleep:
                return
            try:
                await self._pause(self.update_mode)
            except Exception as error:
                await self._resume()
                raise EngineError(f"the engine did not fall asleep: {type(error).__name__}: {error}") from error
            self._asleep = True
            try:
                # Level 2 drops weights, and the next policy overwrites all. Level 1 keeps those below adapters.
                await self._weights.call(self.llm.sleep(level=2 if self._slot is None else 1, mode="keep"))
            except Exception as error:  # noqa: BLE001 - a part of its memory may be gone
                await self._give_up(f"the engine did not fall asleep: {type(error).__name__}: {error}")

    async def _rehearse_sleep(self) -> None:
        """Sleep and wake once: weights are compared with their checksum, and what no load renews with what it was."""
        before = await self._weights.digests_beside()
        await self.sleep()
        await self.wake()
        after = await self._weights.digests_beside()
        if lost := [name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name]]:
            raise EngineError(f"vLLM does not bring {min(lost)} back after a sleep; set engine.share = 'split'")

    async def _pause(self, mode: UpdateMode) -> None:
        aborting = mode == "abort"
        self._aborts_begun += aborting
        try:
            # `llm.pause_generation` would also sleep 20 ms, for callers that want every output before it returns.
            core = self.llm.engine_core
            await self._weights.call(core.pause_scheduler_async(mode=mode, clear_cache=self.clear_cache_on_reload))
        finally:
            self._aborts_ended += aborting

    async def _resume(self) -> None:
        await self._insist(self._go_on, "generation could not be resumed after a weight update")
        if self._holds:
            self._holds, self._held_until = False, time.perf_counter()

    async def _go_on(self) -> None:
        if self._asleep:
            await self._weights.call(self.llm.wake_up(tags=["kv_cache"]))
            self._asleep = False
        await self._weights.call(self.llm.resume_generation())

    async def _insist(self, work: Callable[[], Awaitable[Any]], complaint: str) -> None:
        """Do `work`, in at most `TRIES` tries. If all fail, end the running requests, refuse new ones, and raise
        `EngineUnusable`; the next policy that loads makes the engine usable again."""
        for attempt in range(1, TRIES + 1):
            try:
                await work()
                return
            except Exception as error:  # noqa: BLE001 - tried again, then reported
                logger.warning("%s, try %d/%d: %s", complaint, attempt, TRIES, error)
                reason = f"{complaint}: {type(error).__name__}: {error}"
        await self._give_up(reason)

    async def _give_up(self, reason: str) -> NoReturn:
        """End the running requests and refuse new ones; an engine whose memory may be gone ends with its process."""
        self._end_with_core(hopeless=self._asleep)
        self._unusable = self._unusable or reason
        await self.llm.abort(list(self._running))
        raise EngineUnusable(self._unusable)

    def _end_with_core(self, *, hopeless: bool = False) -> None:
        """End this process if vLLM's core has died, or is of no use any more, and `ends_process` is set."""
        if not self._ends_process or self.llm is None:
            return
        if self.llm.errored:
            logger.critical("vLLM's engine core has ended: this process ends too, another takes its place")
            os._exit(1)
        if hopeless:
            logger.critical("vLLM's engine core cannot be woken: this process ends, another takes its place")
            os._exit(1)

    async def _layers_of(self, request_id: str) -> list[tuple[int, str, str]]:
        """What the first worker has computed for a request, see `LayerWatch`."""
        layers: list[tuple[int, str, str]] = results(await self.llm.collective_rpc("layers_of", args=(request_id,)))[0]
        return layers
