"""MLflow shows what the log says: every version, and which shards made it; and it can be made anew from the log."""

from __future__ import annotations

import dataclasses
import getpass
import json
import logging
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from settings.errors import InvalidInput
from storage.log.entries import Alias, Evaluation, LogEntry, Registration, Retire, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run, run_config
from storage.objects.digests import sha256_of_json
from storage.objects.object_store import LocalStore
from storage.tracking import registry
from storage.tracking.mlflow_run import RegistryUnavailable, registered_version
from storage.tracking.registry import Registry, dataset_digest
from tests.builders import BASE, a_claim, a_log, a_shard, a_step, a_summary, local_store

CONFIG = {"seed": 0, "train": {"scale": "std"}, "workflow": "my.env:Board"}


class _Mirror:
    """A run, and the database it was synced into."""

    def __init__(self, log: RunLog, folder: Path) -> None:
        from mlflow import MlflowClient

        self.log, self.tracking = log, f"sqlite:///{folder / 'mlflow.db'}"
        self.registered = self.sync()
        self.client: Any = MlflowClient(tracking_uri=self.tracking, registry_uri=self.tracking)

    def sync(self) -> list[Registration]:
        return Registry(self.log, tracking_uri=self.tracking).sync()

    def versions(self) -> dict[str, Any]:
        """Model versions by our own version number."""
        versions = self.client.search_model_versions("name = 'run'")
        return {version.tags["millrace.version"]: version for version in versions}

    def run(self) -> Any:
        [run] = self.client.search_runs([self.client.get_experiment_by_name("millrace").experiment_id])
        return run

    def history(self, metric: str) -> list[tuple[Any, ...]]:
        return [(m.step, m.value, m.timestamp) for m in self.client.get_metric_history(self.run().info.run_id, metric)]

    def everything(self) -> list[Any]:
        """All that was sent, without MLflow's own ids and clocks."""
        run = self.run()
        return [
            run.data.tags["millrace.synced_entries"],
            run.data.params,
            {metric: self.history(metric) for metric in run.data.metrics},
            {number: (version.tags, version.source) for number, version in self.versions().items()},
            sorted((i.dataset.name, i.dataset.digest, i.dataset.source) for i in run.inputs.dataset_inputs),
            self.client.get_model_version_by_alias("run", "rollout").tags["millrace.version"],
        ]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> _Mirror:
    """Two steps, made by two sessions."""
    folder = tmp_path_factory.mktemp("registry")
    log = create_run(local_store(folder / "with space"), "run", CONFIG)
    log.append(Session(id="first", code_version="c0de1"))
    log.append(BASE)
    log.append(a_shard("s0", [a_summary(0), a_summary(1), a_summary(2, accepted=False)]))
    log.append(a_step(log.state, a_claim(log.state, trained=["0.task0"])))
    log.append(Alias(name="rollout", version=1, checksum="sum1"))
    log.append(Session(id="second", code_version="c0de2", reward_sha256="4e3a"))
    log.append(a_shard("s1", [a_summary(3, version=1)]))
    log.append(a_step(log.state, a_claim(log.state, trained=["0.task1", "0.task3"], filtered=["0.task2"])))
    scored: dict[str, Any] = {"split": "test", "num_tasks": 2, "n_samples": 4, "seconds": 1.0}
    counts: dict[str, Any] = {"num_failed": 2, "failures": {"timeout": 2}, "pass_at": {"1": 0.5, "2": 0.75, "4": 1.0}}
    counts |= {"pass_all": {"1": 0.5, "4": 0.25}, "maj_at": {"4": 0.75}}
    log.append(Evaluation(version=1, score=0.5, standard_error=0.25, shard_id="e0", **counts, **scored))
    log.append(Evaluation(version=2, score=0.0, num_failed=8, shard_id="e1", **scored))
    log.append(Alias(name="rollout", version=2, checksum="sum2"))
    return _Mirror(log, folder)


