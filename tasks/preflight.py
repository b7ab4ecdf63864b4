"""Everything that can be found wrong in seconds, before anything heavy starts.

In: a run's configuration. Out: the workflow, or an error that names the thing and the fix. `tasks.trial` plays tasks.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from pathlib import Path

from infra.environment import store_uri
from infra.user_code import load_object
from rollouts.chat.tool_parsing import check_tool_parser
from rollouts.production.engine_choice import check_engine_arguments, local_folder, num_positions
from rollouts.workflow import Workflow, place_of
from settings.errors import InvalidInput, failure_text, path_errors
from settings.loss import CustomLoss
from settings.run_file import RunConfig
from settings.warmup import TINY_POSITIONS
from storage.objects.object_store import StoreError
from storage.objects.opening import open_store, probe
from tasks.trial import check_tasks, play_tasks, tasks_by_split

CHECKED: ContextVar[bool] = ContextVar("checked", default=False)
"""True if a command has checked the run: the flow that it starts does not do so again."""


def check_run(config: RunConfig) -> Workflow:
    """Load the workflow and its data, look for the models, try a loss of the user's, write to the store.

    Raises `InvalidInput` or `StoreError` for the first thing that will not work, and what the workflow itself raises.
    """
    workflow_class = load_object(config.workflow)
    if not (isinstance(workflow_class, type) and issubclass(workflow_class, Workflow)):
        raise InvalidInput(f"workflow = {config.workflow!r} is not a subclass of millrace.Workflow")
    loaded = workflow_class(config.dataset or None)
    for name in ("tasks", "run"):
        if getattr(workflow_class, name) is getattr(Workflow, name):
            raise InvalidInput(f"{config.workflow} has no {name}(); write it")
    if not inspect.iscoroutinefunction(inspect.unwrap(loaded.run)):
        raise InvalidInput(f"{config.workflow}.run is no coroutine: write `async def run`, at {place_of(loaded.run)}")
    tasks = tasks_by_split(loaded, config)
    for split, members in tasks.items():
        if not members:
            raise InvalidInput(
                f"{config.workflow} has no tasks in split {split!r}; check `dataset` and `evaluation.split`"
            )
        check_tasks(members, split, where=place_of(loaded.tasks))
    check_tool_parser(config.engine.tool_parser)
    if config.model:
        check_model(config.model)
    elif workflow_class.demonstrations is Workflow.demonstrations:
        raise InvalidInput(f"{config.workflow} has no demonstrations(); write it, or set `model` in the run file")
    else:
        try:
            loaded.demonstrations(1, seed=0)
        except OSError as error:  # a file of theirs
            raise InvalidInput(f"{config.workflow}.demonstrations raised {failure_text(error)}") from error
    check_lengths(config)
    check_engine_arguments(config.engine.vllm)
    if config.train.reference.model:
        check_model(config.train.reference.model)
    if isinstance(loss := config.train.loss, CustomLoss):
        from trainers.objective.custom_loss import check_loss

        check_loss(loss.path, loss.arguments, with_reference=config.train.reference.kind != "none")
    if not probe(open_store(store_uri(config.store))):
        raise StoreError(
            f"store {store_uri(config.store)} lets a second writer replace what the first one wrote; trainer, rollout "
            "worker and driver all write the run's log, so use a folder, or S3 with conditional writes (If-None-Match)"
        )
    play_tasks(loaded, tasks, config)
    if config.dataset and workflow_class.__init__ is Workflow.__init__ and not loaded.dataset_was_read:
        raise InvalidInput(
            f"dataset = {config.dataset!r}: {config.workflow} never reads it; use self.dataset in tasks(), or leave "
            "the key out"
        )
    return loaded


def check_lengths(config: RunConfig) -> None:
    """Raise `InvalidInput` for a length that was set and that the model's positions do not allow.

    Lengths that were not set are cut to the model's positions when the engine starts.
    """
    if (positions := model_positions(config)) is None:
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


def model_positions(config: RunConfig) -> int | None:
    """Longest sequence of the run's model, in tokens; None if the model is not here or does not say."""
    if not config.model:
        return TINY_POSITIONS
    folder = local_folder(config.model)
    return None if folder is None else num_positions(folder)


def check_model(model: str) -> None:
    """Raise `InvalidInput` unless `model` is a model folder or looks like a hub id."""
    folder = Path(model).expanduser()
    with path_errors(f"model = {model!r}"):
        is_folder = folder.is_dir()
        missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
        missing += [] if missing or any(folder.glob("*.safetensors")) else ["safetensors weights"]
    if is_folder and missing:
        raise InvalidInput(f"model = {model!r}: the folder lacks {', '.join(missing)}")
    if not is_folder and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise InvalidInput(
            f"model = {model!r}: no such folder, and not a Hugging Face id like Qwen/Qwen2.5-0.5B-Instruct"
        )
