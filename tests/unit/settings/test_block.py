"""What a key is called, and which one was meant."""

from __future__ import annotations

import pytest

from settings.block import OTHER_WORDS, keys, nearest
from settings.run_file import ConfigError, RunConfig, as_toml, load_run_file

_NAMES = {key.name for key in keys(RunConfig)}


def test_every_setting_is_a_key_with_help():
    assert all(key.help and key.type and key.default for key in keys(RunConfig))
    for name in RunConfig(workflow="").model_dump():
        assert name in _NAMES or any(key.startswith(f"{name}.") for key in _NAMES)


@pytest.mark.parametrize(
    "word, key",
    [
        ("lr", "learning_rate"),
        ("train.lr", "learning_rate"),
        ("train.lrr", "learning_rate"),
        ("num_steps", "steps"),
        ("warmup.num_step", "warmup.num_steps"),
        ("temperature", "sampling.temperature"),
        ("evaluation.temprature", "evaluation.temperature"),
        ("max_tokens", "sampling.max_tokens"),
        ("vllm_max_model_length", "engine.max_model_len"),
        ("kl_coef", "train.kl.coefficient"),
        ("num_generations", "n_samples"),
        ("train.clip_ratio", "train.loss.clip_high"),
        ("loss", "train.loss"),
        ("rollout.num_worker", "rollout.num_workers"),
        ("nothing_like_it", ""),
    ],
)
def test_the_nearest_key_is_found_in_any_table_and_by_other_trainers_words(word: str, key: str):
    assert nearest(word, RunConfig) == key


def test_other_trainers_words_lead_to_keys_that_exist():
    for key in OTHER_WORDS.values():
        assert key in _NAMES or key.startswith("engine.vllm."), key


def test_a_block_without_a_kind_is_of_the_default_kind():
    config = load_run_file({"workflow": "a:B"}, {"train.loss.clip_high": 0.3, "train.advantage.eps": 1e-5})
    assert (config.train.loss.kind, config.train.loss.clip_high) == ("clip", 0.3)
    assert (config.train.advantage.kind, config.train.advantage.eps) == ("grpo", 1e-5)
    with pytest.raises(
        ConfigError, match="train.loss.tau_positive: no such key here; it is for train.loss.kind = 'sapo'"
    ):
        load_run_file({"workflow": "a:B"}, {"train.loss.tau_positive": 2})


def test_run_files_are_read_one_over_the_other(tmp_path):
    base, other, top = tmp_path / "base.toml", tmp_path / "other.toml", tmp_path / "top.toml"
    base.write_text('workflow = "a:B"\nsteps = 3\n[train]\nloss = "clip"\n[rollout]\nretries = 2\nmin_usable = 3\n')
    other.write_text("steps = 4\n[train.loss]\nclip_high = 0.5\n[rollout]\nretries = 0\n")
    top.write_text('[train.loss]\nkind = "gspo"\n')
    config = load_run_file([base, other], {"seed": 7})
    assert (config.steps, config.seed, config.rollout.retries, config.rollout.min_usable) == (4, 7, 0, 3)
    assert (config.train.loss.kind, config.train.loss.clip_high) == ("clip", 0.5)
    assert load_run_file([base, other, top]).train.loss.clip_high == 4e-4
    with pytest.raises(ConfigError, match="other.toml:\n  batch_size"):
        load_run_file([base, other], {"batch_size": 0})


def test_a_written_run_file_means_the_same(tmp_path):
    changes = {"train.loss": "gspo", "train.lora.rank": 4, "engine.vllm": {"dtype": "float32"}, "reward.clip": 2.0}
    changes["train.reject"] = [{"statistic": "k3", "high": 0.1}, {"low": 0.5, "high": 2.0}]
    config = load_run_file({"workflow": "a:B"}, changes)
    (tmp_path / "whole.toml").write_text(as_toml(config))
    assert load_run_file(tmp_path / "whole.toml") == config
    alone = load_run_file({"workflow": "a:B"}, {"train.reject.high": 2.0, "train.reject.over": "sequence_mean"})
    assert [(rule.over, rule.low, rule.high) for rule in alone.train.reject] == [("sequence_mean", None, 2.0)]
