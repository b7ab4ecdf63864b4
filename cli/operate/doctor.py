"""`millrace doctor`: is everything here that a run needs, and if not, what to do.

In: optionally a run file. Out: one line per check, and exit status 1 when one fails.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.console import open_console
from infra.environment import tracking_uri
from settings.errors import UserError, counted, failure_text, in_one_line, size
from settings.places.hints import command
from settings.places.state_folder import home, store_uri
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from settings.run_file import RunConfig

PROJECT = Path(__file__).resolve().parents[2]
SECONDS_TO_ANSWER = 5.0


class Finding(NamedTuple):
    """Result of one check."""

    text: str
    fix: str = ""
    """What to do; empty when the check passes."""


def doctor(run_file: Annotated[Path | None, typer.Argument(help="Check this run file's places too.")] = None) -> None:
    """Check that everything a run needs is here, and say how to fix what is not."""
    from infra.environment import prepare_environment
    from settings.run_file import load_run_file

    if run_file:
        prepare_environment(run_file.absolute().parent)
    config = load_run_file(run_file) if run_file else None
    if not diagnose(config, open_console(soft_wrap=True)):
        raise typer.Exit(1)


def diagnose(config: RunConfig | None, console: Console) -> bool:
    """Run every check, print it, and return True when all pass."""
    all_pass = True
    for name, check in checks(config):
        try:
            finding = check()
        except Exception as error:  # noqa: BLE001 - a check that breaks is a failed check, the others still run
            text = str(error) if isinstance(error, UserError) else in_one_line(failure_text(error))
            finding = Finding(text, fix="see the error")
        mark = "[red]FAIL[/]" if finding.fix else "[green]ok  [/]"
        console.print(f"{mark} {name:<12} {escape(without_secrets(finding.text))}")
        if finding.fix:
            console.print(f"     {'':<12} fix: {escape(without_secrets(finding.fix))}")
            all_pass = False
    return all_pass


def checks(config: RunConfig | None) -> list[tuple[str, Callable[[], Finding]]]:
    """Name and function of every check, cheap ones first."""
    store = store_uri(config.store if config else "")
    tracking = tracking_uri(config.tracking.uri if config else "")
    return [
        ("Python", check_python),
        ("sandbox", lambda: check_sandbox(config)),
        ("lock", check_lock),
        ("disk", check_disk),
        ("memory", check_memory),
        ("ports", check_ports),
        ("store", lambda: check_store(store)),
        ("MLflow", lambda: check_mlflow(tracking)),
        ("Prefect", check_prefect),
        ("hub", lambda: check_hub(config)),
        ("tokenizer", lambda: check_tokenizer(config)),
        ("device", lambda: check_device(config)),
        ("dataset", lambda: check_dataset(config)),
        ("references", lambda: check_won(config)),
        ("vLLM", check_vllm),
    ]


def check_python() -> Finding:
    is_new = sys.version_info >= (3, 11)
    return Finding(platform.python_version(), "" if is_new else "install Python 3.11 or newer and run make again")


def check_sandbox(config: RunConfig | None) -> Finding:
    """Can foreign code be run without a network and without a way out of its folder?"""
    from rollouts.sandbox.sandbox import kernel_features, sandbox_report

    # Only rewards that run code need it, and those refuse by themselves: no failure.
    if missing := sandbox_report():
        fix = "run where Landlock and seccomp are allowed, or without rollout.require_sandbox"
        is_needed = config is not None and config.rollout.require_sandbox
        return Finding(f"rewards that run a reply's code will refuse: {'; '.join(missing)}", fix if is_needed else "")
    return Finding(f"code of a reply runs under {kernel_features()}")


def check_lock() -> Finding:
    """Installed versions against the lock that .venv was made from, and that of the tests if they were added."""
    import importlib.metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    stamp = PROJECT / ".venv" / ".device"
    device = stamp.read_text().strip() if stamp.exists() else "cpu"
    names = [f"{device}.lock", *([f"{device}-test.lock"] if stamp.with_name(".installed-test").exists() else [])]
    packages = list(importlib.metadata.distributions())[::-1]  # of two with one name Python takes the first
    versions = {canonicalize_name(package.name): package.version for package in packages}
    wrong = []
    text = "\n".join((PROJECT / "requirements" / name).read_text() for name in names)
    rows = [line.split("#")[0].strip() for line in text.splitlines()]
    for requirement in [Requirement(row) for row in rows if row]:
        version = versions.get(canonicalize_name(requirement.name), "missing")
        is_needed = requirement.marker is None or requirement.marker.evaluate()
        if is_needed and (version == "missing" or not requirement.specifier.contains(version, prereleases=True)):
            wrong.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    if wrong:
        return Finding("; ".join(wrong[:5]), "rm .venv/.installed && make .venv/.installed")
    return Finding(f"all versions as in {' and '.join(names)}")


def check_disk() -> Finding:
    home().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home()).free / 2**30
    fix = "" if free >= 5 else "free 5 GiB, or set MILLRACE_HOME elsewhere"
    return Finding(f"{free:.0f} GiB free at {home()}", fix)


def check_memory() -> Finding:
    import psutil

    free = psutil.virtual_memory().available / 2**30
    return Finding(f"{free:.0f} GiB available", "" if free >= 4 else "close programs: a small run takes about 3 GiB")


def check_ports() -> Finding:
    """Ports of `make up`: ours, or free. Others are used when they are taken."""
    from infra.ports import server_listens
    from infra.services.services import running_services

    if running := running_services(home()):
        return Finding("services are up: " + ", ".join(f"{s.name} {s.url}" for s in running.values()))
    busy = [port for port in (4200, 5000) if server_listens(port)]
    return Finding(f"{busy} taken, `{command('up')}` will use others" if busy else "4200 and 5000 are free")


def check_store(uri: str) -> Finding:
    from storage.objects.opening import open_store, probe

    probe(open_store(uri))
    return Finding(f"{uri} can be written; of writers at once one wins")


def check_mlflow(uri: str) -> Finding:
    import mlflow

    started = time.perf_counter()
    mlflow.MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    return Finding(f"{uri} answers in {time.perf_counter() - started:.1f} s")


def check_prefect() -> Finding:
    """The server that runs report to, if one is named or `make up` has started it, and its version."""
    import importlib.metadata

    import httpx
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

    from infra.services.services import running_services

    server = running_services(home()).get("prefect")
    url = os.environ.get("PREFECT_API_URL") or (f"{server.url}/api" if server else PREFECT_API_URL.value() or "")
    if not url:
        return Finding("no server is named: a temporary one is started with each run")
    user, _, password = (PREFECT_API_AUTH_STRING.value() or "").partition(":")
    auth = (user, password) if user else None
    try:
        with httpx.Client(base_url=url, auth=auth, timeout=SECONDS_TO_ANSWER) as client:
            client.get("health").raise_for_status()
            reply = client.get("admin/version")
            if reply.status_code == httpx.codes.UNAUTHORIZED:
                fix = "set PREFECT_API_AUTH_STRING to the server's user:password"
                return Finding(f"{url} asks for a password, or for another one", fix)
            theirs = reply.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        fix = f"start it, on this machine by `{command('up')}`, or unset PREFECT_API_URL and go without its pages"
        return Finding(f"{url} does not answer as Prefect does: {error}", fix)
    ours = importlib.metadata.version("prefect")
    if theirs != ours:
        return Finding(f"{url} is version {theirs}, here is {ours}", "run the same version on both")
    return Finding(f"{url} answers, version {ours} as here")


def check_hub(config: RunConfig | None) -> Finding:
    """The run file's models: folders, in the hub's cache, or on the hub."""
    from tasks.checks.preflight import check_model
    from trainers.model.fetch import local_folder

    models = [model for model in (config.model, config.train.reference.model) if model] if config else []
    for model in models:
        check_model(model)
    here = [f"{model} is {'on this machine' if local_folder(model) else 'on the hub'}" for model in models]
    return Finding("; ".join(here) or "no model is named: nothing to fetch")


def check_device(config: RunConfig | None) -> Finding:
    """GPUs of this machine, or of the Ray cluster, and whether they hold the run file's ranks and engines; without any,
    who computes with how many threads."""
    from infra.ray.client import nodes_to_use
    from infra.ray.placement import gpus_of
    from storage.policies.model_config import number_bytes
    from tasks.checks.learning_rate import num_parameters
    from tasks.checks.machine import for_this_machine, precision_text
    from tasks.checks.memory_plan import memory_plan
    from tasks.checks.preflight import about_model, check_devices

    nodes = nodes_to_use()
    where = f"{len(nodes)} nodes of the Ray cluster" if os.environ.get("RAY_ADDRESS") else "this machine"
    if config is None:
        return Finding(f"{where}: {gpus_of(nodes):g} GPUs")
    about = about_model(config)
    config = for_this_machine(config, about)
    check_devices(config)
    plan = [f"{d.name} about {size(d.needed)} of {size(d.total)}" for d in memory_plan(config, about)]
    if not gpus_of(nodes):
        from tasks.fleet import engine_threads

        cores, num_engines = len(os.sched_getaffinity(0)), config.rollout.num_workers + config.evaluation.own_engine
        weights_bytes = (num_parameters(config) or 0) * number_bytes(config.engine.vllm, about)
        threads = engine_threads(
            cores, max(1, num_engines), max_staleness=config.max_staleness, weights_bytes=weights_bytes
        )
        each = f"{counted(num_engines, 'engine')} of {threads}"
        ranks = f"{counted(config.train.num_ranks, 'trainer rank')} of {config.train.num_threads or cores}"
        plan.append(f"of {counted(cores, 'thread')}: {each}, {ranks}")
    plan.append(f"the trainer computes in {precision_text(config, about)}")
    holds = "GPUs, which hold the run" if gpus_of(nodes) else "GPUs, and the memory of the CPU holds the run"
    return Finding("; ".join([f"{where}: {gpus_of(nodes):g} {holds}", *plan]))


def check_dataset(config: RunConfig | None) -> Finding:
    """The run file's workflow has tasks in both splits, from its dataset if it has one."""
    if config is None:
        return Finding("no run file given: nothing to read")
    from tasks.checks.loading import load_tasks, load_workflow

    tasks = load_tasks(load_workflow(config), config)
    counts = ", ".join(f"{counted(len(members), 'task')} in {split!r}" for split, members in tasks.items())
    return Finding(f"{config.dataset or 'no dataset'}: {counts}")


