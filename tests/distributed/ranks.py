"""Starts the ranks of process groups with the variables the fleet sets.

A module is imported once, in a process of its own, and forked into all ranks before torch has computed anything.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.ports import free_port

_ROOT = Path(__file__).parents[2]
_SECONDS = 240.0
"""Ranks that have not ended by then hang."""


class Ranks:
    """`python -m module folder`, which is to call `fork_ranks`."""

    def __init__(self, module: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Wait for all of them; fails with what they wrote unless all end well."""
        try:
            output = self._process.communicate(timeout=_SECONDS)[0]
        finally:
            self.kill()
        assert self._process.returncode == 0, output

    def kill(self) -> None:
        """End what is left."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()


def fork_ranks(main: Callable[[int], None], *, groups: Sequence[int]) -> None:
    """Run `main(number of the group)` on every rank of groups of these sizes, all at the same time; then exit, with 1
    where one has failed."""
    import peft  # noqa: F401 - once for all

    children = []
    for number, num_ranks in enumerate(groups):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared = {"WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, **address}
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                os.environ.update({name: str(value) for name, value in {**shared, "RANK": rank}.items()})
                os._exit(_run(functools.partial(main, number)))
            children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(1 if any(ended) else 0)


def _run(main: Callable[[], None]) -> int:
    try:
        main()
    except BaseException:  # noqa: BLE001 - a rank's end is told by its exit code
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
