"""Two and four gloo ranks take the step one rank takes, and read each other's saved state.

The ranks are processes that run this very file; one rank is the process of the test.

    one rank:  every scenario, and a state saved half-way ─▶ ranks: every scenario, `resume` from that state
                              compare ◀── weights, gradients, metrics, and a state saved by the ranks ──┘
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.architectures import SEQUENCES, packed_logprobs, tiny_config, tiny_folder
from tests.distributed.ranks import Ranks, fork_ranks
from tests.unit.trainers.builders import (
    Row,
    gradients,
    largest_difference,
    random_rows,
    routed,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from trainers.checkpoint import load_state, save_policy, save_state
from trainers.data.packing import pack_rows
from trainers.data.samples import Samples
from trainers.model import stored
from trainers.model.distributed import gathered, local, num_ranks
from trainers.model.model import load_model
from trainers.model.teams import join_team
from trainers.trainer import Trainer

_LEARNING_RATE = 1e-4
_NUM_RANKS = (2, 4)
_ARCHITECTURES = ("gemma2", "deepseek_v3", "llama4_text", "diffllama", "qwen3_moe")
"""Caps, values of another width, chunks, heads that are joined, experts."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings beside a small budget of tokens, and what is done to the rows of four groups before they are trained."""

    settings: dict[str, object] = field(default_factory=dict)
    rows: Callable[[Sequence[Row]], Sequence[Row]] = list
    team: int = 1  # ranks that compute a pack together, where there are several
    replicas: int = 1  # of the sharded model, where there are several ranks
    model: str = "model"
    replays: bool = False  # experts that the rows bring along


def _only_one_group_has_rewards(rows: Sequence[Row]) -> list[Row]:
    """All of what most ranks get is masked, and their gradient is zero."""
    return [row if row.group == 2 else dataclasses.replace(row, reward=math.nan) for row in rows]


def _one_group(rows: Sequence[Row]) -> list[Row]:
    """Fewer groups than ranks."""
    return [row for row in rows if row.group == 1]


def _two_groups_are_stale(rows: Sequence[Row]) -> list[Row]:
    return [dataclasses.replace(row, versions=[-5] * len(row.versions)) if row.group in (0, 3) else row for row in rows]


def _one_short_row(rows: Sequence[Row]) -> list[Row]:
    """Fewer tokens than ranks."""
    return [dataclasses.replace(rows[0], prompt=[1], reply=[5, 6], logprobs=[-2.0, -3.0], versions=[0, 0])]


def _last_group_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.group, -row.attempt))


