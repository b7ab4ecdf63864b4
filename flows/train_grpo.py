"""The training flow: GRPO as a loop over durable records.

    produce ─▶ shard in the log ─▶ next_batch ─▶ train_step ─▶ publish ─▶ the next tokens come from the new policy
       └── runs beside the loop; with max_staleness = 0 it waits for `publish`, with more it runs ahead ──┘

| part | waits for |
|---|---|
| produce | room in its quota: a newer policy, or a rejected group |
| next_batch | enough committed groups within the staleness bound |
| publish | an evaluation that is running on the loaded version |
| train_step | with `engine.share = "phases"` the same, for the engine sleeps meanwhile |
| evaluate, track, tidy | nothing; only the end of the flow waits for them |

Killed at any point, the same call continues from the log.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow

from settings.places.run_paths import absolute_paths
from settings.run_file import RunConfig, Settings, make_config
from settings.tracking import TrackingSettings
from tasks.base_model import provide_base_model
from tasks.checks.preflight import CHECKED, check_run
from tasks.control import listening, resumed
from tasks.evaluation import is_evaluated, try_gate, warn_of_a_fall
from tasks.mirror import track
from tasks.prefect.run_logs import outside_session
from tasks.prefect.run_page import announce
from tasks.rollout import evaluate_policy, produce, publish_policy, start_rollout_worker
from tasks.session import RunSession, in_flow_run, training_session
from tasks.steps import (
    all_sampled,
    forget_results,
    next_batch,
    open_trainer,
    start_trainer,
    train_step,
    unsearched,
    watched,
)


@flow(name="train-grpo", flow_run_name="{run}", persist_result=False)
async def train_grpo(
    workflow: str = "examples.arithmetic:Arithmetic",
    run: str = "arithmetic",
    store: str = "",
    tracking: str | TrackingSettings = "",
    model: str = "",
    dataset: str = "",
    steps: int = 100,
    batch_size: int = 64,
    n_samples: int = 8,
    max_staleness: float = 0,
    learning_rate: float = 1e-6,
    seed: int = 0,
    reproducible: bool = False,
    settings: Settings = Settings(),  # noqa: B008 - Prefect shows the default in the form
    adopt_tasks: bool = False,
) -> dict[str, Any]:
    """Train a policy by GRPO; starting a run again continues it.

    Args:
        workflow: What to train on: package.module:Class or path/to/file.py:Class.
        run: Name of the run. Starting it again continues it.
        store: A folder, file:///… or s3://bucket/prefix. Empty: $MILLRACE_STORE, or .millrace/store.
        tracking: MLflow tracking URI, or a block with it. Empty: $MILLRACE_TRACKING, or a SQLite database in .millrace.
        model: Hugging Face id or folder. Empty: make a tiny one from the workflow's demonstrations.
        dataset: Handed to the workflow: a file, a folder with one file per split, or a Hugging Face id.
        steps: Optimizer steps in all.
        batch_size: Prompt groups trained per step.
        n_samples: Attempts per prompt, the group size.
        max_staleness: How many weight updates a trained token may be behind. 0 is synchronous training.
        learning_rate: Peak learning rate of AdamW.
        seed: Seeds prompt order, sampling, mini-batches and the base model made here.
        reproducible: The run is a function of its settings: log-probabilities do not depend on what else is in a batch.
        settings: Everything else, one block per part.
        adopt_tasks: Go on although the tasks are other than before, with those to train on from a new epoch.
    """
    document = {
        **settings.model_dump(exclude_unset=True),
        **dict(workflow=workflow, run=run, store=store, model=model, dataset=dataset),
        "tracking": tracking if isinstance(tracking, str) else tracking.model_dump(),
        **dict(steps=steps, batch_size=batch_size, n_samples=n_samples, max_staleness=max_staleness),
        **dict(learning_rate=learning_rate, seed=seed, reproducible=reproducible),
    }
    with outside_session():
        config = make_config(absolute_paths(document, Path.cwd()), source="flow parameters")
        checked = CHECKED.get() or check_run(config, adopt_tasks=adopt_tasks)
    config, tasks = checked.config, checked.tasks
    async with in_flow_run(training_session(config, tasks=tasks, adopt_tasks=adopt_tasks)) as session:
        async with listening(session):
            await resumed(session)  # one that was paused stays so, without an engine
            telling_mlflow = asyncio.create_task(track(session.mirror))  # beside the start of the engines
            if await something_is_left(session, config):
                await start(session, config)
            await train(session, config, telling_mlflow)
        state = session.log.state
        return {"run": config.run, "step": state.step, **state.counters(), "missing": session.mirror.missing()}


async def something_is_left(session: RunSession, config: RunConfig) -> bool:
    """False if the run has all its steps and its last evaluation: engines and a trainer would start for nothing."""
    if session.log.state.step < config.steps or evaluation_is_missing(session, config):
        return True
    return not await asyncio.to_thread(session.fleet.newest_is_served)


async def begin(session: RunSession, config: RunConfig) -> None:
    """What a command begins before the flow run: everything up to the first tokens, and then the trainer."""
    if session.log.refresh().paused or not await something_is_left(session, config):
        return
    with session.before_flow_run():
        await start_engines(session, config, provide_base_model.fn, start_rollout_worker.fn)
        session.once("start-trainer", lambda: open_trainer(session, config))


async def start(session: RunSession, config: RunConfig) -> None:
    """Engines first, and the trainer beside them only if there are cores for it: the first tokens need no trainer."""
    together = session.fleet.leaves_cores(config.train.num_ranks)
    async with asyncio.TaskGroup() as starting:
        if together:
            starting.create_task(start_trainer(session, config=config))
        await start_engines(session, config, provide_base_model, start_rollout_worker)
        if not together:
            starting.create_task(start_trainer(session, config=config))
    # The libraries stay until the end: the collector need not walk them again and again, while a round waits. After the
    # second look it no longer counts them: it would look at what is old only once there is a quarter more of it.
    gc.collect()
    gc.freeze()
    gc.collect()


async def start_engines(
    session: RunSession, config: RunConfig, provide: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    """The base policy by `provide`, then each engine by `launch`; their workers begin at once. A second call finds that
    done."""
    await provide(session, config=config)
    session.housekeeping.announce()
    session.fleet.check_transfer()
    workers = session.fleet.first_names(config.rollout.num_workers)
    evaluators = ["evaluator-0"] if config.evaluation.own_engine else []
    version = session.fleet.due_version()
    launching = (launch(session, name=name, version=version) for name in (*workers, *evaluators))
    checksums = await asyncio.gather(*launching)
    if not session.fleet.workers:
        session.fleet.mark_served(checksums, version=version)
        await session.fleet.take_part(workers)
        session.fleet.evaluator = session.fleet.hosted.get("evaluator-0")
        await session.fleet.refresh()


async def train(session: RunSession, config: RunConfig, telling_mlflow: asyncio.Task[int]) -> None:
    """The loop. `produce` runs beside it; evaluation and tracking, of which a first call is on its way, never hold it
    up."""
    patience = config.rollout.stall_timeout
    async with asyncio.TaskGroup() as beside:
        producing = [beside.create_task(produce(session, name)) for name in session.fleet.workers]
        if config.rollout.schedule == "fixed":  # an earlier session may have ended before it came to that
            await publish_newest(session, config)
        evaluating = [beside.create_task(evaluate_if_due(session, config))]  # after them: rounds wait for their tokens
        session.clock.next_round()
        while session.log.state.step < config.steps:
            claim = await next_batch(session, config=config)
            async with session.device.training():
                training = train_step(session, claim=unsearched(claim), config=config)
                step = await watched(session, training, what=f"step {claim.step}", seconds=patience)
            if step is None:
                await session.device.generate()
                continue  # a damaged shard went into quarantine
            await publish_newest(session, config)
            await session.device.generate()
            evaluating = [task for task in evaluating if not task.done()]
            evaluating.append(beside.create_task(evaluate_if_due(session, config)))
            beside.create_task(session.housekeeping.tidy(claim.step))
            forget_results()
            if telling_mlflow.done() and session.mirror.is_due:
                telling_mlflow = beside.create_task(track(session.mirror))
        await asyncio.gather(*evaluating)  # beside `produce`, which replaces a worker that dies
        for producer in producing:
            producer.cancel()
    announce(session.log, "training.finished", version=session.log.state.newest_version)
    session.end("finished")
    async with asyncio.TaskGroup() as ending:
        ending.create_task(session.fleet.close())  # engines and Ray take as long as MLflow
        ending.create_task(track(session.mirror, is_last=True))
        ending.create_task(session.housekeeping.tidy(session.log.state.step, is_last=True))


async def publish_newest(session: RunSession, config: RunConfig) -> None:
    """Let engines serve the newest policy, if they do not yet; in a fixed schedule once they have sampled a whole batch
    with the one before."""
    for policy in session.fleet.unserved():
        if config.rollout.schedule == "fixed":
            await all_sampled(session, config=config)
        publishing = publish_policy(session, policy=policy)
        what = f"publishing policy {policy.version}"
        await watched(session, publishing, what=what, seconds=config.rollout.stall_timeout)


def evaluation_is_missing(session: RunSession, config: RunConfig) -> bool:
    """Whether the live policy is to be evaluated, and has no evaluation of the run's own in the log.

    That is before the first step, every `evaluation.every` steps, and after the last one.
    """
    state, every = session.log.state, config.evaluation.every
    is_due = every > 0 and (state.step % every == 0 or state.step == config.steps)
    return is_due and not is_evaluated(state, config.evaluation)


async def evaluate_if_due(session: RunSession, config: RunConfig) -> None:
    """Evaluate the live policy unless its own evaluation is in the log already; warn if its score has fallen."""
    await resumed(session)
    if evaluation_is_missing(session, config):
        version = session.log.state.newest_version
        evaluation = await evaluate_policy(session, version=version, settings=config.evaluation)
        warn_of_a_fall(session.log, config.evaluation)
        try_gate(session.log, evaluation, min_score=config.evaluation.gate_score, max_gap=config.gate_gap)
