"""Tables of the run file: what they have in common, their keys, and what is wrong with a value or an unknown key.

In: a pydantic model. Out: its keys with type, default, range and help, for `millrace config`, `docs/configuration.md`
and hints. The text under each field is its help, here and in the Prefect form.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers; write a number")
    if isinstance(value, float) and value != value:
        raise ValueError("NaN cannot be set; write a number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("too large; TOML's integers have 64 bits")
    return value


def _with_checked_numbers(schema: Any, cls: type[BaseModel]) -> Any:
    """The schema of `cls` with `_number` before every number in it; other models inside it have their own."""
    if isinstance(schema, list):
        return [_with_checked_numbers(each, cls) for each in schema]
    if not isinstance(schema, dict) or schema.get("cls", cls) is not cls:
        return schema
    whole_numbers = schema.get("type") == "literal" and any(isinstance(each, int) for each in schema["expected"])
    if schema.get("type") in ("int", "float") or whole_numbers:
        return core_schema.no_info_before_validator_function(_number, schema)
    return {key: _with_checked_numbers(value, cls) for key, value in schema.items()}


class Block(BaseModel):
    """A table of the run file. An unknown key is an error; so are true, false and NaN where a number is meant, and
    infinity unless it is a bound (`allow_inf_nan` of its field)."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked: CoreSchema = _with_checked_numbers(handler(source), cls)
        return checked


