"""Two gloo ranks take the step one rank takes, and read each other's saved state.

The ranks are two processes that run this very file; one rank is the process of the test.

    one rank:  every scenario, and a state saved half-way ─▶ two ranks: every scenario, `resume` from that state
                              compare ◀── weights, gradients, metrics, and a state saved by two ranks ──┘
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.unit.trainers.builders import (
    gradients,
    largest_difference,
    random_rows,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from trainers.checkpoint import load_state, save_policy, save_state
from trainers.packing import pack_rows
from trainers.samples import Samples
from trainers.trainer import Trainer

_ROOT = Path(__file__).parents[2]
_LEARNING_RATE = 1e-4
_SCENARIOS: dict[str, dict[str, object]] = {
    "even": {"tokens_per_microbatch": 32},
    "uneven": {"tokens_per_microbatch": 24},
    "one_pack": {"tokens_per_microbatch": 4096},
    "mini_batches": {"tokens_per_microbatch": 24, "num_minibatches": 2},
    "correct": {"tokens_per_microbatch": 24, "num_minibatches": 2, "stale_policy": "correct"},
    "clipped": {"tokens_per_microbatch": 24, "max_grad_norm": 0.01},
}
_PLAIN = {"tokens_per_microbatch": 24, "weight_decay": 0.1}
_NUM_PACKS = {"even": 4, "uneven": 5, "one_pack": 1}


def _samples(folder: Path) -> Samples:
    return samples_of(random_rows(folder / "model"))


def _run_scenarios(folder: Path, results: Path) -> None:
    """Two steps of every scenario; their weights, the second one's gradient, and both metrics go to `results`."""
    samples = _samples(folder)
    for name, settings in _SCENARIOS.items():
        trainer = trainer_of(folder / "model", learning_rate=_LEARNING_RATE, **settings)
        metrics = [take_step(trainer, samples, step=step, max_staleness=1) for step in (1, 2)]
        _write(trainer, metrics, results / name)


def _resume(folder: Path, results: Path, state: Path) -> None:
    """Step 2 from a saved step 1."""
    trainer = trainer_of(folder / "model", learning_rate=_LEARNING_RATE, **_PLAIN)
    assert load_state(trainer.model, trainer.optimizer, state) == 1
    _write(trainer, [take_step(trainer, _samples(folder), step=2, max_staleness=1)], results / "resumed")


def _first_step(folder: Path, state: Path) -> Trainer:
    """Step 1, saved."""
    trainer = trainer_of(folder / "model", learning_rate=_LEARNING_RATE, **_PLAIN)
    take_step(trainer, _samples(folder))
    save_state(trainer.model, trainer.optimizer, state, step=1)
    return trainer


def _write(trainer: Trainer, metrics: list[dict[str, float]], path: Path) -> None:
    path.mkdir(parents=True)
    save_file(weights(trainer), str(path / "weights.safetensors"))
    save_file(gradients(trainer), str(path / "gradients.safetensors"))
    (path / "metrics.json").write_text(json.dumps(metrics))


def _rank_main(folder: Path) -> None:
    """What each of the two processes does. Collecting a whole tensor needs all ranks, so all of them write."""
    results = folder / f"rank-{os.environ['RANK']}"
    _run_scenarios(folder, results)
    assert dist.get_world_size() == 2
    _resume(folder, results, folder / "one" / "state")
    trainer = _first_step(folder, results / "state")
    save_policy(trainer.model, folder / "model", results / "policy", dtype=torch.float32)
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Where the results are: `one` for one rank, `two` for rank 0 of two."""

    folder: Path
    one: Path
    two: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    _first_step(folder, folder / "one" / "state")
    ranks = _start_ranks(folder)
    try:
        # While the ranks are starting.
        _run_scenarios(folder, folder / "one")
        _resume(folder, folder / "one", folder / "one" / "state")
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return Outcome(folder=folder, one=folder / "one", two=folder / "rank-0")


def _start_ranks(folder: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.test_two_ranks", str(folder)],
            cwd=_ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def _assert_same_step(one: Path, two: Path) -> None:
    """Equal up to float32 rounding: ranks add the same gradients in another order.

    Adam divides by the gradient's size, so an element whose gradient is itself rounding (some keys' biases: the softmax
    cancels them) moves by a random part of the learning rate. Weights are compared where there is a gradient.
    """
    gradients_one, gradients_two = (load_file(folder / "gradients.safetensors") for folder in (one, two))
    weights_one, weights_two = (load_file(folder / "weights.safetensors") for folder in (one, two))
    assert gradients_one.keys() == gradients_two.keys() == weights_one.keys() == weights_two.keys()
    noise = 1e-5 * max(float(gradient.abs().max()) for gradient in gradients_one.values())
    for name, gradient in gradients_one.items():
        torch.testing.assert_close(gradients_two[name], gradient, rtol=1e-6, atol=3e-7)
        learnt = gradient.abs() > noise
        assert learnt.float().mean() > 0.5, name
        torch.testing.assert_close(
            weights_two[name][learnt], weights_one[name][learnt], rtol=1e-6, atol=1e-3 * _LEARNING_RATE
        )
        torch.testing.assert_close(weights_two[name], weights_one[name], rtol=0, atol=4 * _LEARNING_RATE)
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (one, two)]
    for expected, found in zip(*metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_two_ranks_take_the_step_one_rank_takes(outcome: Outcome, scenario: str) -> None:
    _assert_same_step(outcome.one / scenario, outcome.two / scenario)


@pytest.mark.parametrize(("scenario", "num_packs"), _NUM_PACKS.items())
def test_the_scenarios_have_the_packs_they_are_named_after(outcome: Outcome, scenario: str, num_packs: int) -> None:
    budget = _SCENARIOS[scenario]["tokens_per_microbatch"]
    assert isinstance(budget, int)
    assert len(pack_rows(np.diff(_samples(outcome.folder).offsets), budget=budget)) == num_packs


def test_both_ranks_hold_the_same_policy(outcome: Outcome) -> None:
    policies = [load_file(outcome.folder / f"rank-{rank}" / "policy" / "model.safetensors") for rank in range(2)]
    assert largest_difference(*policies) == 0


def test_a_state_saved_at_one_rank_resumes_at_two(outcome: Outcome) -> None:
    _assert_same_step(outcome.one / "resumed", outcome.two / "resumed")


def test_a_state_saved_at_two_ranks_resumes_at_one(outcome: Outcome, tmp_path: Path) -> None:
    _resume(outcome.folder, tmp_path, outcome.two / "state")
    _assert_same_step(outcome.one / "resumed", tmp_path / "resumed")


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