_BASE_KL: dict[str, object] = {"kl": {"coefficient": 0.1}, "reference": {"kind": "base"}, "entropy_bonus": 0.01}
_EXPERTS: dict[str, object] = {"router": {"balance": 0.1, "z": 0.1}, "activation_checkpointing": True}
_REPLAY: dict[str, object] = {**_EXPERTS, "router_replay": True}
_SCENARIOS = {
    "small_packs": Scenario(),
    "one_pack": Scenario(settings={"tokens_per_microbatch": 4096}),
    "another_order": Scenario(settings={"tokens_per_microbatch": 32}, rows=_last_group_first),
    "uneven_minibatches": Scenario(settings={"num_minibatches": 3}),
    "masked_ranks": Scenario(rows=_only_one_group_has_rewards),
    "stale_ranks": Scenario(rows=_two_groups_are_stale),
    "idle_ranks": Scenario(rows=_one_group),
    "decoupled": Scenario(settings={"num_minibatches": 2, "stale_policy": "correct"}),
    "clipped": Scenario(settings={"max_grad_norm": 0.01}),
    "everything_added": Scenario(
        settings={
            **_BASE_KL,
            "loss": {"kind": "gspo"},
            "aggregation": "sequence_mean",
            "top_entropy_fraction": 0.5,
        },
    ),
    "masked_ranks_go_backwards": Scenario(settings=_BASE_KL, rows=_only_one_group_has_rewards),
    "sapo": Scenario(
        settings={"loss": {"kind": "sapo"}, "aggregation": "constant", "advantage": {"kind": "leave_one_out"}}
    ),
    "cispo_under_loglinear_masks": Scenario(
        settings={
            "loss": {"kind": "cispo"},
            "aggregation": "sequence_mean",
            "decoupled": {"proximal": "loglinear", "correction": "sequence_mask"},
        },
    ),
    "kl_in_the_reward": Scenario(
        settings={
            "loss": {"kind": "clip", "dual_clip": 3.0},
            "advantage": {"kind": "opo"},
            "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
            "reference": {"kind": "base"},
        },
    ),
    "critic_of_masked_ranks": Scenario(settings={"advantage": {"kind": "gae"}}, rows=_only_one_group_has_rewards),
    "critic": Scenario(settings={"advantage": {"kind": "gae"}}),
    "dppo_by_flops_within_bounds": Scenario(
        settings={
            "loss": {"kind": "dppo"},
            "reject": [{"over": "sequence_mean", "low": 0.9, "high": 1.05}],
            "advantage": {"kind": "grpo", "scale": "mean"},
            "balance": "flops",
            "num_minibatches": 2,
        }
    ),
    "lora": Scenario(settings={"lora": {"rank": 4}}),
    "team": Scenario(
        settings={
            **_BASE_KL,
            "activation_checkpointing": True,
            "loss": {"kind": "gspo"},
            "top_entropy_fraction": 0.5,
            "num_minibatches": 2,
            "stale_policy": "correct",
        },
        team=2,
    ),
    "replicas": Scenario(settings={"max_grad_norm": 0.01, "ema": 0.5, **_BASE_KL}, replicas=2),
    "team_in_each_replica": Scenario(rows=_two_groups_are_stale, team=2, replicas=2),
    "idle_team": Scenario(rows=_one_group, team=2),
    "team_with_a_critic": Scenario(settings={"advantage": {"kind": "gae"}}, rows=_only_one_group_has_rewards, team=2),
    "team_with_adapters": Scenario(settings={"lora": {"rank": 4}, "reference": {"kind": "lora_off"}}, team=2),
    "team_of_two_with_windows_sinks_and_experts": Scenario(settings=_EXPERTS, model="gpt_oss", team=2),
    "team_of_four_with_windows_sinks_and_experts": Scenario(settings=_EXPERTS, model="gpt_oss", team=4),
    "experts_that_are_given": Scenario(settings=_REPLAY, model="gpt_oss", replays=True),
    "team_of_two_with_experts_that_are_given": Scenario(settings=_REPLAY, model="gpt_oss", team=2, replays=True),
    "team_with_little_to_do": Scenario(
        settings={"loss": {"kind": "sft", "min_reward": -1.0}}, rows=_one_short_row, model="gpt_oss", team=4
    ),
}
_RUNS = {
    num_ranks: [name for name, each in _SCENARIOS.items() if num_ranks == 1 or num_ranks % each.team == 0]
    for num_ranks in (1, *_NUM_RANKS)
}
"""What each number of ranks runs."""
_CASES = [pytest.param(name, num_ranks) for num_ranks in _NUM_RANKS for name in _RUNS[num_ranks]]
_RESUMED: dict[str, object] = {
    "tokens_per_microbatch": 24,
    "weight_decay": 0.1,
    "schedule": "linear",
    "decay_steps": 4,
    "ema": 0.5,
}


def _samples(folder: Path, scenario: Scenario = Scenario()) -> Samples:
    rows = [Row(**row) for row in json.loads((folder / f"{scenario.model}.json").read_text())]
    samples = samples_of(scenario.rows(rows))
    return routed(samples, layers=4) if scenario.replays else samples


def _run_scenarios(folder: Path, results: Path) -> None:
    """Two steps of every scenario; their weights, the second one's gradient, and both metrics go to `results`."""
    for name in _RUNS[num_ranks()]:
        scenario = _SCENARIOS[name]
        samples = _samples(folder, scenario)
        settings = {"tokens_per_microbatch": 24, **scenario.settings}
        if num_ranks() > 1:
            several = {"sequence_parallel": scenario.team, "num_replicas": scenario.replicas}
            settings |= {"num_ranks": num_ranks(), **several}
        trainer = trainer_of(folder / scenario.model, learning_rate=_LEARNING_RATE, **settings)
        metrics = [take_step(trainer, samples, step=step, max_staleness=1) for step in (1, 2)]
        _write(trainer, metrics, results / name)