OTHER_WORDS = {
    "beta": "train.kl.coefficient",
    "clip_ratio": "train.loss.clip_high",
    "clip_ratio_high": "train.loss.clip_high",
    "clip_ratio_low": "train.loss.clip_low",
    "cliprange": "train.loss.clip_high",
    "context_length": "engine.max_model_len",
    "entropy_coef": "train.entropy_bonus",
    "entropy_coeff": "train.entropy_bonus",
    "epsilon": "train.loss.clip_low",
    "epsilon_high": "train.loss.clip_high",
    "eval_steps": "evaluation.every",
    "gpu_memory_utilization": "engine.vllm.gpu_memory_utilization",
    "gradient_checkpointing": "train.activation_checkpointing",
    "group_size": "n_samples",
    "init_kl_coef": "train.kl.coefficient",
    "kl_beta": "train.kl.coefficient",
    "kl_coef": "train.kl.coefficient",
    "kl_loss_coef": "train.kl.coefficient",
    "loss_agg_mode": "train.aggregation",
    "logger": "tracking.also",
    "loss_type": "train.loss.kind",
    "lr": "learning_rate",
    "lr_scheduler_type": "train.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_length": "engine.max_model_len",
    "max_model_length": "engine.max_model_len",
    "max_new_tokens": "sampling.max_tokens",
    "max_off_policy_steps": "max_staleness",
    "max_prompt_length": "engine.max_model_len",
    "max_response_length": "sampling.max_tokens",
    "max_seq_len": "engine.max_model_len",
    "max_steps": "steps",
    "mini_batch_size": "train.num_minibatches",
    "model_name": "model",
    "model_name_or_path": "model",
    "n": "n_samples",
    "num_generations": "n_samples",
    "num_iterations": "train.num_epochs",
    "num_steps": "steps",
    "num_train_epochs": "steps",
    "off_policy_mask_threshold": "train.reject",
    "output_dir": "store",
    "peft_config": "train.lora",
    "ppo_epochs": "train.num_epochs",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "ppo_mini_batch_size": "train.num_minibatches",
    "report_to": "tracking.also",
    "ring_attn_size": "train.sequence_parallel",
    "rollout_n": "n_samples",
    "rollout_rs": "train.reject",
    "rollout_rs_threshold": "train.reject",
    "save_steps": "train.checkpoint_every",
    "scale_rewards": "train.advantage.scale",
    "tensor_model_parallel_size": "engine.vllm.tensor_parallel_size",
    "tensor_parallel_size": "engine.vllm.tensor_parallel_size",
    "total_steps": "steps",
    "train_batch_size": "batch_size",
    "train_dataset": "dataset",
    "ulysses_sequence_parallel_size": "train.sequence_parallel",
    "use_wandb": "tracking.also",
    "wandb": "tracking.also",
    "warmup_ratio": "train.warmup_steps",
}
"""Last names of settings in TRL, verl, OpenRLHF and prime-rl, and the key here that does the same or comes nearest."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    name: str
    """As it is written in a run file or on the command line, with dots: `train.loss.clip_low`."""
    kind: str
    """The kind of `train.loss` or `train.advantage` that has it; empty for a key that is always there."""
    type: str
    """`integer`, `"mask" or "strict"`, `number or unset`, …"""
    range: str
    """`at least 1`, `above 0, at most 1`; empty if any value will do."""
    default: str
    """As it is written in a run file: `4096`, `"mask"`, `unset`; `must be set` if there is none."""
    help: str
    """What it is for."""

    def line(self) -> str:
        """Type, range and default in words."""
        return "; ".join(part for part in (self.type, self.range, f"default {self.default}") if part)


@functools.cache
def keys(model: type[BaseModel]) -> tuple[Key, ...]:
    """Every key of a model in the order of its fields, those at the top level first."""
    schema = model.model_json_schema()
    settings = list(_walk(schema, schema.get("$defs", {}), prefix="", kind=""))
    return tuple(sorted(settings, key=lambda key: "." in key.name))


def nearest(name: str, model: type[BaseModel]) -> str:
    """The key meant by an unknown one: the same name elsewhere, another trainer's word, or a name much like it.

    Empty if no key comes near.
    """
    table, _, last = name.rpartition(".")
    names = list(dict.fromkeys(key.name for key in keys(model)))
    names += sorted({key.rpartition(".")[0] for key in names} - {""})
    # Those beside it first, then those of its name.
    names.sort(key=lambda key: (key.rpartition(".")[0] != table, key.rpartition(".")[2] != last))
    longer = [key for key in names if key.rpartition(".")[2].startswith(last)]
    by_last_name = {key.rpartition(".")[2]: key for key in reversed(names)}
    siblings = [key.rpartition(".")[2] for key in names if key.rpartition(".")[0] == table]
    word = last.lower().removeprefix("vllm_")
    close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    close = close or difflib.get_close_matches(last, by_last_name, n=1, cutoff=0.8)
    if name in OTHER_WORDS and name not in names:
        return OTHER_WORDS[name]
    if len(last) > 2 and longer:
        return longer[0]
    if last in by_last_name or (close and word not in OTHER_WORDS):
        return by_last_name[last if last in by_last_name else close[0]]
    other = difflib.get_close_matches(word, OTHER_WORDS, n=1, cutoff=0.8)
    return OTHER_WORDS[other[0]] if other else ""


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested configuration; an empty table is a value."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def explain(problem: Any, root: type[BaseModel]) -> str:
    """What a user should change, for one of the errors that pydantic lists when it checks a `root` document."""
    key, model = _locate(problem["loc"], root)
    if problem["type"] == "extra_forbidden":
        if kinds := [repr(setting.kind) for setting in keys(root) if setting.name == key]:
            return f"{key}: no such key here; it is for {key.rpartition('.')[0]}.kind = {' or '.join(kinds)}"
        of_others = problem["input"] if isinstance(problem["input"], dict) else {}  # `actor.optim.lr` of verl
        close = nearest(key, root) if not of_others else _nearest_leaf(key, of_others, root)
        if close == key != "":
            return f"{key}: in quotes a key with dots is one word; write it without quotes"
        choices = f"there are: {', '.join(model.model_fields)}"
        return f"{key}: no such key; " + (f"did you mean {close!r}?" if close else choices)
    if problem["type"] == "missing":
        return f"{key}: must be set"
    if problem["type"] == "union_tag_invalid":
        return f"{key}.kind = {problem['ctx']['tag']!r}: there are {problem['ctx']['expected_tags']}"
    if problem["type"] == "string_type" and isinstance(problem["input"], date | int | float):  # a bool is an int
        return f'{key} = {problem["input"]} is no text: put it into quotes, {key} = "{problem["input"]}"'
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key} = {problem['input']!r} is no table: write its keys below [{key}]"
    message = problem["msg"].removeprefix("Value error, ").replace("\n", "\n  ")
    return f"{key} = {problem['input']!r}: {message}" if key else message


def _nearest_leaf(key: str, table: dict[str, Any], root: type[BaseModel]) -> str:
    """The key meant by the first setting of an unknown table that means any; else by the table's own name."""
    close = (nearest(name, root) for name, _ in leaves(table, key))
    return next(filter(None, close), "") or nearest(key, root)


