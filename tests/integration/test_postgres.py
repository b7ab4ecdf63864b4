"""infra/compose.yaml with PostgreSQL and an S3 server for real: a deployed training, and what the databases then hold.

Without Docker: the services of the file run as processes here (tests/compose.py), PostgreSQL is Debian's and the S3
server is Ceph's. Skipped where either cannot be had.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import yaml
from mlflow import MlflowClient

from storage.log.runs import open_run
from storage.objects.opening import open_store
from tests.apt import CannotInstall
from tests.compose import COMPOSE, PROJECT, Composition
from tests.postgres import Postgres, postgres_server

pytest.importorskip("psycopg", reason="MLflow reaches PostgreSQL by psycopg, which is not installed")
pytestmark = pytest.mark.slow

RUN = "on-postgres"


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server that has what the compose file's PostgreSQL has after its first start."""
    try:
        with postgres_server() as server:
            server.sql("CREATE DATABASE prefect", database="postgres")
            for script in yaml.safe_load(COMPOSE.read_text())["configs"].values():
                server.sql(script["content"], database="prefect")
            yield server
    except CannotInstall as reason:
        pytest.skip(str(reason))


@pytest.fixture
def composition(tmp_path: Path, postgres: Postgres, bucket: str, server: dict[str, str]) -> Iterator[Composition]:
    """Every service of the file, started in its order; `bucket` only leads this process to the store."""
    boto3.client("s3").create_bucket(Bucket="millrace")
    keys = {key: server[key] for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    services = Composition(
        tmp_path,
        variables={"POSTGRES_PASSWORD": postgres.password, "PREFECT_AUTH": "millrace:p4ssw0rd", **keys},
        addresses={
            "postgres:5432": f"127.0.0.1:{postgres.port}",
            "s3:8333": server["AWS_ENDPOINT_URL"].removeprefix("http://"),
        },
    )
    try:
        for name in services.services:
            services.up(name)
        services.wait_until_healthy("worker")
        yield services
    finally:
        services.down()


def test_a_deployed_training_leaves_its_state_in_postgres_and_its_shards_in_the_store(
    composition: Composition, postgres: Postgres, base_model: Path
):
    settings = {
        "engine": {"kind": "scripted", "max_model_len": 64},
        "sampling": {"max_tokens": 8},
        "evaluation": {"num_tasks": 8, "every": 0},
    }
    parameters = {
        "run": RUN,
        "store": "s3://millrace/store",
        "tracking": composition.url("mlflow:5000"),
        "model": str(base_model),
        "steps": 2,
        "batch_size": 4,
        "n_samples": 4,
        "settings": json.dumps(settings),
    }
    command = ["prefect", "deployment", "run", "train-grpo/train", "--watch"]
    command += [part for key, value in parameters.items() for part in ("-p", f"{key}={value}")]
    done = subprocess.run(
        command, cwd=PROJECT, env=composition.environment("worker"), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr + composition.logs()

    states = postgres.sql("SELECT state_type FROM flow_run", database="prefect")
    assert states == "COMPLETED"
    assert int(postgres.sql("SELECT count(*) FROM task_run WHERE state_type = 'COMPLETED'", database="prefect")) > 2
    deployed = postgres.sql("SELECT f.name FROM deployment d JOIN flow f ON f.id = d.flow_id", database="prefect")
    assert {"train-grpo", "evaluate", "replay", "maintain"} <= set(deployed.splitlines())

    log = open_run(open_store("s3://millrace/store"), RUN)
    assert log.state.step == 2 and log.state.positions == set(range(8))

    client = MlflowClient(composition.url("mlflow:5000"))
    versions = client.search_model_versions(f"name = '{RUN}'")
    assert len(versions) == 3, "the base and one for each step"
    newest = client.get_model_version_by_alias(RUN, "rollout")
    assert newest.tags["millrace.version"] == "2"
    assert {shard["id"] for shard in json.loads(newest.tags["millrace.shards"])} <= log.state.shards.keys()
    rows = postgres.sql(f"SELECT count(*) FROM model_versions WHERE name = '{RUN}'", database="mlflow")
    assert int(rows) == 3

    # An artifact of a client that knows nothing of the store passes through the server into it.
    client.log_text(newest.run_id, "kept", "note.txt")
    kept = [item["Key"] for item in boto3.client("s3").list_objects_v2(Bucket="millrace", Prefix="mlflow/")["Contents"]]
    assert any(key.endswith("note.txt") for key in kept)


def test_pools_take_their_templates_and_the_deploy_job_deploys_to_its_pool(tmp_path: Path, postgres: Postgres):
    """Of the compose file this needs Prefect alone."""
    variables = {"POSTGRES_PASSWORD": postgres.password, "AWS_ACCESS_KEY_ID": "-", "AWS_SECRET_ACCESS_KEY": "-"}
    variables["PREFECT_AUTH"] = "millrace:p4ssw0rd"
    composition = Composition(tmp_path, variables=variables, addresses={"postgres:5432": f"127.0.0.1:{postgres.port}"})
    environment = composition.environment("deploy")

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr + composition.logs()

    try:
        composition.up("prefect")
        composition.wait_until_healthy("prefect")
        for kind in ("kubernetes", "docker"):
            template = f"infra/work_pools/{kind}.json"
            run("prefect", "work-pool", "create", kind, "--type", kind, "--base-job-template", template)
        stored = json.loads(
            postgres.sql("SELECT base_job_template FROM work_pool WHERE name = 'docker'", database="prefect")
        )
        assert stored == json.loads((PROJECT / "infra" / "work_pools" / "docker.json").read_text())

        job = yaml.safe_load((PROJECT / "infra" / "kubernetes" / "deploy.yaml").read_text())
        (container,) = job["spec"]["template"]["spec"]["containers"]
        run(*(argument.replace("/tmp/", f"{tmp_path}/") for argument in container["args"]))
        pools = postgres.sql(
            "SELECT DISTINCT p.name FROM deployment d JOIN work_queue q ON q.id = d.work_queue_id"
            " JOIN work_pool p ON p.id = q.work_pool_id",
            database="prefect",
        )
        assert pools == "kubernetes"
    finally:
        composition.down()
