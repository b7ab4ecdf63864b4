"""vLLM's AsyncLLM behind the `Engine` protocol: the same code on CUDA and on the CPU build.

    load_policy:  pause(mode) ─▶ reload_policy ─▶ checksum verified ─▶ update_weight_version ─▶ resume (always)
                       │ on any failure: the old weights, checksum and version again, or `EngineUnusable`

Running requests, by mode:
    keep   are frozen during the change. If the cache is cleared, their tokens are computed anew under the new weights;
           otherwise they go on with the keys and values of the old weights.
    wait   finish first; new requests wait.
    abort  are ended by vLLM; `generate` continues each as a new request, from its prompt and the tokens it has.
vLLM stamps every finished output with the versions of its tokens.

With adapters (LoRA) `load_policy` fills the one adapter slot, or on CPUs merges each with the base: `vllm_lora.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.weight_broadcast import Broadcast
from rollouts.engines.batch_probe import check_batches, check_drafts
from rollouts.engines.engine import EngineError, EngineUnusable, Generation, Until, UpdateMode, WeightUpdate
from rollouts.engines.vllm_core import CoreStart, for_model, in_every_batch
from rollouts.engines.vllm_lora import adapter_arguments, check_applied, merges, slot_request
from rollouts.engines.vllm_requests import Draws, end_token_ids, prompt_logprobs, sampling_parameters, with_draws
from rollouts.engines.vllm_worker import results
from settings.errors import InvalidInput
from storage.objects.digests import read_seal, sha256_of_json
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from storage.records import Sampling

logger = logging.getLogger("millrace.engine")

TRIES = 3
"""How often restoring old weights, or resuming the engine, is tried."""


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A policy to load."""

    version: int
    digest: str
    """Digest of the safetensors content."""
    fetch: Callable[[], Path]
    """Returns its folder; may read it from the store first."""


def _weights_in(folder: Path, version: int) -> _Weights:
    return _Weights(version=version, digest=read_seal(folder).weights_sha256, fetch=lambda: folder)


