"""The rows of one file of problems: JSON lines or Parquet, compressed or not.

In: a file, and the keys that every row must have. Out: dictionaries. A broken line is an error that names it.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from settings.errors import InvalidInput
from settings.redaction import read_json

_COMPRESSIONS = (".gz", ".zst", ".bz2")
_ENCODINGS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
"""Mark at the beginning of a file → encoding; a file without one is UTF-8."""
_CONVERSATION = re.compile(r"""\s*\[\s*\{\s*(["'])(role|from)\1\s*:\s*["']""")
_LFS_POINTER = b"version https://git-lfs"
"""What Git puts in a file's place until Git LFS has fetched it."""


def kind_of(file: Path) -> str:
    """`.jsonl` or `.parquet`, also below a compression; empty for any other file."""
    plain = file.with_suffix("") if file.suffix in _COMPRESSIONS else file
    return kind if (kind := plain.suffix.lower()) in (".jsonl", ".parquet") else ""


def read_rows(file: Path, *, required: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one JSONL or Parquet file, also of .jsonl.gz and .jsonl.zst.

    Values of the keys in `required` are text: a number or a truth value as JSON writes it, a conversation that is one
    message of the user as that message. A key may name a nested one, also in a list: `reward_model.ground_truth`,
    `prompt.0.content`; its value is under that name too. Other keys are as they are in the file.

    Raises `InvalidInput` with the number of the line for what cannot be read, for a key that is missing, empty, NaN or
    there twice, and for a value that is no text.
    """
    with open(file, "rb") as begin:
        if begin.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise InvalidInput(f"{file} is a pointer of Git LFS and not the data; `git lfs pull` fetches them")
    rows = []
    for number, row in _parquet_rows(file) if kind_of(file) == ".parquet" else _json_rows(file):
        where = f"{file}, line {number}"
        if not isinstance(row, dict):
            raise InvalidInput(f"{where}: a {type(row).__name__} instead of an object with keys")
        values = {key: _value(row, key) for key in required}
        missing = [key for key, value in values.items() if value is None or value != value or not str(value).strip()]
        if missing:
            raise InvalidInput(f"{where}: {' and '.join(map(repr, missing))} missing or empty")
        rows.append(row | {key: _as_text(value, key, where) for key, value in values.items()})
    if not rows:
        raise InvalidInput(f"{file} has no rows")
    return rows


def _value(row: Any, key: str) -> Any:
    """The value of a key, or of one in a key or a place of a list; None if there is none."""
    if isinstance(row, list):
        row = {str(number): each for number, each in enumerate(row)}
    if not isinstance(row, Mapping):
        return None
    head, _, rest = key.partition(".")
    return row[key] if key in row else _value(row.get(head), rest) if rest else None


def _as_text(value: Any, key: str, where: str) -> str:
    match value:
        case str() if _CONVERSATION.match(value):
            problem = "a conversation written down as text; write it as a list of messages"
        case str():
            return value
        case float() if value.is_integer():
            return _as_text(Decimal(repr(value + 0.0)), key, where)  # no −0
        case Decimal() if value.is_finite():
            whole, point, part = f"{value:f}".partition(".")
            return f"{whole}{point}{part}".rstrip("0").rstrip(".") if part else whole
        case int():  # a truth value too
            return json.dumps(value)
        case float() if math.isfinite(value):
            return json.dumps(value)
        case [{"role": "user", "content": str(content)}] | [
            {"role": "user", "content": [{"type": "text", "text": str(content)}]}
        ]:
            return content
        case [{"role": _}, *_]:
            roles = ", ".join(str(each.get("role")) for each in value)
            problem = f"a conversation of {roles}, and a prompt is one text; name its parts, such as {key}.0.content"
        case Mapping() | list() if value:
            inner = next(key for key in ("content", *value) if key in value) if isinstance(value, Mapping) else 0
            problem = f"a {type(value).__name__}, not text; name a key in it, such as {key}.{inner}"
        case _:
            problem = f"{value!r}, not text; write it as text"
    raise InvalidInput(f"{where}: {key!r} is {problem}")


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    from storage.objects.tables import read_parquet_rows

    try:
        yield from enumerate(read_parquet_rows(file), start=1)
    except ValueError as error:
        raise InvalidInput(f"{file}: {error}") from error


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    from storage.objects.tables import read_unpacked

    try:
        data = read_unpacked(file)
    except ValueError as error:
        raise InvalidInput(f"{file}: {error}") from error
    mark, encoding = next(((mark, name) for mark, name in _ENCODINGS if data.startswith(mark)), (b"", "utf-8"))
    newline = "\n".encode(encoding)
    for number, line in enumerate(_lines(data[len(mark) :], newline), start=1):
        try:
            text = line.decode(encoding)
        except UnicodeDecodeError as error:
            problem = f"byte {error.start + 1} is no {encoding.upper()}: save the file as UTF-8"
            raise InvalidInput(f"{file}, line {number}: {problem}") from None
        if not text.strip():
            continue
        try:
            yield number, read_json(text, as_object=_object)
        except _Doubled as error:
            raise InvalidInput(f"{file}, line {number}: the key {str(error)!r} is there twice; keep one") from None
        except json.JSONDecodeError as error:
            fix = "mend or remove the line" if kind_of(file) else "files are JSON lines or Parquet"
            raise InvalidInput(f"{file}, line {number}: not JSON ({error.msg}); {fix}") from None


class _Doubled(Exception):
    """A key that an object has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Doubled(next(name for name in names if names.count(name) > 1))
    return made


def _lines(data: bytes, newline: bytes) -> Iterator[bytes]:
    """Lines of text whose characters are as wide as the newline: in UTF-16 its bytes may also begin in a character."""
    start = at = 0
    while (at := data.find(newline, at)) >= 0:
        if (at - start) % len(newline):
            at += 1
            continue
        yield data[start:at]
        start = at = at + len(newline)
    yield data[start:]
