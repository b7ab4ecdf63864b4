"""The experiment, the MLflow run and the registered model that mirror a run: found, or made.

In: a client of MLflow and a run's log. Out: MLflow's ids. The birth id tells a run from an earlier one of its name, and
finds it again if its store has moved; runs from before it was recorded are known by their name and store.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from settings.errors import WHOLE_NUMBER, InvalidInput, UserError
from settings.places.state_folder import sqlite_file
from settings.redaction import without_secrets
from storage.log.run_log import RunLog
from storage.log.runs import birth_id
from storage.objects.opening import open_store
from storage.tracking.descriptions import ABOUT
from storage.tracking.follower import FollowerUnavailable
from storage.tracking.metrics import import_mlflow

logger = logging.getLogger("millrace.registry")

NOTE = "mlflow.note.content"
"""Tag with what people read on the page of a run or an experiment."""
_EXPERIMENT = "millrace"


class RegistryUnavailable(FollowerUnavailable):
    """MLflow did not take everything; the next `sync` sends the rest."""


def ensure_experiment(client: Any, tracking_uri: str) -> str:
    """The id of the experiment of all runs."""
    experiment = client.get_experiment_by_name(_EXPERIMENT)
    if experiment is None:
        database = sqlite_file(tracking_uri)
        # By default, MLflow without a server puts files into the current folder.
        files = (
            (database.parent / "mlartifacts" / _EXPERIMENT).as_uri() if database and database.is_absolute() else None
        )
        made = str(client.create_experiment(_EXPERIMENT, artifact_location=files))
        experiment = client.get_experiment(made)
    elif experiment.lifecycle_stage == "deleted":  # its name stays taken
        logger.warning("MLflow's experiment %s had been deleted, and is restored", _EXPERIMENT)
        client.restore_experiment(experiment.experiment_id)
    # What people see above the list of runs, and MLflow's pages for training instead of those for agents.
    for key, value in {NOTE: ABOUT, "mlflow.experimentKind": "custom_model_development"}.items():
        if experiment.tags.get(key) is None:  # else a user may have written something better
            client.set_experiment_tag(experiment.experiment_id, key, value)
    return str(experiment.experiment_id)


def identity(log: RunLog) -> dict[str, str]:
    """Tags of the MLflow run and of the registered model."""
    tags = {"millrace.run_id": log.run_id, "millrace.store": log.store.uri}
    return tags | ({"millrace.birth": birth} if (birth := birth_id(log)) else {})


def find_run(client: Any, experiment_id: str, tags: dict[str, str]) -> Any:
    """The MLflow run of this `identity`, also if its store was elsewhere; None if there is none yet."""
    birth, store = tags.get("millrace.birth", ""), tags["millrace.store"]
    searched = {"millrace.birth": birth} if birth else tags
    text = " and ".join(f"tags.`{key}` = '{value}'" for key, value in searched.items())
    runs = [run for run in client.search_runs([experiment_id], filter_string=text) if _birth(run) == birth]
    if here := [run for run in runs if run.data.tags.get("millrace.store") == store]:
        return here[0]
    for run in runs:
        before = run.data.tags.get("millrace.store", "")
        if not _is_still_in(before, tags["millrace.run_id"], birth):  # else this store is a copy of that one
            logger.warning("run %s was in %s before; its MLflow run goes on", tags["millrace.run_id"], before)
            client.set_tag(run.info.run_id, "millrace.store", store)
            return run
    return None


def ensure_model(client: Any, tags: dict[str, str], *, is_new: bool) -> None:
    """Make the registered model if there is none. A run that `is_new` takes no alias over from an earlier one of its
    name."""
    name = tags["millrace.run_id"]
    models = client.search_registered_models(f"name = '{name}'", max_results=1)
    if not models:
        if not is_new:
            logger.warning("MLflow has no model %s any more; new versions go to a new one", name)
        client.create_registered_model(name, tags=tags)
    for alias, version in dict(models[0].aliases).items() if models and is_new else ():
        made_by = client.get_model_version(name, version).run_id
        if made_by and client.get_run(made_by).data.tags.get("millrace.store") == tags["millrace.store"]:
            logger.warning("alias %s of model %s in MLflow was an earlier run's; it is gone", alias, name)
            client.delete_registered_model_alias(name, alias)


def _birth(run: Any) -> str:
    return str(run.data.tags.get("millrace.birth", ""))


def _is_still_in(store: str, run_id: str, birth: str) -> bool:
    """True if a store has the run with this birth id."""
    try:
        return birth_id(RunLog(open_store(store), run_id)) == birth
    except (UserError, OSError):
        return False


def registered_version(log: RunLog, name: str, *, tracking_uri: str) -> int:
    """The policy version behind an alias or a version number of the run's registered model.

    Raises `InvalidInput` if MLflow does not have it, or has it of a run in another store, and `RegistryUnavailable` if
    MLflow cannot be reached.
    """
    mlflow = import_mlflow()
    from mlflow.exceptions import MlflowException

    shown = without_secrets(tracking_uri)
    if (database := sqlite_file(tracking_uri)) and not database.exists():
        raise RegistryUnavailable(f"there is no database {database}")  # a client would create it
    client = mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    try:
        get = client.get_model_version if re.fullmatch(WHOLE_NUMBER, name) else client.get_model_version_by_alias
        version = get(log.run_id, name)
        run = client.get_run(version.run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise InvalidInput(
                f"neither the log of run {log.run_id!r} nor MLflow at {shown} knows {log.run_id}@{name}; "
                f"aliases in the log: {', '.join(sorted(log.state.aliases)) or 'none'}"
            ) from error
        raise RegistryUnavailable(without_secrets(f"MLflow at {shown}: {error}")) from error
    store, birth = run.data.tags.get("millrace.store"), birth_id(log)
    if _birth(run) != birth or (store != log.store.uri and not birth):
        other = f"a run in {store}, not {log.store.uri}" if store != log.store.uri else "an earlier run of this name"
        raise InvalidInput(f"{log.run_id}@{name} in MLflow at {shown} is of {other}")
    return int(version.tags["millrace.version"])
