"""The run in Prefect, beyond the states of its flow run: a page beside the loop, and events that automations hang on.

In: a log. Out: artifacts `run-<run>` (Markdown, a new version each time: its history is the run's) and
`progress-<run>`, and events on the resource `millrace.run.<run>`. All of it is in the log too: a server that is down
holds nothing up, and costs one warning.

| event | when |
|---|---|
| `millrace.alias.rollout` | the engines serve another policy |
| `millrace.training.finished` | the last step is served and evaluated |
| `millrace.gate.passed`, `millrace.gate.failed` | an evaluation made its policy the champion, or did not |
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, aupdate_progress_artifact
from prefect.context import FlowRunContext
from prefect.events import emit_event

from infra.environment import local_tracking_uri
from infra.services.services import TRAINING_VIEW, running_services
from settings.errors import in_one_line
from settings.places.state_folder import home
from settings.redaction import as_markdown, as_markdown_code, without_secrets
from storage.log.entries import Step
from storage.log.promotion import CHAMPION
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.log.scores import own_scores

logger = logging.getLogger("millrace.artifacts")

LEAST_PAUSE = 10.0
"""Seconds between two versions: rounds may be short, and the server writes each of them down."""
_ANSWER_SECONDS = 10.0
_ROWS = 10


Happening = Literal["alias.rollout", "training.finished", "gate.passed", "gate.failed"]


def announce(log: RunLog, what: Happening, *, version: int, **details: Any) -> None:
    """Tell Prefect, if this is a flow run: outside of one Prefect would start a server for the event."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": f"millrace.run.{log.run_id}", "prefect.resource.name": log.run_id}
    payload = {"run": log.run_id, "store": log.store.uri, "version": version, **details}
    emit_event(event=f"millrace.{what}", resource=resource, payload=payload)


class RunPage:
    """Writes the artifacts of one flow run; outside of one it writes nothing."""

    def __init__(self, log: RunLog, *, steps: int, tracking: str, mlflow_run: Callable[[], str]) -> None:
        """`tracking` is MLflow's URI; `mlflow_run` says the run's page there, empty as long as MLflow has not heard."""
        self._log = log
        self._config = run_config(log)
        self._steps = steps
        self._tracking = tracking
        self._mlflow_run = mlflow_run
        self._progress_id: UUID | None = None
        self._written_at = -LEAST_PAUSE
        self._written_entries = 0
        self._warned = False

    async def update(self, *, finished: bool = False) -> None:
        """Write what is new in the log, unless that was done a moment ago; `finished` does not wait for that moment."""
        state, now = self._log.state, time.monotonic()
        is_due = now - self._written_at >= LEAST_PAUSE and state.entries > self._written_entries
        if FlowRunContext.get() is None or not (is_due or finished):
            return
        self._written_at, self._written_entries = now, state.entries
        try:
            if finished:
                self._log.refresh()  # a trainer may have committed a step after the last wait for it
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._write()
            self._warned = False
        except Exception as error:  # noqa: BLE001 - whatever it is: the run does not need its page
            if not self._warned:
                logger.warning("Prefect does not take the run's page in; the log has all of it: %r", error)
            self._warned = True

    async def _write(self) -> None:
        log, mlflow = self._log, _mlflow_server(self._tracking)
        text = summary(log, self._config, steps=self._steps, mlflow=mlflow, mlflow_run=self._mlflow_run())
        await acreate_markdown_artifact(text, key=f"run-{artifact_key(log.run_id)}", description=f"run {log.run_id}")
        step, steps = log.state.step, self._steps
        progress, sentence = 100 * min(1.0, step / max(1, steps)), f"step {step} of {steps}"
        if self._progress_id is None:
            key = f"progress-{artifact_key(log.run_id)}"
            self._progress_id = await acreate_progress_artifact(progress, key=key, description=sentence)
        else:
            await aupdate_progress_artifact(self._progress_id, progress, description=sentence)


def artifact_key(run: str) -> str:
    """A run id as Prefect wants keys: small letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")


def summary(log: RunLog, config: dict[str, Any], *, steps: int, mlflow: str, mlflow_run: str) -> str:
    """A run as Markdown; `mlflow` is the address of a server, empty if none shows the run, and `mlflow_run` the
    run's page there, empty until MLflow has heard of the run."""
    state, run = log.state, log.run_id
    champion, counters = state.aliases.get(CHAMPION), state.counters()
    scores = own_scores(log, config)
    policies = f"{mlflow}/#/models/{quote(run)}{TRAINING_VIEW}"
    facts = {
        "step": f"{state.step} of {steps}{_ended(log)}",
        "policy": "none yet" if state.live is None else f"{state.live.version}, `{state.live.weights_sha256[:12]}`",
        "champion": "none" if champion is None else f"policy {champion.version}",
        "held-out": " → ".join(dict.fromkeys(f"{e.score:.3f} (policy {e.version})" for e in scores[:1] + scores[-1:]))
        or "not evaluated",
        "prompt groups": ", ".join(f"{count} {name}" for name, count in counters.items() if count),
        "store": as_markdown_code(log.store.uri),
        "MLflow": f"[policies]({policies})" if mlflow else "no server shows it: `millrace up`",
        "web page": f"`millrace report {run}` writes `reports/{run}.html` in the state folder",
    }
    if mlflow and mlflow_run:
        facts["MLflow"] = f"[run]({mlflow}/{mlflow_run}{TRAINING_VIEW}), {facts['MLflow']}"
        beside = f"{mlflow}/{mlflow_run}/artifacts{TRAINING_VIEW}"
        facts["web page"] += f"; the end of the run puts it [beside the run]({beside})"
    lines = [f"# run {run}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    if state.step:
        lines += ["| step | reward | staleness | engine gap | tokens/s | seconds |", "|---|---|---|---|---|---|"]
        lines += [_row(state.steps[place]) for place in range(state.step - 1, max(-1, state.step - 1 - _ROWS), -1)]
    return "\n".join(lines)


def _ended(log: RunLog) -> str:
    """How the run ended, unless it has all its steps, or that it is paused."""
    ended, paused = log.state.ended, log.state.paused
    if ended is not None and ended.outcome != "finished":
        reason = f": {as_markdown(in_one_line(ended.reason))}" if ended.reason else ""
        return f", **{as_markdown(ended.outcome)}**{reason}"
    return f", **paused**: {as_markdown(paused)}" if paused else ""


def _row(step: Step) -> str:
    columns = ("reward", "staleness_mean", "engine_gap", "tokens_per_second", "round_seconds")
    values = [f"{step.metrics[name]:.4g}" if name in step.metrics else "" for name in columns]
    return f"| {' | '.join([str(step.claim.step), *values])} |"


def _mlflow_server(tracking: str) -> str:
    if tracking == local_tracking_uri():
        service = running_services(home()).get("mlflow")
        return "" if service is None else service.url
    return without_secrets(tracking).rstrip("/") if tracking.startswith("http") else ""
