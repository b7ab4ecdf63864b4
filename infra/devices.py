"""The processors and GPUs of this machine that this process may use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("millrace.devices")

_LISTED_GPUS = Path("/proc/driver/nvidia/gpus")
_ELSEWHERE = "/usr/bin:/usr/local/nvidia/bin:/usr/lib/wsl/lib"
"""Where containers and WSL have `nvidia-smi`, not always on PATH."""
_SECONDS_TO_LIST = 30.0


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """A GPU of this machine; bytes."""

    name: str
    total: int
    free: int


def gpu_memory() -> list[GpuMemory]:
    """The GPUs that this process may use, in their order; none where `nvidia-smi` is not there or does not answer, or
    says of none how much memory it has."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_ELSEWHERE)
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            query, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_SECONDS_TO_LIST, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("the GPUs of this machine cannot be asked: %s", error)
        return []
    rows = [line.split(", ") for line in listed.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        by_name = {name: row for row in rows for name in row[:2]}
        rows = [by_name[name] for name in visible.replace(" ", "").split(",") if name in by_name]
    return [
        GpuMemory(name=name, total=int(total) * 2**20, free=int(free) * 2**20)
        for name, _, total, free in rows
        if total.isdigit() and free.isdigit()  # a GPU that shares the CPU's memory says [N/A]
    ]


def num_gpus() -> int:
    """GPUs of this machine that this process may use. Where the kernel lists none, as in some sandboxes, those that
    `nvidia-smi` does."""
    listed = len(list(_LISTED_GPUS.glob("*")))
    if not listed:
        return len(gpu_memory())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else len([v for v in visible.split(",") if v.strip() not in ("", "-1")])


def has_cores_for(num_processes: int) -> bool:
    """True if this machine has a core for each of so many processes."""
    return len(os.sched_getaffinity(0)) >= num_processes
