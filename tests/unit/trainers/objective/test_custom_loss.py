"""A loss of one's own is one function in a file; what is wrong with it is said before anything is loaded."""

from pathlib import Path

import pytest

from tests.unit.trainers.builders import gradients, largest_difference, random_rows, samples_of, take_step, trainer_of
from trainers.objective.custom_loss import check_loss, load_loss
from trainers.objective.losses import clip_loss
from trainers.objective.objective import OFF_POLICY

TOPR = '''
"""Tapered off-policy REINFORCE, https://arxiv.org/abs/2503.14286, token by token: failures fade with their ratio."""

import torch

from trainers.objective.losses import LossInputs, LossOutput


def topr_loss(inputs: LossInputs, cap: float = 1.0) -> LossOutput:
    ratio = (inputs.logprobs.detach() - inputs.old_logprobs).exp()
    taper = torch.where(inputs.advantages < 0, ratio.clamp(max=cap), torch.ones_like(ratio))
    surrogate = taper * inputs.advantages * inputs.logprobs
    weight = inputs.weights * inputs.importance * inputs.mask
    tapered = ((taper < 1) * inputs.mask).sum()
    return LossOutput(loss=-(weight * surrogate).sum(), sums={"tapered_fraction": float(tapered)})
'''


def _file(folder: Path, body: str, name: str = "mine.py") -> str:
    (folder / name).write_text("import torch\nfrom trainers.objective.losses import LossInputs, LossOutput\n\n" + body)
    return str(folder / name)


def test_a_loss_in_a_file_passes_the_trial_and_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "topr.py").write_text(TOPR)
    path = f"{tmp_path}/topr.py:topr_loss"
    check_loss(path, {"cap": 0.5})
    assert load_loss(path) is load_loss(path)


def test_a_file_may_define_a_dataclass(tmp_path: Path) -> None:
    body = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from trainers.objective.losses import LossOutput\n"
        "@dataclass\nclass Bound:\n    high: float\n"
        "def f(inputs):\n"
        "    return LossOutput(loss=Bound(2.0).high * (inputs.weights * inputs.logprobs).sum(), sums={})\n"
    )
    (tmp_path / "with_dataclass.py").write_text(body)
    check_loss(f"{tmp_path}/with_dataclass.py:f", {})


def test_a_loss_in_a_module_is_found_by_its_dotted_name() -> None:
    assert load_loss("trainers.objective.losses:clip_loss") is clip_loss
    check_loss("trainers.objective.losses:clip_loss", {"clip_low": 0.2, "clip_high": 0.28})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("trainers.objective.losses", "is not an import path"),
        (":f", "is not an import path"),
        ("no_such_package.losses:f", "No module named 'no_such_package'"),
        ("nowhere/at_all.py:f", "no file .*nowhere/at_all.py; run from the folder"),
        ("trainers.objective.losses:clip_los", "no 'clip_los'; import it from .millrace."),
    ],
)
def test_what_cannot_be_loaded_says_why(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_loss(path)


def test_a_file_that_does_not_parse_says_where(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be imported.*broken\.py, line 4"):
        load_loss(_file(tmp_path, "def f(:", "broken.py") + ":f")


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
        (
            "def f(inputs):\n    kl = inputs.logprobs - inputs.reference_logprobs\n"
            "    return LossOutput(loss=(inputs.weights * kl).sum(), sums={})",
            "TypeError: unsupported operand",
        ),
    ],
)
def test_what_a_trial_of_five_tokens_shows_is_said_before_training(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(_file(tmp_path, body) + ":f", {})


_TAKEN = ["loss", "tokens", *OFF_POLICY, "entropy", "importance_squared", "value_error/of"]
_TAKEN += ["reward", "grad_norm/mlp", "learning_rate", "effective_sample_size", "staleness_mean", "trained_rows"]


@pytest.mark.parametrize("name", _TAKEN)
def test_a_sum_that_would_stand_in_for_one_of_the_trainers_is_an_error(name: str, tmp_path: Path) -> None:
    body = (
        f"def f(inputs):\n    return LossOutput(loss=(inputs.weights * inputs.logprobs).sum(), sums={{{name!r}: 1.0}})"
    )
    with pytest.raises(ValueError, match=f"sums \\['{name}'\\] have names that the trainer's own metrics have"):
        check_loss(_file(tmp_path, body) + ":f", {})


def test_an_argument_the_function_does_not_know_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "topr.py").write_text(TOPR)
    with pytest.raises(ValueError, match="unexpected keyword argument 'kap'"):
        check_loss(f"{tmp_path}/topr.py:topr_loss", {"kap": 1.0})


def test_a_loss_that_needs_the_reference_passes_where_there_is_one(tmp_path: Path) -> None:
    body = (
        "def f(inputs):\n    kl = inputs.logprobs - inputs.reference_logprobs\n"
        "    return LossOutput(loss=(inputs.weights * inputs.mask * kl).sum(), sums={})"
    )
    check_loss(_file(tmp_path, body) + ":f", {}, with_reference=True)


def test_the_entropy_in_a_custom_loss_has_the_gradient_of_the_bonus(tmp_path: Path, tiny_folder: Path) -> None:
    body = """
def f(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    token = inputs.importance * ratio * inputs.advantages + 0.3 * inputs.entropy
    return LossOutput(loss=-(inputs.weights * inputs.mask * token).sum(), sums={})
"""
    path = _file(tmp_path, body) + ":f"
    check_loss(path, {})
    samples = samples_of(random_rows(tiny_folder))
    built_in = {"loss": {"kind": "clip", "clip_low": 1.0, "clip_high": 1e6}, "entropy_bonus": 0.3}
    trainers = [trainer_of(tiny_folder, loss={"kind": "custom", "path": path}), trainer_of(tiny_folder, **built_in)]
    losses = [take_step(trainer, samples)["loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert largest_difference(*map(gradients, trainers)) < 1e-6
    without = trainer_of(tiny_folder, loss=built_in["loss"])
    take_step(without, samples)
    assert largest_difference(gradients(without), gradients(trainers[1])) > 1e-4
