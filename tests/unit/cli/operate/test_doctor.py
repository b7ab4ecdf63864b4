"""`millrace doctor`: every check looks at the real thing, says what it found, and stops none of the others."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from rich.console import Console

from cli.operate import doctor
from cli.operate.doctor import (
    Finding,
    check_lock,
    check_ports,
    check_prefect,
    check_tokenizer,
    check_vllm,
    check_won,
    diagnose,
)
from infra.services.services import Service
from settings.errors import UserError
from settings.run_file import make_config
from tests.unit.cli.builders import printed

PREFECT = importlib.metadata.version("prefect")
PASSWORD = "Basic bWU6cGFzczp3b3Jk"
"""`me:pass:word` as a header has it."""


@pytest.fixture(autouse=True)
def no_server() -> Iterator[None]:
    """Prefect's own settings name no server either."""
    with temporary_settings(restore_defaults={PREFECT_API_URL, PREFECT_API_AUTH_STRING}):
        yield


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What importing vLLM in a process of its own comes to; every other command runs."""
    done: dict[str, Any] = {"returncode": 0, "stdout": "1.2.3 CPU\n", "stderr": ""}
    run = subprocess.run

    def run_or_done(command: list[str], **options: Any) -> Any:
        if "import vllm" in command[-1]:
            return subprocess.CompletedProcess(command, **done)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", run_or_done)
    return done


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of Prefect: `ours`, and `older`, which tells its version only to those with the password."""

    def reply(request: httpx.Request) -> httpx.Response:
        is_ours, path = request.url.host == "ours", request.url.path
        if path == "/api/admin/version" and not is_ours and request.headers.get("Authorization") != PASSWORD:
            return httpx.Response(401)
        replies = {"/api/health": True, "/api/admin/version": PREFECT if is_ours else "2.0.0"}
        return httpx.Response(200, json=replies[path]) if path in replies else httpx.Response(404)

    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(reply)))


def _services(home: Path, **urls: str) -> None:
    """As if `millrace up` had started them; their process is this one."""
    started_at = psutil.Process().create_time()
    services = [Service(name=name, pid=os.getpid(), started_at=started_at, url=url) for name, url in urls.items()]
    (home / "services.json").write_text(json.dumps([asdict(service) for service in services]))


def _doctor(*, status: int) -> dict[str, str]:
    """Mark and sentence of every check, and of a failed one its fix, by name."""
    found: dict[str, str] = {}
    for line in printed("doctor", status=status).splitlines():
        if line.startswith(("ok ", "FAIL ")):
            mark, name, text = line.split(maxsplit=2)
            found[name] = f"{mark} {text}"
        else:
            found[name] += f" {line.strip()}"
    return found


def test_a_healthy_home_passes_every_check(home: Path, vllm: dict[str, Any]) -> None:
    if psutil.virtual_memory().available < 7 * 2**30:
        pytest.skip("this machine has too little memory free to be healthy")
    found = _doctor(status=0)
    names = ["Python", "sandbox", "lock", "disk", "memory", "ports", "store", "MLflow", "Prefect", "hub", "tokenizer"]
    assert list(found) == [*names, "device", "dataset", "references", "vLLM"] and all(
        text.startswith("ok ") for text in found.values()
    )
    assert f"{(home / 'store').as_uri()} can be written; of writers at once one wins" in found["store"]
    assert f"sqlite:///{home / 'mlflow.db'} answers" in found["MLflow"] and (home / "mlflow.db").exists()
    assert "Landlock" in found["sandbox"] and "seccomp" in found["sandbox"] and "cgroup v2" in found["sandbox"]
    assert "a temporary one is started with each run" in found["Prefect"] and found["vLLM"] == "ok 1.2.3 CPU"
    assert not list((home / "store").rglob("probe/*")), "it leaves nothing behind"


def test_what_fails_says_how_to_mend_it_and_the_others_still_run(
    home: Path, vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.update(returncode=1, stderr="Traceback:\nImportError: no torch [here]\n")
    monkeypatch.setenv("MILLRACE_STORE", "/dev/null/store")
    monkeypatch.setenv("MILLRACE_TRACKING", "nonsense://me:secret@nowhere")
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:9/api")
    found = _doctor(status=1)
    assert {name for name, text in found.items() if text.startswith("FAIL")} >= {"store", "MLflow", "Prefect", "vLLM"}
    assert "choose another `store`" in found["store"]
    assert found["vLLM"].startswith("FAIL ImportError: no torch [here] fix: rm -r .venv")
    assert "fix: start it, on this machine by `millrace up`" in found["Prefect"]
    assert found["Python"].startswith("ok") and found["tokenizer"].startswith("ok")
    assert "secret" not in str(found)
    vllm.update(returncode=-11, stderr="")
    assert check_vllm().text == "no output" and check_vllm().fix


def test_a_check_that_raises_anything_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("closing tag '[/red]'")

    checks = [("first", broken), ("second", lambda: Finding("fine"))]
    monkeypatch.setattr(doctor, "checks", lambda config: checks)
    shown = io.StringIO()
    assert not diagnose(None, Console(file=shown, width=200))
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["FAIL", "first", "RuntimeError:", "closing", "tag", "'[/red]'", "at", ANY],
        ["fix:", "see", "the", "error"],
        ["ok", "second", "fine"],
    ]
    checks.pop(0)
    assert diagnose(None, Console(file=io.StringIO()))


