"""An engine without a model: replies come from a function; versions and logprobs behave like the real engine's.

In: a reply function. Out: generations; each token has the version that was served at that moment.
For tests, and to try a pipeline without a model (`engine.kind = "scripted"`).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import EngineError, Generation, Until, WeightUpdate
from storage.objects.digests import DigestMismatch, verify_folder
from storage.policies.adapters import has_adapter
from storage.records import Sampling

Reply = Callable[[list[int], str], list[int]]
"""(prompt ids, the seed of the request, or its id if it has none) → reply ids, the end token included."""


class ScriptedEngine:
    """Replies token by token. Every token has the logprob −ln(`num_choices`)."""

    proof = ""

    def __init__(self, reply: Reply, *, num_choices: int = 10, seconds_per_token: float = 0.0) -> None:
        self._reply = reply
        self._logprob = -math.log(num_choices)
        self._seconds_per_token = seconds_per_token
        self.version = 0
        self.running = 0
        self.peak_running = 0
        self._adapters: dict[int, str] = {}
        self._open = asyncio.Event()
        self._open.set()

    async def start(self, folder: Path, version: int, *, stop_ids: Sequence[int] = ()) -> str:
        return (await self.load_policy(folder, version)).checksum

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
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            reply = self._reply(prompt_ids, request_id if sampling.seed is None else str(sampling.seed))
            if until is not None:
                reply = reply[: until(reply) or len(reply)]
            token_ids = reply[: sampling.max_tokens]
            versions = []
            started = time.perf_counter()
            await self._open.wait()
            held_seconds = time.perf_counter() - started
            for _ in token_ids:
                # Yields to the loop at every token, so that a policy swap can happen inside a reply.
                await asyncio.sleep(self._seconds_per_token)
                versions.append(self.version)
        finally:
            self.running -= 1
        return Generation(
            token_ids=token_ids,
            logprobs=[self._logprob] * len(token_ids),
            weight_versions=versions,
            finish_reason="stop" if len(token_ids) == len(reply) else "length",
            held_seconds=held_seconds,
            adapters={version: self._adapters[version] for version in set(versions) & self._adapters.keys()},
        )

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        try:
            checksum = verify_folder(folder)
        except (DigestMismatch, OSError, ValueError) as error:
            raise EngineError(
                f"policy {version} from {folder} was not loaded, policy {self.version} serves on: {error}"
            ) from error
        finally:
            self._open.set()
        self.version = version
        if has_adapter(folder):
            self._adapters[version] = checksum
        return WeightUpdate(checksum=checksum, mode="keep", cache_cleared=True, paused_seconds=0.0)

    async def receive_policy(self, broadcast: Broadcast, fetch: Callable[[], Path]) -> WeightUpdate:
        raise EngineError(f"policy {broadcast.version}: an engine without weights takes part in no broadcast")

    async def hold(self) -> None:
        self._open.clear()

    async def release(self) -> None:
        self._open.set()

    async def sleep(self) -> None:
        self._open.clear()

    async def wake(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        return None


def random_reply(*, alphabet: list[int], end_id: int, longest: int) -> Reply:
    """Replies of 1 … `longest` tokens from `alphabet`: a pure function of the prompt and the request's seed."""

    def reply(prompt_ids: list[int], draw: str) -> list[int]:
        digest = hashlib.sha256(f"{draw}/{prompt_ids}".encode()).digest()
        length = 1 + digest[0] % longest
        return [alphabet[digest[1 + i] % len(alphabet)] for i in range(length)] + [end_id]

    return reply
