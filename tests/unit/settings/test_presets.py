"""A preset fills in another system's conventions where the run file is silent, and nowhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from settings.advantage import GrpoAdvantage
from settings.loss import CispoLoss
from settings.presets import with_preset
from settings.train import TrainSettings


def _train(**table: Any) -> TrainSettings:
    return TrainSettings.model_validate(table)


def test_without_a_preset_the_table_stays_as_it_is() -> None:
    assert with_preset({"num_epochs": 2}) == {"num_epochs": 2}
    assert with_preset({"preset": ""}) == {"preset": ""}


def test_trl_is_grpo_with_its_eps_clipped_evenly_and_averaged_over_tokens() -> None:
    settings = _train(preset="trl")
    assert settings.advantage == GrpoAdvantage(scale="std", ddof=1, eps=1e-4, singleton="zero")
    assert settings.loss.model_dump() == {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert settings.aggregation == "token_mean"
    assert (settings.kl.estimator, settings.kl.place, settings.kl.clamp) == ("k3", "loss", None)


def test_trl_values_are_the_installed_trls() -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    ours = _train(preset="trl")
    assert ours.loss.kind == "clip"
    assert theirs["loss_type"] == "dapo" and ours.aggregation == "token_mean"
    assert theirs["epsilon_high"] is None and theirs["epsilon"] == ours.loss.clip_low == ours.loss.clip_high
    assert theirs["delta"] is None and ours.loss.dual_clip is None
    assert theirs["scale_rewards"] == "group"
    assert theirs["multi_objective_aggregation"] == "sum_then_normalize"
    assert ours.advantage.kind == "grpo" and ours.advantage.scale == "std" and not ours.advantage.per_reward
    assert theirs["beta"] == ours.kl.coefficient
    assert theirs["max_grad_norm"] == ours.max_grad_norm
    sapo = _train(preset="trl", loss={"kind": "sapo"}).loss
    assert sapo.kind == "sapo"
    temperatures = (theirs["sapo_temperature_pos"], theirs["sapo_temperature_neg"])
    assert temperatures == (sapo.tau_positive, sapo.tau_negative)


def test_verl_gives_a_lone_reward_to_itself_clips_twice_and_clamps_kl() -> None:
    settings = _train(preset="verl")
    assert settings.advantage == GrpoAdvantage(scale="std", ddof=1, eps=1e-6, singleton="reward")
    assert settings.loss.model_dump() == {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert (settings.kl.estimator, settings.kl.place, settings.kl.clamp) == ("k3", "loss", 10.0)
    assert settings.critic.clip == 0.5


def test_openrlhf_whitens_over_the_batch_and_puts_kl_into_the_reward() -> None:
    settings = _train(preset="openrlhf")
    assert settings.advantage.model_dump() == {"kind": "reinforce++", "baseline": False, "eps": 1e-8}
    assert (settings.kl.estimator, settings.kl.place, settings.kl.clamp) == ("k1", "reward", 10.0)


@pytest.mark.parametrize("preset", ["trl", "verl", "openrlhf"])
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


def test_a_block_without_a_kind_is_of_the_presets_kind() -> None:
    advantage = _train(preset="verl", advantage={"ddof": 0}).advantage
    assert advantage == GrpoAdvantage(scale="std", ddof=0, eps=1e-6, singleton="reward")


def test_a_kind_with_conventions_of_its_own_takes_those() -> None:
    assert _train(preset="trl", loss={"kind": "cispo"}).loss == CispoLoss(clip_low=None, clip_high=4.0)
    assert _train(preset="verl", loss={"kind": "cispo"}).loss == CispoLoss(clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("preset", ["trl", "verl", "openrlhf"])
@pytest.mark.parametrize("kind", ["opo", "pass_at_k"])
def test_a_kind_the_preset_says_nothing_about_keeps_our_defaults(preset: str, kind: str) -> None:
    assert _train(preset=preset, advantage={"kind": kind}).advantage == _train(advantage={"kind": kind}).advantage
    assert _train(preset=preset, loss={"kind": "gspo"}).loss == _train(loss={"kind": "gspo"}).loss


def test_settings_built_in_python_are_whole_already() -> None:
    assert _train(preset="verl", advantage=GrpoAdvantage()).advantage == GrpoAdvantage()


@pytest.mark.parametrize("preset", ["trl", "verl", "openrlhf"])
def test_stored_settings_read_back_the_same(preset: str) -> None:
    settings = _train(preset=preset, loss={"kind": "clip", "clip_high": 0.3})
    assert TrainSettings.model_validate(settings.model_dump()) == settings
    assert TrainSettings.model_validate_json(settings.model_dump_json()) == settings


def test_the_run_files_table_is_not_changed() -> None:
    table: dict[str, Any] = {"preset": "trl", "advantage": {"kind": "grpo"}}
    with_preset(table)
    assert table == {"preset": "trl", "advantage": {"kind": "grpo"}}


def test_a_preset_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValidationError, match="'trl', 'verl' or 'openrlhf'"):
        _train(preset="tlr")
    with pytest.raises(ValidationError, match="preset"):
        _train(preset=["trl"])
