"""What a user of Millrace imports: `from millrace import Workflow, Task, Chat, Score, score, tool`.

`docs/api.md` describes every name. A name is loaded when it is first used, so this import is free: no torch, no vLLM.

Every process of ours imports this package first. From then on our own imports find our packages, whatever folders of
the same names lie in the working directory or on PYTHONPATH, and threads parse code one after another.
"""

# ruff: noqa: F401 - the imports below are the list of names, and for type checkers and editors

from __future__ import annotations

import ast
import functools
import importlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cli.run.notebook import Run, evaluate, open_run, replay, train
    from rollouts.chat.chat import Chat, OutOfRoom, Reply
    from rollouts.chat.tool_parsing import CallRequest
    from rollouts.chat.tools import Tool, ToolUnavailable, tool
    from rollouts.engines.engine import EngineError
    from rollouts.environments.agents import AgentFailed, AgentWorkflow, CommandWorkflow
    from rollouts.environments.datasets import read_dataset
    from rollouts.environments.environments import Environment, EnvironmentWorkflow, Observation
    from rollouts.environments.rows import read_rows
    from rollouts.environments.verifiers_environments import VerifiersWorkflow
    from rollouts.rewards.answers import exact, final_answer, gsm8k, matches, math_answer
    from rollouts.rewards.code_reward import unit_tests
    from rollouts.rewards.judge import RUBRIC, Judge
    from rollouts.rewards.scoring import RewardFailed, RewardTimeout, score, score_all
    from rollouts.sandbox.sandboxed_tools import run_python, sandboxed
    from rollouts.workflow import Score, Workflow, WorkflowContext, WrongWorkflow, workflow_context
    from settings.errors import InvalidInput, NotFound, UserError
    from storage.records import Message, RolloutGroup, Sampling, Task, ToolCall, Trajectory, Turn
    from trainers.objective.losses import LossInputs, LossOutput


def _parse_one_at_a_time() -> None:
    """Let no thread parse code beside another.

    Python 3.11 and 3.12 count the depth of a syntax tree for all threads together: when the collector lets another one
    in, both raise `SystemError: AST constructor recursion depth mismatch`. Libraries parse while they are imported,
    torch, transformers, pydantic, Prefect and MLflow among them, and some are imported in threads.
    """
    lock, parse = threading.RLock(), ast.parse

    @functools.wraps(parse)
    def alone(*arguments: Any, **keywords: Any) -> Any:
        with lock:
            return parse(*arguments, **keywords)

    ast.parse = alone
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined] # as logging does it


_parse_one_at_a_time()

_IMPORTS = next(node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.If)).body
_HOME = {name.name: node.module for node in _IMPORTS if isinstance(node, ast.ImportFrom) for name in node.names}
"""Each name and its module, as imported above."""

__all__ = sorted(_HOME)

_FOLDER = Path(__file__).resolve().parents[1]
_PACKAGES = ("cli", "infra", "rollouts", "settings", "storage", "tasks", "trainers", "flows")
"""Those before the last are empty; `flows` imports others, to turn telemetry off."""


def _load_own_packages() -> None:
    """Import our top-level packages. Raises `ImportError` if a user's module has one's name."""
    sys.path.insert(0, str(_FOLDER))
    try:
        for name in _PACKAGES:
            package = importlib.import_module(name)
            place = Path(package.__file__ or list(package.__path__)[0]).resolve()
            if place != _FOLDER / name / "__init__.py":
                raise ImportError(f"{place} is imported as {name!r}, a package of Millrace has that name: rename it")
    finally:
        sys.path.remove(str(_FOLDER))


_load_own_packages()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'millrace' has no attribute {name!r}; docs/api.md lists what it has")
    value = getattr(importlib.import_module(str(_HOME[name])), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