def test_every_policy_is_a_model_version_that_points_into_the_store(mirror: _Mirror):
    versions, uri = mirror.versions(), mirror.log.store.uri
    assert sorted(versions) == ["0", "1", "2"]
    assert (versions["0"].source, versions["2"].source) == (f"{uri}/models/base", f"{uri}/runs/run/policies/2-a")
    assert {version.run_id for version in versions.values()} == {mirror.run().info.run_id}
    assert [(str(r.version), r.model_name, r.registry_version) for r in mirror.registered] == [
        (number, "run", str(versions[number].version)) for number in "012"
    ]
    assert mirror.client.get_model_version_by_alias("run", "rollout").version == versions["2"].version
    # A server must not read a path that might be its own.
    assert Registry(mirror.log, tracking_uri="http://127.0.0.1:9")._source_of(BASE) == "millrace://run/models/base"


def test_a_version_says_what_made_it(mirror: _Mirror):
    versions = mirror.versions()
    run_tags = mirror.run().data.tags
    assert (run_tags["millrace.code_version"], run_tags["millrace.reward_sha256"]) == ("c0de2", "4e3a")
    tags, description = versions["2"].tags, versions["2"].description
    step = mirror.log.state.steps[1]
    assert tags == {
        "millrace.version": "2",
        "millrace.step": "2",
        "millrace.weights_sha256": step.policy.weights_sha256,
        "millrace.dataset_digest": dataset_digest(step),
    }, "at most five, with that of a retired one"
    assert description.splitlines() == [
        "Policy 2 of run run: made by step 2 from policy 1.",
        "",
        f"* weights: {mirror.log.store.uri}/runs/run/policies/2-a",
        "* prompt groups: 2 trained, 1 filtered, 0 stale, 0 failed, 0 cancelled",
        "* shards: 2, the input `step-2` of the MLflow run",
        "* code: c0de2",
        "* reward code, sha256: 4e3a",
        f"* configuration, sha256: {sha256_of_json(run_config(mirror.log))}",
        "* all of it: `millrace lineage run --policy 2`",
    ]
    assert "base model" in versions["0"].description and "* code: c0de1" in versions["1"].description


def test_the_dataset_inputs_lead_to_the_shards_and_groups(mirror: _Mirror):
    inputs = {item.dataset.name: item for item in mirror.run().inputs.dataset_inputs}
    assert sorted(inputs) == ["step-1", "step-2"]
    dataset = inputs["step-2"].dataset
    assert dataset.digest == dataset_digest(mirror.log.state.steps[1]) and len(dataset.digest) <= 36
    assert [(tag.key, tag.value) for tag in inputs["step-2"].tags] == [("mlflow.data.context", "training")]
    folder = f"{mirror.log.store.uri}/runs/run/shards"
    assert json.loads(dataset.source) == [
        {"id": "s0", "uri": f"{folder}/s0.arrow", "sha256": "f" * 64, "num_rows": 6, "groups": ["0.task1"]},
        {"id": "s1", "uri": f"{folder}/s1.arrow", "sha256": "f" * 64, "num_rows": 2, "groups": ["0.task3"]},
    ]


def test_configuration_and_metrics_are_shown(mirror: _Mirror):
    run = mirror.run()
    assert run.data.params == {"seed": "0", "train.scale": "std", "workflow": "my.env:Board"}
    assert [(step, value) for step, value, _ in mirror.history("train/loss")] == [(1, 0.5), (2, 0.5)]
    evaluation = {key.removeprefix("eval/test/"): value for key, value in run.data.metrics.items() if "eval/" in key}
    assert evaluation == {
        **{"score": 0.5, "standard_error": 0.25, "pass_at_1": 0.5, "pass_at_2": 0.75, "pass_at_4": 1.0},
        **{"pass_all_1": 0.5, "pass_all_4": 0.25, "maj_at_4": 0.75},
        **{"tasks": 2.0, "seconds": 1.0, "failed": 1.0},
    }
    assert [(step, value) for step, value, _ in mirror.history("eval/test/failed")] == [(1, 0.25), (2, 1.0)]
    assert run.data.tags["millrace.store"] == mirror.log.store.uri


