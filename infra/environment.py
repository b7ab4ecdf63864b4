"""Environment variables of every Millrace process: the state folder, no telemetry, quiet servers.

In: the state folder (`settings/places`), and the store and MLflow server of a deployment (`MILLRACE_STORE`,
`MILLRACE_TRACKING`). Out: `os.environ` with defaults, under which libraries too keep what they write in the state
folder; what the user has set is kept. Call `prepare_environment` before importing Prefect, Ray, MLflow or vLLM.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from infra.structured_logs import logs_are_json
from settings.errors import InvalidInput, nearest_existing, path_errors
from settings.places.hints import COMMAND, executable
from settings.places.state_folder import HOME, HOME_FOUND, expanded, find_home, home, sqlite_uri
from settings.redaction import holds_secret, redact_logs, without_secrets

KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""With these, glibc keeps the memory that a step frees for the next step. Returning megabytes to the kernel and getting
them again, page by page, takes a twentieth of a small step, and more beside busy engines. Blocks above the first, which
is what it grows to by itself, are mapped, and go back."""
_KEEPS_ALL_IN_ONE_ARENA = "narenas:1,dirty_decay_ms:-1,oversize_threshold:0,lg_extent_max_active_fit:64"
"""The same for jemalloc. More arenas have more holes, also the one that it has for large blocks. By default it cuts no
block from a free one of more than 64 times its size: what a pack has freed in one piece would not serve the next."""
FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""Products of matrices that oneDNN, below torch, keeps ready, one for each shape, each with buffers of a quarter MiB
for its code. A trainer asks for some 20 of each pack, and packs have other lengths each time; the default is 1,024."""
_LARGE = 100 * 10**6
"""Bytes of a model from which a step takes so long that getting its memory anew, page by page, no longer counts."""
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}
"""Variable → its number in malloc.h."""

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "WANDB_ERROR_REPORTING": "false",
}
_EVENT_SECONDS = {"prefect.flow-run.heartbeat": 86_400} | {
    f"prefect.task-run.{state}": 60 for state in ("Pending", "Running", "Completed")
}
"""How long Prefect's server keeps the most frequent events; all others seven days."""
_ours: dict[str, str] = {}
"""What `prepare_environment` has set in this process: a later call with another folder may set it to something else."""


def turn_telemetry_off() -> None:
    """Let no library of this process and its children send usage data, unless the user has said otherwise."""
    for key, value in TELEMETRY_OFF.items():
        os.environ.setdefault(key, value)


def tracking_uri(tracking: str) -> str:
    """The run file's `tracking`, else `$MILLRACE_TRACKING`, else a SQLite database in the state folder.

    Raises `InvalidInput` for an address with a password that is not from the environment: it would be recorded.
    """
    if tracking and holds_secret(tracking):
        raise InvalidInput(
            f"tracking = {without_secrets(tracking)!r} holds a password, and settings and parameters are recorded for "
            "all to read: leave it out and set MILLRACE_TRACKING to it, or MLFLOW_TRACKING_USERNAME and _PASSWORD"
        )
    return tracking or os.environ.get("MILLRACE_TRACKING", "") or local_tracking_uri()


def local_tracking_uri() -> str:
    """The SQLite database in the state folder, which `millrace up` shows."""
    return sqlite_uri(home() / "mlflow.db")


def prefect_database_url(file: Path) -> str:
    """How Prefect is told where its database is."""
    return sqlite_uri(file).replace("sqlite", "sqlite+aiosqlite", 1)


def make_home() -> None:
    """Make the state folder. What Prefect keeps in it is for its user alone: blocks, and the key they are encrypted by.

    Raises `InvalidInput` for a place that cannot be written.
    """
    with path_errors(f"MILLRACE_HOME {home()}"):
        (home() / "prefect").mkdir(parents=True, exist_ok=True)
        (home() / "prefect").chmod(0o700)


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


def _hub_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or expanded("~/.cache")
    return Path(cache) / "huggingface"


