"""What must not be shown: passwords in addresses, and the values of secrets in the environment. And what cannot be
written: half of a surrogate pair, as in a file name that is no UTF-8 or in "\\ud83d" of a JSON file. And JSON that
others wrote, which Python's `json` refuses in four kinds of errors.

In: text on its way out, as a log message, an error or a recorded sentence. Out: the same, with `***` for each secret.
A secret comes from the environment alone: a run file is recorded, so a key of it that looks like one is refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

_ADDRESS = re.compile(r"[^\s/]+:[^\s/]*@")
_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH_STRING|NOTIFY)$", re.IGNORECASE)
_SETTING = re.compile(
    r"^token$|(^|_)(password|passwd|secret|api_?key|access_?key|private_?key|credentials?)$"
    r"|(^|_)(hf|hub|api|access|auth|session|bearer)_token$",
    re.IGNORECASE,
)
SHORTEST = 8
"""Characters a value must have to be taken for a secret: `test` would be starred out of every second sentence."""


def without_secrets(text: str) -> str:
    """A message without the `user:password@` of any address in it, and without the value of any environment variable
    whose name ends as those of secrets do (`OPENAI_API_KEY`, `AWS_SECRET_ACCESS_KEY`, `HF_TOKEN`, …).

    >>> without_secrets("no answer from https://me:secret@host/path")
    'no answer from https://***@host/path'
    """
    if not text:
        return text
    values = {value for name, value in os.environ.items() if len(value) >= SHORTEST and _VARIABLE.search(name)}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, "***")
    return well_formed(_ADDRESS.sub("***@", text))


def well_formed(text: str) -> str:
    """The text in characters that UTF-8 has: half of a surrogate pair becomes U+FFFD, and two halves one character.

    >>> well_formed("\\udcff.txt, \\ud83d\\ude00")
    '\ufffd.txt, 😀'
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def well_formed_data(data: Any) -> Any:
    """Plain data with well-formed texts, also those of keys."""
    match data:
        case str():
            return well_formed(data)
        case dict():
            return {well_formed_data(key): well_formed_data(value) for key, value in data.items()}
        case list():
            return [well_formed_data(value) for value in data]
        case tuple():
            return tuple(map(well_formed_data, data))
        case _:
            return data


def read_json(text: str | bytes, *, most_depth: int | None = None) -> Any:
    """Read JSON. Raises `json.JSONDecodeError`, a `ValueError`, for whatever is wrong with it.

    With `most_depth` lists and objects in each other may be no deeper.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    level = [data] if most_depth is not None else []
    for _ in range((most_depth or 0) + 1):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise _too_deep()
    return data


def _inside(data: Any) -> Any:
    match data:
        case dict():
            return data.values()
        case list():
            return data
    return ()


def _too_deep() -> json.JSONDecodeError:
    return json.JSONDecodeError("it is nested too deeply", "", 0)


def secret_settings(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a run file whose names say that a secret stands there; one that names a variable may."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from secret_settings(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value and _SETTING.search(key):
            yield f"{prefix}{key}"


def redact_logs() -> None:
    """Let no logger of this process say a secret, nor an exception that is logged; once is enough."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            said = record.getMessage()
        except (TypeError, ValueError):
            return record  # its handler complains of arguments that do not fit
        if (shown := without_secrets(said)) != said:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None:
            said = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (shown := without_secrets(said)) != said:
                record.exc_info, record.exc_text = None, shown  # what formatters print instead
        return record

    make_redacted.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_redacted)
