"""A step of our trainer and the same step of TRL's own `GRPOTrainer`: losses, gradients and weights are equal.

Both update twice on the same groups of uneven replies: the second time ratios are away from 1, and tokens are clipped.
Both begin with log-probabilities of the model itself: TRL without vLLM computes them, the engine reports ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from settings.run_file import RunConfig
from settings.train import TrainSettings
from tests.unit.trainers.builders import (
    NO_CLIPPING,
    Row,
    config_of,
    gradients,
    largest_difference,
    logprobs_alone,
    samples_of,
    take_step,
    tiny_model,
    weights,
)
from trainers.model.distributed import shard
from trainers.model.model import PolicyModel, load_model
from trainers.trainer import Trainer

if TYPE_CHECKING:
    from tests.unit.trainers.trl_trainer import Theirs, Update

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM"),
]

LEARNING_RATE = 3e-3
MAX_TOKENS = 8
"""As in `config_of`."""
REWARD_WEIGHTS = {"reward": 1.0, "format": 0.5}


class _Recording(Trainer):
    def __init__(self, folder: Path, config: RunConfig, *, reference: Path | None = None) -> None:
        self.updates: list[Update] = []
        super().__init__(folder, config, reference=reference)

    def _update(self, *arguments: Any, **named: Any) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        sums, norms, gap = super()._update(*arguments, **named)
        self.updates.append((sums["loss"], _as_trl_names(gradients(self))))
        return sums, norms, gap


class _InFloat64(_Recording):
    def _load(self, folder: Path, settings: TrainSettings) -> PolicyModel:
        model = load_model(folder, dtype=torch.float64)
        shard(model, model.layers, mesh=self._mesh, dtype=torch.float64)
        return model


class _Ours(NamedTuple):
    updates: list[Update]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float]


def _as_trl_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("causal_lm."): tensor for name, tensor in tensors.items()}


def _rows(folder: Path, *, temperature: float = 1.0, prompt_tokens: Sequence[int] = (4, 4, 4, 4)) -> list[Row]:
    """4 groups of 4 attempts; one group has equal rewards. All rewards are exact in float32."""
    draw = np.random.default_rng(0)
    causal_lm = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64)
    rows = []
    for group, num_tokens in enumerate(prompt_tokens):
        prompt = draw.integers(4, 16, size=num_tokens).tolist()
        for attempt in range(4):
            reply = draw.integers(1, 16, size=draw.integers(1, MAX_TOKENS + 1)).tolist()
            with torch.no_grad():
                logprobs = logprobs_alone(causal_lm, prompt + reply, temperature=temperature)[len(prompt) - 1 :]
            rows.append(
                Row(
                    prompt=prompt,
                    reply=reply,
                    logprobs=logprobs.tolist(),
                    versions=[0] * len(reply),
                    reward=0.375 if group == 2 else float(draw.integers(0, 9)) / 8,
                    group=group,
                    attempt=attempt,
                )
            )
    return rows


def _rewards(rows: Sequence[Row]) -> dict[str, Sequence[float | None]]:
    return {"reward": [row.reward for row in rows]}


def _step(
    folder: Path,
    rows: Sequence[Row],
    *,
    reference_folder: Path,
    rewards: Mapping[str, Sequence[float | None]] | None = None,
    temperature: float = 1.0,
    trainer: type[_Recording] = _InFloat64,
    **settings: Any,
) -> _Ours:
    """A step of two epochs under TRL's preset and `settings`."""
    dtype = np.float64 if trainer is _InFloat64 else np.float32
    parts = {name: np.array(values, np.float32) for name, values in (rewards or _rewards(rows)).items()}
    samples = dataclasses.replace(
        samples_of(rows),
        logprobs_T=np.concatenate([[0.0] * len(row.prompt) + row.logprobs for row in rows]).astype(dtype),
        rewards_B=np.sum([REWARD_WEIGHTS[name] * values for name, values in parts.items()], axis=0),
        reward_parts_B=parts,
    )
    chosen = {"preset": "trl", "num_epochs": 2, "max_grad_norm": NO_CLIPPING, **settings}
    config = config_of(learning_rate=LEARNING_RATE, temperature=temperature, reward_weights=REWARD_WEIGHTS, **chosen)
    one = trainer(folder, config, reference=reference_folder if config.train.reference.kind == "base" else None)
    metrics = take_step(one, samples)
    return _Ours(one.updates, _as_trl_names(weights(one)), metrics)


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
def ours(tiny_folder: Path, reference_folder: Path) -> Callable[..., _Ours]:
    return functools.partial(_step, tiny_folder, reference_folder=reference_folder)


