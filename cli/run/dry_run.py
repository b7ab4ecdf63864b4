"""`millrace train --dry-run`: what a run file comes to, before anything starts.

In: a run file and overrides. Out: the checks of a start, and derived values: batches, tokens, memory. Nothing heavy is
imported, and nothing of the run is written.
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape

from cli.terminal.formatting import plain_table
from infra.environment import tracking_uri
from settings.errors import size
from settings.places.state_folder import store_uri
from settings.redaction import without_secrets
from settings.run_file import RunConfig, default_values
from storage.log.runs import continues, open_run
from storage.objects.opening import open_store
from tasks.checks.learning_rate import num_parameters, usual_learning_rates
from tasks.checks.machine import precision_text
from tasks.checks.memory_plan import memory_plan
from tasks.checks.preflight import about_model, check_run, model_positions
from tasks.checks.space import expected_space
from tasks.checks.trial import check_references

_MEMORY = ("trainer_weights_bytes", "trainer_gradients_and_moments_bytes", "engine_weights_bytes")
"""What is not known of a model that is not on this machine."""


def derived_values(config: RunConfig, *, adopt_tasks: bool = False) -> dict[str, Any]:
    """Check what a start checks, and return derived values by name; None for those that are not known yet.

    Raises what `millrace train` would.
    """
    checked = check_run(config, adopt_tasks=adopt_tasks)
    config, parameters = checked.config, num_parameters(config)
    store = open_store(store_uri(config.store))
    done = None
    if store.exists(f"runs/{config.run}/run.json"):
        log = open_run(store, config.run)
        document = config.model_dump(mode="json")
        continues(log, document, defaults=default_values(document))
        done = log.state.step
    return {
        "run": config.run,
        "store": store.uri,
        "tracking": without_secrets(tracking_uri(config.tracking.uri)),
        "workflow": config.workflow,
        "model": config.model or "a tiny one, made from the workflow's demonstrations",
        "steps": config.steps,
        "steps_done": done,
        "train_tasks": len(checked.tasks["train"]),
        "references_won": check_references(checked.workflow, checked.tasks, config),
        "evaluation_tasks": min(len(checked.tasks[config.evaluation.split]), config.evaluation.num_tasks),
        "precision": precision_text(config, about_model(config)),
        "learning_rate": config.learning_rate,
        "usual_learning_rate": _usual(config, parameters),
        **_batches(config),
        **_memory(config, parameters),
        **_space(config),
    }


def _usual(config: RunConfig, parameters: int | None) -> list[float] | None:
    """Lowest and highest usual learning rate; None for a model that is not on this machine."""
    if parameters is None:
        return None
    return list(usual_learning_rates(parameters, is_lora=config.train.lora is not None))


def _batches(config: RunConfig) -> dict[str, Any]:
    train, attempts = config.train, config.batch_size * config.n_samples
    most_tokens = attempts * min(config.engine.max_model_len, model_positions(config) or config.engine.max_model_len)
    return {
        "attempts_per_step": attempts,
        "attempts_in_all": attempts * config.steps,
        "updates_per_step": train.num_minibatches * train.num_epochs,
        "attempts_per_update": attempts / train.num_minibatches,
        "most_tokens_per_step": most_tokens,
        "most_sampled_tokens_per_turn": attempts * config.sampling.max_tokens,
        "most_passes_per_update_and_rank": math.ceil(
            most_tokens / train.num_minibatches / train.num_ranks / train.tokens_per_microbatch
        ),
        "most_requests_at_once": config.rollout.max_concurrent * config.n_samples * config.rollout.num_workers,
        "most_groups_ahead": math.ceil((config.max_staleness + 1) * config.batch_size),
    }


def _space(config: RunConfig) -> dict[str, int | None]:
    """Bytes of the disk at the end of the run, and those of the store without `[retention]`."""
    space = expected_space(config, removes=config.retention.every > 0)
    names = {"store_bytes": "store", "store_without_retention_bytes": "everything", "databases_bytes": "databases"}
    return {key: getattr(space, name, None) for key, name in names.items()}


def _memory(config: RunConfig, parameters: int | None) -> dict[str, Any]:
    """Bytes of one rank and of one process of an engine by part, and of each device; None for a model that is not on
    this machine."""
    plan = memory_plan(config, about_model(config))
    values: dict[str, Any] = {"parameters": parameters, **({} if plan else dict.fromkeys(_MEMORY))}
    demands = {demand.process: demand for device in plan for demand in device.demands}
    for name in ("trainer", "engine"):
        for part, held in demands[name].parts.items() if name in demands else ():
            values |= {f"{name}_{part.replace(' ', '_')}_bytes": held} if held else {}
    values["devices"] = {d.name: {"needed": d.needed, "total": d.total, "free": d.free} for d in plan} or None
    return values


def print_values(values: dict[str, Any], console: Console) -> None:
    """The same for people."""
    table = plain_table("", "", show_header=False)
    for key, value in values.items():
        if key == "devices":
            continue
        name = key.removesuffix("_bytes").replace("_", " ")
        table.add_row(f"[dim]{name}[/]", escape(_shown(key, value)))
    console.print(table)
    for name, device in (values["devices"] or {}).items():
        held = f", {size(device['total'] - device['free'])} taken by others" if device["free"] < device["total"] else ""
        console.print(f"{name}: about {size(device['needed'])} of {size(device['total'])}{held}, estimated from sizes")
    console.print("nothing was started; leave --dry-run out to train")


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "new run" if key == "steps_done" else "not known before the model is here"
    if key == "usual_learning_rate":
        return f"{value[0]:g} to {value[1]:g}"
    if key.endswith("_bytes"):
        return f"about {size(int(value))}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