def check_tokenizer(config: RunConfig | None) -> Finding:
    """The run file's model: its chat template renders a message."""
    if config is None or not config.model:
        return Finding("no `model` given: a character tokenizer is made with the base model")
    from rollouts.chat.chat_tokens import ChatTokens
    from storage.records import Message
    from trainers.model.fetch import local_folder

    if (folder := local_folder(config.model)) is None:
        return Finding(f"{config.model} will be fetched from the hub")
    tokens = ChatTokens.load(folder, settings=config.engine.chat_template_kwargs)
    ids = tokens.prompt([Message(role="user", content="hello")])
    return Finding(f"{folder}: a greeting is {counted(len(ids), 'token')}", "" if ids else "add a chat template")


def check_won(config: RunConfig | None) -> Finding:
    """The run file's workflow: its first tasks can be played, and its reference wins them."""
    if config is None:
        return Finding("no run file given: nothing to play")
    from rollouts.workflow import Workflow
    from tasks.checks.loading import load_tasks, load_workflow
    from tasks.checks.preflight import model_positions
    from tasks.checks.trial import check_references, play_tasks

    workflow = load_workflow(config)
    play_tasks(workflow, tasks := load_tasks(workflow, config), config, positions=model_positions(config))
    if type(workflow).reference_reply is Workflow.reference_reply:
        return Finding("the first tasks of each split were played; the workflow has no reference_reply")
    count = check_references(workflow, tasks, config)
    return Finding(f"the first tasks of each split were played; reference_reply wins {counted(count, 'task')}")


def check_vllm() -> Finding:
    """Import it in a process of its own: the import takes seconds and binds threads."""
    code = "import vllm, torch; print(vllm.__version__, 'CUDA' if torch.cuda.is_available() else 'CPU')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    good = done.returncode == 0
    lines = (done.stdout if good else done.stderr).strip().splitlines()
    fix = "rm -r .venv && make .venv/.installed; a torchvision built for CUDA beside CPU torch breaks it"
    return Finding(lines[-1] if lines else "no output", "" if good else fix)
