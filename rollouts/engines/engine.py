"""What the rest of `rollouts/` asks of an inference engine; `vllm_engine.py` and `scripted_engine.py` answer.

In: token ids and sampling settings. Out: token ids, logprobs and, per token, the policy version that sampled it,
all exactly as the engine reports them.

Logprobs are those of what was really drawn from: log-softmax(logits / temperature), after top-k, top-p and min-p
where those are set, of the sampled token under the weights that sampled it (`Sampling.logprobs_mode`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from infra.weight_broadcast import Broadcast
from settings.engine import WeightTransfer
from settings.errors import UserError
from storage.records import Sampling

UpdateMode = Literal["keep", "wait", "abort"]
"""What becomes of running requests when weights change: frozen and continued, finished first, or stopped and
continued from the tokens they have."""


class EngineError(UserError):
    """The engine could not answer a request, or could not load a policy."""


class EngineUnusable(EngineError):
    """The engine holds no weights it could name a version of, and answers nothing until a policy is loaded."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One reply. The three lists have equal length."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str
    """`stop` or `length`; anything else is an `EngineError`."""
    held_seconds: float = 0.0
    """How long `Engine.hold` kept it from beginning."""
    adapters: dict[int, str] = field(default_factory=dict)
    """For the versions above that are adapters: weights digest of what the engine held, as its workers read it."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """A change of weights that was carried out and verified."""

    checksum: str
    """Digest of the weights as the engine holds them; equal weights have equal checksums."""
    mode: UpdateMode
    """What became of the running requests."""
    cache_cleared: bool
    """True where every key and value computed by the old weights was dropped; false where they are used further."""
    paused_seconds: float
    """Wall-clock from asking the engine to pause until it went on; with `wait` this includes the drain."""
    transfer: WeightTransfer = "store"
    """How the weights came."""


class Engine(Protocol):
    """An engine that serves one policy version at a time and can change it while requests are running."""

    async def start(self, folder: Path, version: int) -> str:
        """Load a policy folder (HF layout) and begin to serve; returns the checksum of the weights it holds."""

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, request_id: str) -> Generation:
        """Sample one reply; a change of weights meanwhile shows in the versions only. Raises `EngineError`.

        It has no deadline of its own: cancelling it, as a timeout around it does, ends the request in the engine.
        """

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        """Change the weights under the running requests, and verify that they changed.

        Raises `EngineError` with the old version still serving, `EngineUnusable` where that could not be had either.
        """

    async def receive_policy(self, broadcast: Broadcast, fetch: Callable[[], Path]) -> WeightUpdate:
        """`load_policy` with weights that come by broadcast; `fetch` gives their folder, should it be needed later."""

    async def hold(self) -> None:
        """Keep requests from here on waiting until a policy is loaded; for an engine that has none at the moment."""

    async def release(self) -> None:
        """Undo `hold`: answer with the weights that are served."""

    async def stop(self) -> None:
        """Release everything."""
