"""A machine with a clock that jumps and a disk that fills: Python imports this at its start where this folder is on
PYTHONPATH.

In: `CLOCK_FILE`, a file of seconds, and `FULL_DISK`, a folder. Out: `time.time()` ahead of the true clock by as many,
and no room below the folder as long as a file of the folder's name and `.full` is beside it, in every process of a run.
"""

import os
import shutil
import time

_file, _folder = os.environ.get("CLOCK_FILE", ""), os.environ.get("FULL_DISK", "")
_true_time, _true_time_ns, _true_usage = time.time, time.time_ns, shutil.disk_usage


def _ahead() -> float:
    with open(_file) as file:
        return float(file.read() or 0)


def _usage(path):  # type: ignore[no-untyped-def]
    usage = _true_usage(path)
    is_full = os.path.exists(f"{_folder}.full") and os.path.abspath(path).startswith(_folder)
    return usage._replace(free=3 * 2**20) if is_full else usage


if _file:
    time.time = lambda: _true_time() + _ahead()
    time.time_ns = lambda: _true_time_ns() + int(_ahead() * 1e9)
if _folder:
    shutil.disk_usage = _usage
