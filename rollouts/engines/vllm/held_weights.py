"""The weights that vLLM's workers hold: put there, and verified.

    a policy's folder, or its broadcast ─▶ every worker loads ─▶ digests made where the weights lie ─▶ the checksum

In: a policy, while the engine is paused or asleep. Out: the checksum of all weights in use, or an `EngineError`; then
the workers may hold anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.adapter_slot import check_applied
from rollouts.engines.vllm.worker_extension import results
from storage.objects.digests import read_seal, sha256_of_json
from storage.objects.tensor_digests import is_zero
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter

KIND_OF_CHECKSUM = "tensors-1"
"""How checksums begin. Those of runs recorded earlier have no such beginning and were made in another way: they cannot
be compared with these."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A policy to load."""

    version: int
    digest: str
    """Digest of the safetensors content."""
    fetch: Callable[[], Path]
    """Returns its folder; may read it from the store first."""


def weights_in(folder: Path, version: int) -> Weights:
    return Weights(version=version, digest=read_seal(folder).weights_sha256, fetch=lambda: folder)


class HeldWeights:
    """The weights of one engine."""

    def __init__(self, llm: Any, *, base: Path | None, in_slot: bool) -> None:
        """`llm` is vLLM's engine. Policies are adapters of `base`, if there is one: `in_slot`, so its weights stay, or
        merged with it."""
        self._llm = llm
        self._base = base
        self._in_slot = in_slot
        self.adapters: dict[int, str] = {}
        """Version → weights digest of the adapter that vLLM's workers read."""
        self._checksums: dict[str, str] = {}
        """Weights digest → the engine's checksum of them."""
        self._newest = ""
        """The checksum that was verified last."""
        self._base_checksum = ""
        """Checksum of the weights below adapters."""
        self._zeros: set[tuple[int, str]] = set()
        """Worker and name of each tensor that is zero."""

    async def look(self, started_with: Weights) -> None:
        """Note what the engine holds after its start: a reload of the same must give the same."""
        if self._in_slot:
            await check_applied(self._llm)
            self._base_checksum = await self._read_checksum()
        else:
            self._newest = self._checksums[started_with.digest] = await self._read_checksum()

    async def install(self, weights: Weights, broadcast: Broadcast | None = None, *, asleep: bool = False) -> str:
        """Load weights and name their version; returns the verified checksum. `asleep`: their memory comes back first,
        and what lies in it then is no policy's, so it is made zero; a tensor that stays so was not loaded."""
        zeros = self._zeros
        if asleep:
            await self.call(self._llm.wake_up(tags=["weights"]))
            if not self._in_slot:
                await self.call(self._llm.collective_rpc("reset_weights"))
        checksum = await (self._fill_slot(weights) if self._in_slot else self._reload(weights, broadcast))
        if asleep and (lost := self._zeros - zeros):
            self._zeros = zeros
            raise EngineError(f"{len(lost)} tensors did not come back from a sleep, one is {min(lost)[1]}")
        expected = self._checksums.get(weights.digest)
        if expected is None and checksum == self._newest and not asleep and not self._in_slot:
            # Either other weights round to the same numbers in the engine's precision, or the load did nothing.
            # A second load, over zeros, shows which.
            await self.call(self._llm.collective_rpc("reset_weights"))
            expected = checksum
            checksum = await self._reload(weights)
        if expected is not None and checksum != expected:
            raise EngineError(f"with policy {weights.version} the engine's checksum is {checksum}, not {expected}")
        await self.call(self._llm.update_weight_version(str(weights.version)))
        self._newest = self._checksums[weights.digest] = checksum
        return checksum

    async def digests_beside(self) -> list[dict[str, str]]:
        """Digests of the model's buffers in each worker, by name: what it computes with beside weights."""
        return await self._rpc("buffer_digests")

    async def _reload(self, weights: Weights, broadcast: Broadcast | None = None) -> str:
        """Load whole weights, by broadcast or from their folder, or merge an adapter; returns the checksum."""
        if broadcast is not None:
            await self._rpc("receive_policy", dataclasses.asdict(broadcast))
        elif has_adapter(folder := await asyncio.to_thread(weights.fetch)):
            files = await self._rpc("merge_policy", str(self._base), str(folder))
            self._note_adapter(weights, folder, files)
            return f"{KIND_OF_CHECKSUM}:{sha256_of_json([await self._read_checksum(), files])}"
        else:
            await self._rpc("reload_policy", str(folder))
        return await self._read_checksum()

    async def _fill_slot(self, weights: Weights) -> str:
        """Change the adapter; the workers compare it with its file. Returns a digest of all weights in use."""
        path = await asyncio.to_thread(weights.fetch)
        adapted = has_adapter(path)
        digests = await self._rpc("load_adapter", str(path) if adapted else "")
        if adapted:
            self._note_adapter(weights, path, [sha256 for sha256, _ in digests])
        if (base := await self._read_checksum()) != self._base_checksum:
            raise EngineError("the weights below the adapter are no longer those that the engine was started with")
        return f"{KIND_OF_CHECKSUM}:{sha256_of_json([base, [slot for _, slot in digests]])}"

    def _note_adapter(self, weights: Weights, path: Path, files: list[str]) -> None:
        """Raises `EngineError` if a worker read another file than the policy's seal describes."""
        for sha256 in files:
            if (read := sha256_of_json({ADAPTER_WEIGHTS: sha256})) != weights.digest:
                raise EngineError(f"the engine read adapter {read[:12]} in {path}, not {weights.digest[:12]}")
        self.adapters[weights.version] = weights.digest

    async def _read_checksum(self) -> str:
        """One digest over those of every tensor in every worker."""
        digests = await self._rpc("weight_digests")
        self._zeros = {
            (worker, name) for worker, by_name in enumerate(digests) for name, each in by_name.items() if is_zero(each)
        }
        return f"{KIND_OF_CHECKSUM}:{sha256_of_json(digests)}"

    async def _rpc(self, method: str, *arguments: Any) -> list[Any]:
        """What a `returning_errors` method returned in each worker."""
        return results(await self.call(self._llm.collective_rpc(method, args=arguments)))

    async def call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result of a call to the engine core, or `EngineError` if the core ends before it answers."""
        calling = asyncio.ensure_future(call)
        # vLLM would let the call wait for ever, but its task that reads the core's outputs ends.
        await asyncio.wait({calling, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            calling.cancel()
            raise EngineError("the engine core has ended")
        return calling.result()
