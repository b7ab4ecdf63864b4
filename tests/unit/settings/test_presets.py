"""A preset fills in another system's conventions where the run file is silent, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from settings.advantage import GrpoAdvantage, OpoAdvantage, PassAtKAdvantage, ReinforceAdvantage
from settings.loss import CispoLoss, ClipLoss, GspoLoss, KlSettings
from settings.presets import with_preset
from settings.train import TrainSettings

_PRESETS = ["trl", "verl", "openrlhf"]
_VERL_KL: list[tuple[dict[str, Any], float | None]] = [
    ({"coefficient": 0.1}, 10.0),
    ({"estimator": "k1"}, None),
    ({"estimator": "k2"}, None),
    ({"estimator": "k3", "place": "reward"}, 10.0),
    ({"estimator": "k2", "place": "reward"}, None),
    ({"estimator": "k1", "clamp": 3.0}, 3.0),
]
"""What is set, and the clamp: `kl_penalty_forward` of verl 0.9.1's core_algos.py."""


def _train(**table: Any) -> TrainSettings:
    return TrainSettings.model_validate(table)


def test_the_table_of_the_run_file_is_not_changed_and_without_a_preset_it_stays_as_it_is() -> None:
    table: dict[str, Any] = {"preset": "trl", "advantage": {"kind": "grpo"}}
    with_preset(table)
    assert table == {"preset": "trl", "advantage": {"kind": "grpo"}}
    assert with_preset({"num_epochs": 2}) == {"num_epochs": 2}
    assert with_preset({"preset": ""}) == {"preset": ""}


@pytest.mark.parametrize(
    ("preset", "advantage", "loss", "kl"),
    [
        ("trl", GrpoAdvantage(eps=1e-4, singleton="zero"), ClipLoss(clip_high=0.2), ("k3", "loss", None, True)),
        (
            "verl",
            GrpoAdvantage(eps=1e-6, singleton="reward"),
            ClipLoss(clip_high=0.2, dual_clip=3.0),
            ("k3", "loss", 10.0, False),
        ),
        (
            "openrlhf",
            ReinforceAdvantage(baseline=False, eps=1e-8),
            ClipLoss(clip_high=0.2),
            ("k1", "reward", 10.0, False),
        ),
    ],
)
def test_a_preset_has_the_conventions_of_its_system(
    preset: str, advantage: Any, loss: ClipLoss, kl: tuple[Any, ...]
) -> None:
    settings = _train(preset=preset)
    assert (settings.advantage, settings.loss, settings.aggregation) == (advantage, loss, "token_mean")
    assert (settings.kl.estimator, settings.kl.place, settings.kl.clamp, settings.kl.weighted) == kl
    assert settings.critic.clip == (0.2 if preset == "trl" else 0.5)


@pytest.mark.parametrize("preset", _PRESETS)
def test_what_the_run_file_says_counts_more(preset: str) -> None:
    settings = _train(
        preset=preset,
        advantage={"kind": "grpo", "eps": 0.5},
        loss={"kind": "clip", "clip_high": 0.28},
        aggregation="constant",
        kl={"clamp": 3.0, "coefficient": 0.1},
        reference={"kind": "base"},
    )
    assert settings.advantage.kind == "grpo" and settings.advantage.eps == 0.5
    assert settings.loss.kind == "clip" and (settings.loss.clip_low, settings.loss.clip_high) == (0.2, 0.28)
    assert settings.aggregation == "constant"
    assert settings.kl.clamp == 3.0
    assert settings.kl.estimator == ("k1" if preset == "openrlhf" else "k3")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # A block without a kind is of the preset's first one.
        ({"preset": "verl", "advantage": {"ddof": 0}}, GrpoAdvantage(ddof=0, eps=1e-6, singleton="reward")),
        # A kind with conventions of its own takes those.
        ({"preset": "trl", "loss": {"kind": "cispo"}}, CispoLoss(clip_low=None, clip_high=4.0)),
        ({"preset": "verl", "loss": {"kind": "cispo"}}, CispoLoss(clip_low=0.2, clip_high=0.2)),
        # verl clamps its low_var_kl alone, and charges k1 to the reward.
        *(
            ({"preset": "verl", "kl": kl}, KlSettings(**{"estimator": "k3", "place": "loss", "clamp": clamp, **kl}))
            for kl, clamp in _VERL_KL
        ),
        # A kind that the preset says nothing about keeps our defaults.
        *(({"preset": preset, "advantage": {"kind": "opo"}}, OpoAdvantage()) for preset in _PRESETS),
        *(({"preset": preset, "advantage": {"kind": "pass_at_k"}}, PassAtKAdvantage()) for preset in _PRESETS),
        *(({"preset": preset, "loss": {"kind": "gspo"}}, GspoLoss()) for preset in _PRESETS),
        # Settings built in Python are whole already.
        ({"preset": "verl", "advantage": GrpoAdvantage()}, GrpoAdvantage()),
    ],
)
def test_a_block_is_filled_in_by_its_kind(table: dict[str, Any], expected: Any) -> None:
    settings = _train(**table, **({"reference": {"kind": "base"}} if "kl" in table else {}))
    assert getattr(settings, next(name for name in ("advantage", "kl", "loss") if name in table)) == expected


@pytest.mark.parametrize("preset", _PRESETS)
def test_stored_settings_read_back_the_same(preset: str) -> None:
    settings = _train(preset=preset, loss={"kind": "clip", "clip_high": 0.3})
    assert TrainSettings.model_validate(settings.model_dump()) == settings
    assert TrainSettings.model_validate_json(settings.model_dump_json()) == settings


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValidationError, match="'trl', 'verl' or 'openrlhf'"):
        _train(preset="tlr")
    with pytest.raises(ValidationError, match="preset"):
        _train(preset=["trl"])


def test_verls_penalty_in_the_reward_is_k1_where_no_estimator_is_set() -> None:
    """`algorithm.kl_penalty` is `kl` by default, beside `kl_loss_type = low_var_kl`."""
    kl = _train(preset="verl", kl={"coefficient": 0.1, "place": "reward"}, reference={"kind": "base"}).kl
    assert (kl.estimator, kl.clamp) == ("k1", None)
    kl = _train(preset="openrlhf", kl={"coefficient": 0.1, "estimator": "k2"}, reference={"kind": "base"}).kl
    assert kl.clamp == 10.0, "OpenRLHF clamps all three"
