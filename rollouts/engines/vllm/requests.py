"""What a request says to vLLM.

In: sampling settings, and a model folder. Out: vLLM's sampling parameters, and the tokens that end a reply.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rollouts.engines.draws import DRAW
from rollouts.engines.engine import EngineError, checked_logprobs
from storage.records import Routes, Sampling

Draws = Literal["ours", "hashed", "streamed"]
"""What turns a request's seed into random numbers: `ReloadExtension.own_draws` on CPUs; vLLM, from seed and position in
the sequence; or vLLM's older runner on GPUs, from a generator that it seeds."""


def with_draws(parameters: Any, draws: Draws, *, seed: int | None, position: int) -> Any:
    """A request's parameters with its randomness; `position` is that of its first token in the reply.

    The first kind counts on from there. The second does so by itself: the tokens before it are in the request's prompt.
    The third would repeat the numbers of the reply's part before this one.
    """
    if seed is None:
        return parameters
    parameters = copy.copy(parameters)  # shallow: what is shared is not changed
    if draws == "ours":
        parameters.extra_args = {DRAW: (seed, position)}
    else:
        parameters.seed = seed + position if draws == "streamed" else seed
    return parameters


@functools.lru_cache(maxsize=16)
def sampling_parameters(sampling: Sampling, stop_ids: tuple[int, ...], streams: bool, constraint: str) -> Any:
    """vLLM's sampling parameters without a seed; `streams` if every token is looked at as it comes.

    Attempts share one object, see `with_draws`.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,  # lists, not a dictionary and an object per token
        stop_token_ids=list(stop_ids),
        detokenize=False,
        structured_outputs=StructuredOutputsParams(**json.loads(constraint)) if constraint else None,
        output_kind=RequestOutputKind.CUMULATIVE if streams else RequestOutputKind.FINAL_ONLY,
        skip_clone=not constraint,  # a deep copy for each request would cost as much as the rest of its admission
    )


def routes_of(parts: Sequence[Any], *, num_tokens: int) -> Routes:
    """The first `num_tokens` of what vLLM returned in parts, arrays of shape [tokens, layers, choices]. Raises
    `EngineError` if these are fewer."""
    if (num_routed := sum(map(len, parts))) < num_tokens:
        raise EngineError(f"the engine has the routes of {num_routed} of {num_tokens} tokens")
    _, layers, choices = parts[0].shape
    size = parts[0].dtype.itemsize
    ids = b"".join(part.tobytes() for part in parts)[: num_tokens * layers * choices * size]
    return Routes(ids=ids, layers=layers, choices=choices, id_bytes=size)


def end_token_ids(folder: Path) -> list[int]:
    """Token ids that end a reply, from `generation_config.json` of a model folder, else from `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise EngineError(f"{folder} names no eos_token_id in generation_config.json or config.json")


async def prompt_logprobs(llm: Any, ids: list[int], name: str, **request: Any) -> list[float]:
    """What the served policy gives each token after the first, computed at once. Raises `EngineError` for NaN, with
    which a comparison would always pass."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    final = None
    async for output in llm.generate(TokensPrompt(prompt_token_ids=ids), parameters, name, **request):
        final = output
    assert final is not None
    positions = final.prompt_logprobs[1:]  # the first token has no logprob
    return checked_logprobs([float(at[token].logprob) for at, token in zip(positions, ids[1:], strict=True)])