@pytest.fixture(scope="module")
def theirs(
    tiny_folder: Path, reference_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Theirs]:
    pytest.importorskip("trl")
    from tests.unit.trainers.trl_trainer import trl_updates  # takes seconds

    def run(rows: Sequence[Row], **options: Any) -> Theirs:
        options = {"rewards": _rewards(rows), "dtype": torch.float64, **options}
        return trl_updates(
            tiny_folder,
            rows,
            reference=reference_folder,
            output_dir=tmp_path_factory.getbasetemp() / "trl",
            learning_rate=LEARNING_RATE,
            max_completion_length=MAX_TOKENS,
            **options,
        )

    return run


@pytest.fixture(scope="module")
def rows(tiny_folder: Path) -> list[Row]:
    return _rows(tiny_folder)


@pytest.fixture(scope="module")
def plain(ours: Callable[..., _Ours], rows: list[Row]) -> _Ours:
    """The preset alone."""
    return ours(rows)


def _assert_same(
    ours: _Ours,
    theirs: Theirs,
    *,
    rtol: float = 1e-9,
    updates: Sequence[int] = (0, 1),
) -> None:
    """Losses and gradients of these updates; after the last one the weights too."""
    assert len(ours.updates) == len(theirs.updates) == 2
    for update in updates:
        (loss, gradient), (their_loss, their_gradient) = ours.updates[update], theirs.updates[update]
        assert loss == pytest.approx(their_loss, rel=rtol)
        _assert_close(gradient, their_gradient, rtol=rtol, atol=1e-3 * rtol)
    if 1 in updates:
        _assert_close(ours.weights, theirs.weights, rtol=rtol, atol=1e-3 * rtol)