def test_syncing_again_adds_nothing_even_if_the_one_before_died_before_its_cursor(
    mirror: _Mirror, monkeypatch: pytest.MonkeyPatch
):
    registry, info, before = Registry(mirror.log, tracking_uri=mirror.tracking), mirror.run().info, mirror.everything()
    assert registry.run_page == ""
    ended = int(mirror.log.state.last_at * 1000)
    for outcome, status, end_time in (
        ("finished", "FINISHED", ended),
        ("running", "RUNNING", ended),
        ("stopped", "KILLED", ended),
        ("failed", "FAILED", ended),
    ):
        monkeypatch.setattr("storage.tracking.registry.outcome", lambda log, outcome=outcome: outcome)
        registry.sync()
        info = mirror.run().info
        assert (info.status, info.end_time, mirror.everything()) == (status, end_time, before)
    assert registry.run_page == f"#/experiments/{info.experiment_id}/runs/{info.run_id}"
    for cursor in ("0", "3"):
        mirror.client.set_tag(info.run_id, "millrace.synced_entries", cursor)
        # The log has no registrations of the session that died, so this one does.
        assert mirror.sync() == mirror.registered
        assert mirror.everything() == before


def test_a_sync_decodes_only_the_entries_after_its_cursor_and_fills_a_new_database_from_the_log(
    mirror: _Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And reads the birth id and the configuration once, however many versions there are to register."""
    read: list[str] = []

    class Entries(list[LogEntry]):
        def __getitem__(self, at: Any) -> Any:
            read.append(repr(at))
            return super().__getitem__(at)

    class Store(LocalStore):
        def get(self, key: str) -> bytes:
            read.append(key)
            return super().get(key)

    log = RunLog(Store(mirror.log.store.root), "run")  # type: ignore[attr-defined]
    log.refresh()
    entries = Entries(log.entries)
    monkeypatch.setattr(RunLog, "entries", property(lambda _: entries))
    cursor = log.state.entries - 1
    mirror.client.set_tag(mirror.run().info.run_id, "millrace.synced_entries", str(cursor))
    read.clear()
    Registry(log, tracking_uri=mirror.tracking).sync()
    assert read == [log.key("run.json"), repr(slice(cursor, None)), log.key("run.json")]
    read.clear()
    again = _Mirror(log, tmp_path)
    assert read == [log.key("run.json"), log.key("run.json"), repr(slice(0, None))]
    assert [registration.version for registration in again.registered] == [0, 1, 2]
    assert again.everything() == mirror.everything()


@pytest.mark.parametrize(
    ("rule", "registered"),
    [("evaluated", "0 1 3 5"), ("2", "0 1 2 3 4 5"), ("4", "0 1 3 4 5"), ("all", "0 1 2 3 4 5"), (None, "0 1 2 3 4 5")],
)
def test_the_setting_says_which_policies_are_registered_and_rollout_is_an_alias_of_none_else(
    tmp_path: Path, rule: str | None, registered: str
):
    """Sessions from before there was the setting have None. 0, 3 and 5 are evaluated, and 1 is promoted later."""
    log = create_run(local_store(tmp_path), "run", CONFIG)
    log.append(Session(id="first", code_version="c0de1", **({"register": rule} if rule else {})))
    log.append(BASE)
    _evaluate(log, 0)
    for number in range(1, 6):
        log.append(a_shard(f"s{number}", [a_summary(number, version=number - 1)]))
        log.append(a_step(log.state, trained=[f"0.task{number}"]))
        log.append(Alias(name="rollout", version=number, checksum="sum"))
        if number == 3:
            _evaluate(log, 3)
            shown = _Mirror(log, tmp_path)
    shown.sync()
    aliases = shown.client.get_registered_model("run").aliases
    assert ("rollout" in aliases) == ("5" in shown.versions())
    _evaluate(log, 5)
    log.append(Alias(name="champion", version=1, checksum="sum"))
    log.append(Retire(shard_ids=[], policy_versions=[2, 3], state_paths=[], reason="old"))
    new = shown.sync()
    versions, aliases = shown.versions(), shown.client.get_registered_model("run").aliases
    assert sorted(versions) == registered.split()
    assert aliases == {"champion": versions["1"].version, "rollout": versions["5"].version}
    retired = {number for number, version in versions.items() if "millrace.retired" in version.tags}
    assert retired == {"2", "3"} & versions.keys()
    assert {registration.version for registration in new} == set(map(int, versions)), "for the log"
    assert max(len(version.tags) for version in versions.values()) == 5


def _evaluate(log: RunLog, version: int) -> None:
    about: dict[str, Any] = {
        "split": "test",
        "num_tasks": 2,
        "num_failed": 0,
        "seconds": 1.0,
        "shard_id": f"e{version}",
    }
    log.append(Evaluation(version=version, score=0.5, **about))


def test_experiment_run_model_and_data_say_what_they_are_and_a_users_words_stay(mirror: _Mirror):
    run, experiment = mirror.run(), mirror.client.get_experiment_by_name("millrace")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert experiment.tags["mlflow.note.content"].startswith("Training runs of Millrace")
    tags = run.data.tags
    assert (tags["mlflow.user"], tags["mlflow.source.name"]) == (getpass.getuser(), "my.env:Board")
    assert run.info.start_time == int(mirror.log.state.started_at * 1000)
    about = tags["mlflow.note.content"]
    assert about == mirror.client.get_registered_model("run").description
    assert about.splitlines()[2:6] == [
        "* workflow: `my.env:Board`",
        "* steps: 2",
        "* held-out: 0.500 (policy 1)",
        f"* store: `{mirror.log.store.uri}/runs/run`",
    ]
    assert "`millrace report run`" in about and "`millrace lineage run --policy N`" in about
    datasets = {item.dataset.name: item.dataset for item in run.inputs.dataset_inputs}
    assert json.loads(datasets["step-2"].profile) == {"num_groups": 2, "num_rows": 4, "mean_reward": 0.5}
    columns = json.loads(datasets["step-2"].schema)["mlflow_colspec"]
    assert {"name": "reward", "type": "float", "required": False} in columns


def test_of_a_long_run_mlflow_has_the_metrics_of_every_so_many_steps_and_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ALL_POINTS", 3)
    log = a_log(local_store(tmp_path))
    log.append(Session(id="long", code_version="c0de", steps=8))
    for _ in range(8):
        log.append(a_step(log.state, trained=[]))
    assert [step for step, *_ in _Mirror(log, tmp_path).history("train/loss")] == [1, 2, 3, 4, 6, 8]


def test_a_database_whose_first_migration_was_killed_is_an_outage_with_the_fix(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE _alembic_tmp_experiments (experiment_id INTEGER)")
    with pytest.raises(RegistryUnavailable, match="its database cannot be used.*delete it and start the run again"):
        log = create_run(local_store(tmp_path), "run", {})
        log.append(BASE)
        Registry(log, tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").sync()


def test_a_database_that_cannot_be_opened_is_an_outage_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a disk that may only be read: MLflow alone would try for 100 s, and the end of a run waits."""
    pauses: list[float] = []
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=pauses.append))
    (tmp_path / "mlflow.db").mkdir()
    log = create_run(local_store(tmp_path), "run", {})
    log.append(BASE)
    with pytest.raises(RegistryUnavailable, match="unable to open database file"):
        Registry(log, tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").sync()
    assert sum(pauses) < 1


def test_files_are_attached_once_by_name_and_lie_beside_the_database(mirror: _Mirror, tmp_path: Path):
    page = tmp_path / "report.html"
    for text in ("first", "second"):
        page.write_text(text)
        Registry(mirror.log, tracking_uri=mirror.tracking).attach(page)
    run_id = mirror.run().info.run_id
    assert [file.path for file in mirror.client.list_artifacts(run_id)] == ["report.html"]
    [kept] = (Path(mirror.tracking.removeprefix("sqlite:///")).parent / "mlartifacts").rglob("report.html")
    assert kept.read_text() == "second"


def test_only_versions_new_to_the_log_are_returned_and_retired_ones_are_tagged(mirror: _Mirror):
    """Changes the log, as the next one does."""
    for registration in mirror.registered:
        mirror.log.append(registration)
    assert mirror.sync() == []
    mirror.log.append(a_shard("s2", [a_summary(4, version=2)]))
    mirror.log.append(a_step(mirror.log.state, trained=["0.task4"]))
    mirror.log.append(Retire(shard_ids=["s0"], policy_versions=[1], state_paths=[], reason="keep_last 1"))
    [added] = mirror.sync()
    assert (added.version, added.registry_version) == (3, str(mirror.versions()["3"].version))
    retired = {number: version.tags.get("millrace.retired") for number, version in mirror.versions().items()}
    assert retired == {"0": None, "1": "keep_last 1", "2": None, "3": None}


def test_an_alias_of_a_version_that_was_deleted_in_mlflow_is_left_out(
    mirror: _Mirror, caplog: pytest.LogCaptureFixture
):
    """Changes the log and MLflow, so it comes last."""
    mirror.client.delete_model_version("run", mirror.versions()["2"].version)
    mirror.log.append(Alias(name="best", version=2, checksum="sum2"))
    mirror.log.append(Alias(name="second", version=0, checksum="sum0"))
    with caplog.at_level(logging.WARNING, logger="millrace.registry"):
        mirror.sync()
    assert "no version of policy 2 any more, so alias best is not set" in caplog.text
    assert mirror.client.get_model_version_by_alias("run", "second").tags["millrace.version"] == "0"
    assert mirror.run().data.tags["millrace.synced_entries"] == str(mirror.log.state.entries)


NAMES = [
    "pass@1",
    "fmt(strict)",
    "f1 %",
    "a//b",
    "../up",
    "Über",
    "x" * 300,
    "tab\tnew\nline",
    "plain_name",
    "two words",
    "",
    "half \ud800",
    *("x" * 300 + end for end in ("a", "b")),
    *("F1", "f1", "a/b/", "/abs", "a/../b", "nul\0", "\u202e", "😀", "%2e", "a\\b"),
]


def _run_with(store: LocalStore, metrics: dict[str, float], config: dict[str, Any] = CONFIG) -> RunLog:
    log = create_run(store, "run", config)
    log.append(Session(id="first", code_version="c0de1"))
    log.append(BASE)
    log.append(a_shard("s0", [a_summary(0)]))
    log.append(dataclasses.replace(a_step(log.state, trained=["0.task0"]), metrics=metrics))
    log.append(Alias(name="champion", version=1, checksum=""))
    return log


def test_a_name_that_mlflow_refuses_costs_itself_alone_and_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every metric and setting is there, with its value, under a name of its own; a good name is as it was."""
    config = {**CONFIG, "reward": {"weights": {name: 0.5 for name in NAMES}}}
    metrics = {f"reward/{name}": float(number) for number, name in enumerate(NAMES)} | {"loss": 9.0}
    its = _Mirror(_run_with(local_store(tmp_path), metrics, config), tmp_path)
    data = its.run().data
    assert sorted(data.metrics.values()) == sorted([*map(float, range(len(NAMES))), 9.0])
    good = {"train/reward/plain_name": 8.0, "train/reward/two words": 9.0, "train/reward/Über": 5.0, "train/loss": 9.0}
    assert good.items() <= data.metrics.items()
    assert len([key for key in data.params if key.startswith("reward.weights")]) == len(NAMES)
    assert data.tags["millrace.synced_entries"] == "5"
    said = [record.getMessage() for record in caplog.records if "takes no name like" in record.getMessage()]
    assert len(said) == len(set(said)) and any("'train/reward/pass@1'" in sentence for sentence in said)
    its.sync()
    assert len([record for record in caplog.records if "takes no name like" in record.getMessage()]) == len(said)


def test_a_run_removed_and_made_again_under_its_name_is_another_one_in_mlflow(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    its = _Mirror(_run_with(store, {"loss": 1.0}), tmp_path)
    first = its.run().info.run_id
    assert its.client.get_model_version_by_alias("run", "champion").run_id == first
    shutil.rmtree(store.root / "runs" / "run")
    log = create_run(store, "run", CONFIG)
    log.append(Session(id="again", code_version="c0de1"))
    log.append(BASE)
    Registry(log, tracking_uri=its.tracking).sync()
    runs = its.client.search_runs([its.client.get_experiment_by_name("millrace").experiment_id])
    [second] = [run for run in runs if run.info.run_id != first]
    assert not second.data.metrics and second.data.tags["millrace.synced_entries"] == "2"
    assert not its.client.get_registered_model("run").aliases, "the earlier run's champion is no champion of this one"
    versions = {version.run_id: version.tags["millrace.version"] for version in its.client.search_model_versions("")}
    assert versions[second.info.run_id] == "0"
    with pytest.raises(InvalidInput, match="is of an earlier run of this name"):
        registered_version(log, "2", tracking_uri=its.tracking)  # the earlier run's policy 1


def test_a_moved_store_goes_on_in_its_mlflow_run_and_a_copy_gets_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its = _Mirror(_run_with(local_store(tmp_path), {"loss": 1.0}), tmp_path)
    moved = LocalStore(tmp_path / "elsewhere")
    shutil.move(tmp_path / "store", moved.root)
    log = open_run(moved, "run")
    log.append(Alias(name="champion", version=0, checksum=""))
    for _ in range(2):
        assert Registry(log, tracking_uri=its.tracking).sync() == its.registered  # the log was not told of them
    assert its.run().data.tags["millrace.store"] == moved.uri, "one MLflow run"
    assert its.client.get_model_version_by_alias("run", "champion").tags["millrace.version"] == "0"
    assert [r.getMessage() for r in caplog.records].count(
        f"run run was in {local_store(tmp_path).uri} before; its MLflow run goes on"
    ) == 1
    copy = LocalStore(tmp_path / "copy")
    shutil.copytree(moved.root, copy.root)
    Registry(open_run(copy, "run"), tracking_uri=its.tracking).sync()
    runs = its.client.search_runs([its.client.get_experiment_by_name("millrace").experiment_id])
    assert {run.data.tags["millrace.store"] for run in runs} == {moved.uri, copy.uri}


def test_what_a_user_deletes_in_mlflow_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = _run_with(local_store(tmp_path), {"loss": 1.0})
    its = _Mirror(log, tmp_path)
    for registration in its.registered:
        log.append(registration)
    its.client.delete_registered_model("run")
    log.append(a_shard("s1", [a_summary(1, version=1)]))
    log.append(dataclasses.replace(a_step(log.state, trained=["0.task1"]), metrics={"loss": 0.25}))
    its.sync()
    assert [value for _, value, _ in its.history("train/loss")] == [1.0, 0.25] and list(its.versions()) == ["2"]
    experiment = its.client.get_experiment_by_name("millrace").experiment_id
    its.client.delete_experiment(experiment)
    log.append(Alias(name="champion", version=2, checksum=""))
    its.sync()
    assert its.client.get_model_version_by_alias("run", "champion").tags["millrace.version"] == "2"
    its.client.delete_run(its.run().info.run_id)
    its.sync()
    assert its.run().data.tags["millrace.synced_entries"] == str(log.state.entries), "all of it, in a new one"
    said = " ".join(record.getMessage() for record in caplog.records)
    assert said.count("has no model run any more") == 1 and said.count("is restored") == 1
