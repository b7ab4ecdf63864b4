"""The evaluation flow: one policy version, held-out tasks, a score in the run's log.

In: a run and a version. Out: the score. It runs on an engine of its own, beside a training that goes on.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.config import make_config
from flows.train_grpo import start_engine
from tasks.rollout import evaluate_policy
from tasks.session import reading_session
from tasks.track import track


@flow(name="evaluate", flow_run_name="{run}", persist_result=False)
async def evaluate(
    run: str = "arithmetic",
    store: str = "",
    tracking: str = "",
    version: int | None = None,
    split: str = "",
    num_tasks: int = 0,
    n_samples: int = 0,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Score one policy version of a run on held-out tasks.

    Args:
        run: Name of the run.
        store: Where the run is. Empty: .millrace/store.
        tracking: MLflow tracking URI. Empty: a SQLite database in .millrace.
        version: Policy version. Empty: the newest.
        split: Split of the workflow. Empty: the run's own evaluation split.
        num_tasks: At most this many problems. 0: as the run evaluates.
        n_samples: Attempts per problem. 0: as the run evaluates.
        temperature: 0 is greedy. Empty: as the run evaluates.
    """
    async with reading_session(store=store, tracking=tracking, run_id=run, what="evaluate") as session:
        config = make_config(session.config, source=f"run {run}")
        wanted = {"split": split or None, "num_tasks": num_tasks or None, "n_samples": n_samples or None}
        changes = {key: value for key, value in (wanted | {"temperature": temperature}).items() if value is not None}
        settings = type(config.evaluation).model_validate(config.evaluation.model_dump() | changes)
        await start_engine(session, config, name="evaluator-0", version=version)
        evaluation = await evaluate_policy(session, version=version, settings=settings)
        await track(session)
        return {"run": run, "version": evaluation.version, "split": evaluation.split, "score": evaluation.score}
