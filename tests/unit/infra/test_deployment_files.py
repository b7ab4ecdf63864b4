"""The files of infra/ that deploy Millrace, against the schemas of the tools that read them, and against the lock.

What can be executed here is executed in tests/integration/test_postgres.py. The schemas come with check-jsonschema
(Compose), kubernetes-validate (Kubernetes), Prefect and Ray; a test whose schema is not installed is skipped.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import importlib.util
import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml

from infra.environment import TELEMETRY_OFF
from infra.ports import server_listens
from infra.services.services import GPU_QUEUE, GPU_RUNS, NOTIFY
from tests.compose import COMPOSE, PROJECT, image_environment, interpolate

INFRA = PROJECT / "infra"
DOCKERFILES = [INFRA / "Dockerfile.cpu", INFRA / "Dockerfile.gpu"]
MANIFESTS = sorted((INFRA / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.32"
SECRETS = {
    "POSTGRES_PASSWORD": "p4ss",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "PREFECT_AUTH": "millrace:p4ssw0rd",
}


def _locked(package: str) -> str:
    """The version of a package that both locks agree on."""
    text = "".join((PROJECT / "requirements" / f"{device}.lock").read_text() for device in ("cpu", "gpu"))
    (version,) = set(re.findall(rf"^{package}==([^\s;+]+)", text, flags=re.MULTILINE))
    return str(version)


def _services(variables: dict[str, str] = SECRETS) -> dict[str, dict[str, Any]]:
    """The services of compose.yaml, where these variables are set."""
    services: dict[str, dict[str, Any]] = interpolate(yaml.safe_load(COMPOSE.read_text()), variables)["services"]
    return services


def _documents() -> list[dict[str, Any]]:
    return [document for file in MANIFESTS for document in yaml.safe_load_all(file.read_text())]


# ── Compose ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_compose_files_fit_the_compose_specification():
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    schema = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    command = [sys.executable, *schema, str(COMPOSE), str(INFRA / "compose.gpu.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_has_no_default_secret_and_publishes_on_loopback_unless_told_otherwise():
    for missing in SECRETS:
        with pytest.raises(ValueError, match=f"{missing}: choose"):
            _services({name: value for name, value in SECRETS.items() if name != missing})
    for address in ("127.0.0.1", "192.0.2.7"):
        services = _services(SECRETS if address == "127.0.0.1" else SECRETS | {"BIND_ADDRESS": address})
        assert {port.split(":")[0] for service in services.values() for port in service.get("ports", [])} == {address}
        assert "ports" not in services["postgres"] and "ports" not in services["worker"]


def test_compose_services_come_back_and_are_watched():
    compose = yaml.safe_load(COMPOSE.read_text())
    mounted = set()
    for name, service in compose["services"].items():
        mounted |= {volume.split(":")[0] for volume in service.get("volumes", [])}
        if name == "deploy":  # runs to its end
            assert service["restart"].startswith("on-failure")
            continue
        assert service["restart"] == "unless-stopped" and service["healthcheck"]["test"][0] == "CMD", name
        for needed, how in service.get("depends_on", {}).items():
            finishes = needed == "deploy"
            assert how["condition"] == ("service_completed_successfully" if finishes else "service_healthy"), needed
    assert mounted == set(compose["volumes"])
    slots = compose["services"]["prefect"]["environment"]["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]
    assert importlib.util.find_spec(slots) and slots.endswith(".filesystem"), "Prefect's slots outlive a restart"


def test_compose_gives_each_secret_to_the_services_that_need_it_and_to_no_other():
    """Prefect's password to its server and clients; the address of notifications to what stores it."""
    services = _services(SECRETS | {NOTIFY: "slack://a/b/c"})
    environments = {name: service.get("environment", {}) for name, service in services.items()}
    clients = {name for name, variables in environments.items() if "PREFECT_API_URL" in variables}
    assert clients == {"deploy", "worker"}
    assert {environments[name]["PREFECT_API_AUTH_STRING"] for name in clients} == {SECRETS["PREFECT_AUTH"]}
    assert environments["prefect"]["PREFECT_SERVER_API_AUTH_STRING"] == SECRETS["PREFECT_AUTH"]
    assert {name for name, service in services.items() if "slack://a/b/c" in str(service)} == {"deploy"}
    assert _services()["deploy"]["environment"][NOTIFY] == "", "no notifications by default"


