"""Prefect's flow runs from outside of them: cancel one, find those whose process is gone, limit those on GPUs.

In: a Prefect server. Out: states and settings there. Commands call this, not flows; `python -m
tasks.prefect.flow_runs` gives a server with the deployments its automations, and its limit `$MILLRACE_GPU_RUNS`.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
from collections.abc import Callable
from uuid import UUID

import psutil
from prefect.automations import AutomationCore, EventTrigger, Posture
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.events import ResourceSpecification
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Crashed

from infra.services.services import GPU_QUEUE, GPU_RUNS, NOTIFY, POOL
from settings.errors import UserError
from storage.log.run_log import RunLog
from storage.log.runs import is_training, outcome
from tasks.prefect.notifications import failure_automations

ZOMBIES = "millrace: flow runs without a heartbeat"
SILENT_SECONDS = 90
"""Three heartbeats."""
_BEAT = "prefect.flow-run.heartbeat"
_OVER = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut", "Paused", "Suspended", "Scheduled", "AwaitingRetry")
_UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
_NEW_NAMES = {
    "flows.train_grpo.train_grpo": "train-grpo/train",
    "flows.evaluate.evaluate": "evaluate/eval",
    "flows.rollout.rollout": "rollout/produce",
    "flows.maintain.maintain": "maintain/gc",
    "flows.replay.replay": "replay/replay",
}
_GONE = "its process is gone; what was committed is safe, start it again"


async def cancel_flow_run(flow_run_id: str, *, api_url: str) -> bool:
    """Ask the server for what its Cancel button does; False if the flow run is over already."""
    with temporary_settings({PREFECT_API_URL: api_url}):
        async with get_client() as client:
            flow_run = await client.read_flow_run(UUID(flow_run_id))
            if flow_run.state is None or flow_run.state.is_final():
                return False
            await client.set_flow_run_state(flow_run.id, Cancelling(message="millrace stop"))
            return True


def crash_silent_flow_runs() -> AutomationCore:
    """The server marks flow runs Crashed that stop beating: their process, or its machine, is gone."""
    trigger = EventTrigger(
        after={_BEAT},
        expect={_BEAT, *(f"prefect.flow-run.{state}" for state in _OVER)},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=datetime.timedelta(seconds=SILENT_SECONDS),
    )
    crash = ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {SILENT_SECONDS} s: {_GONE}")
    description = "Millrace makes this automation on `millrace up`."
    return AutomationCore(name=ZOMBIES, description=description, trigger=trigger, actions=[crash])


async def make_automation(automation: AutomationCore) -> None:
    """Making one of this name again changes it to what the code says now; switched off, it stays off."""
    async with get_client() as client:
        existing = await client.read_automations_by_name(automation.name)
        if not existing:
            await client.create_automation(automation)
            return
        automation.enabled = existing[0].enabled
        await client.update_automation(existing[0].id, automation)
        for double in existing[1:]:
            await client.delete_automation(double.id)


async def limit_gpu_runs(num_runs: int) -> None:
    """Limit the flow runs of the GPU queue at a time, unless a user has. Raises `ObjectNotFound` without a queue."""
    async with get_client() as client:
        queue = await client.read_work_queue_by_name(GPU_QUEUE, work_pool_name=POOL)
        if queue.concurrency_limit is None:
            await client.update_work_queue(queue.id, concurrency_limit=num_runs)


async def remove_old_deployments() -> list[str]:
    """Delete the deployments that an older version named `local`, once no flow run of theirs is left to end.

    A schedule that was on is on in the one that has taken its place. Returns the names of the deleted ones.
    """
    removed = []
    unfinished = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNFINISHED)))
    of_old_name = DeploymentFilter(name=DeploymentFilterName(any_=["local"]))
    async with get_client() as client:
        for old in await client.read_deployments(deployment_filter=of_old_name):
            new, this = _NEW_NAMES.get(old.entrypoint or ""), DeploymentFilter(id=DeploymentFilterId(any_=[old.id]))
            waiting = await client.read_flow_runs(deployment_filter=this, flow_run_filter=unfinished)
            if new is None or not all(flow_run.auto_scheduled for flow_run in waiting):
                continue
            if any(schedule.active for schedule in old.schedules):
                heir = await client.read_deployment_by_name(new)
                for schedule in heir.schedules:
                    await client.update_deployment_schedule(heir.id, schedule.id, active=True)
            await client.delete_deployment(old.id)
            removed.append(f"{new.split('/')[0]}/local")
    return removed


async def set_up_server() -> None:
    """What a server needs beside the deployments. Raises `InvalidInput` for a bad `$MILLRACE_NOTIFY`."""
    destination = os.environ.get(NOTIFY, "")
    for automation in [crash_silent_flow_runs(), *(await failure_automations(destination) if destination else [])]:
        await make_automation(automation)
    for name in await remove_old_deployments():
        print(f"the deployment {name} had a name of an older version, and is removed")
    if num_runs := os.environ.get(GPU_RUNS):
        await limit_gpu_runs(int(num_runs))


async def crash_lost_flow_runs(log_of: Callable[[str, str], RunLog]) -> list[str]:
    """Mark those Crashed whose process is gone; returns their names. All workers must be of this machine. `log_of` a
    store and a name is the log of a run."""
    unfinished = [StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
    wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished)))
    names = []
    async with get_client() as client:
        for flow_run in await client.read_flow_runs(flow_run_filter=wanted, limit=200):
            if _is_lost(flow_run) or _is_killed_training(flow_run, log_of):
                await client.set_flow_run_state(flow_run.id, Crashed(message=_GONE), force=True)
                names.append(flow_run.name)
    return names


def _is_lost(flow_run: FlowRun) -> bool:
    """Whether it has run as a process and does not any more. A suspended one needs none; a container has a name."""
    pid = flow_run.infrastructure_pid or ""
    suspended = flow_run.state is not None and flow_run.state.state_details.pause_reschedule
    if suspended or not pid.isdecimal():
        return False
    try:
        process = psutil.Process(int(pid))
        alive = process.status() != psutil.STATUS_ZOMBIE
        return not (alive and process.environ().get("PREFECT__FLOW_RUN_ID") == str(flow_run.id))
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False  # another process has the number, or it is one we may not look into


def _is_killed_training(flow_run: FlowRun, log_of: Callable[[str, str], RunLog]) -> bool:
    """Whether a command's process began it, of which Prefect keeps no number, and the run's log says that none trains
    it."""
    run = flow_run.parameters.get("run")
    if flow_run.infrastructure_pid or "workflow" not in flow_run.parameters or not isinstance(run, str):
        return False
    try:
        log = log_of(str(flow_run.parameters.get("store") or ""), run)
        return outcome(log) != "running" and not is_training(log)
    except (UserError, OSError):  # a store that cannot be asked says nothing of who trains
        return False


if __name__ == "__main__":
    try:
        asyncio.run(set_up_server())
    except ValueError as error:
        sys.exit(str(error))
