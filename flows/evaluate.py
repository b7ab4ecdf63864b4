"""The evaluation flow: one policy version, held-out tasks, a score in the run's log.

In: a run and a version. Out: avg@n, pass@k, failures, standard error; and the alias `champion` if there is a gate.
It runs on an engine of its own, beside a training that goes on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from prefect import flow

from settings.evaluation import EvaluationSettings
from settings.run_file import RunConfig, make_config
from tasks.evaluation import check_split, look_up_policy, raise_if_failed, try_gate, warn_of_greedy_attempts
from tasks.mirror import track
from tasks.prefect.run_logs import outside_session
from tasks.rollout import evaluate_policy, evaluating, start_rollout_worker
from tasks.session import RunSession, in_flow_run, reading_session

EVALUATOR = "evaluator-0"


@flow(name="evaluate", flow_run_name="{run}", persist_result=False)
async def evaluate(
    run: str = "arithmetic",
    store: str = "",
    tracking: str = "",
    version: int | None = None,
    split: str = "",
    num_tasks: int | None = None,
    n_samples: int | None = None,
    temperature: float | None = None,
    gate_score: float | None = None,
    gate_gap: float | None = None,
    adopt_tasks: bool = False,
) -> dict[str, Any]:
    """Score one policy version of a run on held-out tasks.

    Args:
        run: Name of the run.
        store: Where the run is. Empty: $MILLRACE_STORE, or .millrace/store.
        tracking: MLflow tracking URI. Empty: $MILLRACE_TRACKING, or a SQLite database in .millrace.
        version: Policy version. Empty: the newest.
        split: Split of the workflow. Empty: the run's own evaluation split.
        num_tasks: At most this many problems. Empty: as the run evaluates.
        n_samples: Attempts per problem. Empty: as the run evaluates.
        temperature: 0 is greedy. Empty: as the run evaluates.
        gate_score: With this score or more the policy becomes the champion, unless the log speaks against it.
            Empty: the run's evaluation.gate_score; without that, nothing is promoted.
        gate_gap: Largest gap between engine and trainer on the way to a champion, in nats per token. Empty: the run's.
        adopt_tasks: Go on although the tasks are other than the run has had in this split.
    """
    wanted = {"split": split or None, "num_tasks": num_tasks, "n_samples": n_samples, "temperature": temperature}
    wanted |= {"gate_score": gate_score, "gate_gap": gate_gap}
    with outside_session():
        config, version = plan_evaluation(run=run, store=store, version=version, wanted=wanted, adopt_tasks=adopt_tasks)
        settings = config.evaluation
        warn_of_greedy_attempts(settings)
    async with in_flow_run(reading_session(config, store=store, tracking=tracking, what="evaluate")) as session:
        await start_rollout_worker(session, name=EVALUATOR, version=version)
        session.fleet.evaluator = session.fleet.hosted[EVALUATOR]
        evaluation = await evaluate_policy(session, version=version, settings=settings, adopt_tasks=adopt_tasks)
        problems = try_gate(session.log, evaluation, min_score=settings.gate_score, max_gap=config.gate_gap)
        await track(session.mirror)
    raise_if_failed(evaluation)
    return {"run": run, **dataclasses.asdict(evaluation), "gate": problems}


async def begin(session: RunSession, *, version: int, settings: EvaluationSettings, adopt_tasks: bool) -> None:
    """What a command begins before the flow run: an engine, and on it the evaluation."""
    with session.before_flow_run():
        await start_rollout_worker.fn(session, name=EVALUATOR, version=version)
        session.fleet.evaluator = session.fleet.hosted[EVALUATOR]
        evaluating(session, version=version, settings=settings, adopt_tasks=adopt_tasks)


def plan_evaluation(
    *, run: str, store: str, version: int | None, wanted: dict[str, Any], adopt_tasks: bool = False
) -> tuple[RunConfig, int]:
    """The run's configuration, its evaluation changed by what is `wanted`, and the policy version.

    Raises `InvalidInput` or `NotFound` for what cannot work, before anything starts.
    """
    log, saved, chosen = look_up_policy(store=store, run=run, version=version)
    changes = {key: value for key, value in wanted.items() if value is not None}
    document = {**saved, "evaluation": {**saved.get("evaluation", {}), **changes}}
    config = make_config(document, source=f"evaluating run {run}")
    of_workflow = {"workflow": config.workflow, "dataset": config.dataset, "split": config.evaluation.split}
    check_split(log, **of_workflow, adopt_tasks=adopt_tasks)
    return config, chosen
