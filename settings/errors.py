"""Errors that the user can mend, and where in the user's code any other error came from.

A command prints a `UserError` as one line and everything else as a traceback. A failed attempt keeps its error as text:

    KeyError: 'answr'
      at my/board.py:12 in look_up: return self._answers["answr"]
      at my/env.py:31 in run: return await score(exact, reply, board.look_up())
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import re
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from settings.places.run_paths import OWN_PACKAGES
from settings.redaction import without_secrets

MOST_FRAMES = 8
MOST_CHARACTERS = 2000
"""Longest text of one failure, frames included."""
WHOLE_NUMBER = r"\d{1,9}"
"""Pattern of a version, a step or an attempt that a user names: what has more digits is none."""
LEAST_ROOM = 20e6
"""Bytes for what libraries write beside a run's data: databases, logs, sockets."""
_NO_ROOM = 1e6
_FULL = re.compile("no space left on device|disk quota exceeded|database or disk is full|os error 28|errno 28", re.I)
_CHECKOUT = Path(__file__).resolve().parents[1]
_WHOLE = ("train", "cpu", "gpu")
"""Extras that `make` installs from a lock; pip alone would choose other versions."""
_LONGEST_FRAME = 160  # characters
_LONGEST_LINE = 300  # characters, without the place
_FRAME = re.compile(r"^  at (?P<place>.+?:\d+) in .*$", re.MULTILINE)
_PYTHON_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)(?:\n    +(?! *[\^~])(.+))?', re.MULTILINE)


class UserError(Exception):
    """Something outside of this program has to change; the message names the thing and the fix."""

    exit_status = 2
    """Exit status of a command that ends with this error."""
    may_pass = True
    """Whether the same may succeed when it is tried again, though nothing has been mended meanwhile."""


class InvalidInput(UserError, ValueError):
    """A value that was given cannot be used."""

    may_pass = False


class NotFound(UserError, FileNotFoundError):
    """Something that was named is not there."""

    may_pass = False


class DiskFull(UserError):
    """A disk, a quota or a store has no space left; the message names the place and the bytes that it needs. Nothing
    that was committed is lost, and the same command continues once there is room."""

    exit_status = errno.ENOSPC
    may_pass = False


class MissingPackage(UserError, ImportError):
    """A package that is no part of this install."""

    may_pass = False


def missing_package(module: str | None) -> MissingPackage | None:
    """The error for a module of one of our extras that cannot be imported; None for any other module."""
    name = (module or "").partition(".")[0]
    extra = _extra_of(name.replace("_", "-"))
    if not extra:
        return None
    fix = "run `make train`" if extra in _WHOLE else f'run pip install -e ".[{extra}]"'
    return MissingPackage(f"the package {name} is not installed in {sys.executable}: {fix} in {_CHECKOUT}", name=name)


@cache
def _extra_of(name: str) -> str:
    """The extra that brings a package, a small one first; empty if none does, or if tests alone do."""
    extras = []
    for row in importlib.metadata.requires("millrace") or ():
        package, extra = re.match(r"[\w.-]+", row), re.search(r"""extra == ['"](\w+)""", row)
        if package and extra and package[0].removesuffix("-cpu") == name and extra[1] != "test":
            extras.append(extra[1])
    return min(extras, key=_WHOLE.__contains__, default="")


@contextlib.contextmanager
def path_errors(what: str, *, fix: str = "") -> Iterator[None]:
    """Raise `InvalidInput`, beginning with `what`, for an `OSError` about a path that the user named."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise InvalidInput(f"{what}: {error.strerror or error}{f'; {fix}' if fix else ''}") from error


def is_disk_full(error: BaseException) -> bool:
    """True if an error or its cause is that of a full disk: by its number, or by its words if the library sets none."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_disk_full, error.exceptions))
    if isinstance(error, DiskFull) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return bool(_FULL.search(str(error))) or (cause is not None and is_disk_full(cause))


