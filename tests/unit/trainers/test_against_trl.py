"""A step of our trainer and the same step of TRL's own `GRPOTrainer`: losses, gradients and weights are equal.

Both update twice on the same groups of uneven replies: the second time ratios are away from 1, and tokens are clipped.
Both begin with log-probabilities of the model itself: TRL without vLLM computes them, the engine reports ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from settings.run_file import RunConfig
from settings.train import TrainSettings
from tests.unit.trainers.builders import (
    NO_CLIPPING,
    Row,
    config_of,
    gradients,
    largest_difference,
    random_rows,
    samples_of,
    take_step,
    tiny_model,
    weights,
)
from trainers.model.distributed import shard
from trainers.model.model import PolicyModel, load_model
from trainers.step_batch import UpdateSums
from trainers.trainer import Trainer

if TYPE_CHECKING:
    from tests.unit.trainers.trl_trainer import Updates

pytestmark = [
    pytest.mark.server,  # TRL imports vLLM
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM"),
]

LEARNING_RATE = 3e-3
REWARD_WEIGHTS = {"reward": 1.0, "format": 0.5}
Step = Callable[..., "Updates"]
Options = dict[str, Any]
Rewards = Mapping[str, Sequence[float | None]]


class _Recording(Trainer):
    def __init__(self, folder: Path, config: RunConfig, *, reference: Path | None = None) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        super().__init__(folder, config, reference=reference)

    def _conclude(self, *arguments: Any, **named: Any) -> UpdateSums:
        update = super()._conclude(*arguments, **named)
        self.losses.append(update.sums["loss"])
        self.gradients.append(_as_trl_names(gradients(self)))
        return update


class _InFloat64(_Recording):
    def _load(self, folder: Path, settings: TrainSettings) -> PolicyModel:
        model = load_model(folder, dtype=torch.float64)
        shard(model, model.layers, mesh=self._mesh, dtype=torch.float64)
        return model


def _as_trl_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("causal_lm."): tensor for name, tensor in tensors.items()}


def _rows(folder: Path, *, temperature: float = 1.0, prompt_tokens: Sequence[int] = (4, 4, 4, 4)) -> list[Row]:
    """4 groups of 4 attempts; one group has equal rewards. All rewards are exact in float32."""
    rows = random_rows(
        folder, attempts=4, seed=2, noise=0, temperature=temperature, prompt_tokens=prompt_tokens, dtype=torch.float64
    )
    return [dataclasses.replace(row, reward=0.375 if row.group == 2 else round(8 * row.reward) / 8) for row in rows]


def _rewards(rows: Sequence[Row]) -> Rewards:
    return {"reward": [row.reward for row in rows]}


@pytest.fixture(scope="module", autouse=True)
def norms_in_float64() -> Iterator[None]:
    """transformers rounds them to float32, and a gradient that is summed before it is rounded is another one."""

    def forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = norm.weight
        return weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + norm.variance_epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2RMSNorm, "forward", forward)
        yield


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy than the one trained, so that there is a KL at the first update."""
    return tiny_model(tmp_path_factory.mktemp("reference") / "tiny", seed=1)


@pytest.fixture(scope="module")
def ours(tiny_folder: Path, reference_folder: Path) -> Step:
    """A step of two epochs under TRL's preset and settings."""
    trl_trainer = pytest.importorskip("tests.unit.trainers.trl_trainer")  # takes seconds

    def step(
        rows: Sequence[Row],
        *,
        rewards: Rewards | None = None,
        temperature: float = 1.0,
        trainer: type[_Recording] = _InFloat64,
        **settings: Any,
    ) -> Updates:
        dtype = np.float64 if trainer is _InFloat64 else np.float32
        parts = {name: np.array(values, np.float32) for name, values in (rewards or _rewards(rows)).items()}
        samples = dataclasses.replace(
            samples_of(rows),
            logprobs_T=np.concatenate([[0.0] * len(row.prompt) + row.logprobs for row in rows]).astype(dtype),
            rewards_B=np.sum([REWARD_WEIGHTS[name] * values for name, values in parts.items()], axis=0),
            reward_parts_B=parts,
        )
        config = config_of(
            learning_rate=LEARNING_RATE,
            temperature=temperature,
            reward_weights=REWARD_WEIGHTS,
            **{"preset": "trl", "num_epochs": 2, "max_grad_norm": NO_CLIPPING, **settings},
        )
        one = trainer(tiny_folder, config, reference=reference_folder if "reference" in settings else None)
        metrics = take_step(one, samples)
        made: Updates = trl_trainer.Updates(one.losses, one.gradients, _as_trl_names(weights(one)), metrics)
        return made

    return step


