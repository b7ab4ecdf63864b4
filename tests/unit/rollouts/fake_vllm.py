"""A small stand-in of vLLM that a test steps by hand.

A policy's weights are a number in its file, and the logprob of a token is minus the number that was loaded when it was
sampled: a token of which version and logprob disagree was sampled wrongly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclasses.dataclass
class FakeRequest:
    """A request and what it has got so far."""

    prompt: list[int]
    parameters: Any
    outputs: asyncio.Queue[Any]
    tokens: list[tuple[int, float, str]] = dataclasses.field(default_factory=list)
    finish_reason: str = ""


class FakeVllm:
    """What `VllmEngine` uses of AsyncLLM. `step()` gives one token to every running request."""

    draws = "ours"

    def __init__(self, folder: Path) -> None:
        self.weights, self.version, self.paused = weights_of(folder), "default", False
        self.asleep: set[str] = set()
        """What has no memory."""
        self.buffers = {"rotary_emb.cos_sin_cache": "angles"}
        self.requests: dict[str, FakeRequest] = {}
        self.parts: list[FakeRequest] = []
        self.calls: list[str] = []
        self.faults: dict[str, list[str]] = {}
        """Method → what goes wrong in its next calls: `before`, `after` or `` for nothing."""
        self.output_handler = asyncio.get_running_loop().create_future()
        self.refuses: Exception | None = None
        """What a new request raises."""
        self._drained = asyncio.Event()
        self.engine_core = self

    async def generate(
        self, prompt: dict[str, list[int]], parameters: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        assert lora_request is None, "whole weights are served here"
        if self.refuses is not None:
            raise self.refuses
        request = FakeRequest(prompt=prompt["prompt_token_ids"], parameters=parameters, outputs=asyncio.Queue())
        self.requests[request_id] = request
        self.parts.append(request)
        try:
            while True:
                output = await request.outputs.get()
                yield output
                if output.outputs[0].finish_reason:
                    return
        finally:
            self.requests.pop(request_id, None)

    def step(self) -> None:
        if self.paused:
            return
        assert not self.asleep, "computes without memory"
        for request in list(self.requests.values()):
            if request.finish_reason:
                continue
            request.tokens.append((100 + len(request.prompt) + len(request.tokens), -self.weights, self.version))
            if len(request.tokens) == request.parameters.max_tokens:
                self._finish(request, "length")
            elif request.parameters.output_kind == 0:  # CUMULATIVE
                tokens = [token for token, _, _ in request.tokens]
                output = SimpleNamespace(token_ids=tokens, finish_reason=None, weight_versions=None)
                request.outputs.put_nowait(SimpleNamespace(outputs=[output]))

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        async def pause() -> None:
            if mode == "wait":
                while self._in_flight():
                    self._drained.clear()
                    await self._drained.wait()
            if mode == "abort":
                await self.abort(list(self.requests))
            self.paused = True

        await self._call("pause_scheduler_async", pause)

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        if method == "own_draws":
            return [self.draws]
        if method == "buffer_digests":
            return [(dict(self.buffers), "")]
        if method == "weight_digests":

            async def compute() -> Any:
                return [({"weights": f"float {self.weights or 32 * '0'}"}, "")]

            return await self._call(method, compute)

        async def reload() -> None:
            assert self.paused or not self._in_flight(), "weights change under a running request"
            assert "weights" not in self.asleep, "weights without memory"
            await asyncio.sleep(0)
            if method == "reset_weights":
                self.weights = 0.0
            else:
                self.weights = float("nan")  # as far as a load that fails in its middle comes
                self.weights = weights_of(Path(args[0]))

        await self._call(method, reload)
        return [(None, "")]

    async def sleep(self, *, level: int, mode: str) -> None:
        async def sleep() -> None:
            assert self.paused and (level, mode) == (2, "keep")
            self.asleep, self.weights = {"weights", "kv_cache"}, 77.0  # whatever was in that memory

        await self._call("sleep", sleep)

    async def wake_up(self, *, tags: list[str]) -> None:
        async def wake() -> None:
            self.asleep -= set(tags)
            if not self.asleep:
                self.paused = False

        await self._call(f"wake {tags[0]}", wake)

    async def update_weight_version(self, version: str) -> None:
        async def update() -> None:
            self.version = version

        await self._call("update_weight_version", update)

    async def resume_generation(self) -> None:
        async def resume() -> None:
            self.paused = False

        await self._call("resume_generation", resume)

    async def abort(self, request_ids: list[str] | str) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if request_id in self.requests:
                self._finish(self.requests[request_id], "abort")

    async def _call(self, method: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append(method)
        fault = self.faults[method].pop(0) if self.faults.get(method) else ""
        if fault == "before":
            raise ConnectionError(f"{method} was cut off")
        result = await work()
        if fault == "after":
            raise ConnectionError(f"{method} was cut off")
        return result

    def _in_flight(self) -> int:
        return sum(not request.finish_reason for request in self.requests.values())

    def _finish(self, request: FakeRequest, reason: str) -> None:
        if request.finish_reason:
            return
        request.finish_reason = reason
        spans, start = [], 0
        for version, tokens in itertools.groupby(request.tokens, key=lambda token: token[2]):
            end = start + len(list(tokens))
            spans.append(SimpleNamespace(version=version, start=start, end=end))
            start = end
        completion = SimpleNamespace(
            token_ids=[token for token, _, _ in request.tokens],
            logprobs=SimpleNamespace(logprobs=[logprob for _, logprob, _ in request.tokens]),  # FlatLogprobs
            weight_versions=spans,
            finish_reason=reason,
        )
        request.outputs.put_nowait(SimpleNamespace(outputs=[completion]))
        if not self._in_flight():
            self._drained.set()


def weights_of(folder: Path) -> float:
    """The number in a policy's weights file."""
    return float((folder / "model.safetensors").read_text())
