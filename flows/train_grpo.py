"""The training flow: GRPO as a loop over durable records.

    produce ─▶ shard in the log ─▶ next_batch ─▶ train_step ─▶ publish ─▶ the next tokens come from the new policy
       └── runs beside the loop; with max_staleness = 0 it waits for `publish`, with more it runs ahead ──┘

| who | waits for |
|---|---|
| produce | room by the admission formula: a newer policy, or a rejected group |
| next_batch | enough committed groups within the staleness bound |
| publish | an evaluation that is running on the loaded version |
| evaluate, track | nobody waits for them but the end of the flow |

Killed at any point, the same call continues from the log.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

from prefect import flow

from settings.run_file import RunConfig, Settings, default_values, make_config
from tasks.base_model import provide_base_model, provide_reference
from tasks.control import listening, resumed
from tasks.gate import try_gate
from tasks.prefect.announcements import announce
from tasks.preflight import check_run
from tasks.rollout import evaluate_policy, produce_until_death
from tasks.session import RunSession, training_session
from tasks.track import track, tracking_is_due
from tasks.train import claim_rules, forget_results, next_batch, start_trainer, train_step, unsearched
from tasks.watchdog import watched
from tasks.worker_arguments import worker_arguments
from tasks.workers import (
    choose_transfer,
    mark_served,
    newest_is_served,
    publish_policy,
    replace,
    start_rollout_worker,
    take_part,
)


@flow(name="train-grpo", flow_run_name="{run}", persist_result=False)
async def train_grpo(
    workflow: str = "examples.arithmetic:Arithmetic",
    run: str = "arithmetic",
    store: str = "",
    tracking: str = "",
    model: str = "",
    dataset: str = "",
    steps: int = 100,
    batch_size: int = 64,
    n_samples: int = 8,
    max_staleness: float = 0,
    learning_rate: float = 1e-6,
    seed: int = 0,
    settings: Settings = Settings(),  # noqa: B008 - Prefect shows the default in the form
) -> dict[str, Any]:
    """Train a policy by GRPO; starting a run again continues it.

    Args:
        workflow: What to train on: package.module:Class or path/to/file.py:Class.
        run: Name of the run. Starting it again continues it.
        store: A folder, file:///… or s3://bucket/prefix. Empty: $MILLRACE_STORE, or .millrace/store.
        tracking: MLflow tracking URI. Empty: $MILLRACE_TRACKING, or a SQLite database in .millrace.
        model: Hugging Face id or folder. Empty: make a tiny one from the workflow's demonstrations.
        dataset: Handed to the workflow: a file, a folder with one file per split, or a Hugging Face id.
        steps: Optimizer steps in all.
        batch_size: Prompt groups trained per step.
        n_samples: Attempts per prompt, the group size.
        max_staleness: How many weight updates a trained token may be behind. 0 is synchronous training.
        learning_rate: Peak learning rate of AdamW.
        seed: Seeds prompt order, sampling, mini-batches and the base model made here.
        settings: Everything else, one block per part.
    """
    config = make_config(
        {
            **settings.model_dump(),
            **dict(workflow=workflow, run=run, store=store, tracking=tracking, model=model, dataset=dataset),
            **dict(steps=steps, batch_size=batch_size, n_samples=n_samples, max_staleness=max_staleness),
            **dict(learning_rate=learning_rate, seed=seed),
        },
        source="flow parameters",
    )
    check_run(**config.of_preflight)
    async with training_session(
        store=config.store,
        tracking=config.tracking,
        run_id=config.run,
        workflow=config.workflow,
        config=config.model_dump(mode="json"),
        defaults=default_values(),
        num_workers=config.rollout.num_workers + config.evaluation.own_engine,
        gpus_per_engine=config.engine.num_gpus,
        train=config.train,
    ) as session:
        async with listening(session, steps=config.steps):
            await resumed(session)  # one that was paused stays so, without an engine
            telling_mlflow = asyncio.create_task(track(session))  # it begins while the engines do: each takes seconds
            if await something_is_left(session, config):
                await start(session, config)
            await train(session, config, telling_mlflow)
        return {"run": config.run, "step": session.log.state.step, **session.log.state.counters()}


async def something_is_left(session: RunSession, config: RunConfig) -> bool:
    """False where the run has ended whole, and engines and a trainer would start for nothing."""
    if session.log.state.step < config.steps or evaluation_is_missing(session, config):
        return True
    return not await asyncio.to_thread(newest_is_served, session)


async def start(session: RunSession, config: RunConfig) -> None:
    """Base policy first, then engines and trainer at the same time."""
    await provide_base_model(
        session,
        model=config.model,
        workflow=config.workflow,
        dataset=config.dataset,
        seed=config.seed,
        warmup=config.warmup.model_dump(),
    )
    if config.train.reference.model:
        await provide_reference(session, model=config.train.reference.model)
    choose_transfer(session, engine=config.engine, train=config.train)
    starting_trainer = start_trainer(session, config=config)
    workers = [session.next_worker_name() for _ in range(config.rollout.num_workers)]
    evaluators = ["evaluator-0"] if config.evaluation.own_engine else []
    starting = [start_engine(session, config, name=name) for name in (*workers, *evaluators)]
    *checksums, _ = await asyncio.gather(*starting, starting_trainer)
    # The libraries stay until the end: the collector need not walk them again and again, while a round waits.
    gc.collect()
    gc.freeze()
    mark_served(session, checksums=checksums)
    await take_part(session, workers)
    session.evaluator = session.hosted.get("evaluator-0")


async def start_engine(session: RunSession, config: RunConfig, *, name: str, version: int | None = None) -> str:
    """A worker whose engine serves a policy version, the live one by default; returns the checksum of its weights."""
    arguments = worker_arguments(session.log, cache=session.cache, **config.of_rollouts)
    checksum: str = await start_rollout_worker(session, name=name, arguments=arguments, version=version)
    return checksum


async def train(session: RunSession, config: RunConfig, telling_mlflow: asyncio.Task[int]) -> None:
    """The loop. `produce` runs beside it; evaluation and tracking, of which a first call is on its way, never hold it
    up."""
    patience = config.rollout.stall_timeout
    session.tracked_at = time.monotonic()  # MLflow heard of the run while the engines started
    rules = claim_rules(
        batch_size=config.batch_size, max_staleness=config.max_staleness, rollout=config.rollout, train=config.train
    )
    async with asyncio.TaskGroup() as beside:
        producing = [beside.create_task(produce(session, config, name)) for name in session.workers]
        evaluating = [beside.create_task(evaluate_if_due(session, config))]  # after them: rounds wait for their tokens
        round_started = time.time()
        while session.log.state.step < config.steps:
            claim = await next_batch(
                session,
                rules=rules,
                pace=config.rollout.pace,
                stall_timeout=patience,
                lease_timeout=config.rollout.lease_timeout,
            )
            training = train_step(session, claim=unsearched(claim), round_started=round_started)
            step = await watched(session, training, what=f"step {claim.step}", seconds=patience)
            if step is None:
                continue  # a damaged shard went into quarantine
            round_started = time.time()
            if step.policy.version % config.train.steps_per_update == 0 or claim.step == config.steps:
                publishing = publish_policy(session, policy=step.policy)
                await watched(session, publishing, what=f"publishing policy {step.policy.version}", seconds=patience)
            evaluating = [task for task in evaluating if not task.done()]
            evaluating.append(beside.create_task(evaluate_if_due(session, config)))
            forget_results()
            if telling_mlflow.done() and tracking_is_due(session):
                telling_mlflow = beside.create_task(track(session))
        await asyncio.gather(*evaluating)  # with producers, who put another worker in the place of one that dies
        for producer in producing:
            producer.cancel()
    announce(session.log, "training.finished", version=session.log.state.newest_version)
    async with asyncio.TaskGroup() as ending:
        ending.create_task(session.fleet.close())  # engines take as long as MLflow
        ending.create_task(track(session, finished=True))


async def produce(session: RunSession, config: RunConfig, name: str) -> None:
    """Collect shard after shard with one worker, and with another where it dies. Ends when it is cancelled."""
    while name and await produce_until_death(session, worker=name):
        name = await replace(session, lambda name: start_engine(session, config, name=name))


def is_due(step: int, config: RunConfig) -> bool:
    """Evaluate before the first step, every `evaluation.every` steps, and after the last one."""
    every = config.evaluation.every
    return every > 0 and (step % every == 0 or step == config.steps)


def evaluation_is_missing(session: RunSession, config: RunConfig) -> bool:
    """Whether the live policy is to be evaluated, and has no score on the run's own split in the log."""
    state, split = session.log.state, config.evaluation.split
    return is_due(state.step, config) and (state.newest_version, split) not in {
        (e.version, e.split) for e in state.evaluations
    }


async def evaluate_if_due(session: RunSession, config: RunConfig) -> None:
    """Evaluate the live policy unless its score on the run's own split is in the log already."""
    await resumed(session)
    if evaluation_is_missing(session, config):
        version = session.log.state.newest_version
        evaluation = await evaluate_policy(session, version=version, settings=config.evaluation)
        try_gate(session, evaluation, min_score=config.evaluation.gate_score, max_gap=config.gate_gap)