def _is_writable(folder: Path) -> bool:
    """True if files can be made in a folder, which may not exist yet."""
    nearest = nearest_existing(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def prepare_environment(run_folder: Path | None = None) -> Path:
    """Set the defaults, redact logs, return the state folder, for a run file in `run_folder` or where one stands.

    Raises `ValueError` for a bad `MILLRACE_LOG_FORMAT`, and `InvalidInput` for a state folder that is a file or in one.
    """
    folder = home() if run_folder is None else find_home(run_folder)
    with path_errors(f"MILLRACE_HOME {folder}"):
        if not nearest_existing(folder).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    caches = folder / "cache" / "libraries"
    logs_are_json()
    redact_logs()
    # Prefect wants to make its folder as it is imported. A command that is refused makes no state folder for it.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
    defaults = {
        **TELEMETRY_OFF,
        COMMAND: executable(),
        "PREFECT_HOME": str(folder / "prefect"),
        # What a flow raised, pickled: in ~/.prefect by default, wherever PREFECT_HOME is.
        "PREFECT_LOCAL_STORAGE_PATH": str(folder / "prefect" / "storage"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_LOGGING_LEVEL": "WARNING",
        # Of the server beside a run, whose errors reach the run as they reach every client. `millrace up` logs more.
        "PREFECT_LOGGING_SERVER_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "millrace",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # a command without a flow run has its terminal
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; a flow run without heartbeats is marked Crashed
        # The server writes the states of task runs once a second instead of one by one: a transaction costs more than
        # its content.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "500",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
        # Nine events per round are three quarters of what a long run would write into the database, and nothing reads
        # them later: the states of task runs are rows of their own.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "60",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_BATCH_SIZE": "1000",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(_EVENT_SECONDS),
        "RAY_preload_python_modules": "millrace",  # first of all, in every worker: see `millrace/__init__.py`
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # vLLM's CPU worker runs inside its engine core: as a separate process it spins for a second after each message,
        # on a core that training needs.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # its password too
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a later sync sends what failed, from the log
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",  # seconds; a server that was stopped never answers
        # Arrow's own allocator keeps the memory of shards and log segments: the driver would grow with every round.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # it would break the table that shows a run
        # Engine and trainer share the cores: a waiting thread must sleep instead of spinning on a core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # Ray would give every actor one
        # What libraries compile, or find out about models.
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_CONFIG_ROOT": str(caches / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torchinductor"),
        "TORCH_EXTENSIONS_DIR": str(caches / "torch-extensions"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(caches),
        "TILELANG_CACHE_DIR": str(caches / "tilelang"),
        "DG_JIT_CACHE_DIR": str(caches / "deep-gemm"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),
        "NUMBA_CACHE_DIR": str(caches / "numba"),
        "OUTLINES_CACHE_DIR": str(caches / "outlines"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_DIR": str(folder),
        "WANDB_CACHE_DIR": str(caches / "wandb"),
        "WANDB_DATA_DIR": str(caches / "wandb-data"),
        "MPLCONFIGDIR": str(caches / "matplotlib"),
        # Models and data sets of the hub stay where all programs of the user share them, if that place can be written.
        **({} if _is_writable(_hub_folder()) else {"HF_HOME": str(caches / "huggingface")}),
    }
    if sqlite_uri(file := folder / "prefect" / "prefect.db") != f"sqlite:///{file}":
        defaults["PREFECT_API_DATABASE_CONNECTION_URL"] = prefect_database_url(file)
    if HOME not in os.environ or os.environ[HOME] == os.environ.get(HOME_FOUND):
        os.environ[HOME] = os.environ[HOME_FOUND] = str(folder)
    for key, value in defaults.items():
        if key not in os.environ or os.environ[key] == _ours.get(key):
            os.environ[key] = _ours[key] = value
    _exempt_loopback()
    return folder


def _exempt_loopback() -> None:
    """Keep what this machine says to itself (prompts, keys, states of tasks) away from a user's proxy."""
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        exempt = [host for name in ("no_proxy", "NO_PROXY") for host in os.environ.get(name, "").split(",")]
        hosts = dict.fromkeys(host.strip() for host in [*exempt, "localhost", "127.0.0.1", "::1"])
        value = "*" if "*" in hosts else ",".join(filter(None, hosts))  # beside others, urllib takes it for a name
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = value


def allocator() -> dict[str, str]:
    """Variables for a process that is to take its memory from jemalloc, of which Ray brings a copy. There are none if
    Ray does not, or if `LD_PRELOAD` is empty. What it has comes first, so an allocator of the user's stays.

    glibc finds ever fewer of its free blocks large enough for what the next step asks: after five steps of SmolLM2-135M
    a trainer has had 6.0 GiB with it, and with jemalloc 5.1. What is freed is kept, as with `KEEPS_FREED_MEMORY`.
    """
    spec = find_spec("ray")
    folders = (spec.submodule_search_locations if spec else None) or []
    libraries = [str(path) for folder in folders if (path := Path(folder, "core", "libjemalloc.so")).exists()]
    preloaded = os.environ.get("LD_PRELOAD")
    if not libraries or preloaded == "":
        return {}
    preloaded = f"{preloaded}:{libraries[0]}" if preloaded else libraries[0]  # vLLM sets it too, to OpenMP's library
    return {"LD_PRELOAD": preloaded, "MALLOC_CONF": os.environ.get("MALLOC_CONF", _KEEPS_ALL_IN_ONE_ARENA)}


def adopt_malloc(variables: Mapping[str, str]) -> None:
    """Let glibc follow variables that it reads only when a process starts. Without glibc nothing is done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number in _MALLOPT.items():
        if mallopt is not None and name in variables:
            mallopt(number, int(variables[name]))


def give_back_freed_memory() -> None:
    """Give the kernel what the allocator keeps, where it would fit nothing that comes. Another one than jemalloc and
    glibc keeps it."""
    process = ctypes.CDLL(None)
    if purge := getattr(process, "mallctl", None):
        purge(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))  # MALLCTL_ARENAS_ALL
    elif trim := getattr(process, "malloc_trim", None):
        trim(0)


def give_back_beside_large(model_bytes: int) -> None:
    """The same after a step or a load, of a model of so many bytes, if it is large. Its blocks have other sizes each
    time, so what is kept fits the next ones less and less."""
    if model_bytes >= _LARGE:
        give_back_freed_memory()
