"""The run file: what a user may set, checked before anything heavy starts.

In: a TOML file, or the parameters of the Prefect form. Out: `RunConfig`. The knobs most people turn are top-level
keys; everything else sits in one table per part. An unknown key is an error that suggests the nearest one.
"""

from __future__ import annotations

import copy
import difflib
import functools
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from settings.block import Block, explain, leaves
from settings.engine import EngineSettings
from settings.errors import InvalidInput, path_errors
from settings.evaluation import EvaluationSettings
from settings.places.run_paths import absolute_paths
from settings.presets import under_preset
from settings.redaction import secret_settings, well_formed
from settings.reward import RewardSettings
from settings.rollout import RolloutSettings
from settings.sampling import SamplingSettings
from settings.tracking import TraceSettings, TrackingSettings
from settings.train import RetentionSettings, TrainSettings
from settings.warmup import WarmupSettings


class ConfigError(InvalidInput):
    """A run file that cannot be used; every line of the message names a key and what to do."""


class Settings(Block):
    """Everything but the common knobs, one table per part."""

    sampling: SamplingSettings = Field(default_factory=SamplingSettings)
    """How tokens are drawn."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """How attempts are scheduled and stored."""
    reward: RewardSettings = Field(default_factory=RewardSettings)
    """How replies are scored."""
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    """Held-out evaluation."""
    engine: EngineSettings = Field(default_factory=EngineSettings)
    """The inference engine."""
    train: TrainSettings = Field(default_factory=TrainSettings)
    """Advantages, loss and optimizer."""
    warmup: WarmupSettings = Field(default_factory=WarmupSettings)
    """The tiny base model made when no `model` is given."""
    traces: TraceSettings = Field(default_factory=TraceSettings)
    """Which attempts MLflow shows turn by turn."""
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    """What is removed from the store while the run trains."""


class RunConfig(Settings):
    """A whole run."""

    workflow: str
    """What to train on: `package.module:Class` or `path/to/file.py:Class`, a Workflow. This path and all others in a
    run file are relative to the file, those on the command line to the current folder."""
    run: str = "run"
    """Name of the run. Starting it again continues it."""
    store: str = ""
    """Where shards and policies live: a folder, file:///… or s3://bucket/prefix. Empty: `$MILLRACE_STORE`,
    or `.millrace/store`; the nearest `.millrace` in the run file's folder or above."""
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    """MLflow: its address, and which policies it registers."""
    model: str = ""
    """Base model: a Hugging Face id, a folder or a GGUF file. Empty: a tiny one from the workflow's demonstrations."""
    dataset: str = ""
    """Handed to the workflow: a JSONL or Parquet file, a folder with one per split, or a Hugging Face id."""
    steps: int = Field(default=100, ge=0)
    """Optimizer steps in all."""
    batch_size: int = Field(default=64, ge=1)
    """Prompt groups trained per step."""
    n_samples: int = Field(default=8, ge=1, le=65536)
    """Attempts per prompt: the group size."""
    max_staleness: float = Field(default=0, ge=0)
    """How many weight updates a trained token may be behind (η). 0 is synchronous training; 0.5 lets rollouts run
    half a batch ahead."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    seed: int = Field(default=0, ge=0)
    """Seeds prompt order, sampling, mini-batches and the base model made here."""
    reproducible: bool = False
    """The run is a function of this file on this machine: log-probabilities do not depend on what else is in a batch.
    Costs some of the engine's speed; what cannot hold is refused with its name."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = []
        advantage = self.train.advantage
        needs_group = advantage.kind in ("grpo", "leave_one_out", "opo", "pass_at_k") and self.train.loss.kind != "sft"
        if self.n_samples < 2 and (needs_group or getattr(advantage, "baseline", False)):
            problems.append(
                f"n_samples = 1 with train.advantage.kind = {advantage.kind!r}: a single attempt has nothing to be "
                'compared with; use n_samples of 2 or more, or another kind ("reinforce++", "gae", "remax")'
            )
        if advantage.kind == "pass_at_k" and advantage.k >= self.n_samples:
            problems.append(
                f"train.advantage.k = {advantage.k} is not below n_samples = {self.n_samples}: every mixed group would "
                "pass, and teach nothing; lower the one or raise the other"
            )
        if getattr(advantage, "scale", "") == "mean" and self.reward.overlong_tokens and self.reward.overlong_penalty:
            problems.append(
                'train.advantage.scale = "mean" is for rewards of at least 0, and reward.overlong_tokens takes some '
                "off; leave the one or the other out"
            )
        if advantage.kind == "remax" and self.reward.weights.get(advantage.baseline_part, 1.0) != 0:
            problems.append(
                f"train.advantage.kind = 'remax': its baseline would count as reward; set "
                f"reward.weights.{advantage.baseline_part} = 0"
            )
        if self.engine.max_model_len > self.train.longest_pack:
            ranks = self.train.sequence_parallel
            times = f" on {ranks} ranks (train.sequence_parallel)" if ranks > 1 else ""
            problems.append(
                f"train.tokens_per_microbatch = {self.train.tokens_per_microbatch}{times} is below "
                f"engine.max_model_len = {self.engine.max_model_len}: a sequence is never cut; raise the one or lower "
                "the other"
            )
        if self.engine.weight_transfer != "store" and (self.train.lora is not None or self.engine.kind == "scripted"):
            problems.append(
                f"engine.weight_transfer = '{self.engine.weight_transfer}': only whole weights are broadcast, and only "
                "to vLLM; leave it out (adapters are small enough for the store)"
            )
        if self.rollout.min_usable > self.n_samples:
            problems.append(
                f"rollout.min_usable = {self.rollout.min_usable} is above n_samples = {self.n_samples}: "
                "no group could ever be trained; lower it"
            )
        if self.train.schedule != "constant" and self.steps > self.train.decay_steps:
            problems.append(
                f"steps = {self.steps} is above train.decay_steps = {self.train.decay_steps}, after which the learning "
                "rate is 0 and nothing is learnt; raise train.decay_steps"
            )
        if self.train.advantage.kind == "gae" and self.train.critic.warmup_steps >= self.steps:
            problems.append(
                f"train.critic.warmup_steps = {self.train.critic.warmup_steps} leaves none of steps = {self.steps} to "
                "train the policy; lower it"
            )
        if self.train.num_minibatches > self.batch_size:
            problems.append(
                f"train.num_minibatches = {self.train.num_minibatches} is above batch_size = {self.batch_size}: "
                "groups are not split; lower it"
            )
        if not self.rollout.num_workers and self.evaluation.every and not self.evaluation.own_engine:
            problems.append(
                "rollout.num_workers = 0 leaves no worker to evaluate; set evaluation.own_engine = true, or "
                "evaluation.every = 0"
            )
        if self.sampling.max_tokens >= self.engine.max_model_len:
            problems.append(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_len = {self.engine.max_model_len}; lower the one or raise the other"
            )
        if self.rollout.stall_timeout < self.rollout.attempt_timeout:
            problems.append(
                f"rollout.stall_timeout = {self.rollout.stall_timeout:g} is below rollout.attempt_timeout = "
                f"{self.rollout.attempt_timeout:g}: a slow attempt would look like a stall; raise the one or lower "
                "the other"
            )
        if self.reward.overlong_tokens > self.sampling.max_tokens:
            problems.append(
                f"reward.overlong_tokens = {self.reward.overlong_tokens} is above sampling.max_tokens = "
                f"{self.sampling.max_tokens}: every reply would be overlong; lower it"
            )
        if self.rollout.drop_uniform_groups and self.n_samples < 2:
            problems.append("rollout.drop_uniform_groups with n_samples = 1 rejects every group; raise n_samples")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def gate_gap(self) -> float:
        """Largest gap between engine and trainer, in nats per token, on the way to a champion."""
        return self.train.max_gap if self.evaluation.gate_gap is None else self.evaluation.gate_gap

    @property
    def settings(self) -> Settings:
        """The part of the configuration that is one block in the Prefect form."""
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})