def test_compose_limits_flow_runs_where_it_gives_the_worker_gpus():
    deploy = _services()["deploy"]
    assert GPU_RUNS not in deploy["environment"] and "python -m tasks.prefect.flow_runs" in deploy["command"][-1]
    over = yaml.safe_load((INFRA / "compose.gpu.yaml").read_text())["services"]
    assert over["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert over["deploy"]["environment"] == {GPU_RUNS: "1"}
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    queued = {row["entrypoint"] for row in deployments if row["work_pool"].get("work_queue_name") == GPU_QUEUE}
    assert queued == {row["entrypoint"] for row in deployments} - {"flows.maintain.maintain"}


def test_mlflow_answers_to_the_name_that_the_worker_uses_and_databases_are_reached_by_drivers_that_are_locked():
    from mlflow.server.security_utils import is_allowed_host_header

    allowed = _services()["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert is_allowed_host_header(allowed, "mlflow:5000") and is_allowed_host_header(allowed, "127.0.0.1:5000")
    assert not is_allowed_host_header(allowed, "rebound.example:5000")
    prefect, mlflow = (_services()[name]["environment"] for name in ("prefect", "mlflow"))
    at = "://millrace:p4ss@postgres:5432/"
    assert prefect["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith(f"postgresql+asyncpg{at}")
    assert mlflow["MLFLOW_BACKEND_STORE_URI"].startswith(f"postgresql+psycopg{at}")
    assert _locked("asyncpg") and _locked("psycopg") and _locked("psycopg-binary") == _locked("psycopg")


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_image_is_pinned_and_versions_are_those_of_the_package_and_the_lock():
    version = re.search(r'^version = "(.+)"', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    files = [path for path in INFRA.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    named = r'(?:"image":|\bimage:|"default":|^FROM) *"?([a-z][\w./-]*:[\w.-]+)'
    images = {image: file for file in files for image in re.findall(named, file.read_text(), re.MULTILINE)}
    assert {"postgres", "chrislusf/seaweedfs", "millrace", "prefecthq/prefect"} <= {i.split(":")[0] for i in images}
    for image, file in images.items():
        name, tag = image.split(":")
        assert tag not in ("latest", "main", "stable"), f"{image} in {file}"
        assert name != "millrace" or tag in (f"{version[1]}-cpu", f"{version[1]}-gpu"), f"{image} in {file}"
        assert name != "prefecthq/prefect" or tag.split("-")[0] == _locked("prefect"), f"{image} in {file}"
    assert yaml.safe_load((PROJECT / "prefect.yaml").read_text())["prefect-version"] == _locked("prefect")
    (ray_cluster,) = [document for document in _documents() if document["kind"] == "RayCluster"]
    assert ray_cluster["spec"]["rayVersion"] == _locked("ray")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_copy_what_there_is_and_the_build_context_lets_through(file: Path):
    instructions = _instructions(file)
    ignored = [row for row in (PROJECT / ".dockerignore").read_text().splitlines() if row and not row.startswith("#")]
    device = file.suffix.removeprefix(".")
    copied = [value.split()[0] for instruction, value in instructions if instruction == "COPY"]
    assert copied == [f"requirements/{device}.lock", "."], "the lock has a layer of its own, before the code"
    for needed in ("cli/main.py", "prefect.yaml", "LICENSE", "pyproject.toml", "infra/entrypoint.sh", copied[0]):
        assert (PROJECT / needed).is_file()
        parts = Path(needed).parts
        prefixes = ["/".join(parts[: end + 1]) for end in range(len(parts))]
        lost = [row for row in ignored for prefix in prefixes if fnmatch.fnmatch(prefix, row.removeprefix("**/"))]
        assert not lost, f"{needed} is ignored by {lost}"
    assert {".git", ".venv", ".millrace", "**/*.env"} <= set(ignored)
    # Images do not run as root, and send no telemetry.
    names, last = [name for name, _ in instructions], dict(instructions)
    assert last["USER"] == "millrace" and "useradd --uid 10001" in "".join(value for _, value in instructions)
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    assert TELEMETRY_OFF.items() <= image_environment(file).items()
    # As lists: a shell in between would keep SIGTERM from the worker.
    for instruction in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(last[instruction]), list)
    assert json.loads(last["HEALTHCHECK"].partition("CMD")[2])[0] == "python"


def _instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, value) of a Dockerfile, by the parser of dockerfile-parse."""
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is not installed")
    parser = parse.DockerfileParser(fileobj=io.BytesIO(file.read_bytes()), env_replace=False)
    structure = [(row["instruction"], row["value"]) for row in parser.structure if row["instruction"] != "COMMENT"]
    known = {"FROM", "RUN", "ARG", "COPY", "WORKDIR", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD", "HEALTHCHECK"}
    assert {name for name, _ in structure} <= known
    return structure


def test_the_entrypoint_becomes_the_command_it_is_given():
    done = subprocess.run(["sh", INFRA / "entrypoint.sh", "sh", "-c", "exit 7"], env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 7


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _validate(document: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("document", _documents(), ids=lambda document: document["kind"])
def test_manifests_fit_the_schema_of_kubernetes(document: dict[str, Any]):
    if document["kind"] != "RayCluster":
        _validate(document)
        return
    # KubeRay's own resource is not in Kubernetes' schema, but its pods are.
    spec = document["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "ray start takes strings"
        _validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]})


def test_pods_run_without_privileges_and_refer_to_what_the_manifests_and_their_headers_make():
    documents = _documents()
    made = {(document["kind"], document["metadata"].get("name")) for document in documents}
    pods = [pod for document in documents for pod in _pods(document)]
    assert len(pods) == 4
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert ("ServiceAccount", pod["serviceAccountName"]) in made
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == rights
            for source in container.get("envFrom", []):
                secret = source.get("secretRef")
                assert secret == {"name": "millrace-store"} if secret else ("ConfigMap", "millrace") in made


def test_every_pod_that_talks_to_prefect_has_its_password_from_the_secret():
    pods = {
        document["metadata"].get("name", document["metadata"].get("generateName")): pod
        for document in _documents()
        if document["kind"] != "RayCluster"  # its actors know no Prefect: only the driver does
        for pod in _pods(document)
    }
    (pods["flow run"],) = _pods(json.loads((INFRA / "work_pools" / "kubernetes.json").read_text()))
    assert set(pods) == {"millrace-worker", "millrace-deploy-", "flow run"}
    secret = {"name": "millrace-prefect", "key": "auth-string", "optional": True}
    for name, pod in pods.items():
        (container,) = pod["containers"]
        environment = {row["name"]: row for row in container["env"]}
        assert {"configMapRef": {"name": "millrace"}} in container["envFrom"], f"{name} does not know where Prefect is"
        assert environment["PREFECT_API_AUTH_STRING"]["valueFrom"] == {"secretKeyRef": secret}, name
    token = {row["name"]: row for row in pods["flow run"]["containers"][0]["env"]}["RAY_AUTH_TOKEN"]["valueFrom"]
    assert token == {"secretKeyRef": {"name": "millrace-ray", "key": "auth_token", "optional": True}}
    # Else the worker would write the password into the Jobs it makes.
    worker = {row["name"]: row.get("value") for row in pods["millrace-worker"]["containers"][0]["env"]}
    setting = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET"
    assert (worker[f"{setting}_NAME"], worker[f"{setting}_KEY"]) == (secret["name"], secret["key"])


def _pods(value: Any) -> list[dict[str, Any]]:
    """Every pod specification in a document."""
    if isinstance(value, list):
        return [pod for inner in value for pod in _pods(inner)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for inner in value.values() for pod in _pods(inner)]


# ── Prefect's work pools ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["kubernetes", "docker"])
def test_work_pool_templates_use_every_variable_and_no_other(kind: str):
    from prefect.utilities.templating import find_placeholders

    template = json.loads((INFRA / "work_pools" / f"{kind}.json").read_text())
    properties = template["variables"]["properties"]
    used = {placeholder.name for placeholder in find_placeholders(template["job_configuration"])}
    assert used == set(properties)
    assert all(field.get("description") for field in properties.values())
    assert properties["stream_output"]["default"] is False, "a worker that streams leaves runs behind when it stops"
    assert properties["image"]["default"].startswith("millrace:")


@pytest.mark.parametrize("gpus", [0, 1])
def test_jobs_of_the_kubernetes_pool_fit_the_schema_of_kubernetes(gpus: int):
    from prefect.utilities.templating import apply_values

    template = json.loads((INFRA / "work_pools" / "kubernetes.json").read_text())
    fields = template["variables"]["properties"]
    values = {name: field["default"] for name, field in fields.items() if "default" in field}
    # What the worker puts in by itself, in the form it gives Kubernetes.
    values |= {"name": "run", "labels": {}, "command": ["prefect", "flow-run"]}
    manifest = copy.deepcopy(apply_values(template["job_configuration"]["job_manifest"], values | {"num_gpus": gpus}))
    pod = manifest["spec"]["template"]["spec"]
    assert pod.pop("parallelism") == pod.pop("completions") == 1, "Prefect insists on them here; Kubernetes drops them"
    _validate(manifest)
    assert manifest["spec"]["backoffLimit"] == 0 and pod["restartPolicy"] == "Never", "the flow decides on retries"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == gpus


# ── Ray ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_ray_launcher_takes_its_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((INFRA / "ray-cluster.yaml").read_text())
    prepared = prepare_config(copy.deepcopy(config))  # `ray up` does this before it validates
    validate_config(prepared)
    (machines,) = prepared["available_node_types"].values()
    assert machines["min_workers"] == prepared["max_workers"] == len(config["provider"]["worker_ips"])
    assert prepared["docker"]["image"].startswith("millrace:")
    with pytest.raises(jsonschema.ValidationError, match="dockr"):
        validate_config(prepared | {"dockr": {}})


_DRIVER = """
import asyncio, pathlib, sys
import ray
from infra.ray.cluster import Cluster

async def main():
    async with Cluster(log_folder=pathlib.Path(sys.argv[1])) as cluster:
        counter = await cluster.host("counter", "tests.unit.infra.ray.counting:Counting")
        await counter.call("open", start=3)
        print("sum", await counter.call("add", 4))
        print("cpus", sorted(node["Resources"].get("CPU", 0) for node in ray.nodes()))

asyncio.run(main())
"""


@pytest.mark.server
def test_a_container_joins_the_ray_cluster_it_is_given_as_a_node_that_offers_nothing(tmp_path: Path):
    """Two nodes on this machine, with a token between them; the entry point starts the second and then the driver."""
    mark, port = uuid.uuid4().hex, 20000 + os.getpid() % 10000  # above 19999 begin the ports Ray leaves free
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    environment = {**os.environ, **token, **path, "TEST_MARK": mark}
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # short: a socket's path has 107 characters
    start = ["ray", "start", "--head", "--block", f"--port={port}", f"--temp-dir={temporary}", "--num-cpus=2"]
    small = ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=100000000"]
    try:
        with open(tmp_path / "head.log", "wb") as log:
            head = subprocess.Popen([*start, *small], env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not server_listens(port):
            assert head.poll() is None and time.monotonic() < deadline, (tmp_path / "head.log").read_text()
            time.sleep(0.1)  # polling a port: nothing would wake us
        done = subprocess.run(
            ["sh", INFRA / "entrypoint.sh", "python", "-c", _DRIVER, tmp_path],
            env={**environment, "MILLRACE_RAY_HEAD": f"127.0.0.1:{port}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.stdout.splitlines() == ["sum 7", "cpus [0, 2.0]"], done.stdout + done.stderr
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # this test started it, though it went its own way, as Ray's do
                if process.pid != os.getpid() and process.environ().get("TEST_MARK") == mark:
                    process.kill()
                    process.wait(10)
        shutil.rmtree(temporary, ignore_errors=True)
