"""Environment variables of every Millrace process: the state folder, no telemetry, quiet servers.

In: the state folder (`MILLRACE_HOME`, by default `.millrace` in the working directory), and the store and MLflow server
of a deployment (`MILLRACE_STORE`, `MILLRACE_TRACKING`). Out: `os.environ` with defaults; what the user has set is kept.
Call `prepare_environment` before importing Prefect, Ray, MLflow or vLLM.
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
    """The state folder: runs, databases and logs, unless the run file names other places."""
    return Path(os.environ.get("MILLRACE_HOME", ".millrace")).resolve()


def store_uri(store: str) -> str:
    """The run file's `store`, else `$MILLRACE_STORE`, else a folder in the state folder; absolute, for workers."""
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
    """Set the defaults, redact logs, return the state folder. Raises `ValueError` for a bad `MILLRACE_LOG_FORMAT`."""
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
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; a flow run without heartbeats is marked Crashed
        # The server writes the states of task runs once a second instead of one by one: a transaction costs more than
        # its content.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
        "RAY_preload_python_modules": "millrace",  # first of all, in every worker: see `millrace/__init__.py`
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM's CPU worker runs inside its engine core: as a separate process it spins for a second after each message,
        # on a core that training needs.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a later sync sends what failed, from the log
        # Arrow's own allocator keeps the memory of shards and log segments: the driver would grow with every round.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # it would break the table that shows a run
        # Engine and trainer share the cores: a waiting thread must sleep instead of spinning on a core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # Ray would give every actor one
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    return folder
