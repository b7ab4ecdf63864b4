"""The randomness of a token: the published generator, and a seed of its own for each place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from rollouts.engines.draws import DRAW, nth_seed, seed_of
from rollouts.engines.vllm.worker_extension import ReloadExtension


def test_seeds_are_those_of_splitmix64_and_no_two_places_share_one():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of 1234567
    assert [nth_seed(1234567, number) for number in range(3)] == [value >> 1 for value in published]
    attempts = {seed_of(seed_of(0, position, 0), attempt) for position in range(500) for attempt in range(8)}
    assert len(attempts) == 4000
    assert len({nth_seed(seed, number) for seed in sorted(attempts)[:100] for number in range(100)}) == 10_000
    assert seed_of(0, 1, 11) != seed_of(0, 11, 1) and 0 <= seed_of(0) < 2**63


def test_each_row_of_a_batch_gets_the_seed_of_the_token_that_it_samples():
    """As vLLM's runner has them: in any order, prompts computed in parts, or again with the reply behind them."""
    requests = {"fresh": (5, (7, 0), 5), "again": (4, (8, 0), 10), "part": (9, (8, 6), 9), "another's": (3, None, 4)}
    worker = ReloadExtension()
    worker.model_runner = SimpleNamespace(
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=draw and {DRAW: draw}))
            for name, (_, draw, _) in requests.items()
        },
        input_batch=SimpleNamespace(
            req_ids=list(requests), num_prompt_tokens=np.array([prompt for prompt, _, _ in requests.values()] + [0] * 4)
        ),
        optimistic_seq_lens_cpu=SimpleNamespace(
            numpy=lambda: np.array([computed for _, _, computed in requests.values()] + [0] * 4)
        ),
    )
    rows, seeds = worker._token_seeds()
    assert rows == [0, 1, 2] and seeds.tolist() == [nth_seed(7, 0), nth_seed(8, 6), nth_seed(8, 6)]
