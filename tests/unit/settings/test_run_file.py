"""A run file that cannot work is refused before anything starts, in a sentence that says what to change."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from settings.advantage import GrpoAdvantage
from settings.block import Key
from settings.block import keys as keys_of
from settings.loss import CispoLoss, ClipLoss
from settings.run_file import (
    ConfigError,
    RunConfig,
    Settings,
    default_values,
    load_run_file,
    make_config,
    training_changes,
    with_training_changes,
)
from settings.train import CriticSettings

_ROOT = Path(__file__).parents[3]


def _config(keys: str = "") -> RunConfig:
    """A configuration with these keys, as TOML with `;` for a new line."""
    document = tomllib.loads("\n".join(keys.split(";")))
    return make_config({"workflow": "examples.arithmetic:Arithmetic", **document}, source="run.toml")


def _error(keys: str) -> str:
    """What the user reads, without the first line, which names the file."""
    with pytest.raises(ConfigError) as raised:
        _config(keys)
    first, *rest = str(raised.value).split("\n")
    assert first == "run.toml:"
    return "\n".join(line.strip() for line in rest)


def _file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("batchsize = 3", "batchsize: no such key; did you mean 'batch_size'?"),
        ("train.wieght_decay = 0.1", "train.wieght_decay: no such key; did you mean 'train.weight_decay'?"),
        (
            "train.loss = {kind = 'cispo', clip_hi = 1}",
            "train.loss.clip_hi: no such key; did you mean 'train.loss.clip_high'?",
        ),
        ("train.lora.rnk = 1", "train.lora.rnk: no such key; did you mean 'train.lora.rank'?"),
        ("train.loss.clip = 1", "train.loss.clip: no such key; did you mean 'train.loss.clip_low'?"),
        ("sampling.temp = 1", "sampling.temp: no such key; did you mean 'sampling.temperature'?"),
        ("trian = {}", "trian: no such key; did you mean 'train'?"),
        ("actor.optim.lr = 1e-5", "actor: no such key; did you mean 'learning_rate'?"),
        ("train.kl.coef = 0.1", "train.kl.coef: no such key; did you mean 'train.kl.coefficient'?"),
        ("sampling.zzz = 1", "sampling.zzz: no such key; there are: temperature, max_tokens"),
        (
            "engine.vllm.data_parallel_size = 2",
            "engine.vllm = {'data_parallel_size': 2}: each worker has one engine; set rollout.num_workers for more of "
            "them",
        ),
        (
            "engine.vllm.max_model_len = 64",
            "engine.vllm = {'max_model_len': 64}: max_model_len Millrace gives to vLLM itself; set "
            "engine.max_model_len",
        ),
        ("engine.vllm.model = 'x'", "engine.vllm = {'model': 'x'}: model Millrace gives to vLLM itself; set model"),
        ("'train.loss' = 'cispo'", "train.loss: in quotes a key with dots is one word; write it without quotes"),
    ],
)
def test_an_unknown_key_suggests_the_nearest_one_or_lists_those_there_are(keys: str, sentence: str) -> None:
    assert _error(keys) == sentence


def test_only_the_workflow_must_be_set_and_a_secret_belongs_in_the_environment() -> None:
    assert _config().n_samples == 8
    with pytest.raises(ConfigError, match="workflow: must be set"):
        make_config({}, source="run.toml")
    with pytest.raises(ConfigError, match=r"engine\.vllm\.hf_token looks like a secret.*environment") as caught:
        _config("engine.vllm.hf_token = 'hf_abcdefgh'")
    assert "hf_abcdefgh" not in str(caught.value)


def test_several_errors_come_at_once() -> None:
    train = "train = {los = {}, loss = {kind = 'clip', clip_low = 2}}"
    lines = _error(f"batchsize = 3; learning_rate = -1.0; max_staleness = -1; {train}")
    assert [line.partition(":")[0] for line in lines.split("\n")] == [
        "train.loss.clip_low = 2",
        "train.los",
        "max_staleness = -1",
        "learning_rate = -1.0",
        "batchsize",
    ]
    lines = _error("n_samples = 1; batch_size = 1; train.num_minibatches = 2; rollout.drop_uniform_groups = true")
    assert len(lines.split("\n")) == 4, "settings that do not fit together"


_REINFORCE = "n_samples = 1; rollout.min_usable = 1; train.advantage = 'reinforce++'"
_DISTILL = "train.advantage = 'distill'; train.reference = {kind = 'model', model = 'm'}"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("max_staleness = -1", "max_staleness = -1: Input should be greater than or equal to 0"),
        ("run = 2026-11-27", 'run = 2026-11-27 is no text: put it into quotes, run = "2026-11-27"'),
        ("run = 7", 'run = 7 is no text: put it into quotes, run = "7"'),
        ("seed = -1", "seed = -1: Input should be greater than or equal to 0"),
        ("learning_rate = 0", "learning_rate = 0: Input should be greater than 0"),
        ("steps = 'many'", "steps = 'many': Input should be a valid integer"),
        ("train = 5", "train = 5 is no table: write its keys below [train]"),
        (
            "steps = 6; train = {schedule = 'linear', decay_steps = 5}",
            "steps = 6 is above train.decay_steps = 5, after which the learning rate is 0",
        ),
        ("train = {schedule = 'cosine', decay_steps = 1}", 'schedule = "cosine" needs decay_steps above 1'),
        (
            "steps = 3; train = {advantage = 'gae', critic = {warmup_steps = 3}}",
            "train.critic.warmup_steps = 3 leaves none of steps = 3 to train the policy",
        ),
        ("train = {advantage = 'gae', loss = 'sft'}", 'loss.kind = "sft" has no use for a critic'),
        (f"{_DISTILL}; train.loss = 'sft'", 'loss.kind = "sft" has no use for a teacher'),
        ("train = {preset = 'verl', critic = {learning_rate = 1e-3}}", 'train.critic is for advantage.kind = "gae"'),
        ("train.kl.estimator = 'k1'", "train.kl without a coefficient and without a train.reference does"),
        (
            "train.advantage = {kind = 'grpo', scale = 'sdt'}",
            "train.advantage.scale = 'sdt': Input should be 'std', 'batch', 'mean' or 'none'",
        ),
        (
            "train.loss = 'ppo'",
            "train.loss.kind = 'ppo': there are 'clip', 'gspo', 'cispo', 'sapo', 'dppo', 'sft', 'custom'",
        ),
        ("train.reject = [{}]", "train.reject.0 = {}: it rejects nothing without a bound; set low or high"),
        ("train.reject = [{high = 0.5}]", "ratio is 1 where no probability has moved, which this would reject"),
        ("train.reject = [{statistic = 'k3', low = 0.1}]", "k3 is 0 where no probability has moved"),
        ("train.reject = [{high = 2, policy = 'proximal'}]", 'policy = "proximal" needs train.decoupled'),
        (
            "train = {kl = {coefficient = 0.1, place = 'reward', gradient = 'k2'}, reference = {kind = 'base'}}",
            "kl.gradient is about a term of the loss",
        ),
        (
            "train.advantage = {kind = 'grpo', scale = 'mean'}; reward.overlong_tokens = 8",
            "is for rewards of at least 0, and reward.overlong_tokens takes some off",
        ),
        (
            "train.loss = {kind = 'cispo', dual_clip = 3}",
            "train.loss.dual_clip: no such key here; it is for train.loss.kind = 'clip'",
        ),
        ("train.advantage = 'pass_at_k'; n_samples = 2", "train.advantage.k = 4 is not below n_samples = 2"),
        ("train.kl.coefficient = 0.1", 'kl.coefficient needs a reference: set train.reference.kind = "base"'),
        ("n_samples = 1; rollout.min_usable = 1", "use n_samples of 2 or more"),
        ("rollout.num_workers = 0", "leaves no worker to evaluate; set evaluation.own_engine = true"),
        ("n_samples = 2; rollout.min_usable = 3", "rollout.min_usable = 3 is above n_samples = 2"),
        (
            "train.num_ranks = 4; train.sequence_parallel = 3",
            "train.num_ranks = 4 is no multiple of train.sequence_parallel = 3, the ranks of a pack; raise",
        ),
        (
            "train.num_ranks = 4; train.num_replicas = 8",
            "train.num_ranks = 4 is no multiple of train.num_replicas = 8, the copies of the model",
        ),
        (
            "train.num_ranks = 2; train.sequence_parallel = 2; train.tokens_per_microbatch = 64; "
            "engine.max_model_len = 129; sampling.max_tokens = 99",
            "train.tokens_per_microbatch = 64 on 2 ranks (train.sequence_parallel) is below engine.max_model_len = 129",
        ),
        ("batch_size = 2; train.num_minibatches = 3", "train.num_minibatches = 3 is above batch_size = 2"),
        ("sampling.max_tokens = 64; engine.max_model_len = 64", "leaves no room for a prompt"),
        (f"{_REINFORCE}; rollout.drop_uniform_groups = true", "rejects every group; raise n_samples"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_to_do(keys: str, sentence: str) -> None:
    error = _error(keys)
    assert sentence in error and len(error.split("\n")) == 1


@pytest.mark.parametrize(
    "keys",
    [
        _REINFORCE,
        "n_samples = 2; rollout.min_usable = 2",
        "rollout.num_workers = 0; evaluation.own_engine = true",
        "rollout.num_workers = 0; evaluation.every = 0",
        "batch_size = 2; train.num_minibatches = 2",
        "sampling.max_tokens = 63; engine.max_model_len = 64",
        "steps = 0",
        "engine.vllm.anything.goes = 1",
    ],
)
def test_the_nearest_value_that_can_work_is_accepted(keys: str) -> None:
    _config(keys)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("steps = = 3", {}, "{file} is not valid TOML: Invalid value (at line 2, column 9)"),
        ("step = 3", {}, "{file}:\n  step: no such key; did you mean 'steps'?"),
        ("", {"train.los": "none"}, "{file}:\n  train.los: no such key; did you mean 'train.loss'?"),
        ("steps = 3", {"steps.more": 1}, "{file}: cannot set steps.more, because steps is no table but 3"),
        (
            r'run = "a\u0000b"',
            {},
            r"{file}:" "\n" r"  run = 'a\x00b': it has a character that UTF-8 lacks, or NUL; rename it",
        ),
        (
            "",
            {"model": "/\udcff"},  # of a command line that is no UTF-8
            r"{file}:"
            "\n"
            r"  model = '/\udcff': it has a character that UTF-8 lacks, or NUL; rename it",
        ),
        (
            "[" + ".".join("a" * 3000) + "]",
            {},
            "{file}: its tables are nested too deeply; `millrace config` lists all keys",
        ),
    ],
)
def test_the_error_of_a_file_or_an_override_names_the_file(
    tmp_path: Path, text: str, overrides: dict[str, Any], message: str
) -> None:
    path = _file(tmp_path, f'workflow = "a:B"\n{text}\n')
    with pytest.raises(ConfigError) as raised:
        load_run_file(path, overrides)
    assert str(raised.value) == message.format(file=path)


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        (
            "run.toml",
            'workflow = "ä"'.encode("utf-16"),
            "is no text in UTF-8 (invalid start byte at byte 0); save it as",
        ),
        ("mine.py", b"import os\n", 'name Python in a run file: workflow = "mine.py:MyClass"'),
    ],
)
def test_a_file_that_is_no_run_file_says_what_to_do(tmp_path: Path, name: str, data: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as raised:
        load_run_file(tmp_path / name)
    assert sentence in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbfworkflow = "a:B"\r\nsteps = 3\r\n')
    assert load_run_file(tmp_path / "run.toml").steps == 3


def test_dotted_overrides_reach_into_tables_that_are_there_or_not_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run file .*missing\.toml; see examples"):
        load_run_file(tmp_path / "missing.toml")
    path = _file(tmp_path, 'workflow = "a:B"\nsteps = 3\n[train]\nloss = "cispo"\n')
    with pytest.raises(ConfigError, match=r"no run file .*/run; did you mean .*/run\.toml\?"):
        load_run_file(tmp_path / "run")
    overrides = {"steps": 5, "train.loss.clip_low": 0.1, "engine.vllm.dtype": "float32"}
    config = load_run_file(path, overrides)
    assert (config.steps, config.train.loss) == (5, CispoLoss(clip_low=0.1))
    assert config.engine.vllm == {"dtype": "float32"}
    backwards = {"train.loss.clip_low": 0.3, "train.loss": "cispo", "engine.vllm.dtype": "half", "engine.vllm": {}}
    config = load_run_file(path, backwards)
    assert (config.train.loss, config.engine.vllm) == (CispoLoss(clip_low=0.3), {"dtype": "half"})


def test_a_replay_changes_settings_of_the_trainer_and_says_which() -> None:
    config = _config()
    changed = with_training_changes(
        config, {"train.loss.clip_low": 0.1, "train.loss": "cispo", "learning_rate": 2e-6, "train.lora.rank": 4}
    )
    assert training_changes(config, changed) == {
        "learning_rate": "1e-06 → 2e-06",
        "train.loss.kind": "clip → cispo",
        "train.loss.clip_low": "0.2 → 0.1",
        "train.lora": "None → {'rank': 4, 'alpha': 32.0, 'target_modules': 'all-linear'}",
    }
    assert changed.train.loss == CispoLoss(clip_low=0.1) and changed.n_samples == config.n_samples
    assert training_changes(config, with_training_changes(config, {})) == {}


@pytest.mark.parametrize("run", ["", "trl", "verl", "openrlhf"])
@pytest.mark.parametrize("preset", ["trl", "verl", "openrlhf"])
def test_a_replay_under_a_preset_has_its_conventions_and_keeps_kinds_and_coefficients(run: str, preset: str) -> None:
    common = "train.advantage = 'grpo'; train.loss = 'clip'; train.reference.kind = 'base'; train.kl.coefficient = 0.01"
    config = _config(f"{common}; train.preset = '{run}'; train.kl.place = 'loss'")
    changed = with_training_changes(config, {"train.preset": preset}).train
    assert changed == _config(f"{common}; train.preset = '{preset}'; train.critic.clip = {changed.critic.clip}").train


def test_what_a_replay_says_beside_a_preset_counts_more_and_a_critic_goes_with_its_advantage() -> None:
    config = _config("train = {preset = 'trl', loss = 'cispo'}")
    changes = {"train.advantage.eps": 0.5, "train.loss": "clip", "train.preset": "verl"}
    changed = with_training_changes(config, changes).train
    assert changed.advantage == GrpoAdvantage(eps=0.5, singleton="reward")
    assert changed.loss == ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    config = _config("train = {advantage = 'gae', critic = {learning_rate = 1e-3}}")
    assert with_training_changes(config, {"train.advantage": "opo"}).train.critic == CriticSettings()
    assert with_training_changes(config, {"train.loss": "sapo"}).train.critic.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("n_samples", 4, "n_samples: a replay can change learning_rate, max_staleness and train.…"),
        ("sampling.temperature", 0.5, "sampling.temperature: a replay can change"),
        ("loss.clip_high", 0.5, "did you mean 'train.loss.clip_high'?"),
        ("train.los", "cispo", "did you mean 'train.loss'?"),
        ("train.loss", "ppo", "train.loss.kind = 'ppo': there are 'clip', 'gspo'"),
        ("learning_rate", -1, "learning_rate = -1"),
    ],
)
def test_what_a_replay_cannot_change_is_an_error(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        with_training_changes(_config(), {key: value})
    assert sentence in str(raised.value)


def test_defaults_are_what_an_empty_file_gives_and_settings_are_the_tables_without_the_common_knobs() -> None:
    spelled_out = {**default_values(), "workflow": "examples.arithmetic:Arithmetic"}
    assert spelled_out["train"]["dtype"] == "float32", "of runs from before it could be left to the machine"
    assert make_config(spelled_out, source="run.toml") == _config('train.dtype = "float32"')
    assert default_values()["train"]["loss"]["kind"] == "clip"
    config = _config("train.loss = 'sapo'; evaluation.every = 3")
    assert config.settings == Settings.model_validate({"train": {"loss": "sapo"}, "evaluation": {"every": 3}})
    assert make_config({"workflow": config.workflow, **config.settings.model_dump()}, source="run.toml") == config


def test_every_field_has_a_help_text_and_no_table_takes_unknown_keys() -> None:
    assert [name for name, field in RunConfig.model_fields.items() if not field.description] == []
    schema = RunConfig.model_json_schema()
    assert schema["additionalProperties"] is False and len(schema["$defs"]) >= 20
    for name, table in schema["$defs"].items():
        assert table["additionalProperties"] is False, name
        assert [key for key, field in table["properties"].items() if not field.get("description")] == [], name


_NUMBERS = [
    key
    for key in keys_of(RunConfig)
    if re.search(r"integer|number|0 or 1", key.type) and not key.name.startswith("train.reject.")
]


_BOUNDS = ("train.loss.clip_high", "train.loss.cap", "train.decoupled.cap", "train.max_grad_norm", "train.max_gap")
_BOUNDS += ("evaluation.gate_gap",)


@pytest.mark.parametrize("key", _NUMBERS, ids=lambda key: f"{key.kind}.{key.name}")
def test_true_false_and_nan_are_no_numbers_and_infinity_is_a_bound(key: Key) -> None:
    """Python's True is 1: a run would train with it, and say nothing."""
    table = key.name.rpartition(".")[0]
    kind = {"train.reference.kind": "base", **({f"{table}.kind": key.kind} if key.kind else {})}
    words = {True: "true and false are no numbers", False: "no numbers", math.nan: "NaN cannot"}
    bound = key.name in _BOUNDS or (key.name == "train.loss.clip_low" and key.kind == "dppo")
    words[2**63] = "too large"
    words |= {} if bound else dict.fromkeys((math.inf, -math.inf, "inf"), "should be|must be|valid")
    for value, problem in words.items():
        with pytest.raises(ConfigError, match=rf"(?s){re.escape(key.name)}.*({problem})"):
            load_run_file({"workflow": "a:B"}, {**kind, key.name: value})
    if bound:
        assert load_run_file({"workflow": "a:B"}, {**kind, key.name: math.inf})


def test_numbers_inside_tables_and_lists_are_checked_and_what_may_be_a_bool_is_one() -> None:
    for changes in ({"reward.weights": {"style": True}}, {"train.reject": [{"high": True}]}):
        with pytest.raises(ConfigError, match="true and false are no numbers"):
            load_run_file({"workflow": "a:B"}, changes)
    for changes in ({"reward.weights": {"style": math.inf}}, {"train.reject": [{"high": math.inf}]}):
        with pytest.raises(ConfigError, match="should be a finite number"):
            load_run_file({"workflow": "a:B"}, changes)
    for key in ("engine.vllm.gpu_memory_utilization", "engine.chat_template_kwargs.x", "train.loss.arguments.x"):
        with pytest.raises(ConfigError, match=f"{key} = nan: NaN cannot be set"):  # nor would the run continue itself
            load_run_file({"workflow": "a:B"}, {key: math.nan})
    free = {"engine.vllm": {"enforce_eager": True}, "train.compile": True, "train.max_gap": math.inf}
    config = load_run_file({"workflow": "a:B"}, free)
    assert (config.engine.vllm, config.train.compile, config.train.max_gap) == ({"enforce_eager": True}, True, math.inf)