class VllmEngine:
    """One AsyncLLM in this process; vLLM runs its core and its workers in child processes."""

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
        guided_decoding: bool = False,
        reproducible: bool = False,
    ) -> None:
        """With `lora_rank` above 0 the engine serves adapters of at most that rank on the weights in `base_folder`.

        With `ends_process` this process ends at once if vLLM's core dies, and the driver starts another: requests that
        failed with the core must not count as failed attempts.
        If `reproducible`, log-probabilities do not depend on the batch, or `start` raises `InvalidInput`.
        `arguments` go to vLLM as they are. Raises `InvalidInput` for a rank that vLLM cannot serve.
        """
        assert (lora_rank > 0) == (base_folder is not None)
        self._base_folder = base_folder
        self._has_slot = base_folder is not None and not merges(arguments, base_folder)
        self._ends_process = ends_process
        self._reproducible = reproducible
        self.proof = ""
        self._arguments = {
            "max_model_len": max_model_len,
            "seed": seed,
            # Requests and replies are token ids; only a grammar needs the text of tokens.
            "skip_tokenizer_init": not guided_decoding,
            "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
            "disable_log_stats": True,
            "worker_extension_cls": "rollouts.engines.vllm_worker.ReloadExtension",
            **(adapter_arguments(lora_rank) if self._has_slot else {}),
            **arguments,
            **(in_every_batch() if reproducible else {}),
        }
        if self._arguments.get("enforce_eager"):
            # Else the sampler is compiled for each new shape of a batch, and replies wait. The core inherits this.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self._core = CoreStart(self._arguments)
        self.update_mode: UpdateMode = update_mode
        """May be changed between updates, like `clear_cache_on_reload`."""
        self.clear_cache_on_reload = clear_cache_on_reload
        self.llm: Any = None
        """vLLM's own engine; None before `start` and after `stop`."""
        self._as_input: Callable[[list[int]], Any]
        self._refusal: type[Exception]
        """What vLLM raises for a request that it cannot follow."""
        self._draws: Draws
        self._stop_ids: list[int] = []
        self._served: _Weights
        self._checksums: dict[str, str] = {}
        """Weights digest → the engine's checksum of them."""
        self._slot: Any = None
        """The adapter slot that every request names; None if whole weights are served, or merged ones."""
        self._adapters: dict[int, str] = {}
        """Version → weights digest of the adapter that vLLM's workers read."""
        self._update = asyncio.Lock()
        self._updating: asyncio.Task[WeightUpdate]
        self._running: set[str] = set()
        self._aborts_begun = 0
        self._aborts_ended = 0
        self._unusable = ""
        self._holds = False
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
        self._served = _weights_in(model, version)
        arguments = for_model(self._arguments, model)
        with self._core.starting():
            self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        self._draws = (await self.llm.collective_rpc("own_draws"))[0]
        enable_envs_cache()  # as the core does; otherwise every request looks up some variables, slowly
        if self._has_slot:
            self._slot = slot_request()
            await check_applied(self.llm)
        else:
            self._checksums[self._served.digest] = await self._read_checksum()
        if self._reproducible:
            results(await self.llm.collective_rpc("fix_order"))
        checksum = await self._install(policy := _weights_in(folder, version))  # of the same weights the same checksum
        self._served = policy
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
    ) -> Generation:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        started = time.perf_counter()
        for part_idx in itertools.count():
            aborts_ended = self._aborts_ended
            part = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - len(token_ids), seed=None)
            name = f"{request_id}.part{part_idx}" if part_idx else request_id
            parameters = sampling_parameters(part, tuple(self._stop_ids), until is not None, constraint)
            parameters = with_draws(parameters, self._draws, seed=sampling.seed, position=len(token_ids))
            completion = await self._sample(prompt_ids, token_ids, parameters, name, until)
            token_ids += completion.token_ids
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
        self, what: str, weights: Callable[[], _Weights], broadcast: Broadcast | None = None
    ) -> WeightUpdate:
        # In a task of its own: a cancelled caller must not leave half of the new weights behind.
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
                if paused:  # otherwise nothing has changed
                    complaint = f"{what} was not loaded, and policy {old.version} could not be put back"
                    await self._insist(lambda: self._install(old), complaint)
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
            # `llm.pause_generation` would also sleep 20 ms, for callers that want every output before it returns.
            core = self.llm.engine_core
            await self._call(core.pause_scheduler_async(mode=mode, clear_cache=self.clear_cache_on_reload))
        finally:
            self._aborts_ended += aborting

    async def _install(self, weights: _Weights, broadcast: Broadcast | None = None) -> str:
        """Load weights into the paused engine and name their version; returns the verified checksum."""
        checksum = await (self._reload(weights, broadcast) if self._slot is None else self._fill_slot(weights))
        expected = self._checksums.get(weights.digest)
        if self._slot is None and expected is None and checksum == self._checksums[self._served.digest]:
            # Either other weights round to the same numbers in the engine's precision, or the load did nothing.
            # A second load, over zeros, shows which.
            await self._call(self.llm.collective_rpc("reset_weights"))
            expected = checksum
            checksum = await self._reload(weights)
        if expected is not None and checksum != expected:
            raise EngineError(f"with policy {weights.version} the engine's checksum is {checksum}, not {expected}")
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
        """Do `work`, in at most `TRIES` tries. If all fail, end the running requests, refuse new ones, and raise
        `EngineUnusable`; the next policy that loads makes the engine usable again."""
        for attempt in range(1, TRIES + 1):
            try:
                await work()
                return
            except Exception as error:  # noqa: BLE001 - tried again, then reported
                logger.warning("%s, try %d/%d: %s", complaint, attempt, TRIES, error)
                reason = f"{complaint}: {type(error).__name__}: {error}"
        self._end_with_core()
        self._unusable = self._unusable or reason
        await self.llm.abort(list(self._running))
        raise EngineUnusable(self._unusable)

    def _end_with_core(self) -> None:
        """End this process if vLLM's core has died and `ends_process` is set."""
        if self._ends_process and self.llm is not None and self.llm.errored:
            logger.critical("vLLM's engine core has ended: this process ends too, another takes its place")
            os._exit(1)

    async def _reload(self, weights: _Weights, broadcast: Broadcast | None = None) -> str:
        """Load whole weights, by broadcast or from their folder, or merge an adapter; returns the checksum."""
        if broadcast is not None:
            results(await self._call(self.llm.collective_rpc("receive_policy", args=(dataclasses.asdict(broadcast),))))
        elif has_adapter(folder := await asyncio.to_thread(weights.fetch)):
            folders = (str(self._base_folder), str(folder))
            files = results(await self._call(self.llm.collective_rpc("merge_policy", args=folders)))
            self._note_adapter(weights, folder, files)
            return sha256_of_json([await self._read_checksum(), files])  # which is without packed matrices on CPUs
        else:
            results(await self._call(self.llm.collective_rpc("reload_policy", args=(str(folder),))))
        return await self._read_checksum()

    async def _fill_slot(self, weights: _Weights) -> str:
        """Change the adapter; the workers compare it with its file. Returns a digest of all weights in use."""
        path = await asyncio.to_thread(weights.fetch)
        folder = str(path) if has_adapter(path) else ""
        digests = results(await self._call(self.llm.collective_rpc("load_adapter", args=(folder,))))
        if folder:
            self._note_adapter(weights, path, [sha256 for sha256, _ in digests])
        return sha256_of_json([await self._read_checksum(), [slot for _, slot in digests]])

    def _note_adapter(self, weights: _Weights, path: Path, files: list[str]) -> None:
        """Raises `EngineError` if a worker read another file than the policy's seal describes."""
        for sha256 in files:
            if (read := sha256_of_json({ADAPTER_WEIGHTS: sha256})) != weights.digest:
                raise EngineError(f"the engine read adapter {read[:12]} in {path}, not {weights.digest[:12]}")
        self._adapters[weights.version] = weights.digest

    async def _layers_of(self, request_id: str) -> list[tuple[int, str, str]]:
        """What the first worker has computed for a request, see `LayerWatch`."""
        layers: list[tuple[int, str, str]] = results(await self.llm.collective_rpc("layers_of", args=(request_id,)))[0]
        return layers

    async def _read_checksum(self) -> str:
        """One digest over the per-tensor checksums of every vLLM worker."""
        return sha256_of_json(await self._call(self.llm.compute_weight_checksums()))

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call to the engine core, or `EngineError` if the core ends before it answers."""
        calling = asyncio.ensure_future(call)
        # vLLM would let the call wait for ever, but its task that reads the core's outputs ends.
        await asyncio.wait({calling, self.llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            calling.cancel()
            raise EngineError("the engine core has ended")
        return calling.result()
