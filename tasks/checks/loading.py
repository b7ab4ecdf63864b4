"""A run's workflow and its tasks, loaded, with the shape that both must have.

In: a run's configuration. Out: the workflow, and its tasks by split; else an error with the user's file and line.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import time
from collections.abc import Sequence

from infra.user_code import load_object
from rollouts.workflow import Workflow, place_of
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.records import Task
from tasks.checks.playing import errors_of_users
from tasks.checks.trial import check_tasks

_MOST_TASKS = 10_000_000
"""Every process keeps all of them, and their ids are compared."""
_SECONDS_FOR_TASKS = 2.0
"""Tasks that take no longer to make are made twice."""


def load_workflow(config: RunConfig) -> Workflow:
    """The run's workflow, with its data. Raises `InvalidInput` unless it can be made and has its methods."""
    if not config.workflow:
        raise InvalidInput("workflow = '' names nothing; write package.module:Name or path/to/file.py:Name")
    with errors_of_users(f"workflow = {config.workflow!r}"):
        workflow_class = load_object(config.workflow)
    if not (isinstance(workflow_class, type) and issubclass(workflow_class, Workflow)):
        raise InvalidInput(f"workflow = {config.workflow!r} is not a subclass of millrace.Workflow")
    made_by = vars(workflow_class).get("__init__", workflow_class)  # of a dataclass it has no file
    is_written = os.path.isfile(getattr(getattr(made_by, "__code__", None), "co_filename", ""))
    with errors_of_users(f"{config.workflow}({config.dataset or None!r})", made_by if is_written else workflow_class):
        loaded = workflow_class(config.dataset or None)
    for name in ("tasks", "run"):
        if getattr(workflow_class, name) is getattr(Workflow, name):
            raise InvalidInput(f"{config.workflow} has no {name}(); write it")
    for name in ("tasks", "demonstrations", "reference_reply", "accept", "run"):
        if isinstance(value := inspect.getattr_static(loaded, name), property) or not hasattr(value, "__get__"):
            raise InvalidInput(
                f"{config.workflow}.{name} is a {type(value).__name__}, not a method: write `def {name}`"
            )
    for name in ("tasks", "demonstrations", "reference_reply", "accept"):
        method = inspect.unwrap(getattr(loaded, name))
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise InvalidInput(
                f"{config.workflow}.{name} is awaited by nothing: write `def {name}`, at {place_of(method)}"
            )
    for name in ("run", "run_agent", "score", "score_group", "close"):
        method = getattr(loaded, name, None)
        if method is not None and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            raise InvalidInput(
                f"{config.workflow}.{name} is no coroutine: write `async def {name}`, at {place_of(method)}"
            )
    preload = getattr(loaded, "preload", ())
    if not isinstance(preload, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in preload):
        raise InvalidInput(f"{config.workflow}.preload is {preload!r}; write a list of names of modules")
    for name in preload:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise InvalidInput(f"{config.workflow}.preload names {name!r}, and there is no such module; install it")
    return loaded


def load_tasks(workflow: Workflow, config: RunConfig) -> dict[str, Sequence[Task]]:
    """The run's tasks by split. Raises `InvalidInput` for a split that has none, or wrong ones."""
    tasks = {}
    for split in dict.fromkeys(["train", config.evaluation.split]):
        began = time.monotonic()
        with errors_of_users(f"{config.workflow} has no split {split!r}, or cannot make its tasks", workflow.tasks):
            members = workflow.tasks(split)
            is_quick = time.monotonic() - began < _SECONDS_FOR_TASKS
            again = workflow.tasks(split) if is_quick else members
        where = place_of(workflow.tasks)
        if not hasattr(members, "__len__") or not hasattr(members, "__getitem__") or isinstance(members, str | dict):
            what = f"{config.workflow}.tasks({split!r}) returned {type(members).__name__}"
            raise InvalidInput(f"{what}; return a list of Task, at {where}")
        if len(members) == 0:  # arrays have no truth value
            raise InvalidInput(
                f"{config.workflow} has no tasks in split {split!r}; check `dataset` and `evaluation.split`"
            )
        if len(members) > _MOST_TASKS:
            what = f"{config.workflow} has {len(members):,} tasks in split {split!r}, and every process keeps them all"
            raise InvalidInput(f"{what}; return at most {_MOST_TASKS:,}, at {where}")
        check_tasks(members, split, where=where)
        if len(again) != len(members) or any(
            repr(one) != repr(other) for one, other in zip(again, members, strict=True)
        ):
            what = f"{config.workflow}.tasks({split!r}) returns other tasks each time, and every process calls it"
            raise InvalidInput(f"{what}; draw from random.Random(0), sort folders and sets, at {where}")
        tasks[split] = members
    return tasks
