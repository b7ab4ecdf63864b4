"""Prefect flows. Importing one turns the telemetry of all libraries off first: Prefect reads that at its import."""

import contextlib
import os
from pathlib import Path

from infra.environment import turn_telemetry_off

turn_telemetry_off()
with contextlib.suppress(KeyError, OSError):  # Prefect makes its folder, with a warning if there is none to make it in
    Path(os.environ["PREFECT_HOME"]).parent.mkdir(parents=True, exist_ok=True)