def _resume(folder: Path, results: Path, state: Path) -> None:
    """Step 2 from a saved step 1."""
    trainer = trainer_of(folder / "model", learning_rate=_LEARNING_RATE, **_RESUMED)
    assert load_state(trainer, state) == 1
    _write(trainer, [take_step(trainer, _samples(folder), step=2, max_staleness=1)], results / "resumed")


def _first_step(folder: Path, state: Path) -> Trainer:
    """Step 1, saved."""
    trainer = trainer_of(folder / "model", learning_rate=_LEARNING_RATE, **_RESUMED)
    take_step(trainer, _samples(folder))
    save_state(trainer, state, step=1)
    return trainer


def _divide_rows(folder: Path, results: Path) -> None:
    """How far log-probabilities and gradients of a team of all ranks are from those of one, by architecture."""
    team, gaps = join_team(num_ranks()), {}
    for name in _ARCHITECTURES:
        model = load_model(folder / name, dtype=torch.float64)
        weights = torch.linspace(-1, 2, sum(map(len, SEQUENCES)) - len(SEQUENCES), dtype=torch.float64)
        seen = []
        for its in (None, team):
            model.zero_grad()
            logprobs = packed_logprobs(model, SEQUENCES, temperature=0.7, team=its)
            (logprobs @ weights).backward()
            found = {n: parameter.grad for n, parameter in model.named_parameters() if parameter.grad is not None}
            for gradient in found.values() if its else ():
                dist.all_reduce(gradient)
            seen.append((logprobs.detach(), torch.cat([found[n].flatten() for n in sorted(found)])))
        (alone, its_gradient), (divided, gradient) = seen
        assert its_gradient.norm() > 1
        gaps[name] = [
            float((divided - alone).abs().max()),
            float((gradient - its_gradient).norm() / its_gradient.norm()),
        ]
    (results / "architectures.json").write_text(json.dumps(gaps))


def _write(trainer: Trainer, metrics: list[dict[str, float]], path: Path) -> None:
    path.mkdir(parents=True)
    save_file(weights(trainer), str(path / "weights.safetensors"))
    save_file(gradients(trainer), str(path / "gradients.safetensors"))
    (path / "metrics.json").write_text(json.dumps(metrics))
    if trainer.ema is not None:
        save_file(trainer.ema.state_tensors(), str(path / "average.safetensors"))


def _rank_main(folder: Path) -> None:
    """What each of the ranks does. Collecting a whole tensor needs all of them, so all of them write."""
    trainer = trainer_of(folder / "model", **_RESUMED)  # starts the process group
    results = folder / f"{dist.get_world_size()}-ranks" / str(dist.get_rank())
    del trainer
    _run_scenarios(folder, results)
    _resume(folder, results, folder / "one" / "state")
    _first_step(folder, results / "state")
    _divide_rows(folder, results)
    for replicas in (1, 2):
        several = {"num_ranks": num_ranks(), "num_replicas": replicas}
        _save_policy(folder, folder / f"{num_ranks()}-ranks" / f"policy-{replicas}", results, **several)
    dist.barrier()
    dist.destroy_process_group()


