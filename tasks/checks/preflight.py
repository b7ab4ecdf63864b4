"""Everything that can be found wrong in seconds, before anything heavy starts.

In: a run's configuration. Out: the workflow, or an error that names the thing and the fix. `tasks.checks.trial` plays.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import httpx

from infra.environment import tracking_uri
from infra.ray.client import nodes_to_use
from infra.ray.placement import check_shares, gpus_of
from rollouts.chat.tool_parsing import check_parser
from rollouts.engines.vllm.core_start import is_cpu_build
from rollouts.production.engine_arguments import check_engine_arguments, check_token_limits
from rollouts.production.engine_choice import ADAPTERS_OF_16_BITS, check_cpu_engine
from rollouts.production.prompts import task_set
from rollouts.sandbox.sandbox import require_sandbox, sandbox_report
from rollouts.workflow import Workflow
from settings.errors import InvalidInput, MissingPackage, check_room, counted, nearest_existing, path_errors
from settings.loss import CustomLoss
from settings.places.hints import command
from settings.places.state_folder import expanded, home, sqlite_file, store_folder, store_uri, written_places
from settings.redaction import without_secrets
from settings.run_file import RunConfig
from settings.warmup import TINY_POSITIONS
from storage.log.claims import waits_for_batch
from storage.log.runs import check_run_id, open_run
from storage.objects.hub import check_on_hub
from storage.objects.opening import open_store, probe
from storage.policies.model_config import EXPERTS, model_config, num_positions
from storage.records import Task
from storage.tracking.trackers import check_trackers
from tasks.checks.gpu_share import check_share
from tasks.checks.learning_rate import unusual_learning_rate
from tasks.checks.loading import load_tasks, load_workflow
from tasks.checks.machine import for_this_machine
from tasks.checks.memory_plan import check_memory
from tasks.checks.playing import errors_of_users, exits_named
from tasks.checks.reproducible import check_settings
from tasks.checks.trial import check_repeats, play_tasks
from trainers.model.fetch import local_folder, own_folder
from trainers.model.kinds import replay_refusal, team_refusal
from trainers.model.weight_index import check_kind, check_model_folder

logger = logging.getLogger("millrace.preflight")

SECONDS_TO_ANSWER = 5.0
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a run's file names, loaded once."""

    config: RunConfig
    """The run's settings, with what they left to this machine decided."""
    workflow: Workflow
    tasks: dict[str, Sequence[Task]]
    """By split."""


CHECKED: ContextVar[Checked | None] = ContextVar("checked", default=None)
"""Set if a command has checked the run: the flow that it starts does not do so again."""