def _assert_close(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """`atol` is a share of the tensor's largest element."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        absolute = atol * float(tensor.abs().max())
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=absolute, msg=f"{name}: {{}}".format)


def _distance(ours: _Ours, other: _Ours, *, update: int) -> float:
    return largest_difference(ours.updates[update][1], other.updates[update][1])


CLIP = {"kind": "clip"}
NARROW = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
GSPO = {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03}
BASE = {"reference": {"kind": "base"}}
FOUR_MICRO_BATCHES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    "entropy_coef": ({"entropy_coef": 0.05}, {"entropy_bonus": 0.05}),
    "scale_rewards none": ({"scale_rewards": "none"}, {"advantage": {"kind": "grpo", "scale": "none"}}),
    "scale_rewards batch": ({"scale_rewards": "batch"}, {"advantage": {"kind": "grpo", "scale": "batch"}}),
}
"""TRL's options, and ours beside its preset."""


def test_the_preset_is_trls_default_step(theirs: Callable[..., Any], rows: list[Row], plain: _Ours) -> None:
    trl = theirs(rows)
    _assert_same(plain, trl)
    # Theirs are shares of all tokens, ours on either side of those that this side may clip.
    region = [shares["clip_ratio/region_mean"] for shares in trl.clip_ratios]
    assert plain.metrics["clip_fraction"] == pytest.approx(np.mean(region), rel=1e-6)
    assert plain.metrics["clip_fraction_low"] > 0.1 and plain.metrics["clip_fraction_high"] > 0.1
    assert plain.metrics["fraction_groups_without_signal"] == 0.25


@pytest.mark.parametrize(("options", "settings"), CASES.values(), ids=CASES)
def test_trls_options_have_settings_of_equal_updates(
    theirs: Callable[..., Any],
    ours: Callable[..., _Ours],
    rows: list[Row],
    plain: _Ours,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    step = ours(rows, **settings)
    _assert_same(step, theirs(rows, **options))
    assert _distance(step, plain, update=1) > 1e-3  # it does something here: without it the two would differ
    assert step.metrics.get("dual_clip_fraction", 1) > 0


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_reward_functions_are_named_parts(
    theirs: Callable[..., Any], ours: Callable[..., _Ours], rows: list[Row], aggregation: str
) -> None:
    """TRL's `normalize_then_sum` is GDPO, `per_reward`; the weighted sum of `sum_then_normalize` is the row's reward,
    made where it is scored."""
    rewards = {**_rewards(rows), "format": [float(len(row.reply) % 3) for row in rows]}
    advantage = {"kind": "grpo", "per_reward": aggregation == "normalize_then_sum"}
    options = {"multi_objective_aggregation": aggregation, "reward_weights": list(REWARD_WEIGHTS.values())}
    _assert_same(ours(rows, rewards=rewards, advantage=advantage), theirs(rows, rewards=rewards, **options))


def test_a_null_reward_teaches_nothing_and_stays_in_the_denominator(
    theirs: Callable[..., Any], ours: Callable[..., _Ours], rows: list[Row], plain: _Ours
) -> None:
    rewards = {"reward": [None, *(row.reward for row in rows[1:])]}
    step = ours(rows, rewards=rewards)
    _assert_same(step, theirs(rows, rewards=rewards))
    assert _distance(step, plain, update=0) > 1e-3


def test_log_probabilities_are_at_the_temperature(
    theirs: Callable[..., Any], ours: Callable[..., _Ours], tiny_folder: Path
) -> None:
    rows = _rows(tiny_folder, temperature=0.7)
    _assert_same(ours(rows, temperature=0.7), theirs(rows, temperature=0.7))


def test_gradients_are_clipped_alike(theirs: Callable[..., Any], ours: Callable[..., _Ours], rows: list[Row]) -> None:
    """To float32: the norm that we clip by is rounded to it."""
    step = ours(rows, max_grad_norm=0.1)
    _assert_same(step, theirs(rows, max_grad_norm=0.1), rtol=1e-6)
    assert step.metrics["grad_norm"] > 0.5


def test_tokens_of_highest_entropy_are_trls_at_the_first_update(
    theirs: Callable[..., Any], ours: Callable[..., _Ours], rows: list[Row], plain: _Ours
) -> None:
    """We choose them once a step, among all of its tokens; TRL at each update anew, among those of a micro-batch. With
    one update a step (`num_epochs = 1`, `num_minibatches = 1`) and one micro-batch of TRL's they are the same."""
    step = ours(rows, top_entropy_fraction=0.4)
    _assert_same(step, theirs(rows, top_entropy_quantile=0.4), updates=[0])
    assert _distance(step, plain, update=0) > 1e-3


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_accumulated_gradients_are_those_of_small_packs(
    theirs: Callable[..., Any], ours: Callable[..., _Ours], rows: list[Row], loss_type: str
) -> None:
    settings = CASES["grpo"][1] if loss_type == "grpo" else {}
    step = ours(rows, tokens_per_microbatch=32, **settings)
    _assert_same(step, theirs(rows, loss_type=loss_type, **FOUR_MICRO_BATCHES))


def test_bnpo_is_token_mean_until_gradients_are_accumulated(
    theirs: Callable[..., Any], rows: list[Row], plain: _Ours
) -> None:
    """TRL's `bnpo` averages over the tokens of each micro-batch, so that it depends on how a batch is cut. Ours never
    does: `token_mean` is TRL's `dapo`, and its `bnpo` where there is one micro-batch."""
    _assert_same(plain, theirs(rows, loss_type="bnpo"))
    (_, cut), *_ = theirs(rows, loss_type="bnpo", **FOUR_MICRO_BATCHES).updates
    assert largest_difference(plain.updates[0][1], cut) > 1e-3


FLOAT32: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
    theirs: Callable[..., Any],
    ours: Callable[..., _Ours],
    tiny_folder: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Both as they are. TRL pads prompts on the left, which shifts positions, and those are float32 in any model."""
    rows = _rows(tiny_folder, prompt_tokens=(2, 5, 3, 6))
    step = ours(rows, trainer=_Recording, **settings)
    their_updates, their_weights, _ = theirs(rows, dtype=torch.float32, **options)
    for (loss, gradient), (their_loss, their_gradient) in zip(step.updates, their_updates, strict=True):
        assert loss == pytest.approx(their_loss, rel=1e-4, abs=1e-6)
        _assert_close(gradient, their_gradient, rtol=1e-4, atol=1e-5)
    # Adam makes a whole step out of any gradient, of one that is little more than rounding too.
    assert largest_difference(step.weights, their_weights) < 0.01 * LEARNING_RATE