def _save_policy(folder: Path, policy: Path, results: Path, **settings: object) -> None:
    """Write weights that are others than the base's, and note what this rank had of them to write."""
    trainer = trainer_of(folder / "gpt_oss", **settings)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            local(parameter).add_(0.01)
    held: list[int] = []

    def noted(tensor: torch.Tensor, *, to: int) -> torch.Tensor | None:
        whole = gathered(tensor, to=to)
        held.append(0 if whole is None else whole.nbytes)
        return whole

    with patch.object(stored, "gathered", noted):
        digest = save_policy(trainer.model, folder / "gpt_oss", policy)
    (results / f"{policy.name}.json").write_text(json.dumps({"digest": digest, "held": held}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` holds the results of one rank, `2-ranks/0` those of the first of two."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model")
    for name in ("gpt_oss", *_ARCHITECTURES):
        tiny_folder(folder / name, tiny_config(name))
    for name in ("model", "gpt_oss"):
        rows = random_rows(folder / name)
        (folder / f"{name}.json").write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    _first_step(folder, folder / "one" / "state")
    ranks = Ranks("tests.distributed.test_ranks", folder)
    try:
        # While the ranks are starting.
        _run_scenarios(folder, folder / "one")
        _resume(folder, folder / "one", folder / "one" / "state")
        _save_policy(folder, folder / "one" / "policy", folder / "one")
        ranks.finish()
    finally:
        ranks.kill()
    return folder


def _assert_same_step(one: Path, many: Path, *, is_large: bool = False) -> None:
    """Equal up to float32 rounding: ranks add the same gradients in another order.

    Adam divides by the gradient's size, so an element whose gradient is itself rounding (some keys' biases: the softmax
    cancels them) moves by a random part of the learning rate. Weights are compared where there is a gradient; not those
    of a larger model, of which some have one for the first time in the second step.
    """
    gradients_one, gradients_many = (load_file(folder / "gradients.safetensors") for folder in (one, many))
    weights_one, weights_many = (load_file(folder / "weights.safetensors") for folder in (one, many))
    assert gradients_one.keys() == gradients_many.keys()
    assert gradients_one.keys() <= weights_one.keys() == weights_many.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients_one.values())
    assert largest > 1e-4, "a step without a gradient shows nothing"
    num_learnt = 0
    for name, gradient in gradients_one.items():
        torch.testing.assert_close(gradients_many[name], gradient, rtol=1e-5, atol=1e-5 * largest)
        learnt = gradient.abs() > (math.inf if is_large else 1e-3 * largest)
        num_learnt += int(learnt.sum())
        torch.testing.assert_close(
            weights_many[name][learnt], weights_one[name][learnt], rtol=1e-6, atol=5e-2 * _LEARNING_RATE
        )
        torch.testing.assert_close(weights_many[name], weights_one[name], rtol=0, atol=4 * _LEARNING_RATE)
    assert is_large or num_learnt > 0.5 * sum(gradient.numel() for gradient in gradients_one.values())
    metrics = [json.loads((path / "metrics.json").read_text()) for path in (one, many)]
    first_loss = metrics[0][0]["loss"]
    for expected, result in zip(*metrics, strict=True):
        # What cancels in the loss is of size 1, and rounding is relative to that. A second step starts from weights
        # that differ as above, so its loss differs by as small a part of what the first step changed in it.
        moved = abs(expected["loss"] - first_loss)
        assert result["loss"] == pytest.approx(expected["loss"], rel=0, abs=2e-6 + 1e-5 * moved)
        # A team's packs are larger, so that they have more of what is computed once.
        assert 0.7 < result["train_flops"] / expected["train_flops"] < 1 + 1e-5
        same = {name: result[name] for name in ("loss", "train_flops")}
        assert result == pytest.approx({**expected, **same}, rel=1e-5, abs=1e-7)


def _assert_same_average(one: Path, many: Path) -> None:
    """Equal but for rounding, which is far less than how far the average is behind the weights."""
    averages = [load_file(folder / "average.safetensors") for folder in (one, many)]
    now = {f"ema/{name}": tensor for name, tensor in load_file(one / "weights.safetensors").items()}
    behind = torch.cat([(averages[0][name] - now[name]).abs().flatten() for name in averages[0]])
    apart = torch.cat([(averages[0][name] - averages[1][name]).abs().flatten() for name in averages[0]])
    assert behind.mean() > 0.1 * _LEARNING_RATE
    assert apart.mean() < 0.02 * behind.mean()


@pytest.mark.parametrize(("scenario", "num_ranks"), _CASES)
def test_many_ranks_take_the_step_one_rank_takes(folder: Path, scenario: str, num_ranks: int) -> None:
    is_large = _SCENARIOS[scenario].model != "model"
    _assert_same_step(folder / "one" / scenario, folder / f"{num_ranks}-ranks" / "0" / scenario, is_large=is_large)


@pytest.mark.parametrize("scenario", ["one_pack", "another_order"])
def test_packing_and_order_change_nothing_on_any_number_of_ranks(folder: Path, scenario: str) -> None:
    for results in ("one", "2-ranks/0", "4-ranks/0"):
        _assert_same_step(folder / "one" / "small_packs", folder / results / scenario)


def test_the_scenarios_have_the_packs_they_are_named_after(folder: Path) -> None:
    lengths = np.diff(_samples(folder).offsets)
    assert [len(pack_rows(lengths, budget=budget)) for budget in (24, 32, 4096)] == [5, 4, 1]


@pytest.mark.parametrize("num_ranks", _NUM_RANKS)
def test_all_ranks_hold_the_same_weights_and_metrics(folder: Path, num_ranks: int) -> None:
    results = [folder / f"{num_ranks}-ranks" / str(rank) / "small_packs" for rank in range(num_ranks)]
    whole = [load_file(path / "weights.safetensors") for path in results]
    assert all(largest_difference(whole[0], weights) == 0 for weights in whole)
    metrics = [(path / "metrics.json").read_text() for path in results]
    assert set(metrics) == {metrics[0]}


@pytest.mark.parametrize("num_ranks", _NUM_RANKS)
@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_a_row_divided_among_ranks_has_the_logprobs_and_gradients_it_has_on_one(
    folder: Path, architecture: str, num_ranks: int
) -> None:
    for rank in range(num_ranks):
        gaps = json.loads((folder / f"{num_ranks}-ranks" / str(rank) / "architectures.json").read_text())
        logprob_gap, gradient_gap = gaps[architecture]
        assert logprob_gap < 1e-5 and gradient_gap < 1e-5  # transformers' norms are in float32


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("num_ranks", _NUM_RANKS)
def test_each_rank_writes_its_share_of_a_policy_whose_bytes_are_those_of_one_rank(
    folder: Path, num_ranks: int, replicas: int
) -> None:
    one = json.loads((folder / "one" / "policy.json").read_text())
    seen = [
        json.loads((folder / f"{num_ranks}-ranks" / str(rank) / f"policy-{replicas}.json").read_text())
        for rank in range(num_ranks)
    ]
    assert {each["digest"] for each in seen} == {one["digest"]}
    files = [folder / "one" / "policy", folder / f"{num_ranks}-ranks" / f"policy-{replicas}"]
    assert len({(path / "model.safetensors").read_bytes() for path in files}) == 1
    held, total = [sum(each["held"]) for each in seen], sum(one["held"])
    assert sum(held) == total, "no tensor is whole on two ranks"
    assert max(held) < 1.3 * total / num_ranks


@pytest.mark.parametrize("num_ranks", _NUM_RANKS)
def test_a_state_saved_at_one_rank_resumes_at_many(folder: Path, num_ranks: int) -> None:
    one, many = folder / "one" / "resumed", folder / f"{num_ranks}-ranks" / "0" / "resumed"
    _assert_same_step(one, many)
    _assert_same_average(one, many)


@pytest.mark.parametrize("num_ranks", _NUM_RANKS)
def test_a_state_saved_at_many_ranks_resumes_at_one_and_says_how_exactly(
    folder: Path, tmp_path: Path, num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="millrace.trainer"):
        _resume(folder, tmp_path, folder / f"{num_ranks}-ranks" / "0" / "state")
    _assert_same_step(folder / "one" / "resumed", tmp_path / "resumed")
    _assert_same_average(folder / "one" / "resumed", tmp_path / "resumed")
    assert f"saved by {num_ranks} ranks, and the number is now 1" in caplog.text and "not bit for bit" in caplog.text


if __name__ == "__main__":
    fork_ranks(lambda _: _rank_main(Path(sys.argv[1])), groups=_NUM_RANKS)
