"""Environment variables every Millrace process starts with: where state lives, no telemetry, quiet servers.

In: the state folder (`MILLRACE_HOME`, by default `.millrace` in the working directory), and where a deployment has its
store and its MLflow (`MILLRACE_STORE`, `MILLRACE_TRACKING`). Out: `os.environ` with
defaults filled in; what the user has set is kept. Call it before importing Prefect, Ray, MLflow or vLLM.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from infra.structured_logs import logs_are_json
from settings.redaction import redact_logs

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def home() -> Path:
    """The folder that holds runs, databases and logs unless the run file says otherwise."""
    return Path(os.environ.get("MILLRACE_HOME", ".millrace")).resolve()


def store_uri(store: str) -> str:
    """The run file's `store`, else `$MILLRACE_STORE`, else a folder in the state folder.

    A path becomes absolute, because workers start elsewhere.
    """
    store = store or os.environ.get("MILLRACE_STORE", "")
    if "://" in store:
        return store
    return (Path(store).expanduser().resolve() if store else home() / "store").as_uri()


def tracking_uri(tracking: str) -> str:
    """The run file's `tracking`, else `$MILLRACE_TRACKING`, else a SQLite database in the state folder."""
    return tracking or os.environ.get("MILLRACE_TRACKING", "") or local_tracking_uri()


def local_tracking_uri() -> str:
    """The SQLite database in the state folder, which `millrace up` shows."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def cache_folder() -> Path:
    """Where policies that were fetched, or made whole, are kept."""
    return home() / "cache"


def code_version() -> str:
    """The commit of this checkout, with `+changes` when it has uncommitted ones; the package version elsewhere."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return version("millrace")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def prepare_environment() -> Path:
    """Fill in the defaults, let no log message say a secret, and return the state folder.

    Raises `ValueError` for an unknown `MILLRACE_LOG_FORMAT`.
    """
    folder = home()
    logs_are_json()
    redact_logs()
    defaults = {
        **TELEMETRY_OFF,
        "MILLRACE_HOME": str(folder),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "millrace",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; a flow run that falls silent is marked Crashed
        # The server takes in what task runs report once a second, not each of their states by itself: a transaction
        # costs it more than all that is in it.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
        "RAY_preload_python_modules": "millrace",  # first of all, in every worker: see `millrace/__init__.py`
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM's CPU worker inside its engine core: as a process of its own it spins for a second after each message,
        # on a core that training needs.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the log is the outbox: a later sync repeats what failed
        # Arrow's own allocator keeps what shards and log segments once took: the driver would grow with every round.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # it would tear the table in which a run is watched
        # Engine and trainer share the cores: a thread that waits must sleep, not spin on the core another one needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # Ray would give every actor one
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    return folder
