"""End the Prefect servers that killed drivers have left behind.

In: the state folder. Out: the processes that were ended. Workers and engines die with their driver. The server that
Prefect starts beside a flow, if `millrace up` runs none, does not.
"""

from __future__ import annotations

from pathlib import Path

import psutil


def end_orphaned_servers(home: Path) -> list[int]:
    """End the Prefect servers of this state folder whose driver was killed; returns their process ids."""
    ended = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            ours = variables.get("PREFECT__SERVER_EPHEMERAL") and variables.get("PREFECT_HOME") == str(home / "prefect")
            parent = process.parent() if ours else None
            if not ours or (parent is not None and "python" in Path(parent.exe()).name):
                continue
            process.terminate()
        except psutil.Error:
            continue  # it ended meanwhile, or belongs to another user
        ended.append(process.pid)
    return ended
