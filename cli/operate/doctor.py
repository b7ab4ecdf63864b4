"""`millrace doctor`: is everything here that a run needs, and if not, what to do.

In: optionally a run file. Out: one line per check, and exit status 1 when one fails.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from infra.environment import home, store_uri, tracking_uri
from settings.errors import UserError, failure_text, in_one_line
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from settings.run_file import RunConfig

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_ANSWER = 5.0


class Finding(NamedTuple):
    """Result of one check."""

    good: bool
    text: str
    fix: str = ""


def doctor(run_file: Annotated[Path | None, typer.Argument(help="Check this run file's places too.")] = None) -> None:
    """Check that everything a run needs is here, and say how to fix what is not."""
    from settings.run_file import load_run_file

    config = load_run_file(run_file) if run_file else None
    if not diagnose(config, Console(highlight=False, soft_wrap=True)):
        raise typer.Exit(1)


def diagnose(config: RunConfig | None, console: Console) -> bool:
    """Run every check, print it, and return True when all are good."""
    all_good = True
    for name, check in checks(config):
        try:
            finding = check()
        except Exception as error:  # noqa: BLE001 - a check that breaks is a failed check, the others still run
            text = str(error) if isinstance(error, UserError) else in_one_line(failure_text(error))
            finding = Finding(good=False, text=text, fix="see the error")
        mark = "[green]ok  [/]" if finding.good else "[red]FAIL[/]"
        console.print(f"{mark} {name:<12} {_shown(finding.text)}")
        if not finding.good:
            console.print(f"     {'':<12} fix: {_shown(finding.fix)}")
        all_good = all_good and finding.good
    return all_good


def _shown(text: str) -> str:
    return escape(without_secrets(text))


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
        ("Prefect", check_prefect),
        ("tokenizer", lambda: check_tokenizer(config)),
        ("references", lambda: check_won(config)),
        ("vLLM", check_vllm),
    ]


def check_sandbox() -> Finding:
    """Can foreign code be run without a network and without a way out of its folder?"""
    from rollouts.sandbox.sandbox import sandbox_report

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
    import importlib.metadata

    from packaging.requirements import Requirement

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
    import psutil

    available = psutil.virtual_memory().available / 2**30
    return Finding(
        good=available >= 6, text=f"{available:.0f} GiB available", fix="close programs: a run takes about 6 GiB"
    )


def check_ports() -> Finding:
    """Ports of `make up`: ours, or free. Others are used when they are taken."""
    from infra.ports import somebody_listens
    from infra.services import running_services

    running = running_services(home())
    if running:
        return Finding(good=True, text="services are up: " + ", ".join(f"{s.name} {s.url}" for s in running.values()))
    taken = [port for port in (4200, 5000) if somebody_listens(port)]
    return Finding(good=True, text=f"{taken} taken, `make up` will use others" if taken else "4200 and 5000 are free")


def check_store(uri: str) -> Finding:
    from storage.objects.opening import open_store, probe

    atomic = probe(open_store(uri))
    text = f"{uri} can be written; " + ("put-if-absent holds" if atomic else "put-if-absent does NOT hold")
    return Finding(good=atomic, text=text, fix="use a store with conditional writes, or only one writer")


def check_mlflow(uri: str) -> Finding:
    from storage.tracking.registry import prepare_database

    return Finding(good=True, text=f"{uri} answers in {prepare_database(uri):.1f} s")


def check_prefect() -> Finding:
    """The server that runs report to, if one is named or `make up` has started it, and its version."""
    import importlib.metadata

    import httpx
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    from infra.services import running_services

    server = running_services(home()).get("prefect")
    url = os.environ.get("PREFECT_API_URL") or (f"{server.url}/api" if server else PREFECT_API_URL.value() or "")
    if not url:
        return Finding(good=True, text="no server is named: a temporary one is started with each run")
    user, _, password = (PREFECT_API_AUTH_STRING.value() or "").partition(":")
    auth = (user, password) if user else None
    try:
        with httpx.Client(base_url=url, auth=auth, timeout=SECONDS_TO_ANSWER) as client:
            client.get("health").raise_for_status()
            answer = client.get("admin/version")
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                fix = "set PREFECT_API_AUTH_STRING to the server's user:password"
                return Finding(good=False, text=f"{url} asks for a password, or for another one", fix=fix)
            theirs = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        fix = "start it, on this machine by `millrace up`, or unset PREFECT_API_URL and go without its pages"
        return Finding(good=False, text=f"{url} does not answer as Prefect does: {error}", fix=fix)
    ours = importlib.metadata.version("prefect")
    if theirs != ours:
        return Finding(
            good=False, text=f"{url} is version {theirs}, here is {ours}", fix="run the same version on both"
        )
    return Finding(good=True, text=f"{url} answers, version {ours} as here")


def check_tokenizer(config: RunConfig | None) -> Finding:
    """The run file's model: its chat template renders a message."""
    if config is None or not config.model:
        return Finding(good=True, text="no `model` given: a character tokenizer is made with the base model")
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        return Finding(good=True, text=f"{config.model} will be fetched from the hub")
    from rollouts.chat.chat_tokens import ChatTokens
    from storage.records import Message

    ids = ChatTokens.load(folder).prompt([Message(role="user", content="hello")])
    return Finding(good=bool(ids), text=f"{folder}: a greeting is {len(ids)} tokens", fix="add a chat template")


def check_won(config: RunConfig | None) -> Finding:
    """The run file's workflow: its reference wins the tasks."""
    if config is None:
        return Finding(good=True, text="no run file given: nothing to play")
    from infra.user_code import load_object
    from tasks.trial import check_references

    count = check_references(load_object(config.workflow)(config.dataset or None), config)
    return Finding(good=True, text=f"reference_reply wins {count} of the first tasks of each split")


def check_vllm() -> Finding:
    """Import it in a process of its own: the import takes seconds and binds threads."""
    code = "import vllm, torch; print(vllm.__version__, 'CUDA' if torch.cuda.is_available() else 'CPU')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    fix = "rm -r .venv && make .venv/.installed; a torchvision built for CUDA beside CPU torch breaks it"
    return Finding(good=done.returncode == 0, text=last[-1] if last else "no output", fix=fix)
