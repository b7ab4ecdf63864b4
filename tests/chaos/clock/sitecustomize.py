"""A clock that jumps: Python imports this at its start where this folder is on PYTHONPATH.

In: `CLOCK_FILE`, a file of seconds. Out: `time.time()` ahead of the true clock by as many, in every process of a run.
"""

import os
import time

_file = os.environ.get("CLOCK_FILE", "")
_true_time, _true_time_ns = time.time, time.time_ns


def _ahead() -> float:
    with open(_file) as file:
        return float(file.read() or 0)


if _file:
    time.time = lambda: _true_time() + _ahead()
    time.time_ns = lambda: _true_time_ns() + int(_ahead() * 1e9)
