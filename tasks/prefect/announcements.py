"""What Prefect hears about a run beyond its states: events that automations hang on.

In: a session and what happened. Out: an event on the resource `millrace.run.<run>`, sent by a thread of Prefect's own:
a server that is down holds nothing up, and the log has it all anyway.

| event | when |
|---|---|
| `millrace.alias.rollout` | the engines serve another policy |
| `millrace.training.finished` | the last step is served and evaluated |
| `millrace.gate.passed`, `millrace.gate.failed` | an evaluation made its policy the champion, or did not |
"""

from __future__ import annotations

from typing import Any, Literal

from prefect.context import FlowRunContext
from prefect.events import emit_event

from storage.log.run_log import RunLog

Happening = Literal["alias.rollout", "training.finished", "gate.passed", "gate.failed"]


def announce(log: RunLog, what: Happening, *, version: int, **details: Any) -> None:
    """Tell Prefect, if this is a flow run: outside of one Prefect would start a server for the event."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": f"millrace.run.{log.run_id}", "prefect.resource.name": log.run_id}
    payload = {"run": log.run_id, "store": log.store.uri, "version": version, **details}
    emit_event(event=f"millrace.{what}", resource=resource, payload=payload)
