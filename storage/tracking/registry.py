"""MLflow as a view of the run's log: metrics, model versions, aliases and the shards behind each version.

In: a run's log. Out: an MLflow run and a registered model with the same content. `sync` sends the entries that MLflow
has not got: the next call makes up for an outage, and a deleted database is filled again. The cursor is a tag of the
MLflow run, written in the same call as the metrics it covers. Entries are sent a block at a time; a block that was cut
short is sent again, without doubles.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from settings.block import leaves
from settings.redaction import without_secrets
from settings.tracking import TraceSettings
from storage.log.entries import Alias, Evaluation, LogEntry, Policy, Registration, Retire, Session, Step
from storage.log.history import to_json
from storage.log.run_log import RunLog
from storage.log.runs import outcome, run_config
from storage.objects.digests import sha256_of_json
from storage.tracking.descriptions import SHARD_SCHEMA, describe_policy, describe_run, step_profile, user_name
from storage.tracking.metrics import accepted_name, charted, import_mlflow, is_refusal
from storage.tracking.mlflow_run import NOTE, RegistryUnavailable, ensure_experiment, ensure_model, find_run, identity
from storage.tracking.traces import Traces

logger = logging.getLogger("millrace.registry")

_CURSOR = "millrace.synced_entries"
ALL_POINTS = 1000
"""MLflow has the metrics of the first so many steps, then of every second for as many, then of every third, and so on:
it keeps 16 kB of each, and its pages draw at most 2,500 points of a curve. The log has them all."""
_TRIES = 3
"""To open MLflow's database, with pauses of 0.4 s in all."""
_VERSIONS_AT_ONCE = 1000
_MOST_METRICS = 1000  # MLflow takes no more in one call
_LONGEST_PARAMETER = 6000  # characters
_reported: set[tuple[str, str]] = set()
"""Refusals of MLflow's that this process has logged: the model's name, and what was refused."""
ROLLOUT = "rollout"
"""Alias of the policy that the engines serve."""
_STATUS = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "vanished": "FAILED"}
"""Outcome of a run's newest session → status of the MLflow run."""


