"""`millrace doctor`: is everything here that a run needs, and if not, what to do.

In: optionally a run file. Out: one line per check, and exit status 1 when one fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from rich.console import Console

from flows.config import RunConfig
from infra.environment import home, store_uri, tracking_uri
from infra.services import free_port, running_services

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    good: bool
    text: str
    fix: str = ""


def diagnose(config: RunConfig | None, console: Console) -> bool:
    """Run every check, print it, and return True when all are good."""
    all_good = True
    for name, check in checks(config):
        try:
            finding = check()
        except Exception as error:  # noqa: BLE001 - a check that breaks is a failed check, the others still run
            finding = Finding(good=False, text=f"{type(error).__name__}: {error}", fix="see the error")
        mark = "[green]ok  [/]" if finding.good else "[red]FAIL[/]"
        console.print(f"{mark} {name:<12} {finding.text}", soft_wrap=True)
        if not finding.good:
            console.print(f"     {'':<12} fix: {finding.fix}", soft_wrap=True)
        all_good = all_good and finding.good
    return all_good


def checks(config: RunConfig | None) -> list[tuple[str, Callable[[], Finding]]]:
    """Name and function of every check, cheap ones first."""
    store = store_uri(config.store if config else "")
    tracking = tracking_uri(config.tracking if config else "")
    return [
        ("Python", check_python),
        ("sandbox", check_sandbox),
        ("lock", check_lock),
        ("disk", check_disk),
        ("memory", check_memory),
        ("ports", check_ports),
        ("store", lambda: check_store(store)),
        ("MLflow", lambda: check_mlflow(tracking)),
        ("tokenizer", lambda: check_tokenizer(config)),
        ("vLLM", check_vllm),
    ]


def check_sandbox() -> Finding:
    """Can foreign code be run without a network and without a way out of its folder?"""
    from rollouts.sandbox import sandbox_report

    missing = sandbox_report()
    if not missing:
        return Finding(good=True, text="code of a reply runs under Landlock and seccomp")
    # Only rewards that run code need it, and those refuse by themselves.
    return Finding(good=True, text=f"rewards that run a reply's code will refuse: {'; '.join(missing)}")


def check_python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(good=good, text=platform.python_version(), fix="install Python 3.11 or newer and run make again")


def check_lock() -> Finding:
    """Installed versions against the lock that .venv was made from."""
    device = PROJECT / ".venv" / ".device"
    lock = PROJECT / "requirements" / f"{device.read_text().strip() if device.exists() else 'cpu'}.lock"
    wrong = []
    rows = [line.split("#")[0].strip() for line in lock.read_text().splitlines()]
    for requirement in [Requirement(row) for row in rows if row]:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = "missing"
        if installed == "missing" or not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} instead of {requirement.specifier}")
    text = "; ".join(wrong[:5]) if wrong else f"all versions as in {lock.name}"
    return Finding(good=not wrong, text=text, fix="rm .venv/.installed && make .venv/.installed")


def check_disk() -> Finding:
    home().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home()).free / 2**30
    return Finding(
        good=free >= 5, text=f"{free:.0f} GiB free at {home()}", fix="free 5 GiB, or set MILLRACE_HOME elsewhere"
    )


def check_memory() -> Finding:
    available = psutil.virtual_memory().available / 2**30
    return Finding(
        good=available >= 6, text=f"{available:.0f} GiB available", fix="close programs: a run takes about 6 GiB"
    )


def check_ports() -> Finding:
    """Ports of `make up`: ours, or free. Others are used when they are taken."""
    running = running_services(home())
    if running:
        return Finding(good=True, text="services are up: " + ", ".join(f"{s.name} {s.url}" for s in running.values()))
    taken = [port for port in (4200, 5000) if free_port(port) != port]
    return Finding(good=True, text=f"{taken} taken, `make up` will use others" if taken else "4200 and 5000 are free")


def check_store(uri: str) -> Finding:
    from storage.object_store import open_store, probe

    atomic = probe(open_store(uri))
    text = f"{uri} can be written; " + ("put-if-absent holds" if atomic else "put-if-absent does NOT hold")
    return Finding(good=atomic, text=text, fix="use a store with conditional writes, or only one writer")


def check_mlflow(uri: str) -> Finding:
    from storage.redaction import without_secrets
    from storage.registry import prepare_database

    return Finding(good=True, text=f"{without_secrets(uri)} answers in {prepare_database(uri):.1f} s")


def check_tokenizer(config: RunConfig | None) -> Finding:
    """The run file's model: its chat template renders a message."""
    if config is None or not config.model:
        return Finding(good=True, text="no `model` given: a character tokenizer is made with the base model")
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        return Finding(good=True, text=f"{config.model} will be fetched from the hub")
    from rollouts.chat_tokens import ChatTokens
    from storage.records import Message

    ids = ChatTokens.load(folder).prompt([Message(role="user", content="hello")])
    return Finding(good=bool(ids), text=f"{folder}: a greeting is {len(ids)} tokens", fix="add a chat template")


def check_vllm() -> Finding:
    """Import it in a process of its own: the import takes seconds and binds threads."""
    code = "import vllm, torch; print(vllm.__version__, 'CUDA' if torch.cuda.is_available() else 'CPU')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    fix = "rm -r .venv && make .venv/.installed; a torchvision built for CUDA beside CPU torch breaks it"
    return Finding(good=done.returncode == 0, text=last[-1] if last else "no output", fix=fix)