def disk_full(error: BaseException, places: Mapping[str, Path]) -> DiskFull | None:
    """The error to show if the cause is a full disk, whichever library raised it; None for any other error.

    `places` maps the name of each place that is written to, as the message has it, to its folder. The full one is the
    one with the error's file, or else the one with the least space. A server whose database is full only says that it
    failed. So if a place has no space at all, every error counts, except one about the user's input.
    """
    free = {name: free_bytes(folder) for name, folder in places.items()}
    is_input = isinstance(error, InvalidInput | NotFound | MissingPackage)
    if not is_disk_full(error) and (is_input or min(free.values()) >= _NO_ROOM):
        return None
    each: BaseException | None = error
    file, words = None, ""
    while each is not None:
        if isinstance(each, BaseExceptionGroup):
            each = next(filter(is_disk_full, each.exceptions), each.exceptions[0])
            continue
        if isinstance(each, DiskFull):
            return each
        file, words = file or getattr(each, "filename", None), in_one_line(str(each))
        each = each.__cause__ or each.__context__
    within = [name for name, folder in places.items() if isinstance(file, str) and Path(file).is_relative_to(folder)]
    name = max(within, key=lambda name: len(str(places[name])), default="") or min(free, key=lambda name: free[name])
    if not within and free[name] >= LEAST_ROOM:  # a quota, another machine, or there is room again
        return _no_room(f"a disk or quota ({words})", free[name])
    return _no_room(f"{name}, {places[name]},", free[name])


def check_room(places: Mapping[str, Path]) -> None:
    """Raise `DiskFull` for a place without the space that every command needs there."""
    for name, folder in places.items():
        if (free := free_bytes(folder)) < LEAST_ROOM:
            raise _no_room(f"{name}, {folder},", free)


def nearest_existing(place: Path) -> Path:
    """The place, or what is there of those above it."""
    return next((each for each in (place, *place.parents) if each.exists()), place)


def free_bytes(folder: Path) -> int:
    """Free space of the disk that a folder is on, or will be. What has no size, such as /sys, is never full."""
    folder = nearest_existing(folder)
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize


def _no_room(what: str, free: int) -> DiskFull:
    left = f"{size(free)} free, and " if free < LEAST_ROOM else ""
    return DiskFull(
        f"{what} is full: {left}{size(LEAST_ROOM)} are needed there. Make room, or name another "
        "place. Nothing that was committed is lost: the same command continues"
    )


def failure_text(error: BaseException, message: str = "") -> str:
    """The error, and below it at most `MOST_FRAMES` frames of the user's code, innermost first, without secrets.

    Frames of Millrace and of libraries are left out, unless there are no others. `message` replaces
    `type: str(error)`; frames it has already, from another process such as a reward's, stand first.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    head, *given = re.split(r"\n(?=  at )", message or kind_and_words(error))
    users = [frame for frame in given if _is_users(place_of(frame).rpartition(":")[0])]
    users += _frames(error, users_only=True)
    return _limited(head, users or given or _frames(error, users_only=False))


def kind_and_words(error: BaseException) -> str:
    """`KeyError: 'answr'`; the kind alone if the error has no words, or cannot say them."""
    kind, words = type(error).__name__, ""
    with contextlib.suppress(Exception):  # of the `__str__` of the user's class
        words = str(error)
    return f"{kind}: {words}" if words else kind


def failure_text_of_output(output: str, message: str = "") -> str:
    """The same from what a Python program wrote to its standard error as it died; "" if that has no traceback."""
    _, separator, last = output.rpartition("Traceback (most recent call last):\n")
    if not separator:
        return ""
    error, frames = last, []
    for match in _PYTHON_FRAME.finditer(last):
        file, line, function, code = match.groups(default="")
        frames.append((file, int(line), function, code))
        error = last[match.end() :]
    error = re.sub(r"^\n +[\^~]+(?=\n)", "", error).strip()  # the markers below a line of code
    chosen = [frame for frame in frames if _is_users(frame[0])] or frames
    return _limited(message or error, [_frame(*frame) for frame in reversed(chosen)])


def place_of(text: str) -> str:
    """The innermost place, `my/env.py:31`, in a text of `failure_text`; "" if it has none."""
    frame = _FRAME.search(text)
    return frame["place"] if frame else ""


def failure_kind(text: str) -> str:
    """What such texts have in common when the same thing failed: the kind of error, and the innermost place."""
    first, place = text.partition("\n")[0], place_of(text)
    return f"{first.partition(':')[0]} at {place}" if place else first


def has_users_frames(error: BaseException) -> bool:
    """True if the error, or what caused it, came through code of the user's."""
    return bool(_frames(error, users_only=True))