def load_run_file(run: Path | dict[str, Any] | Sequence[Path], overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a run file, or take its content, and apply overrides, dotted keys as in `train.num_minibatches`.

    Of several files each is read over those before it, key by key; a table of another `kind` replaces the one before.
    Relative paths in a file are relative to its folder, those of overrides and of content to the current one.
    Raises `ConfigError` whose message names the key, what is wrong, and the nearest known key.
    """
    if isinstance(run, dict):
        document, source = absolute_paths(copy.deepcopy(run), Path.cwd()), "run"
    else:
        files = [run] if isinstance(run, Path) else run
        document, source = functools.reduce(_over, map(_read, files), {}), " + ".join(map(str, files))
    for key, value in _kinds_first(absolute_paths(overrides or {}, Path.cwd())).items():
        _set(document, key, value, source=source)
    return make_config(document, source=source)


def _read(path: Path) -> dict[str, Any]:
    with path_errors(f"run file {path}"):
        if not path.exists():
            run_files = sorted(str(each) for each in path.parent.glob("*.toml"))
            close = difflib.get_close_matches(str(path), run_files, n=1)
            hint = f"did you mean {close[0]}?" if close else "see examples/ for some"
            raise ConfigError(f"no run file {path}; {hint}")
        if path.is_dir():
            raise ConfigError(f"run file {path} is a folder; name a file in it, such as {path / 'my.toml'}")
        data = path.read_bytes()
    try:
        document = tomllib.loads(data.decode("utf-8-sig"))  # editors of Windows begin with a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        about = f'; name Python in a run file: workflow = "{path.name}:MyClass"' if path.suffix == ".py" else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{about}") from None
    return absolute_paths(document, path.absolute().parent)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Two documents as one, in which `above` counts."""
    merged = dict(below)
    for key, value in above.items():
        default = below.get(key)
        default = {"kind": default} if isinstance(default, str) and isinstance(value, dict) else default
        if isinstance(default, dict) and isinstance(value, dict) and value.get("kind") in (None, default.get("kind")):
            value = _over(default, value)
        merged[key] = value
    return merged


def as_toml(config: RunConfig) -> str:
    """A whole run file that means this configuration, with every key whose value TOML can say."""
    import tomli_w

    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value


def make_config(document: dict[str, Any], *, source: str) -> RunConfig:
    """Validate a document; see `load_run_file`."""
    try:
        _check_values(document, source=source)
        return RunConfig.model_validate(document)
    except ValidationError as error:
        lines = [explain(problem, RunConfig) for problem in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None
    except RecursionError:
        raise ConfigError(f"{source}: its tables are nested too deeply; `millrace config` lists all keys") from None


def _check_values(document: dict[str, Any], *, source: str) -> None:
    """Raise `ConfigError` for a value that no key may have."""
    for key in secret_settings(document):
        raise ConfigError(
            f"{source}: {key} looks like a secret, and the settings of a run are recorded for all to read: put it "
            "into the environment variable that its library reads (HF_TOKEN, OPENAI_API_KEY, the AWS chain; "
            "MILLRACE_TRACKING for an address of MLflow with a password)"
        )
    for key, value in leaves(document):
        if isinstance(value, float) and value != value:
            raise ConfigError(f"{source}:\n  {key} = nan: NaN cannot be set; write a number")
        if isinstance(value, str) and ("\0" in value or well_formed(value) != value):
            raise ConfigError(f"{source}:\n  {key} = {value!r}: it has a character that UTF-8 lacks, or NUL; rename it")


def default_values(like: dict[str, Any] | None = None) -> dict[str, Any]:
    """The default of every key, under the kinds and the preset of `like`. What a run does not say, because it is from
    before the key existed, was this."""
    try:
        values = make_config({"workflow": "", **_kinds(like or {})}, source="defaults")
    except ConfigError:  # a kind with something that must be set
        values = RunConfig(workflow="")
    train = values.train.model_copy(update={"dtype": values.train.computes_in})  # before there was `auto`
    return values.model_copy(update={"train": train}).model_dump(mode="json")


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a recorded configuration sets other than its default, by dotted key; of a table with a `kind`, other than
    that kind's defaults. Without `run`, `workflow`, `model`, `steps`, `store` and `tracking`."""
    plain = default_values()
    plain, defaults, now = (dict(leaves(each)) for each in (plain, default_values(config), config))
    defaults |= {key: plain.get(key) for key in defaults if key.rpartition(".")[2] in ("kind", "preset")}
    own = {"run", "workflow", "model", "steps", "store", "tracking"}
    return {key: value for key, value in now.items() if key not in own and value != defaults.get(key)}


def _kinds(table: dict[str, Any]) -> dict[str, Any]:
    """The kinds alone, and the preset: what the other defaults depend on."""
    below = {key: _kinds(value) for key, value in table.items() if isinstance(value, dict)}
    chosen = {key: table[key] for key in ("kind", "preset") if isinstance(table.get(key), str)}
    return chosen | {key: kinds for key, kinds in below.items() if kinds}


def with_training_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """A run's configuration with other settings of the trainer, by dotted key as in `train.loss.clip_high`.

    `train.loss` and `train.advantage` take a kind, with its defaults; `train.preset` comes before any other key. Raises
    `ConfigError` for a key that does not exist or that says how trajectories were made, and for a bad value.
    """
    changeable, changes = _training_settings(config), absolute_paths(changes, Path.cwd())
    document = config.model_dump()
    if "train.preset" in changes:
        document["train"] = under_preset(document["train"], changes["train.preset"])
    for key in _kinds_first(changes):
        if key not in changeable and not key.startswith("train."):
            close = difflib.get_close_matches(key, changeable, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{key}: a replay can change {', '.join(_REPLAYABLE)} and train.…{hint}")
        _set(document, key, changes[key], source="replay")
    advantage = document["train"]["advantage"]
    if (advantage if isinstance(advantage, str) else advantage.get("kind")) != "gae":
        document["train"].pop("critic", None)  # recorded with a critic, trained without one
    return make_config(document, source="replay")


def training_changes(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """What `with_training_changes` changed, as `old → new` by dotted key."""
    before, after = _training_settings(old), _training_settings(new)
    return {
        key: f"{value} → {after[key]}"
        for key, value in before.items()
        if key in after and value != after[key] and not (isinstance(value, dict) and isinstance(after[key], dict))
    }


_REPLAYABLE = ("learning_rate", "max_staleness")


def _training_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a replay may change, by dotted key; also tables as a whole."""
    return {key: getattr(config, key) for key in _REPLAYABLE} | dict(_below("train", config.train.model_dump()))


def _below(key: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        yield f"{key}.{name}", value
        if isinstance(value, dict):
            yield from _below(f"{key}.{name}", value)


def _kinds_first(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes by dotted key in the order in which they can be made: a kind, or a table, before what is set in it."""
    return dict(sorted(changes.items(), key=lambda change: change[0].count(".")))


def _set(document: dict[str, Any], key: str, value: Any, *, source: str) -> None:
    """Set a dotted key in place, making the tables on the way; a kind in its place becomes a table of that kind."""
    *tables, name = key.split(".")
    target = document
    for table in tables:
        value_there = target.get(table)
        is_kind = isinstance(value_there, str) and table in ("loss", "advantage")
        target[table] = {"kind": value_there} if is_kind else value_there or {}
        if not isinstance(target[table], dict):
            raise ConfigError(f"{source}: cannot set {key}, because {table} is no table but {target[table]!r}")
        target = target[table]
    target[name] = value
