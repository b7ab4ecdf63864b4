"""The replay flow: recorded steps trained again from their recorded shards, perhaps with one thing changed.

In: a run and a span of its steps. Out: how each came out, beside what was recorded. Nothing is generated and nothing
is committed, so it may run beside a training that goes on.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from settings.run_file import make_config, training_changes, with_training_changes
from tasks.base_model import provide_reference
from tasks.checks.preflight import check_model
from tasks.prefect.run_logs import outside_session
from tasks.replay import check_replay, describe_replay, lead_up, retrain, save_policy, start_replay
from tasks.session import in_flow_run, reading_session


@flow(name="replay", flow_run_name="{run}", persist_result=False)
async def replay(
    run: str = "arithmetic",
    store: str = "",
    first: int = 1,
    last: int | None = None,
    changes: dict[str, Any] | None = None,
    rewards: str = "",
    save: str = "",
) -> dict[str, Any]:
    """Train recorded steps again, without generating anything, and compare the weights.

    Args:
        run: Name of the run.
        store: Where the run is. Empty: $MILLRACE_STORE, or .millrace/store.
        first: First step of the span. Steps before it are trained as recorded, from the nearest saved state.
        last: Last step of the span. Empty: the run's newest.
        changes: Settings of the trainer that differ in the span, for example {"train.loss": "cispo"}.
        rewards: Train the span on these rewards of `millrace rescore`. Empty: the recorded ones.
        save: Folder for the replayed policy. Empty: it is not kept.
    """
    with outside_session():
        plan, saved = check_replay(store=store, run=run, first=first, last=last, rewards=rewards, save=save)
        config = make_config(saved, source=f"run {run}")
        changed = with_training_changes(config, changes or {})
        teacher = changed.train.reference.model
        is_another = teacher != config.train.reference.model and bool(teacher)
        if is_another:
            check_model(teacher)
    async with in_flow_run(reading_session(changed, store=store, what="replay", trains=True)) as session:
        # Where to compute is no part of the maths: it holds for the steps before the span too.
        places = ("device", "num_ranks", "sequence_parallel", "num_replicas")
        where = {f"train.{name}": getattr(changed.train, name) for name in places}
        recorded = with_training_changes(config, where)
        reference = await provide_reference(session, model=teacher) if is_another else ""
        chosen = {"rewards": rewards, "reference": reference}
        loaded = await start_replay(session, plan=plan, recorded=recorded, changed=changed, **chosen)

        def progress(step: int) -> str:
            return f"{step - loaded} of {plan.last - loaded}"

        start_identical = True
        for step in range(loaded + 1, plan.first):
            start_identical = await lead_up(session, step=step, progress=progress(step))
        steps = []
        for step in range(plan.first, plan.last + 1):
            steps.append(await retrain(session, step=step, progress=progress(step)))
        if save:
            await save_policy(session, folder=save)
        facts = {"steps": steps, "changes": training_changes(config, changed), "start_identical": start_identical}
        return describe_replay(session, plan=plan, loaded=loaded, rewards=rewards, **facts)