def _locate(location: Sequence[str | int], root: type[BaseModel]) -> tuple[str, Any]:
    """The dotted key as a user writes it, and the model it is looked up in."""
    key: list[str] = []
    model: Any = root
    members: list[Any] = [root]
    for part in location:
        by_kind = [m for m in members if "kind" in m.model_fields and m.model_fields["kind"].default == part]
        if len(members) > 1 and by_kind:
            members = by_kind  # pydantic names the kind on the way; users do not write it there
            continue
        key.append(str(part))
        model = members[0] if members else model
        field = model.model_fields.get(part)
        annotation = None if field is None else field.annotation
        parts = get_args(annotation) or (annotation,)
        members = [m for m in parts if isinstance(m, type) and issubclass(m, BaseModel)]
    return ".".join(key), model


def _walk(table: dict[str, Any], tables: dict[str, Any], *, prefix: str, kind: str) -> Iterator[Key]:
    required = table.get("required", [])
    for name, field in table["properties"].items():
        if kind and name == "kind":
            continue
        default = field.get("default")
        kinds = field.get("discriminator", {}).get("mapping", {})
        inner = [] if kinds else [tables[_name(part)] for part in _parts(field) if "$ref" in part]
        written = "must be set" if name in required else _written(default["kind"] if kinds and default else default)
        key = Key(
            name=f"{prefix}{name}.kind" if kinds else f"{prefix}{name}",
            kind=kind,
            type=" or ".join(map(_written, kinds)) if kinds else _type(field),
            range=_range(field),
            default=written,
            help=" ".join(field.get("description", "").split()),
        )
        if not inner or "anyOf" in field or "items" in field:
            yield key
        for variant in inner:
            yield from _walk(variant, tables, prefix=f"{prefix}{name}.", kind=kind)
        for variant, reference in kinds.items():
            yield from _walk(tables[_name({"$ref": reference})], tables, prefix=f"{prefix}{name}.", kind=variant)


def _parts(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value may be, or what a list of them may hold."""
    return [field, *field.get("anyOf", []), field.get("items", {})]


def _name(part: dict[str, Any]) -> str:
    return str(part["$ref"]).rpartition("/")[2]


def _written(value: Any) -> str:
    """A value as TOML has it."""
    if value is None:
        return "unset"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else f"{value:g}"


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        names = [_type(part) for part in field["anyOf"]]
        return " or ".join(name for name in names if name != "unset") + (" or unset" if "unset" in names else "")
    if "$ref" in field or field.get("type") == "object":
        return "table"
    if "enum" in field or "const" in field:
        return " or ".join(map(_written, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        items = field.get("items", {})
        return f"list of {_type(items)}{'' if 'enum' in items else 's'}" if items else "list"
    return {"null": "unset"}.get(str(field.get("type")), str(field.get("type", "any value")))


def _range(field: dict[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    parts: Sequence[dict[str, Any]] = [field, *field.get("anyOf", [])]
    return ", ".join(f"{word} {part[bound]:g}" for part in parts for bound, word in words.items() if bound in part)
