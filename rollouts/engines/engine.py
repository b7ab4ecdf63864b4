"""The interface of an inference engine; `vllm_engine.py` and `scripted_engine.py` implement it.

In: token ids and sampling settings. Out: token ids, logprobs and, per token, the policy version that sampled it,
all exactly as the engine reports them.

A logprob belongs to the sampled token and to the distribution it was drawn from: log-softmax(logits / temperature)
after top-k, top-p and min-p, under the weights that sampled it (`Sampling.logprobs_mode`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from infra.weight_broadcast import Broadcast
from settings.engine import WeightTransfer
from settings.errors import UserError
from storage.records import Routes, Sampling

UpdateMode = Literal["keep", "wait", "abort"]
"""What happens to running requests when weights change: `keep` freezes and continues them, `wait` finishes them
first, `abort` stops them and continues from the tokens they have."""


_ROUNDING = 1e-4
"""Nats by which a log-probability may be above 0; it is the logarithm of a rounded sum."""


class EngineError(UserError):
    """The engine failed to answer a request or to load a policy."""


class EngineUnusable(EngineError):
    """The engine's weights have no known version. It answers no request until a policy is loaded."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One reply. The three lists have equal length. Raises `EngineError` for a logprob that no distribution has."""

    token_ids: list[int]
    logprobs: list[float]
    """At most 0 and finite."""
    weight_versions: list[int]
    finish_reason: str
    """`stop` or `length`; anything else is an `EngineError`."""
    held_seconds: float = 0.0
    """Seconds that `Engine.hold` delayed it."""
    adapters: dict[int, str] = field(default_factory=dict)
    """Version → digest of the weights that the engine's workers read, for the versions that are adapters."""
    routes: Routes | None = None
    """Experts of the tokens from `routes_from` up to the last but one; None if the engine does not capture them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", checked_logprobs(self.logprobs))


def checked_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Log-probabilities of sampled tokens, without what rounding puts above 0.

    Raises `EngineError` for one that no distribution has: NaN, above 0, or −∞.
    """
    checked = [0.0 if 0 < logprob < _ROUNDING else logprob for logprob in logprobs]
    for place, logprob in enumerate(checked):
        if not -math.inf < logprob <= 0:
            raise EngineError(
                f"the engine's log-probability of token {place + 1} of {len(checked)} is {logprob}: its weights or its "
                "sampler are broken"
            )
    return checked


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """A verified change of weights."""

    checksum: str
    """Digest of the weights in the engine; equal weights have equal checksums."""
    mode: UpdateMode
    """What happened to the running requests."""
    cache_cleared: bool
    """True if the keys and values computed by the old weights were dropped."""
    paused_seconds: float
    """Wall-clock from the call to pause until the engine resumed; with `wait` this includes the drain."""
    transfer: WeightTransfer = "store"
    """How the weights arrived."""


Until = Callable[[list[int]], int]
"""(the ids sampled so far) → how many of them the reply has, the one that completes a stop string last; 0 to go on."""


class Engine(Protocol):
    """An engine that serves one policy version at a time and can change it while requests are running."""

    proof: str
    """A digest of what a reproducible engine computed from a few prompts at its start: equal bits have an equal
    digest. Empty for any other engine."""

    async def start(self, folder: Path, version: int, *, stop_ids: Sequence[int] = ()) -> str:
        """Load a policy folder (HF layout) and begin to serve; returns the checksum of the weights.

        `stop_ids` end a reply beside the tokens that the folder's own configuration names.
        """

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
        """Sample one reply. A change of weights meanwhile shows only in the versions. Raises `EngineError`.

        A reply that `until` ends has the finish reason `stop`. It only cuts: the tokens before are those without it.
        `constraint` are vLLM's structured-output parameters, as JSON: logprobs are of what they leave. Raises
        `InvalidInput` if vLLM cannot follow them. `routes_from` is the first token whose experts are asked for, if the
        engine captures them.

        There is no deadline. Cancelling the call, as a timeout around it does, ends the request in the engine.
        """

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        """Change the weights under the running requests, and verify that they changed.

        Raises `EngineError` if the old version still serves, `EngineUnusable` if it does not.
        """

    async def receive_policy(self, broadcast: Broadcast, fetch: Callable[[], Path]) -> WeightUpdate:
        """`load_policy` with weights from a broadcast; `fetch` gets their folder if it is needed later."""

    async def hold(self) -> None:
        """Make new requests wait until a policy is loaded. The engine must have no running request."""

    async def release(self) -> None:
        """Undo `hold`: answer with the served weights."""

    async def sleep(self) -> None:
        """Give the GPU's memory back until a policy is loaded, or `wake`; running requests wait, new ones too. Raises
        `EngineError` if the engine is awake as before, `EngineUnusable` if it may not be."""

    async def wake(self) -> None:
        """Serve the policy of before again, if the engine sleeps."""

    async def stop(self) -> None:
        """Release everything."""