@pytest.mark.usefixtures("servers")
def test_prefect_is_the_server_of_make_up_or_the_one_that_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _services(home, prefect="http://ours", mlflow="http://127.0.0.1:2")
    assert check_ports().text == "services are up: prefect http://ours, mlflow http://127.0.0.1:2"
    assert check_prefect() == Finding(f"http://ours/api answers, version {PREFECT} as here")
    monkeypatch.setenv("PREFECT_API_URL", "http://ours")
    found = check_prefect()
    assert "404" in found.text and "unset PREFECT_API_URL" in found.fix, "it is no Prefect"
    monkeypatch.setenv("PREFECT_API_URL", "http://older/api/")
    assert "PREFECT_API_AUTH_STRING" in check_prefect().fix
    with temporary_settings({PREFECT_API_AUTH_STRING: "me:pass:word"}):
        found = check_prefect()
    assert f"http://older/api/ is version 2.0.0, here is {PREFECT}" in found.text and "same version" in found.fix


def test_a_version_that_is_not_the_locked_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typer = importlib.metadata.version("typer")
    lock = [f"typer=={typer}", "rich==0.0.1  # via typer", 'nothing-at-all==1 ; sys_platform == "nowhere"', "", "# end"]
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock").write_text("\n".join([*lock, "nothing-at-all==2"]))
    monkeypatch.setattr(doctor, "PROJECT", tmp_path)
    rich = importlib.metadata.version("rich")
    wrong = f"rich {rich} instead of ==0.0.1; nothing-at-all missing instead of ==2"
    assert check_lock() == Finding(wrong, "rm .venv/.installed && make .venv/.installed")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".device").write_text("gpu\n")
    (tmp_path / "requirements" / "gpu.lock").write_text("\n".join(lock[:1]))
    assert check_lock() == Finding("all versions as in gpu.lock")
    (tmp_path / ".venv" / ".installed-test").touch()
    (tmp_path / "requirements" / "gpu-test.lock").write_text("nothing-at-all==2")
    assert check_lock().text == "nothing-at-all missing instead of ==2"
    (tmp_path / "requirements" / "gpu-test.lock").write_text(lock[0])
    assert check_lock() == Finding("all versions as in gpu.lock and gpu-test.lock")


def test_too_little_room_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        free = available = 2 * 2**30

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Little)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Little)
    for check in ("disk", "memory"):
        found = dict(doctor.checks(None))[check]()
        assert "2 GiB" in found.text and found.fix


def test_a_run_file_s_places_are_checked_too(home: Path, base_model: Path) -> None:
    document = {"workflow": "examples.arithmetic:Arithmetic", "run": "run", "store": str(home / "elsewhere")}
    config = make_config({**document, "model": str(base_model)}, source="test")
    assert f"{base_model}: a greeting is " in check_tokenizer(config).text and not check_tokenizer(config).fix
    assert (home / "elsewhere").as_uri() in dict(doctor.checks(config))["store"]().text
    hub = make_config({**document, "model": "somebody/something"}, source="test")
    assert "will be fetched from the hub" in check_tokenizer(hub).text


def test_hub_device_and_dataset_of_a_run_file_are_looked_at(home: Path, base_model: Path) -> None:
    def found(**values: Any) -> dict[str, str]:
        document = {"workflow": "examples.arithmetic:Arithmetic", "run": "run", **values}
        shown, names = io.StringIO(), ("hub", "device", "dataset")
        chosen = [check for check in doctor.checks(make_config(document, source="test")) if check[0] in names]
        with patch.object(doctor, "checks", lambda config: chosen):
            diagnose(None, Console(file=shown, width=1000))
        return {line.split()[1]: line for line in shown.getvalue().splitlines() if line.startswith(("ok ", "FAIL"))}

    fine = found(model=str(base_model))
    assert f"{base_model} is on this machine" in fine["hub"]
    assert "0 GPUs, and the memory of the CPU holds the run" in fine["device"]
    cores = len(os.sched_getaffinity(0))
    assert f"1 engine of {max(1, cores - 1)}, 1 trainer rank of {cores}" in fine["device"], "a model below 100 MB"
    assert "the trainer computes in float32: the model is stored in float32" in fine["device"]
    assert "no dataset: 9,800 tasks in 'train', 200 tasks in 'test'" in fine["dataset"]
    wrong = found(model="no/where/at/all", train={"device": "cuda"}, evaluation={"split": "nosuch"})
    assert all(line.startswith("FAIL") for line in wrong.values())
    assert "not a Hugging Face id" in wrong["hub"] and "there is no GPU" in wrong["device"]
    assert "has no split 'nosuch', or cannot make its tasks: KeyError: 'nosuch'" in wrong["dataset"]


def test_the_run_files_workflow_is_played(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "from millrace import Task, Workflow\nclass Mine(Workflow):\n"
    text += "    def tasks(self, split):\n        return [Task(id=split, prompt='2+3')]\n"
    text += "    async def run(self, task, chat):\n"
    config = make_config({"workflow": f"{file}:Mine"}, source="test")
    file.write_text(text + "        return 1, 2\n")
    with pytest.raises(UserError, match=r"Mine.run returned tuple; .*mine\.py:5"):
        check_won(config)
