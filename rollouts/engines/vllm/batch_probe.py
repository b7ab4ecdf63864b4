"""Are the log-probabilities of an engine those that a run needs? Played on the engine that serves, before its first
prompt. In every batch the same, if the run is to be reproducible:

    prompts alone ─▶ greedy replies and log-probabilities ═ the same among others, in another order, and continued from
                     the middle, where what was computed token by token is computed at once
                         └ if not: played again while every layer is watched ─▶ the first that computes other bits

And the policy's own, if tokens are drafted (speculative decoding):

    replies of drafts that were accepted and refused ═ the same tokens as a prompt

In: an engine. Out: a digest of the numbers, or the name of what differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.engines.engine import EngineError, Generation
from settings.errors import InvalidInput
from storage.objects.digests import sha256_of_json
from storage.policies.model_config import model_config, number_bytes
from storage.records import Sampling

_LENGTHS = (3, 40, 150)
"""Lengths of the prompts, in tokens."""
_OTHERS = 29
_NEW = 12
"""Tokens of each reply."""
ROUNDING = {4: 1e-3, 2: 0.1}
"""Nats per token that log-probabilities of equal weights may differ by, by the bytes of a weight."""
_DRAFTED = 8
"""Replies with drafts."""

Generate = Callable[..., Awaitable[Generation]]
"""`Engine.generate`."""
Replayed = Callable[[list[int], str], Awaitable[Sequence[float]]]
"""Log-probabilities of every token of a prompt after the first."""
LayersOf = Callable[[str], Awaitable[Sequence[Sequence[Any]]]]
"""`LayerWatch.of_request` of an engine's first worker, which begins to watch when it is first called."""


async def check_batches(generate: Generate, layers_of: LayersOf, *, max_model_len: int) -> str:
    """A digest of what an engine computes. Raises `InvalidInput` that names the layer if it computes other bits of a
    token in another batch."""
    room = max_model_len - _NEW - 1
    prompts = [_prompt(number, min(length, room)) for number, length in enumerate(_LENGTHS)]
    others = [_prompt(number, min(1 + 5 * number, room)) for number in range(_OTHERS)]

    def reply(prompt: list[int], name: str, after: Sequence[int] = ()) -> Awaitable[Generation]:
        sampling = Sampling(max_tokens=_NEW - len(after), temperature=0.0)
        return generate([*prompt, *after], sampling=sampling, request_id=f"probe-{name}")

    async def among(prompt: list[int], name: str, after: Sequence[int]) -> Generation:
        beside = [reply(other, f"other{number}") for number, other in enumerate(others)]
        return (await asyncio.gather(*beside[::2], reply(prompt, name, after), *beside[1::2]))[len(beside[::2])]

    computed = []
    for number, prompt in enumerate(prompts):
        alone = await reply(prompt, f"alone{number}")
        computed.append([alone.token_ids, alone.logprobs])
        half = len(alone.token_ids) // 2
        for kept in (0, half) if half else (0,):
            again = await among(prompt, f"among{number}-{kept}", alone.token_ids[:kept])
            if (again.token_ids, again.logprobs) == (alone.token_ids[kept:], alone.logprobs[kept:]):
                continue
            await layers_of("none yet")
            await reply(prompt, "watched-alone")
            await among(prompt, "watched-among", alone.token_ids[:kept])
            layers = first_difference(await layers_of("probe-watched-alone"), await layers_of("probe-watched-among"))
            fault = f"{layers} computes other bits for a token in another batch"
            raise InvalidInput(f"reproducible = true does not hold on this machine: {fault}; leave it out")
    return sha256_of_json(computed)


async def check_drafts(generate: Generate, replayed: Replayed, arguments: Mapping[str, Any], model: Path) -> None:
    """Raise `InvalidInput` if the log-probabilities of sampled tokens are further from what the engine gives the same
    tokens in a prompt than rounding makes them. `arguments` are those of vLLM."""
    most = ROUNDING[number_bytes(arguments, model_config(model))]
    length = min(_LENGTHS[1], arguments["max_model_len"] // 2)
    prompts = [_prompt(number, length) for number in range(_DRAFTED)]  # they repeat themselves, which can be drafted
    requests = (
        generate(prompt, sampling=Sampling(max_tokens=length - 2, seed=number), request_id=f"draft{number}")
        for number, prompt in enumerate(prompts)
    )
    try:
        replies = await asyncio.gather(*requests)
    except EngineError as error:
        raise InvalidInput(f"engine.vllm.speculative_config: {error}; leave it out") from error
    gaps: list[float] = []
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        own = await replayed([*prompt, *reply.token_ids], f"replayed{number}")
        gaps += [abs(one - other) for one, other in zip(reply.logprobs, own[len(prompt) - 1 :], strict=True)]
    gap = sum(gaps) / len(gaps)
    if not gap <= most:  # NaN too
        raise InvalidInput(
            "engine.vllm.speculative_config: the log-probabilities that vLLM reports of sampled tokens are not the "
            f"policy's, they are {gap:.3g} nats per token off (at most {most:g}), and would be trained on; leave it out"
        )


def _prompt(number: int, length: int) -> list[int]:
    """Small token ids, which every vocabulary has; prompts of other numbers begin otherwise."""
    return [3 + (number + place * (1 + number % 5)) % 8 for place in range(length)]


def first_difference(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> str:
    """The first layer that computed other bits for a token, by position and then in the order of computation."""
    digests = {(position, layer): digest for position, layer, digest in one}
    for position, layer, digest in sorted(other, key=lambda each: each[0]):
        if digests.get((position, layer), digest) != digest:
            return str(layer)
    return "the sampler"