def place_in_thread(ident: int | None) -> str:
    """The user's frame in which a thread is, as in the text of a failure; empty if it is in none."""
    frame = sys._current_frames().get(ident or 0)
    stack = [each for each in traceback.extract_stack(frame) if _is_users(each.filename)] if frame else []
    return _frame(stack[-1].filename, stack[-1].lineno or 0, stack[-1].name, stack[-1].line or "") if stack else ""


def counted(count: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def all_of(count: int, noun: str) -> str:
    """`all 2,000 attempts`, `the only attempt`."""
    return f"the only {noun}" if count == 1 else f"all {counted(count, noun)}"


def size(num_bytes: float) -> str:
    """Bytes for people: `1.2 GB`, in powers of 1000 as disks are sold."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: `1, 3–7`."""
    spans: list[list[int]] = []
    for value in numbers:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def in_one_line(text: str, *, whole: bool = False) -> str:
    """The first line of such a text, or the `whole` error, and the innermost place:
    `KeyError: 'answr' at my/env.py:31`."""
    error = re.split(r"\n(?=  at )", text)[0]
    first, place = " ".join(error.split()) if whole else error.partition("\n")[0], place_of(text)
    first = first if len(first) <= _LONGEST_LINE else f"{first[: _LONGEST_LINE - 1]}…"
    return f"{first} at {place}" if place else first


def _frames(error: BaseException, *, users_only: bool) -> list[str]:
    """Innermost first. An error that our code or a library raised because of another has that one's frames first."""
    stack = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in reversed(stack) if not users_only or _is_users(frame.filename)]
    own = [_frame(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in shown]
    if error.__cause__ is None:
        return own
    because = _frames(error.__cause__, users_only=users_only)
    raised_by_user = bool(stack) and _is_users(stack[-1].filename)
    return list(dict.fromkeys([*own, *because] if raised_by_user else [*because, *own]))


def _frame(file: str, line: int, function: str, code: str) -> str:
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    text = without_secrets(f"  at {shown}:{line} in {function}" + (f": {code.strip()}" if code else ""))
    return text if len(text) <= _LONGEST_FRAME else f"{text[: _LONGEST_FRAME - 1]}…"


def _limited(head: str, frames: list[str]) -> str:
    shown = "".join(f"\n{frame}" for frame in frames[:MOST_FRAMES])
    if len(head) > 8 * MOST_CHARACTERS:  # to look for secrets in a page that a server sent takes seconds
        head = head[: 4 * MOST_CHARACTERS] + head[-4 * MOST_CHARACTERS :]
    head, room = without_secrets(head), MOST_CHARACTERS - len(shown)
    if len(head) > room:  # what a program writes last says most
        head = f"{head[: room // 3]} … {head[-(room - room // 3 - 3) :]}"
    return head + shown


@cache
def _is_users(file: str) -> bool:
    """True if a source file belongs to the user, and not to Millrace, to Python or to an installed package."""
    if file.startswith("<"):
        return False
    path, root = Path(file).resolve(), Path(__file__).resolve().parents[1]
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return not any(path.is_relative_to(folder) for folder in (*installed, *(root / name for name in OWN_PACKAGES)))
