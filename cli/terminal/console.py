"""The consoles that commands print on.

In: which stream. Out: a rich console that prints no control character but its own, whatever text it prints. Outside of
a terminal nothing is folded or cut, so that `millrace runs | grep` finds whole names; there a line is as long as what
it says.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from settings.redaction import printable

_ENDLESS = 100_000  # characters; rich has no console without a width
_NARROWEST = 20  # characters; a terminal that says less, such as `COLUMNS=0`, does not know


def open_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that colours nothing by itself: as wide as the terminal, or as `COLUMNS` says, or as its lines."""
    console = _Plain(highlight=False, emoji=False, stderr=stderr, soft_wrap=soft_wrap)
    if not console.is_terminal:
        console.file = _Trimmed(sys.stderr if stderr else sys.stdout)  # type: ignore[assignment]
        if not os.environ.get("COLUMNS"):
            console.width = _ENDLESS
    console.width = console.width if console.width >= _NARROWEST else 80
    return console


def open_streams() -> None:
    """Let every command print: a stream that the caller has closed takes everything, and one whose encoding lacks a
    character, as of `LC_ALL=de_DE.ISO-8859-1`, shows `?`."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # a database would be opened in its place, and printed into
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="replace")


def reader_is_gone() -> bool:
    """True if what reads our output, such as `head`, has ended."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def say(sentence: str) -> None:
    """Print a sentence without markup, in one line."""
    open_console(soft_wrap=True).print(sentence, markup=False)


@contextlib.contextmanager
def prints_to_stderr(wanted: bool) -> Iterator[None]:
    """What others print meanwhile on standard output, such as a module of the user's, goes to standard error: the JSON
    of a command stands alone."""
    if not wanted:
        yield
        return
    stdout, own = sys.stdout, os.dup(1)
    stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        if not stdout.closed:
            stdout.flush()
        os.dup2(own, 1)
        os.close(own)
        sys.stdout = open(1, "w", closefd=False) if stdout.closed else stdout  # noqa: SIM115 - for the process's life


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show what a command is at: a spinner on a terminal, else a line on stderr. Yields what shows the next thing."""
    console = open_console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
    else:
        show = functools.partial(console.print, markup=False)
        show(what)
        yield show


class _Plain(Console):
    """A console on which a policy, a task or a store's writer steers nothing: control characters are `·`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _Trimmed:
    """A text file that leaves out the blanks with which rich fills up the last column of a table."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return int(self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
