"""The consoles that commands print on.

In: which stream. Out: a rich console. Outside of a terminal nothing is folded or cut, so that `millrace runs | grep`
finds whole names; there a line is as long as what it says.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from rich.console import Console

_ENDLESS = 100_000  # characters; rich has no console without a width


def open_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that colours nothing by itself: as wide as the terminal, or as `COLUMNS` says, or as its lines."""
    console = Console(highlight=False, stderr=stderr, soft_wrap=soft_wrap)
    if not console.is_terminal:
        console.file = _Trimmed(sys.stderr if stderr else sys.stdout)  # type: ignore[assignment]
        if not os.environ.get("COLUMNS"):
            console.width = _ENDLESS
    return console


class _Trimmed:
    """A text file that leaves out the blanks with which rich fills up the last column of a table."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return int(self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