@exits_named()
def check_run(config: RunConfig, *, adopt_tasks: bool = False) -> Checked:
    """Load the workflow and its data, look for models, servers and devices, try a loss of the user's, write to the
    store, compare the tasks with those of the run, unless `adopt_tasks`, and play some.

    Raises `InvalidInput`, `NotFound` or `StoreError` for the first thing that will not work; an error of the user's
    code is an `InvalidInput` with its file and line.
    """
    check_run_id(config.run)
    check_sandbox(config)
    check_engine_arguments(config.engine.vllm)
    check_cpu_engine(config.engine.vllm)
    check_room(written_places(config.store))
    loaded = load_workflow(config)
    tasks = load_tasks(loaded, config)
    check_parser("tool_parser", config.engine.tool_parser)
    check_parser("reasoning_parser", config.engine.reasoning_parser)
    if config.model:
        check_model(config.model, trains_weights=config.train.lora is None)
    elif type(loaded).demonstrations is Workflow.demonstrations:
        raise InvalidInput(f"{config.workflow} has no demonstrations(); write it, or set `model` in the run file")
    else:
        with errors_of_users(f"{config.workflow}.demonstrations(1, seed=0)", loaded.demonstrations):
            if not loaded.demonstrations(1, seed=0):
                raise InvalidInput(f"{config.workflow}.demonstrations(1, seed=0) returned no conversation")
    check_lengths(config)
    check_adapters(config)
    check_router_replay(config)
    probe(store := open_store(store_uri(config.store)))  # before it is read: what was recorded there decides
    config = for_this_machine(config, about_model(config))
    check_devices(config)
    if config.reproducible:
        check_settings(config, on_gpus=config.train.device != "cpu" and bool(gpus_of(nodes_to_use())))
    if config.train.reference.model:
        check_model(config.train.reference.model)
    if isinstance(loss := config.train.loss, CustomLoss):
        from trainers.objective.custom_loss import check_loss

        with errors_of_users(f"train.loss.path = {loss.path!r}"):
            check_loss(loss.path, loss.arguments, with_reference=config.train.reference.kind != "none")
    is_new = not store.exists(f"runs/{config.run}/run.json")
    if not is_new:
        state = open_run(store, config.run).state
        for split, members in tasks.items():
            task_set(state, members, run=config.run, split=split, adopt=adopt_tasks)
    check_batch(config, len(tasks["train"]), is_new=is_new)
    if config.train.stream and (reason := waits_for_batch(config)):
        logger.warning("train.stream: gradients wait for the whole batch: %s", reason)
    if problem := unusual_learning_rate(config):
        logger.warning(problem)
    if config.evaluation.split == "train" and config.evaluation.every:
        logger.warning("evaluation.split = 'train': the held-out score is one of tasks that are trained on")
    try:
        check_tracking(tracking_uri(config.tracking.uri))
        check_trackers(config.tracking.also)
    except (InvalidInput, MissingPackage) as error:
        if is_new:
            raise
        logger.warning("%s; run %s goes on, and its log keeps everything for later", error, config.run)
    play_tasks(loaded, tasks, config, positions=model_positions(config))
    if config.reproducible:
        check_repeats(loaded, tasks, config)
    if config.dataset and type(loaded).__init__ is Workflow.__init__ and not loaded.dataset_was_read:
        raise InvalidInput(
            f"dataset = {config.dataset!r}: {config.workflow} never reads it; use self.dataset in tasks(), or leave "
            "the key out"
        )
    return Checked(config=config, workflow=loaded, tasks=tasks)


def check_sandbox(config: RunConfig) -> None:
    """Raise `SandboxUnavailable` if the run demands a sandbox that this machine does not have, else say so."""
    if config.rollout.require_sandbox:
        require_sandbox()
    elif missing := sandbox_report():
        logger.warning(
            "this machine cannot isolate code that a policy wrote: %s. Code rewards and sandboxed tools refuse to run "
            "it, unless they have allow_unsandboxed=True; rollout.require_sandbox = true refuses such a start",
            "; ".join(missing),
        )


def check_batch(config: RunConfig, num_tasks: int, *, is_new: bool) -> None:
    """Raise `InvalidInput` for a `batch_size` above the number of tasks; only warn if it is the default or recorded."""
    if config.batch_size <= num_tasks:
        return
    times = math.ceil(config.batch_size / num_tasks)
    problem = (
        f"batch_size = {config.batch_size} prompts, but split 'train' has {counted(num_tasks, 'task')}, so each step "
        f"would ask the same prompt up to {times} times: set batch_size to at most {num_tasks}, and n_samples for the "
        "attempts at each"
    )
    if is_new and "batch_size" in config.model_fields_set:
        raise InvalidInput(problem)
    logger.warning(problem)


def check_devices(config: RunConfig) -> None:
    """Raise `InvalidInput` for ranks and engines that the devices of this machine, or of the cluster, cannot hold."""
    nodes, train, parts = nodes_to_use(), config.train, config.engine.num_gpus
    num_gpus, num_engines = gpus_of(nodes), config.rollout.num_workers + config.evaluation.own_engine
    if train.device == "cuda" and not num_gpus:
        raise InvalidInput("train.device = 'cuda', and there is no GPU; use 'auto' or 'cpu'")
    num_heads = about_model(config).get("num_attention_heads")
    tensor_parallel = int(config.engine.vllm.get("tensor_parallel_size", 1))
    if num_heads and num_heads % tensor_parallel:
        raise InvalidInput(
            f"engine.vllm.tensor_parallel_size = {tensor_parallel} does not divide the model's {num_heads} attention "
            "heads; lower it to a divisor"
        )
    if train.sequence_parallel > 1 and (reason := team_refusal(about_model(config), train.sequence_parallel)):
        raise InvalidInput(reason)
    gpu_ranks = train.num_ranks if train.device != "cpu" else 0
    shares = max(1, num_engines * parts + gpu_ranks)
    check_shares(nodes, num_workers=shares, gpus_per_engine=parts if num_engines else 1, num_ranks=gpu_ranks)
    check_share(config, num_gpus)
    check_memory(config, about_model(config))
    what = f"train.num_ranks = {train.num_ranks} and {num_engines} engines of {parts} processes"
    if (wanted := train.num_ranks + num_engines * parts) > (slots := sum(node.get("CPU", 0.0) for node in nodes)):
        raise InvalidInput(f"{what} need {wanted} CPUs of the cluster, which has {slots:g}; lower one of them")