@pytest.fixture(scope="module")
def theirs(tiny_folder: Path, reference_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Step:
    trl_trainer = pytest.importorskip("tests.unit.trainers.trl_trainer")

    def step(rows: Sequence[Row], **options: Any) -> Updates:
        made: Updates = trl_trainer.trl_updates(
            tiny_folder,
            rows,
            reference=reference_folder,
            output_dir=tmp_path_factory.getbasetemp() / "trl",
            learning_rate=LEARNING_RATE,
            max_completion_length=8,  # as in `config_of`
            **{"rewards": _rewards(rows), "dtype": torch.float64, **options},
        )
        return made

    return step


@pytest.fixture(scope="module")
def rows(tiny_folder: Path) -> list[Row]:
    return _rows(tiny_folder)


@pytest.fixture(scope="module")
def plain(ours: Step, rows: list[Row]) -> Updates:
    """The preset alone."""
    return ours(rows)


def _assert_same(ours: Updates, theirs: Updates, *, rtol: float = 1e-9, only_first: bool = False) -> None:
    """Losses and gradients of both updates, and the weights after them; or those of the first update."""
    end = 1 if only_first else 2
    assert ours.losses[:end] == pytest.approx(theirs.losses[:end], rel=rtol) and len(theirs.losses) == 2
    for gradient, expected in zip(ours.gradients[:end], theirs.gradients[:end], strict=True):
        _assert_close(gradient, expected, rtol=rtol, atol=1e-3 * rtol)
    if not only_first:
        _assert_close(ours.weights, theirs.weights, rtol=rtol, atol=1e-3 * rtol)


def _assert_close(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """`atol` is a share of the tensor's largest element."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        absolute = atol * float(tensor.abs().max())
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=absolute, msg=f"{name}: {{}}".format)


CLIP = {"kind": "clip"}
ROUNDING = 1e-12
"""Above what packs of other rows differ by in float64, and below what an update moves."""
NARROW = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
GSPO = {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03}
BASE = {"reference": {"kind": "base"}}
FOUR_MICRO_BATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
CASES: dict[str, tuple[Options, Options]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    "epsilon_high": ({"epsilon": 0.1, "epsilon_high": 0.3}, {"loss": {**CLIP, "clip_low": 0.1, "clip_high": 0.3}}),
    "delta": (
        {"epsilon": 0.05, "delta": 1.06},
        {"loss": {**CLIP, "clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.06}},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {"loss": {"kind": "cispo", "clip_high": 0.1}}),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "sequence_mean"}),
    "gspo": ({"loss_type": "grpo", **NARROW}, {"loss": GSPO, "aggregation": "sequence_mean"}),
    "gspo by tokens": ({"loss_type": "dapo", **NARROW}, {"loss": GSPO}),
    "luspo": ({"loss_type": "luspo", **NARROW}, {"loss": GSPO, "aggregation": "sequence_sum"}),
    "beta": ({"beta": 0.1}, {**BASE, "kl": {"coefficient": 0.1}}),
    "beta, uncorrected": (
        {"beta": 0.1, "use_bias_correction_kl": False},
        {**BASE, "kl": {"coefficient": 0.1, "weighted": False}},
    ),
    "off_policy_mask_threshold": (
        {"off_policy_mask_threshold": ROUNDING},
        {"reject": [{"statistic": "k1", "over": "sequence_mean", "high": ROUNDING, "advantage": "negative"}]},
    ),
    "entropy_coef": ({"entropy_coef": 0.05}, {"entropy_bonus": 0.05}),
    "scale_rewards none": ({"scale_rewards": "none"}, {"advantage": {"kind": "grpo", "scale": "none"}}),
    "scale_rewards batch": ({"scale_rewards": "batch"}, {"advantage": {"kind": "grpo", "scale": "batch"}}),
}
"""TRL's options, and ours beside its preset."""


def test_the_preset_is_trls_default_step(theirs: Step, ours: Step, rows: list[Row], plain: Updates) -> None:
    trl = theirs(rows)
    _assert_same(plain, trl)
    # Theirs are shares of all tokens, ours on either side of those that this side may clip.
    everywhere = ours(rows, entropy_bonus=1e-30)  # with a bonus the group without signal is measured too, as theirs is
    for name, value in trl.metrics.items():
        assert everywhere.metrics[name] == pytest.approx(value, rel=1e-6), name
    assert plain.metrics["clip_fraction_low"] > 0.1 and plain.metrics["clip_fraction_high"] > 0.1
    assert plain.metrics["fraction_groups_without_signal"] == 0.25
    assert plain.metrics["trained_tokens"] == sum(len(row.reply) for row in rows), "once, whatever the epochs"


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_trls_options_have_settings_of_equal_updates(
    theirs: Step, ours: Step, rows: list[Row], plain: Updates, options: Options, settings: Options
) -> None:
    step = ours(rows, **settings)
    _assert_same(step, theirs(rows, **options))
    # It does something here: without it the two would differ.
    assert largest_difference(step.gradients[1], plain.gradients[1]) > 1e-3
    assert step.metrics.get("dual_clip_fraction", 1) > 0


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_reward_functions_are_named_parts(theirs: Step, ours: Step, rows: list[Row], aggregation: str) -> None:
    """TRL's `normalize_then_sum` is GDPO, `per_reward`; the weighted sum of `sum_then_normalize` is the row's reward,
    made where it is scored."""
    rewards = {**_rewards(rows), "format": [float(len(row.reply) % 3) for row in rows]}
    advantage = {"kind": "grpo", "per_reward": aggregation == "normalize_then_sum"}
    options = {"multi_objective_aggregation": aggregation, "reward_weights": list(REWARD_WEIGHTS.values())}
    _assert_same(ours(rows, rewards=rewards, advantage=advantage), theirs(rows, rewards=rewards, **options))


def test_a_null_reward_teaches_nothing_and_stays_in_the_denominator(
    theirs: Step, ours: Step, rows: list[Row], plain: Updates
) -> None:
    rewards = {"reward": [None, *(row.reward for row in rows[1:])]}
    step = ours(rows, rewards=rewards)
    _assert_same(step, theirs(rows, rewards=rewards))
    assert largest_difference(step.gradients[0], plain.gradients[0]) > 1e-3


def test_log_probabilities_are_at_the_temperature(theirs: Step, ours: Step, tiny_folder: Path) -> None:
    rows = _rows(tiny_folder, temperature=0.7)
    _assert_same(ours(rows, temperature=0.7), theirs(rows, temperature=0.7))


def test_gradients_are_clipped_alike(theirs: Step, ours: Step, rows: list[Row]) -> None:
    """To float32: the norm that we clip by is rounded to it."""
    step = ours(rows, max_grad_norm=0.1)
    _assert_same(step, theirs(rows, max_grad_norm=0.1), rtol=1e-6)
    norm = sum(gradient.square().sum() for gradient in step.gradients[0].values()).sqrt()
    assert float(norm) == pytest.approx(0.1, rel=1e-5)
    assert step.metrics["grad_norm"] > 0.5, "reported as it was before the clip"


def test_tokens_of_highest_entropy_are_trls_at_the_first_update(
    theirs: Step, ours: Step, rows: list[Row], plain: Updates
) -> None:
    """We choose them once a step, among all of its tokens; TRL at each update anew, among those of a micro-batch. With
    one update a step (`num_epochs = 1`, `num_minibatches = 1`) and one micro-batch of TRL's they are the same."""
    step = ours(rows, top_entropy_fraction=0.4)
    _assert_same(step, theirs(rows, top_entropy_quantile=0.4), only_first=True)
    assert largest_difference(step.gradients[0], plain.gradients[0]) > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_accumulated_gradients_are_those_of_small_packs(
    theirs: Step, ours: Step, rows: list[Row], loss_type: str
) -> None:
    settings = CASES["grpo"][1] if loss_type == "grpo" else {}
    step = ours(rows, tokens_per_microbatch=32, **settings)
    _assert_same(step, theirs(rows, loss_type=loss_type, **FOUR_MICRO_BATCHES))


def test_bnpo_is_token_mean_until_gradients_are_accumulated(theirs: Step, rows: list[Row], plain: Updates) -> None:
    """TRL's `bnpo` averages over the tokens of each micro-batch, so that it depends on how a batch is cut. Ours never
    does: `token_mean` is TRL's `dapo`, and its `bnpo` where there is one micro-batch."""
    _assert_same(plain, theirs(rows, loss_type="bnpo"))
    cut = theirs(rows, loss_type="bnpo", **FOUR_MICRO_BATCHES)
    assert largest_difference(plain.gradients[0], cut.gradients[0]) > 1e-3


FLOAT32: dict[str, tuple[Options, Options]] = {
    "default": ({}, {}),
    "grpo, beta": (
        {"loss_type": "grpo", "beta": 0.1},
        {**BASE, "aggregation": "sequence_mean", "kl": {"coefficient": 0.1}},
    ),
    "gspo": CASES["gspo"],
    "entropy_coef": CASES["entropy_coef"],
}


@pytest.mark.parametrize(("options", "settings"), FLOAT32.values(), ids=FLOAT32)
def test_in_float32_with_trls_output_layer_and_prompts_of_any_length(
    theirs: Step, ours: Step, tiny_folder: Path, options: Options, settings: Options
) -> None:
    """Both as they are. TRL pads prompts on the left, which shifts positions, and those are float32 in any model."""
    rows = _rows(tiny_folder, prompt_tokens=(2, 5, 3, 6))
    step, trl = ours(rows, trainer=_Recording, **settings), theirs(rows, dtype=torch.float32, **options)
    assert step.losses == pytest.approx(trl.losses, rel=1e-4, abs=1e-6)
    for gradient, expected in zip(step.gradients, trl.gradients, strict=True):
        _assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    # Adam makes a whole step out of any gradient, of one that is little more than rounding too.
    assert largest_difference(step.weights, trl.weights) < 0.01 * LEARNING_RATE