class Registry:
    """One run's mirror in MLflow; `model_name`, the registered model, is named after the run."""

    def __init__(self, log: RunLog, *, tracking_uri: str) -> None:
        self._log = log
        self._tracking_uri = tracking_uri
        self._run_id = ""
        self._experiment_id = ""
        self.num_entries = 0
        self._is_filling = False
        """True while MLflow has nothing of the run yet: then the log's registrations are of another database."""
        self._mirrored: tuple[dict[str, str], str] | None = None
        """Tags and status of the MLflow run after the last `sync`: to read a run takes all its datasets, one a step."""
        self.name = f"MLflow at {without_secrets(tracking_uri)}"
        self.model_name = log.run_id

    @functools.cached_property
    def _client(self) -> Any:
        mlflow = import_mlflow()
        if not self._tracking_uri.startswith(("http:", "https:", "databricks", "uc")):
            from mlflow.store.db import utils

            # MLflow would try a database for 100 s that it cannot open, and the end of a run waits. The next `sync`
            # tries again.
            utils.MAX_RETRY_COUNT = _TRIES
        return mlflow.MlflowClient(tracking_uri=self._tracking_uri, registry_uri=self._tracking_uri)

    @functools.cached_property
    def _traces(self) -> Traces:
        from mlflow.tracing.client import TracingClient

        settings = TraceSettings(**self._config.get("traces", {}))  # an older run has no such table
        return Traces(self._log, TracingClient(self._tracking_uri), settings)

    def sync(self) -> list[Registration]:
        """Bring MLflow up to the log's state; returns the registered versions that the log does not have yet.

        The MLflow run ends as the run's newest session did; a later sync of a continued run opens it again. Raises
        `RegistryUnavailable` if MLflow cannot be reached or refuses; a later call sends the rest.
        """
        import_mlflow()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return self._replay()
        except SQLAlchemyError as error:
            # A kill in the middle of MLflow's own first migration leaves a database that it cannot open again.
            raise RegistryUnavailable(
                f"its database cannot be used: {str(error).splitlines()[0]}; if nothing else is in it, delete it "
                "and start the run again: MLflow is filled from the log"
            ) from error
        except (MlflowException, OSError) as error:
            raise RegistryUnavailable(str(error)) from error

    @property
    def run_page(self) -> str:
        """The run's page in MLflow, without the server's address; empty before the first `sync`."""
        return f"#/experiments/{self._experiment_id}/runs/{self._run_id}" if self._run_id else ""

    def attach(self, file: Path) -> None:
        """Attach a file to the run, in place of one of the same name. Raises `RegistryUnavailable`."""
        try:
            self._client.log_artifact(self._ensure_run(), str(file))
        except Exception as error:  # every artifact store has its own errors
            raise RegistryUnavailable(f"{file.name} was not taken: {error}") from error

    def _replay(self) -> list[Registration]:
        tags, previous = self._mirrored or self._read_run()
        cursor = int(tags.get(_CURSOR, "0"))
        self._is_filling = cursor == 0
        if cursor == 0:  # logging the same again changes nothing
            from mlflow.entities import Param

            parameters = [
                Param(accepted_name(key), str(value)[:_LONGEST_PARAMETER])
                for key, value in leaves(self._config)
                if value != {}
            ]
            self._log_batch({"millrace.config_sha256": sha256_of_json(self._config)}, params=parameters)
        self.num_entries = cursor
        for block, metrics in _blocks(self._log.entries[cursor:], self._config.get("evaluation", {})):
            self._send(block, metrics)
            self.num_entries = block[-1].number + 1
        with self._skipping_refusals("aliases and description"):
            model = self._client.get_registered_model(self.model_name)
            self._set_aliases(model.aliases)
            tags[NOTE] = self._describe(tags, model.description)
        status = _STATUS[outcome(self._log)]
        if status == "RUNNING" and previous != status:
            self._client.update_run(self._run_id, status=status)
        elif previous != status:
            if not _is_charted(self._log.state.step):
                last = next(entry for entry in reversed(self._log.entries) if isinstance(entry.body, Step))
                self._log_batch({}, metrics=_metrics(last, {}))
            self._client.set_terminated(self._run_id, status, end_time=int(self._log.state.last_at * 1000))
        self._mirrored = {**tags, _CURSOR: str(self.num_entries)}, status
        # Also those that a session registered which died before it could say so in the log.
        missing = self._log.state.policies.keys() - self._log.state.registrations.keys()
        return [
            Registration(version=version, model_name=self.model_name, registry_version=self._versions[version])
            for version in sorted(missing & self._versions.keys())
        ]

    def _read_run(self) -> tuple[dict[str, str], str]:
        run = self._client.get_run(self._ensure_run())
        return dict(run.data.tags), run.info.status

    def _send(self, block: Sequence[LogEntry], metrics: Sequence[Any]) -> None:
        """Send some entries and their metrics, and the cursor last."""
        with self._skipping_refusals("the shards that steps were trained on"):
            self._log_shards([entry.body for entry in block if isinstance(entry.body, Step)])
        for entry in block:
            with self._skipping_refusals("a model version"):
                match entry.body:
                    case Session() as session:
                        code = {"code_version": session.code_version, "reward_sha256": session.reward_sha256}
                        self._log_batch({f"millrace.{name}": value for name, value in code.items()})
                    case Policy(version=version):
                        self._register_if_due(version)
                    case Step(policy=policy):
                        self._register_if_due(policy.version)
                    case Evaluation(version=version, failed=False):
                        self._register(version)
                    case Retire() as retire:
                        self._tag_retired(retire)
                    case Alias(name=name, version=version):
                        self._register_for(name, version)
                    case _:
                        pass
        for entry in block:
            if isinstance(entry.body, Evaluation | Step):
                with self._skipping_refusals("an attempt as a trace"):
                    self._traces.send(
                        entry, experiment_id=self._experiment_id, run_id=self._run_id, find_model=self._versions.get
                    )
        self._log_batch({_CURSOR: str(block[-1].number + 1)}, metrics=metrics)

    def _log_batch(self, tags: dict[str, str], **more: Any) -> None:
        """Tags of the MLflow run, and parameters or metrics, in one call; if it is refused, one by one."""
        from mlflow.entities import RunTag
        from mlflow.exceptions import MlflowException

        more["tags"] = [RunTag(key, value) for key, value in tags.items()]
        try:
            self._client.log_batch(self._run_id, **more)
        except MlflowException as refusal:
            items = [(kind, item) for kind, values in more.items() for item in values]
            if not is_refusal(refusal) or len(items) < 2:
                raise
            num_taken = 0
            for kind, item in items:
                with self._skipping_refusals(f"{item.key!r}"):
                    self._client.log_batch(self._run_id, **{kind: [item]})
                    num_taken += 1
            if not num_taken:  # it is the run that MLflow refuses, perhaps because a user has deleted it
                raise

    @contextlib.contextmanager
    def _skipping_refusals(self, what: str) -> Iterator[None]:
        """Go on without `what` if MLflow refuses it for good, and log that once; an outage rises."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if not is_refusal(error):
                raise
            if (self.model_name, what) not in _reported:
                _reported.add((self.model_name, what))
                reason = without_secrets(str(error).splitlines()[0])
                logger.warning("%s refuses %s, and goes without it: %s", self.name, what, reason)

    def _ensure_run(self) -> str:
        """The MLflow run that mirrors this one, made at the first call."""
        if self._run_id:
            return self._run_id
        client, tags = self._client, identity(self._log)
        self._experiment_id = ensure_experiment(client, self._tracking_uri)
        run = find_run(client, self._experiment_id, tags)
        # The model before the run: a kill between the two is mended by the next call, which finds no run yet.
        ensure_model(client, tags, is_new=run is None)
        if run is None:
            source = {"mlflow.source.name": self._config.get("workflow", ""), "mlflow.source.type": "LOCAL"}
            tags |= {**source, "mlflow.user": user_name()}
            begun = int(self._log.state.started_at * 1000) or None
            run = client.create_run(self._experiment_id, run_name=self._log.run_id, start_time=begun, tags=tags)
        self._run_id = str(run.info.run_id)
        return self._run_id

    def _describe(self, tags: dict[str, str], of_model: str | None) -> str:
        """Describe the run, by a tag, and its registered model; returns the text."""
        about = describe_run(self._log, self._config)
        if tags.get(NOTE) != about:
            if of_model in (None, "", tags.get(NOTE)):  # else a user has written something better
                self._client.update_registered_model(self.model_name, about)
            self._log_batch({NOTE: about})
        return about

    @functools.cached_property
    def _config(self) -> dict[str, Any]:
        return run_config(self._log)

    @functools.cached_property
    def _versions(self) -> dict[int, str]:
        """Policy version → MLflow's number, of all that are registered: what MLflow has, and then what is added."""
        filter_string = f"name = '{self.model_name}' and run_id = '{self._run_id}'"
        versions: dict[int, str] = {}
        token = None
        while token != "":
            page = self._client.search_model_versions(filter_string, max_results=_VERSIONS_AT_ONCE, page_token=token)
            versions |= {int(version.tags["millrace.version"]): str(version.version) for version in page}
            token = page.token or ""
        return versions

    def _register_for(self, name: str, version: int) -> None:
        """A policy that a user gave a name is registered; those that the engines serve come and go."""
        if name != ROLLOUT:
            self._register(version)
            if version not in self._versions:
                logger.warning(
                    "MLflow has no version of policy %d any more, so alias %s is not set there", version, name
                )

    def _set_aliases(self, existing: dict[str, str]) -> None:
        """Make the model's aliases those of the log, without those whose policy is not registered."""
        for name, alias in self._log.state.aliases.items():
            version = self._versions.get(alias.version)
            if version is not None and str(existing.get(name)) != version:
                self._client.set_registered_model_alias(self.model_name, name, version)
            elif version is None and name in existing:
                self._client.delete_registered_model_alias(self.model_name, name)

    def _tag_retired(self, retire: Retire) -> None:
        """Tag each version whose weights are removed; the other tags stay."""
        for policy_version in retire.policy_versions:
            if (version := self._versions.get(policy_version)) is not None:  # else it was deleted, or never registered
                self._client.set_model_version_tag(self.model_name, version, "millrace.retired", retire.reason)

    def _log_shards(self, steps: Sequence[Step]) -> None:
        """Each step's shards as a dataset input, so that MLflow shows what a version was trained on."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tag = InputTag("mlflow.data.context", "training")
        inputs = []
        for step in steps:
            source = json.dumps(self._shards_of(step))
            about = (SHARD_SCHEMA, step_profile(self._log, step))
            dataset = Dataset(f"step-{step.claim.step}", dataset_digest(step), "millrace_shards", source, *about)
            inputs.append(DatasetInput(dataset, [tag]))
        if inputs:
            self._client.log_inputs(self._run_id, inputs)

    def _shards_of(self, step: Step) -> list[dict[str, Any]]:
        shards = self._log.state.shards
        return [
            {
                "id": shard_id,
                "uri": f"{self._log.store.uri}/{self._log.shard_key(shard_id)}",
                "sha256": digest,
                "num_rows": shards[shard_id].num_rows,
                "groups": [g.group_id for g in step.claim.trained if g.shard_id == shard_id],
            }
            for shard_id, digest in step.shard_sha256.items()
        ]

    def _register_if_due(self, version: int) -> None:
        """Register a new policy if `tracking.register` is "all" or its number is due; others wait for an evaluation."""
        session = self._log.state.session_of(version)
        rule = "all" if session is None else session.register
        if rule == "all" or (rule.isdecimal() and version % int(rule) == 0):
            self._register(version)

    def _register(self, version: int) -> None:
        """Make the policy a version of the registered model; a second call does nothing, nor if a user deleted it."""
        state = self._log.state
        if version in self._versions or (version in state.registrations and not self._is_filling):
            return
        policy = state.policies[version]
        tags = {"millrace.version": str(version), "millrace.weights_sha256": policy.weights_sha256}
        if version:
            step = state.steps[version - 1]
            tags |= {"millrace.step": str(step.claim.step), "millrace.dataset_digest": dataset_digest(step)}
        session, config_sha256 = state.session_of(version), sha256_of_json(self._config)
        created = self._client.create_model_version(
            name=self.model_name,
            source=self._source_of(policy),
            run_id=self._run_id,
            tags=tags,
            description=describe_policy(self._log, version, session=session, config_sha256=config_sha256),
            await_creation_for=0,
        )
        self._versions[version] = str(created.version)

    def _source_of(self, policy: Policy) -> str:
        """URI of the weights. A server refuses file paths, which might be its own: it gets the key alone."""
        store = self._log.store.uri
        if store.startswith("file:") and self._tracking_uri.startswith("http"):
            store = f"millrace://{self._log.run_id}"
        return f"{store}/{policy.path}"


def _blocks(entries: Sequence[LogEntry], settings: dict[str, Any]) -> Iterator[tuple[list[LogEntry], list[Any]]]:
    """Entries whose metrics fit into one call, and these: none of a step that is not charted."""
    block: list[LogEntry] = []
    charted_ones: list[Any] = []
    num_metrics = 0
    for entry in entries:
        metrics = _metrics(entry, settings)
        if block and num_metrics + len(metrics) > _MOST_METRICS:
            yield block, charted_ones
            block, charted_ones, num_metrics = [], [], 0
        block.append(entry)
        num_metrics += len(metrics)
        if not isinstance(entry.body, Step) or _is_charted(entry.body.claim.step):
            charted_ones += metrics
    if block:
        yield block, charted_ones


def _is_charted(step: int) -> bool:
    """False for those steps of a long run whose metrics MLflow does not get."""
    return step == 0 or step % math.ceil(step / ALL_POINTS) == 0


def _metrics(entry: LogEntry, settings: dict[str, Any]) -> list[Any]:
    from mlflow.entities import Metric

    number, values = charted(entry, settings)
    return [Metric(accepted_name(key), value, int(entry.written_at * 1000), number) for key, value in values.items()]


def dataset_digest(step: Step) -> str:
    """Digest of the groups and shard files that a step trained on (MLflow allows 36 characters)."""
    return sha256_of_json([step.shard_sha256, to_json(step.claim.trained)])[:32]