def check_tracking(uri: str) -> None:
    """Raise `InvalidInput` if MLflow's server does not answer, or if its database cannot be there."""
    shown = f"tracking = {without_secrets(uri)!r}"
    try:
        parsed = urlparse(uri)
        port = parsed.port
    except ValueError as error:
        raise InvalidInput(f"{shown} is no address: {error}") from error
    start = f"start it (`{command('up')}` starts one on this machine), or leave `tracking` out for a file"
    if parsed.scheme in ("http", "https"):
        try:
            httpx.get(uri, timeout=SECONDS_TO_ANSWER)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidInput(f"{shown}: no server answers ({without_secrets(str(error))}); {start}") from error
    elif parsed.scheme.partition("+")[0] in _PORTS:
        with path_errors(f"{shown}: no database answers"):
            address = (parsed.hostname or "localhost", port or _PORTS[parsed.scheme.partition("+")[0]])
            socket.create_connection(address, timeout=SECONDS_TO_ANSWER).close()
    elif parsed.scheme in ("", "file") and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        file = f"{uri.rstrip('/')}/mlflow.db".removeprefix("file://")
        raise InvalidInput(
            f"{shown}: MLflow writes into no folder any more; use a file, sqlite:///{file}, or http(s)://…"
        )
    elif parsed.scheme == "sqlite" and not ((database := sqlite_file(uri)) and database.name and not database.is_dir()):
        raise InvalidInput(f"{shown} names no file; write sqlite:///FOLDER/mlflow.db")
    elif parsed.scheme in ("", "file", "sqlite"):
        path = expanded(sqlite_file(uri) or store_folder(uri) or parsed.path).resolve()
        folder = path.parent if parsed.scheme == "sqlite" else path
        if not folder.exists() and not folder.is_relative_to(home()) and parsed.scheme == "sqlite":
            raise InvalidInput(f"{shown}: there is no folder {folder}; make it, or name another")
        folder = nearest_existing(folder)
        if not os.access(folder, os.W_OK) or not folder.is_dir():
            raise InvalidInput(f"{shown}: {folder} cannot be written; name another place")
    elif not parsed.scheme.startswith(("databricks", "uc")):
        raise InvalidInput(f"{shown}: MLflow knows no {parsed.scheme}://; use http(s)://… or sqlite:///…")


def check_lengths(config: RunConfig) -> None:
    """Raise `InvalidInput` for a length that was set and that the model's positions do not allow, and as
    `check_token_limits`.

    Lengths that were not set are cut to the model's positions when the engine starts.
    """
    positions = model_positions(config)
    check_token_limits(config.engine.vllm, longest=min(config.engine.max_model_len, positions or sys.maxsize))
    if positions is None:
        return
    lengths = (
        ("engine.max_model_len", config.engine, positions),
        ("sampling.max_tokens", config.sampling, positions - 1),
    )
    for key, block, most in lengths:
        name = key.partition(".")[2]
        if name in block.model_fields_set and (value := getattr(block, name)) > most:
            raise InvalidInput(
                f"{key} = {value}, but {config.model or 'the tiny model'} has {positions} positions for prompt and "
                f"replies: use at most {most}, or leave it out"
            )


