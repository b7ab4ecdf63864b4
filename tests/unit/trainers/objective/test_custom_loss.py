"""A loss of one's own is one function in a file; what is wrong with it is said before anything is loaded."""

import re
from pathlib import Path

import pytest

from tests.unit.trainers.builders import gradients, largest_difference, random_rows, samples_of, take_step, trainer_of
from trainers.objective.custom_loss import check_loss, load_loss
from trainers.objective.losses import clip_loss
from trainers.objective.objective import OFF_POLICY


def _file(folder: Path, body: str) -> str:
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n"
    (folder / "mine.py").write_text(f"{head}from trainers.objective.losses import LossInputs, LossOutput\n\n{body}")
    return f"{folder}/mine.py:f"


_WITH_KL = """
def f(inputs):
    kl = inputs.logprobs - inputs.reference_logprobs
    return LossOutput(loss=(inputs.weights * inputs.mask * kl).sum(), sums={})
"""
_WITH_DATACLASS = """
@dataclass
class Bound:
    high: float

def f(inputs, cap):
    return LossOutput(loss=Bound(cap).high * (inputs.weights * inputs.logprobs).sum(), sums={})
"""


def test_a_loss_in_a_file_passes_the_trial_and_is_loaded_once(tmp_path: Path) -> None:
    path = _file(tmp_path, _WITH_DATACLASS)
    check_loss(path, {"cap": 0.5})
    assert load_loss(path) is load_loss(path)
    with pytest.raises(ValueError, match="unexpected keyword argument 'kap'"):
        check_loss(path, {"cap": 0.5, "kap": 1.0})


def test_a_loss_that_needs_the_reference_passes_where_there_is_one(tmp_path: Path) -> None:
    check_loss(_file(tmp_path, _WITH_KL), {}, with_reference=True)


def test_a_loss_in_a_module_is_found_by_its_dotted_name() -> None:
    assert load_loss("trainers.objective.losses:clip_loss") is clip_loss
    check_loss("trainers.objective.losses:clip_loss", {"clip_low": 0.2, "clip_high": 0.28})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trainers.objective.losses", "is not an import path"),
        (":f", "is not an import path"),
        ("losses.py:f:g", "is not an import path"),
        ("pyproject.toml:f", "is not an import path"),
        ("no_such_package.losses:f", "No module named 'no_such_package'"),
        ("nowhere/at_all.py:f", "no file .*nowhere/at_all.py; paths in a run file are relative"),
        ("trainers.objective.losses:clip_los", "no 'clip_los'; import it from .millrace."),
    ],
)
def test_what_cannot_be_loaded_says_why(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_loss(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(inputs, bound): ...", "does not fit its signature .*missing a required argument: 'bound'"),
        ("def f(inputs): return inputs.logprob", "AttributeError: .* no attribute 'logprob'"),
        ("def f(inputs): return inputs.logprobs.sum()", "returns Tensor; return trainers.objective.losses.LossOutput"),
        ("def f(inputs): return LossOutput(loss=inputs.logprobs, sums={})", r"shape \[5\]; it has to be a scalar"),
        ("def f(inputs): return LossOutput(loss=1.0, sums={})", "shape float; it has to be a scalar"),
        ("def f(inputs): return LossOutput(loss=inputs.logprobs.detach().sum(), sums={})", "without gradient"),
        ("def f(inputs): return LossOutput(loss=inputs.logprobs.log().sum(), sums={})", "returns nan"),
        (
            "def f(inputs): return LossOutput(loss=(inputs.weights * inputs.logprobs).sum(), sums={'x': inputs.mask})",
            r"sums \['x'\] are no numbers",
        ),
        ("def f(inputs): return LossOutput(loss=-inputs.logprobs.mean(), sums={})", "would depend on packing"),
        (_WITH_KL, "TypeError: unsupported operand"),
        ("def f(:", r"cannot be imported.*mine\.py, line 6"),
    ],
)
def test_what_a_trial_of_five_tokens_shows_is_said_before_training(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(_file(tmp_path, body), {})


def test_a_sum_that_would_stand_in_for_one_of_the_trainers_is_an_error(tmp_path: Path) -> None:
    reserved = [
        "loss",
        "tokens",
        *OFF_POLICY,
        "entropy",
        "importance_squared",
        "value_error/of",
        "reward",
        "trained_rows",
    ]
    reserved += ["grad_norm/mlp", "learning_rate", "effective_sample_size", "staleness_mean"]
    sums = dict.fromkeys([*reserved, "mine"], 1.0)
    path = _file(
        tmp_path, f"def f(inputs): return LossOutput(loss=(inputs.weights * inputs.logprobs).sum(), sums={sums})"
    )
    with pytest.raises(ValueError, match=f"sums {re.escape(str(reserved))} have names that the trainer's own metrics"):
        check_loss(path, {})


def test_a_custom_loss_that_copies_a_built_in_one_and_its_bonus_makes_the_same_update(
    tmp_path: Path, tiny_folder: Path
) -> None:
    body = """
def f(inputs, bonus):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    token = inputs.importance * ratio * inputs.advantages + bonus * inputs.entropy
    return LossOutput(loss=-(inputs.weights * inputs.mask * token).sum(), sums={"mine": float(inputs.mask.sum())})
"""
    path = _file(tmp_path, body)
    custom = {"kind": "custom", "path": path, "arguments": {"bonus": 0.3}}
    check_loss(path, custom["arguments"])
    samples = samples_of(random_rows(tiny_folder))
    built_in = {"loss": {"kind": "clip", "clip_low": 1.0, "clip_high": 1e6}, "entropy_bonus": 0.3}
    trainers = [trainer_of(tiny_folder, loss=custom), trainer_of(tiny_folder, **built_in)]
    mine, theirs = (take_step(trainer, samples) for trainer in trainers)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and mine["mine"] == 1
    assert largest_difference(*map(gradients, trainers)) < 1e-6
    without = trainer_of(tiny_folder, loss=built_in["loss"])
    take_step(without, samples)
    assert largest_difference(gradients(without), gradients(trainers[1])) > 1e-4
