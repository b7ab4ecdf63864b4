"""Everything that can be found wrong in a second, before anything heavy starts.

In: the values of a run's configuration. Out: the workflow, or a `InvalidInput` that names the thing and the fix.
"""

from __future__ import annotations

from pathlib import Path

from infra.environment import store_uri
from infra.user_code import load_object
from rollouts.chat.tool_parsing import check_tool_parser
from rollouts.workflow import Workflow
from settings.errors import InvalidInput, path_errors
from settings.loss import CustomLoss, Loss
from settings.run_file import RunConfig
from storage.objects.object_store import StoreError
from storage.objects.opening import open_store, probe


def check_run(config: RunConfig) -> Workflow:
    """Load the workflow and its data, look for the models, try a loss of the user's, write to the store.

    Returns the workflow.

    Raises `InvalidInput`, or `storage.objects.object_store.StoreError`, for the first thing that will not work.
    """
    workflow_class = load_object(config.workflow)
    if not (isinstance(workflow_class, type) and issubclass(workflow_class, Workflow)):
        raise InvalidInput(f"workflow = {config.workflow!r} is not a subclass of millrace.Workflow")
    loaded = workflow_class(config.dataset or None)
    for split in dict.fromkeys(["train", config.evaluation.split]):
        if not loaded.tasks(split):
            raise InvalidInput(
                f"{config.workflow} has no tasks in split {split!r}; check `dataset` and `evaluation.split`"
            )
    check_tool_parser(config.engine.tool_parser)
    if config.model:
        check_model(config.model)
    else:
        loaded.demonstrations(1, seed=0)
    if config.train.reference.model:
        check_model(config.train.reference.model)
    check_loss(config.train.loss, with_reference=config.train.reference.kind != "none")
    if not probe(open_store(store_uri(config.store))):
        raise StoreError(
            f"store {store_uri(config.store)} lets a second writer replace what the first one wrote; trainer, rollout "
            "worker and driver all write the run's log, so use a folder, or S3 with conditional writes (If-None-Match)"
        )
    return loaded


def check_loss(loss: Loss, *, with_reference: bool) -> None:
    """Raise `InvalidInput` for a custom loss that cannot be imported, or that fails on a trial of five tokens."""
    if isinstance(loss, CustomLoss):
        from trainers.objective import custom_loss

        custom_loss.check_loss(loss.path, loss.arguments, with_reference=with_reference)


def check_model(model: str) -> None:
    """Raise `InvalidInput` unless `model` is a model folder or looks like a hub id."""
    folder = Path(model).expanduser()
    with path_errors(f"model = {model!r}"):
        is_folder = folder.is_dir()
        missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
        has_weights = any(folder.glob("*.safetensors"))
    if is_folder and (missing or not has_weights):
        raise InvalidInput(f"model = {model!r}: the folder lacks {', '.join(missing) or 'safetensors weights'}")
    if is_folder:
        return
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise InvalidInput(
            f"model = {model!r}: no such folder, and not a Hugging Face id like Qwen/Qwen2.5-0.5B-Instruct"
        )
