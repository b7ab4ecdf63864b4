"""What people read on MLflow's pages: the experiment, a run, a policy, and the shards of a step.

In: a run's log. Out: Markdown, and the schema and profile of a dataset as MLflow's JSON.
"""

from __future__ import annotations

import getpass
import json
import os
from typing import Any

import pyarrow as pa

from settings.errors import in_one_line
from settings.redaction import as_markdown, as_markdown_code
from storage.log.entries import OUTCOMES, Session, Step
from storage.log.promotion import CHAMPION
from storage.log.run_log import RunLog
from storage.log.scores import own_scores
from storage.shards.schema import SCHEMA

ABOUT = (
    "Training runs of Millrace: one MLflow run and one registered model for each, as views of the run's log. What "
    "MLflow misses while it is away is sent later. `train/…` are the metrics of a step, `eval/…` held-out scores; the "
    "datasets are the shards that each step was trained on."
)
"""Description of the experiment."""

_TYPES = {"string": "string", "bool": "boolean", "float": "float", "double": "double", "int64": "long"}
"""Arrow type → MLflow's type; others are integers, or lists, which its pages do not show."""
SHARD_SCHEMA = json.dumps(
    {
        "mlflow_colspec": [
            {"name": field.name, "type": _TYPES.get(str(field.type), "integer"), "required": not field.nullable}
            for field in SCHEMA
            if not (pa.types.is_nested(field.type) or pa.types.is_null(field.type))
        ]
    }
)


def describe_run(log: RunLog, config: dict[str, Any]) -> str:
    """A run in a few lines of Markdown."""
    state, run = log.state, log.run_id
    scores, champion = own_scores(log, config), state.aliases.get(CHAMPION)
    steps = f" of {state.sessions[-1].steps}" if state.sessions and state.sessions[-1].steps else ""
    facts = {
        "workflow": as_markdown_code(config.get("workflow", "")),
        "model": as_markdown_code(config["model"]) if config.get("model") else "",
        "steps": f"{state.step}{steps}",
        "held-out": " → ".join(dict.fromkeys(f"{e.score:.3f} (policy {e.version})" for e in scores[:1] + scores[-1:])),
        "champion": f"policy {champion.version}" if champion else "",
        "ended": as_markdown(in_one_line(f"{state.ended.outcome} {state.ended.reason}".strip())) if state.ended else "",
        "store": as_markdown_code(f"{log.store.uri}/runs/{run}"),
        "all numbers": f"`millrace status {run}`, `millrace report {run}`; the end of a run puts its report among the "
        "artifacts",
        "what made a policy": f"`millrace lineage {run} --policy N`, for those that are not registered too",
    }
    lines = [f"* {name}: {fact}" for name, fact in facts.items() if fact]
    return "\n".join([f"Run `{run}` of Millrace.", "", *lines])


def user_name() -> str:
    """The user of this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return str(os.getuid())


def describe_policy(log: RunLog, version: int, *, session: Session | None, config_sha256: str) -> str:
    """A policy in a few lines of Markdown; `session` made it, None if the log does not say."""
    policy, step = log.state.policies[version], log.state.steps[version - 1] if version else None
    facts = {"weights": f"{log.store.uri}/{as_markdown(policy.path)}"}
    made = "the base model."
    if step is not None:
        made = f"made by step {step.claim.step} from policy {policy.parent}."
        facts["prompt groups"] = ", ".join(f"{len(getattr(step.claim, outcome))} {outcome}" for outcome in OUTCOMES)
        facts["shards"] = f"{len(step.shard_sha256)}, the input `step-{step.claim.step}` of the MLflow run"
    if policy.anchor is not None:
        facts["difference to policy"] = str(policy.anchor)
    if session is not None:
        facts |= {"code": as_markdown(session.code_version), "reward code, sha256": as_markdown(session.reward_sha256)}
    facts["configuration, sha256"] = config_sha256
    facts["all of it"] = f"`millrace lineage {log.run_id} --policy {version}`"
    lines = [f"* {name}: {fact}" for name, fact in facts.items() if fact]
    return "\n".join([f"Policy {version} of run {log.run_id}: {made}", "", *lines])


def step_profile(log: RunLog, step: Step) -> str:
    """Groups and rows that a step trained on, and their mean reward over usable attempts; None without any."""
    groups = [log.state.groups[group.group_id] for group in step.claim.trained]
    rewards = [(group.mean_reward, group.usable) for group in groups if group.mean_reward is not None]
    usable = sum(count for _, count in rewards)
    mean = sum(reward * count for reward, count in rewards) / usable if usable else None
    return json.dumps({"num_groups": len(groups), "num_rows": sum(g.rows for g in groups), "mean_reward": mean})
