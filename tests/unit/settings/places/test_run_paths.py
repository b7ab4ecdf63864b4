"""Paths in a run's settings mean the same from every folder, and are found again where they have moved to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import PRODUCT
from settings.block import keys
from settings.places.run_paths import PATHS
from settings.run_file import RunConfig, default_values, load_run_file, make_config
from storage.log.run_log import RunLog
from storage.log.runs import RunExists, continues, create_run, local_config
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary


def test_every_key_with_free_text_is_a_path_or_known_to_be_none():
    texts = {key.name for key in keys(RunConfig) if key.type == "string"}
    assert texts - PATHS.keys() == {
        "run",
        "engine.tool_parser",
        "engine.reasoning_parser",
        "evaluation.split",
        "train.advantage.baseline_part",
    }


RUN_FILE = """
workflow = "env.py:Game"
model = "base"
dataset = "problems.jsonl"
store = "lake"
tracking = "sqlite:///mlflow.db"
[train.loss]
kind = "custom"
path = "losses:mine"
[train.reference]
kind = "model"
model = "org/model"
[engine.vllm]
tokenizer = "../tokens"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project" / "my"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN_FILE)
    for name in ("env.py", "losses.py", "problems.jsonl"):
        (folder / name).touch()
    (folder / "base").mkdir()
    return folder


@pytest.mark.parametrize("stand_in", [".", "project", "project/my"])
def test_paths_of_a_run_file_are_relative_to_it_and_those_of_overrides_to_where_one_stands(
    project: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path / stand_in)
    config = load_run_file(project / "run.toml")
    assert [config.workflow, config.model, config.dataset, config.store, config.tracking.uri] == [
        f"{project}/env.py:Game",
        f"{project}/base",
        f"{project}/problems.jsonl",
        f"{project}/lake",
        f"sqlite:///{project}/mlflow.db",
    ]
    assert config.train.loss.path == f"{project}/losses.py:mine"  # type: ignore[union-attr]
    assert config.train.reference.model == "org/model", "an id of the hub stays"
    assert config.engine.vllm["tokenizer"] == str(project.parent / "tokens")
    overrides = {"dataset": "other.jsonl", "store": "s3://bucket/lake", "workflow": "examples.arithmetic:Arithmetic"}
    config = load_run_file(project / "run.toml", overrides)
    assert config.dataset == str(tmp_path / stand_in / "other.jsonl")
    assert (config.store, config.workflow) == ("s3://bucket/lake", "examples.arithmetic:Arithmetic")


def _with_step(log: RunLog) -> RunLog:
    if not log.state.step:
        log.append(BASE)
        log.append(a_shard("s0", [a_summary()]))
        log.append(a_step(log.state))
    return log


def test_a_run_records_paths_relative_to_its_file_and_continues_from_any_folder_also_after_a_move(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def document() -> dict[str, Any]:
        return load_run_file(project / "run.toml").model_dump(mode="json")

    store = LocalStore(tmp_path / "project" / ".millrace" / "store")
    log = _with_step(create_run(store, "mine", document(), folder=project))
    recorded = json.loads(store.get("runs/mine/run.json"))
    assert recorded["folder"] == str(project)
    config = recorded["config"]
    assert [config["workflow"], config["model"], config["dataset"], config["engine"]["vllm"]["tokenizer"]] == [
        "env.py:Game",
        "./base",
        "./problems.jsonl",
        "./../tokens",
    ]
    monkeypatch.chdir("/")
    assert continues(log, document(), defaults=default_values())
    assert make_config(local_config(log), source="run").workflow == f"{project}/env.py:Game"

    (tmp_path / "project").rename(tmp_path / "moved")
    old, project = project, tmp_path / "moved" / "my"
    log = create_run(LocalStore(tmp_path / "moved" / ".millrace" / "store"), "mine", document(), folder=project)
    assert log.state.step and local_config(log)["workflow"] == f"{project}/env.py:Game"

    old.mkdir(parents=True)
    (old / "env.py").touch()  # now there are two
    with pytest.raises(RunExists, match=f"workflow .'{old}/env.py:Game' → '{project}/env.py:Game'"):
        continues(log, document(), defaults=default_values())


def test_a_run_continues_where_its_files_are_reached_through_a_link(project: Path, tmp_path: Path) -> None:
    (project / "base").mkdir(exist_ok=True)
    wanted = {"workflow": f"{project}/env.py:Game", "model": f"{project}/base"}
    log = _with_step(create_run(LocalStore(tmp_path / "store"), "mine", wanted, folder=project))
    (tmp_path / "link").symlink_to(project)
    linked = {name: value.replace(str(project), str(tmp_path / "link")) for name, value in wanted.items()}
    assert continues(log, linked)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "env.py").touch()
    with pytest.raises(RunExists, match="workflow"):
        continues(log, linked | {"workflow": f"{tmp_path}/copy/env.py:Game"})
    with pytest.raises(RunExists, match="workflow"):
        continues(log, linked | {"workflow": f"{tmp_path}/link/env.py:Other"})


def test_a_run_of_before_the_folder_was_recorded_has_its_paths_where_one_stands_or_beside_the_state_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    store = LocalStore(tmp_path / "project" / ".millrace" / "store")
    config = {"workflow": "my/env.py:Game", "dataset": "my/problems.jsonl", "model": "org/model"}
    store.put_if_absent("runs/old/run.json", json.dumps({"run_id": "old", "config": config}).encode())
    wanted = {"workflow": f"{project}/env.py:Game", "dataset": f"{project}/problems.jsonl", "model": "org/model"}
    for folder in (tmp_path / "project", project):
        monkeypatch.chdir(folder)
        log = _with_step(create_run(store, "old", wanted))
        assert local_config(log) == wanted


def test_an_example_is_one_thing_whether_a_run_file_or_a_deployment_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A deployment stands in the checkout, where the module is a file; such runs of before go on."""
    monkeypatch.chdir(PRODUCT)
    example = load_run_file(Path("examples/arithmetic.toml"), {"run": "mine"})
    deployed = load_run_file({"workflow": "examples.arithmetic:Arithmetic"})
    assert example.workflow == deployed.workflow == "examples.arithmetic:Arithmetic"

    store, wanted = LocalStore(tmp_path), example.model_dump(mode="json")
    before = {**wanted, "workflow": f"{PRODUCT}/examples/arithmetic.py:Arithmetic"}
    _with_step(log := create_run(store, "mine", before))
    assert json.loads(store.get("runs/mine/run.json"))["config"]["workflow"] == "examples/arithmetic.py:Arithmetic"
    for folder in (PRODUCT, tmp_path):
        monkeypatch.chdir(folder)
        assert continues(log, wanted, defaults=default_values()) and continues(log, before, defaults=default_values())
    with pytest.raises(RunExists, match="workflow"):
        continues(log, {**wanted, "workflow": "examples.gsm8k:Arithmetic"}, defaults=default_values())
