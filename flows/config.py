"""The run file: what a user may set, checked before anything heavy starts.

In: a TOML file, or the parameters of the Prefect form. Out: `RunConfig`. The knobs most people turn are top-level
keys; everything else sits in one table per part. An unknown key is an error that suggests the nearest one.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollouts.config import EngineSettings, EvaluationSettings, RewardSettings, RolloutSettings, SamplingSettings
from trainers.config import TrainSettings, WarmupSettings


class ConfigError(ValueError):
    """A run file that cannot be used; every line of the message names a key and what to do."""


class Settings(BaseModel):
    """Everything but the common knobs, one table per part."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

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
    """The tiny base model made where no `model` is given."""


class RunConfig(Settings):
    """A whole run."""

    workflow: str
    """What to train on: `package.module:Class` or `path/to/file.py:Class`, a RolloutWorkflow."""
    run: str = "run"
    """Name of the run. Starting it again continues it."""
    store: str = ""
    """Where shards and policies live: a folder, file:///… or s3://bucket/prefix. Empty: `.millrace/store`."""
    tracking: str = ""
    """MLflow tracking URI. Empty: a SQLite database in `.millrace`."""
    model: str = ""
    """Base model: a Hugging Face id or a local folder. Empty: make a tiny one from the workflow's demonstrations."""
    dataset: str = ""
    """Handed to the workflow: a JSONL or Parquet file, a folder with one per split, or a Hugging Face id."""
    steps: int = Field(default=100, ge=0)
    """Optimizer steps in all."""
    batch_size: int = Field(default=64, ge=1)
    """Prompt groups trained per step."""
    n_samples: int = Field(default=8, ge=1)
    """Attempts per prompt: the group size."""
    max_staleness: float = Field(default=0, ge=0)
    """How many weight updates a trained token may be behind (η). 0 is synchronous training; 0.5 lets rollouts run
    half a batch ahead."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    seed: int = Field(default=0, ge=0)
    """Seeds prompt order, sampling, mini-batches and the base model made here."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = []
        if self.n_samples < 2 and self.train.scale == "std":
            problems.append(
                "n_samples = 1 with train.scale = 'std': one reward has no standard deviation; "
                "use n_samples of 2 or more"
            )
        if self.rollout.min_usable > self.n_samples:
            problems.append(
                f"rollout.min_usable = {self.rollout.min_usable} is above n_samples = {self.n_samples}: "
                "no group could ever be trained; lower it"
            )
        if self.train.num_minibatches > self.batch_size:
            problems.append(
                f"train.num_minibatches = {self.train.num_minibatches} is above batch_size = {self.batch_size}: "
                "groups are not split; lower it"
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
    def of_rollouts(self) -> dict[str, Any]:
        """What a rollout worker depends on, by the names of `tasks.worker_arguments`."""
        names = ("workflow", "dataset", "engine", "rollout", "reward", "sampling", "train", "n_samples", "batch_size")
        return {name: getattr(self, name) for name in (*names, "max_staleness", "steps", "seed")}

    @property
    def settings(self) -> Settings:
        """The part of the configuration that is one block in the Prefect form."""
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})


def load_run_file(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a run file and apply overrides, dotted keys as in `train.scale`.

    Raises `ConfigError` whose message names the key, what is wrong, and the nearest known key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no run file {path}; see examples/ for some") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for key, value in (overrides or {}).items():
        *tables, name = key.split(".")
        target = document
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{path}: cannot set {key}, because {table} is no table but {target!r}")
        target[name] = value
    return make_config(document, source=str(path))


def make_config(document: dict[str, Any], *, source: str) -> RunConfig:
    """Validate a document; see `load_run_file`."""
    try:
        return RunConfig(**document)
    except ValidationError as error:
        lines = [_explain(problem, document) for problem in error.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def default_values() -> dict[str, Any]:
    """The default of every key. What a run does not say, because it is from before the key existed, was this."""
    return RunConfig(workflow="").model_dump(mode="json")


def with_training_changes(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """A run's configuration with other settings of the trainer, by dotted key as in `train.loss`.

    Raises `ConfigError` for a key that does not exist, or that says how trajectories were made, and for a bad value.
    """
    changeable = _training_settings(config)
    document = config.model_dump()
    for key, value in changes.items():
        if key not in changeable:
            nearest = difflib.get_close_matches(key, changeable, n=1, cutoff=0.4)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(f"{key}: a replay can change {', '.join(changeable)}{hint}")
        table, _, name = key.rpartition(".")
        (document[table] if table else document)[name] = value
    return make_config(document, source="replay")


def training_changes(old: RunConfig, new: RunConfig) -> dict[str, str]:
    """What `with_training_changes` changed, as `old → new` by dotted key."""
    before, after = _training_settings(old), _training_settings(new)
    return {key: f"{before[key]} → {after[key]}" for key in before if before[key] != after[key]}


def _training_settings(config: RunConfig) -> dict[str, Any]:
    top = {key: getattr(config, key) for key in ("learning_rate", "max_staleness")}
    return top | {f"train.{name}": value for name, value in config.train.model_dump().items()}


def _explain(problem: Any, document: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        model: Any = RunConfig
        for part in problem["loc"][:-1]:
            model = model.model_fields[part].annotation
        nearest = difflib.get_close_matches(str(problem["loc"][-1]), model.model_fields, n=1, cutoff=0.4)
        known = ", ".join(model.model_fields)
        return f"{key}: no such key" + (f"; did you mean {nearest[0]!r}?" if nearest else f"; there are: {known}")
    if problem["type"] == "missing":
        return f"{key}: must be set"
    message = problem["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
    return f"{key} = {problem['input']!r}: {message}" if key else message
