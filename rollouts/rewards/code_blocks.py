"""The Python code in a reply.

In: text as a policy writes it. Out: the last Python block of its Markdown, read as CommonMark reads fences
(https://spec.commonmark.org/0.31.2/#fenced-code-blocks), by markdown-it. If that reading is no Python, a looser one is
tried: fences that are not at the start of a line, or that end on the last line of the code.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PYTHON = re.compile(r"\{?[ \t]*\.?i?py(?:thon)?[0-9.]*(?![\w+#-])", re.IGNORECASE)
"""The start of an info string: `python`, `Python3.11 title="a.py"`, `{.py}`; not `pycon` or `python-repl`."""
_LOOSE = re.compile(
    rf"(?<![`~])(`{{3,}}+|~{{3,}}+)[ \t]*+{_PYTHON.pattern}[^\n`]*\n(.*?)(?:\1|\Z)", re.DOTALL | re.IGNORECASE
)
_MOST_FENCES = 32
"""Fences inside a string of the code that are tried as its end."""
_MOST_FOR_ENDS = 1_000_000
"""Characters that are parsed to find where blocks end, so that no reply takes so long that it is not scored."""


def python_block(reply: str) -> str | None:
    """The last block that is tagged as Python, or if there is none, the last one without a tag; None without one.

    >>> python_block('1. So:\\r\\n   ~~~py title="a"\\r\\n   x = 1\\r\\n   ~~~')
    'x = 1\\n'
    """
    text = re.sub(r"\r\n?", "\n", reply.encode("utf-8", "replace").decode()).replace("\ufeff", "")
    end, code = _last_fence(text)
    loose = list(_LOOSE.finditer(text))[-1:]
    readings = [code, *(textwrap.dedent(match[2]) for match in loose)]
    if loose and text.count("\n", 0, loose[0].start()) >= end:  # it begins after the last fence
        readings.reverse()
    return next((each for each in readings if each is not None and each.strip() and _parses(each)), code)


def _last_fence(text: str) -> tuple[int, str | None]:
    """The line after the chosen block, and its code: if a string of it has fences of its own, up to a later fence."""
    lines = text.split("\n")
    fences = [token for token in _markdown().parse(text) if token.type == "fence"]
    tagged = [token for token in fences if _PYTHON.match(token.info.strip())]
    end, code, left = 0, None, _MOST_FOR_ENDS
    for token in tagged or [token for token in fences if not token.info.strip()]:
        start, stop = token.map or (0, 0)
        if start < end:  # it is inside a string of the block before
            continue
        end, code = stop, token.content
        for reading in itertools.chain([(stop, code)], _longer(token, lines) if left > 0 else []):
            left -= len(reading[1])
            if left > 0 and _parses(reading[1]):
                end, code = reading
                break
    return end, code


def _longer(token: Token, lines: list[str]) -> Iterator[tuple[int, str]]:
    start, end = token.map or (0, 0)
    opening = lines[start]
    indent = len(opening) - len(opening.lstrip())
    ends = [at for at in range(end, len(lines)) if lines[at].strip().startswith(token.markup)]
    for at in ends[:_MOST_FENCES]:
        code = (line[min(indent, len(line) - len(line.lstrip())) :] for line in lines[start + 1 : at])
        yield at + 1, "\n".join([*code, ""])


def _parses(code: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except Exception:  # noqa: BLE001 - SystemError too (python/cpython#106905): whatever the code is, it is no fault of ours
            return False
    return True


@functools.cache
def _markdown() -> MarkdownIt:
    """Only what fences can be in, so that `<answer>` or four spaces before a fence do not hide it as in CommonMark."""
    return MarkdownIt("zero").enable(["fence", "list", "blockquote", "hr"])
