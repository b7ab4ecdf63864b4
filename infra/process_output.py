"""The output of this process and its children as one log file, and what they have written there."""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
from pathlib import Path

from infra.structured_logs import json_handler, logs_are_json
from settings.redaction import redact_logs, without_secrets


class _Redacted(io.TextIOWrapper):
    """A text stream that removes secrets from what user code and libraries print."""

    def write(self, text: str) -> int:
        super().write(without_secrets(text))
        return len(text)


def redirect_output(log_file: str) -> None:
    """Redirect the output of this process and its future children to its log file."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        os.dup2(descriptor, number)
        file = open(number, "wb", closefd=False)  # noqa: SIM115 - it is the process's output until its end
        setattr(sys, name, _Redacted(file, "utf-8", "backslashreplace", line_buffering=True))
    redact_logs()
    line = "%(asctime)s %(name)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr)
    if logs_are_json():
        process = {"run": Path(log_file).parent.name, "worker": Path(log_file).stem}
        logging.getLogger().handlers[:] = [json_handler(sys.stderr, lambda: process)]


def num_written() -> int:
    """Bytes in the log file of this process so far; 0 if it writes to none."""
    status = os.fstat(2)
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def written_since(num_bytes: int) -> str:
    """What this process and its children have written to its log file since `num_written` was `num_bytes`."""
    if not num_written():
        return ""
    with open("/proc/self/fd/2", "rb") as log:
        log.seek(num_bytes)
        return log.read().decode(errors="replace")
