"""Debian packages that tests need: servers and tools no Python package brings.

In: what is missing. Out: it is installed, or `CannotInstall` says why not; its tests are skipped then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence

INSTALL_SECONDS = 400


class CannotInstall(Exception):
    """A package is not here and cannot be brought here; the message names it."""


def install(packages: Sequence[str]) -> None:
    """Bring packages by apt-get, as root. Raises `CannotInstall`."""
    names = " ".join(packages)
    if not shutil.which("apt-get"):
        raise CannotInstall(f"not installed, and there is no apt-get to install it: {names}")
    command = ["apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages]
    if os.geteuid() != 0:
        raise CannotInstall(f"not installed: sudo {' '.join(command)}")
    output = ""
    deadline = time.monotonic() + INSTALL_SECONDS
    for step in (command, ["apt-get", "update"], command):  # fresh package lists only where the ones here do not do
        try:
            done = subprocess.run(
                step,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            raise CannotInstall(f"apt-get did not install {names} within {INSTALL_SECONDS} s") from None
        if done.returncode == 0 and step is command:
            return
        output = done.stderr or output
    raise CannotInstall(f"apt-get cannot install {names}: {(output.strip().splitlines() or ['no message'])[-1]}")
