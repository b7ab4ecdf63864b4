"""What the rest of `rollouts/` asks of an inference engine; `vllm_engine.py` and `scripted_engine.py` answer.

In: token ids and sampling settings. Out: token ids, logprobs and, per token, the policy version that sampled it,
all exactly as the engine reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage.records import Sampling


class EngineError(Exception):
    """The engine could not answer a request, or could not load a policy."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One reply. The three lists have equal length."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str
    """`stop` or `length`; anything else is an `EngineError`."""


class Engine(Protocol):
    """An engine that serves one policy version at a time and can change it while requests are running."""

    async def start(self, folder: Path, version: int) -> str:
        """Load a policy folder (HF layout) and begin to serve; returns the checksum of the weights it holds."""

    async def generate(self, prompt_ids: list[int], *, sampling: Sampling, request_id: str) -> Generation:
        """Sample one reply. Raises `EngineError`."""

    async def load_policy(self, folder: Path, version: int) -> str:
        """Swap the weights under the running requests; returns the checksum of the weights it now holds.

        Raises `EngineError` with the old version still serving.
        """

    async def stop(self) -> None:
        """Release everything."""