def check_adapters(config: RunConfig) -> None:
    """Raise `InvalidInput` for adapters in a model with experts if the installed vLLM is its CPU build, which computes
    experts in another way as soon as it may hold adapters, and not on CPUs; and for adapters in float32 on GPUs."""
    if config.train.lora is None or config.engine.kind != "vllm":
        return
    if not is_cpu_build():
        if (dtype := config.engine.vllm.get("dtype")) in ("float32", "float"):
            raise InvalidInput(
                f"train.lora with engine.vllm.dtype = {dtype!r}: {ADAPTERS_OF_16_BITS}; use 'bfloat16', or leave "
                "train.lora out"
            )
        return
    if any(about_model(config).get(name) for name in EXPERTS):
        raise InvalidInput(
            f"train.lora: vLLM's build for CPUs holds no adapters in a model with experts ({config.model}); leave "
            "train.lora out to train all weights, or use the build for GPUs"
        )


def check_router_replay(config: RunConfig) -> None:
    """Raise `InvalidInput` for `train.router_replay` with a model whose routers take no experts that are given to them,
    or with an engine that does not say which it chose."""
    if not config.train.router_replay:
        return
    if config.engine.kind != "vllm":
        raise InvalidInput(f"train.router_replay: engine.kind = {config.engine.kind!r} has no experts; leave it out")
    about = about_model(config)
    if about and (reason := replay_refusal(about)):
        raise InvalidInput(f"train.router_replay: {reason}; leave it out")
    if about.get("kv_lora_rank") and is_cpu_build():
        raise InvalidInput(
            f"train.router_replay: vLLM's build for CPUs has no prefix cache for {about.get('model_type')!r}, whose "
            "attention is latent, and so does not say which experts it chose; leave it out, or use the build for GPUs"
        )
    arguments = config.engine.vllm
    unfit = {"enable_prefix_caching": False, "scheduler_cls": arguments.get("scheduler_cls")}
    unfit |= {"enforce_eager": False} if is_cpu_build() else {}
    if int(arguments.get("pipeline_parallel_size", 1)) > 1:
        unfit["pipeline_parallel_size"] = arguments["pipeline_parallel_size"]
    for name in unfit.keys() & arguments.keys():
        if arguments[name] == unfit[name]:
            raise InvalidInput(
                f"train.router_replay with engine.vllm.{name} = {arguments[name]!r}: vLLM then does not say which "
                "experts it chose; leave one of them out"
            )


def about_model(config: RunConfig) -> dict[str, Any]:
    """The `config.json` of the run's model, or what is known of the tiny one; empty if the model is not here."""
    if not config.model:
        sizes = {"hidden_size": config.warmup.hidden_size, "num_hidden_layers": config.warmup.num_layers}
        heads = config.warmup.hidden_size // 32
        return {
            "max_position_embeddings": TINY_POSITIONS,
            "num_attention_heads": heads,
            "dtype": "float32",
            "vocab_size": 64,
        } | sizes
    folder = local_folder(config.model)
    return {} if folder is None else model_config(folder)


def model_positions(config: RunConfig) -> int | None:
    """Longest sequence of the run's model, in tokens; None if the model is not here or does not say."""
    return num_positions(about_model(config))


def check_model(model: str, *, trains_weights: bool = False) -> None:
    """Raise `InvalidInput` or `NotFound` unless `model` is a whole model folder, or the hub, or its cache, has it, of a
    kind that can be trained; if `trains_weights`, one that is not quantised."""
    with path_errors(f"model = {model!r}"):
        if (folder := own_folder(model)) is not None:
            try:
                return check_model_folder(folder, trains_weights=trains_weights)
            except InvalidInput as error:
                raise InvalidInput(f"model = {model!r}: {error}") from error
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InvalidInput(
            f"model = {model!r}: no such folder or GGUF file, and not a Hugging Face id like Qwen/Qwen2.5-0.5B-Instruct"
        )
    if (folder := local_folder(model)) is None:
        about = check_on_hub(model, "model")
    else:
        about = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if about:  # else the hub, or a part of it here, does not say
        try:
            check_kind(about, trains_weights=trains_weights)
        except InvalidInput as error:
            raise InvalidInput(f"model = {model!r}: {error}") from error
