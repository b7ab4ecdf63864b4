"""Everything that can be found wrong in seconds, before anything heavy starts.

In: the values of a run's configuration. Out: the workflow, or an error that names the thing and the fix.

    check_run          imports, data, models, loss, store: what every start checks
    check_references   reference_reply ─▶ scripted engine ─▶ run ─▶ reward 1? what `--dry-run` and `doctor` check too
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.environment import store_uri
from infra.user_code import load_object
from rollouts.chat.chat import Chat, Reply
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ParsedReply, ToolParser, check_tool_parser
from rollouts.chat.tools import ToolUnavailable
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.evaluation import CORRECT
from rollouts.rewards.scoring import RewardPool, set_reward_pool
from rollouts.workflow import Score, Workflow, WorkflowContext, set_workflow_context
from settings.errors import InvalidInput, failure_text, path_errors
from settings.loss import CustomLoss
from settings.run_file import RunConfig
from storage.objects.object_store import StoreError
from storage.objects.opening import open_store, probe
from storage.records import Message, Sampling, Task


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
    for split in dict.fromkeys(["train", config.evaluation.split]):
        if not loaded.tasks(split):
            raise InvalidInput(
                f"{config.workflow} has no tasks in split {split!r}; check `dataset` and `evaluation.split`"
            )
    check_tool_parser(config.engine.tool_parser)
    if config.model:
        check_model(config.model)
    elif workflow_class.demonstrations is Workflow.demonstrations:
        raise InvalidInput(f"{config.workflow} has no demonstrations(); write it, or set `model` in the run file")
    else:
        loaded.demonstrations(1, seed=0)
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
    return loaded


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


def local_folder(model: str) -> Path | None:
    """The folder of a model that is on this machine: its own, or the hub's cache. None if it is not here."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def check_references(workflow: Workflow, config: RunConfig, *, num_tasks: int = 20) -> int:
    """Play `reference_reply` on the first tasks of each split; returns how many tasks were won, each with reward 1.

    Passed over are tasks without a reference, without a tool's server, or whose reference calls tools while the model,
    whose tokenizer reads the calls, is not on this machine. Raises `InvalidInput` if any other task is not won.
    """
    if type(workflow).reference_reply is Workflow.reference_reply:
        return 0
    splits = dict.fromkeys(["train", config.evaluation.split])
    tasks = [(split, task) for split in splits for task in workflow.tasks(split)[:num_tasks]]
    outcomes = asyncio.run(_play_references(workflow, tasks, config))
    lost = [(split, task.id, why) for (split, task), why in zip(tasks, outcomes, strict=True) if why]
    if lost:
        split, task_id, why = lost[0]
        raise InvalidInput(
            f"reference_reply does not win {len(lost)} of {len(tasks)} tasks. task {task_id!r} of split {split!r}: "
            f"{why}\nMend the task's answer, its reward or reference_reply, which may return None if it does not know"
        )
    return outcomes.count("")


async def _play_references(
    workflow: Workflow, tasks: Sequence[tuple[str, Task]], config: RunConfig
) -> list[str | None]:
    """Why each task was not won: "" if it was, None if nothing can be said."""
    parser = _ReferenceParser(config.engine.tool_parser, model=config.model)
    settings, limit = config.reward, config.rollout.attempt_timeout
    rewards = RewardPool(num_processes=settings.processes, timeout=settings.timeout, memory_gb=settings.memory_gb)

    async def play(split: str, task: Task) -> str | None:
        set_workflow_context(WorkflowContext(is_eval=split != "train", task_id=task.id, attempt=0))
        set_reward_pool(rewards)
        chat, problem = _ReferenceChat(workflow, task, parser), ""
        try:
            score = await asyncio.wait_for(workflow.run(task, chat), limit)
            if not isinstance(score, Score):
                problem = f"run returned {type(score).__name__}, not a Score"
            elif type(workflow).score_group is Workflow.score_group and not (score.reward or 0.0) >= CORRECT:
                problem = f"its reward is {score.reward}, and an attempt that wins has {CORRECT:g}"
        except ToolUnavailable:  # a server that the run will have, perhaps
            return None
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is the outcome
            problem = failure_text(error)
        return None if chat.reference_is_unknown else problem

    async with rewards:
        try:
            return await asyncio.gather(*(play(split, task) for split, task in tasks))
        finally:
            await workflow.close()
            if "rollouts.endpoint.agent_endpoint" in sys.modules:  # what was not imported was not started
                from rollouts.endpoint.agent_endpoint import close_agent_endpoint

                await close_agent_endpoint()


class _Unknown(Exception):
    """There is no reference for what comes next."""


class _ReferenceChat(Chat):
    """A conversation with a policy that says what the workflow's reference says."""

    def __init__(self, workflow: Workflow, task: Task, parser: ToolParser) -> None:
        self._workflow, self._task, self._next_reply = workflow, task, ""
        self.reference_is_unknown = False
        tokens = _Characters()
        super().__init__(
            engine=ScriptedEngine(lambda *_: [*map(ord, self._next_reply), tokens.end_id]),
            tokens=tokens,
            sampling=Sampling(max_tokens=2**20),
            max_model_len=2**30,
            request_id=task.id,
            tool_parser=parser,
        )

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        try:
            reply = self._workflow.reference_reply(self._task, messages)
            if reply is None:
                raise _Unknown
            self._next_reply = reply
            return await super().complete(messages, **options)
        except _Unknown:
            self.reference_is_unknown = True
            raise


class _Characters(ChatTokens):
    """Stands in for the model's tokenizer: each character is a token."""

    def __init__(self) -> None:
        self.end_id = sys.maxunicode + 1

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return [ord(character) for message in messages for character in message.content]

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        return self.prompt(messages)

    def text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(chr(token) for token in token_ids if token != self.end_id)


class _ReferenceParser(ToolParser):
    """Loads its tokenizer, which vLLM's parsers ask for special tokens, when the first reply with tools is read."""

    def __init__(self, name: str, *, model: str) -> None:
        super().__init__(name, None)
        self._model = model
        self._one_at_a_time = asyncio.Lock()

    async def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedReply:
        async with self._one_at_a_time:  # the first one imports vLLM
            return await super().parse(text, tools)

    def _load(self, tools: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
        if not self._model:
            from trainers.model.warmup import character_tokenizer

            self._tokenizer = character_tokenizer(set("".join(map(chr, range(128)))))
        elif (folder := local_folder(self._model)) is not None:
            self._tokenizer = ChatTokens.load(folder).tokenizer
        else:
            raise _Unknown
        return super()._load(tools)
