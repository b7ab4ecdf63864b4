"""Text on its way out: without secrets, without what steers a terminal or a page, and in characters that UTF-8 has; and
JSON on its way in, which Python's `json` refuses in four kinds of errors.

In: a log message, an error, a recorded sentence, words of a policy or of a store's writer. Out: the same, with `***`
for each secret (`without_secrets`), `·` for each control character (`printable`, `one_line`), and as text of Markdown
(`as_markdown`). A secret comes from the environment, or from the file that its library reads: a run file is recorded,
so a key or value of it that looks like a secret is refused.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

_VARIABLE = re.compile(
    r"PASSW(?:OR)?D|PASSPHRASE|PASSCODE|SECRET|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|SIGNATURE|WEBHOOK"
    r"|AUTH_STRING|AUTHORIZATION|(?:^|_)TOKENS?_|(?:(?:KEY|TOKEN|COOKIE|NOTIFY|(?:PG|SSH)PASS)"
    r"|(?:^|_)(?:PASS|PWD?|PAT|AUTH|BEARER|JWT|SAS|SIG|DSN|CONNECTION_STRING))S?(?:_?\d+)?$",
    re.IGNORECASE,
)
_NOT_ONE = re.compile(
    r"(?:FILE|PATH|DIR|_ENV|_ID|_NAME|_HOST|_MODE|_TYPE|USER|TOKEN_(?:UR[IL]|ENDPOINT))$|^(?:OLD)?PWD$", re.IGNORECASE
)
"""Variables that name a place, or whose secret it is."""
# Every repetition below has a bound: a policy may choose a text, and its search must take linear time.
_NAMED = (
    r"(?:passw(?:or)?d|passphrase|passcode|pgpass|secret|credentials?|jwt|connection[-_]?string"
    r"|(?:api|access|account|encryption|private|secret|signing|ssh|subscription)[-_]?key"
    r"|(?:hf|hub|api|access|auth|session|bearer|security|refresh|id|private|vault|sas)[-_]?token)"
)
_SETTING = re.compile(
    rf"^(?:token|pat|jwt|dsn|cookie|authorization|bearer)$|(?:^|[-_])(?:{_NAMED}|pat)$", re.IGNORECASE
)
_END = r"[^\s&;,'\"<>#)]+"
_WORDS = (
    r"(?!(?:an?|any|are|cannot|empty|expected|for|from|give|given|has|if|in|incorrect|invalid|is|it|leave|missing|must"
    r"|needed|no|none|not|null|of|only|or|rejected|required|see|set|that|the|this|to|undefined|unset|use|was|wrong"
    r"|you|your)(?![^\s,.;:!?)\"']))"
)
"""Words with which a sentence goes on: `no password: any client may read` has no secret in it."""
_NO_VALUE = r"(?!(?:none|null|true|false|undefined)(?![^\s,.;:!?)}\]\"']))"
"""`api_key=None`, as a traceback shows it."""
_IN_ADDRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    # The name and the password, which may hold a slash, up to the last `@`.
    (re.compile(r"(?<=://)[^\s:/?#@\"<>]{0,200}:[^\s\"<>]{0,500}@"), "***@"),
    # A name that is as long as a key, as in `https://<key>@host`.
    (re.compile(r"(?:(?<=http://)|(?<=https://))[^\s:/?#@\"<>]{16,200}@"), "***@"),
    (re.compile(r"(?<=://hooks\.slack\.com/)[^\s\"'<>)]+"), "***"),
    (re.compile(r"(?<=/api/webhooks/)[^\s\"'<>)]+"), "***"),  # of Discord
    (re.compile(rf"([?&;][\w.%-]{{0,40}}(?:{_NAMED}|signature|token)=){_END}", re.IGNORECASE), r"\1***"),
    (re.compile(rf"([?&;](?:key|sig|auth|pass|pwd|code|pat)=){_END}", re.IGNORECASE), r"\1***"),
)
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]{0,9}PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.DOTALL),
        "***",
    ),
    (re.compile(r"\beyJ[\w-]{8,300}\.eyJ[\w-]{8,2000}\.[\w-]+"), "***"),
    (re.compile(r"\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|xox[a-z]-[\w-]{10,})"), "***"),
    (
        re.compile(r"\b(?:glpat-[\w-]{16,}|AIza[\w-]{30,}|npm_\w{30,}|pypi-[\w-]{30,}|[rs]k_(?:live|test)_\w{16,})"),
        "***",
    ),
    (
        re.compile(r"\b(?:dop_v1_\w{40,}|SG\.[\w-]{16,200}\.[\w-]{16,}|AGE-SECRET-KEY-\w{40,}|shp[a-z]{2}_\w{32,})"),
        "***",
    ),
)
"""Secrets that can be told by their first letters."""
_NAMED_IN_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    # An address without its scheme; `mailto:` is none, nor is the digest of an image.
    (re.compile(r"(?<![^\s/*])(?!mailto:)[^\s/*]{1,200}:[^\s/]{0,200}@(?!sha256:)"), "***@"),
    # `"password": "…"`, also in JSON that is text of JSON; `host=db password=…`, `password: …`, `--api-key …`
    (
        re.compile(rf"({_NAMED}\\{{0,3}}[\"']?\s?[:=]\s?\\{{0,3}}([\"']))(?:(?!\2)[^\n]){{1,5000}}", re.IGNORECASE),
        r"\1***",
    ),
    (re.compile(rf"((?:{_NAMED}|signature)=){_NO_VALUE}{_END}", re.IGNORECASE), r"\1***"),
    (re.compile(rf"(passphrase:\s|(?:passw(?:or)?d:|--{_NAMED})\s{_WORDS}){_END}", re.IGNORECASE), r"\1***"),
    (
        re.compile(
            rf"(\bauthorization[\"']?\s?[:=]\s?[\"']?{_WORDS}(?:\w{{1,20}}\s)?)[^\s\"',]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
    (re.compile(r"(\bBearer\s)[\w.~+/=-]{8,}"), r"\1***"),
    (re.compile(r"(\b(?:set-)?cookie[\"']?:\s?[\"']?)[^\"'\n]+", re.IGNORECASE), r"\1***"),
    (
        re.compile(
            r"(\b(?:api-key|(?:auth|security|private|vault|session)-token)[\"']?:\s?[\"']?)" + _WORDS + r"[^\s\"',]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
)
SHORTEST = 8
"""Characters a value must have to be taken for a secret: `test` would be starred out of every second sentence."""


def without_secrets(text: str) -> str:
    """A message without the `user:password@` of any address in it, without what its parts name as a secret
    (`?token=…`, `Authorization: …`), and without the value of any environment variable whose name is that of a secret
    (`OPENAI_API_KEY`, `AWS_SECRET_ACCESS_KEY`, `HF_TOKEN`, `PGPASS`, …), or the password in an address of one.

    >>> without_secrets("no answer from https://me:secret@host/path?sig=1f")
    'no answer from https://***@host/path?sig=***'
    """
    if not text:
        return text
    for value in _secret_values(tuple(os.environ.items())):
        text = text.replace(value, "***")
    for form, shown in (*_IN_ADDRESS, *_SHAPES, *_NAMED_IN_TEXT):
        text = form.sub(shown, text)
    return well_formed(text)


def redact_error(error: BaseException) -> None:
    """Take the secrets out of the words of an error, and of its causes and members, in place: the caller
    that catches it may record it, as Prefect does."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.args = tuple(without_secrets(word) if isinstance(word, str) else word for word in each.args)
        if isinstance(each, OSError) and isinstance(each.strerror, str):
            each.strerror = without_secrets(each.strerror)
        if notes := getattr(each, "__notes__", None):
            each.__notes__ = [without_secrets(note) for note in notes]
        waiting += [each.__cause__, each.__context__]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


@functools.lru_cache(maxsize=8)
def _secret_values(environment: tuple[tuple[str, str], ...]) -> list[str]:
    """The secrets of an environment as they may stand in a text, the longest first: one may be a part of another."""
    values = set()
    for name, value in environment:
        if _VARIABLE.search(name) and not _NOT_ONE.search(name):
            values.add(value)
        parts = [match[1] for match in _PASSWORD.finditer(value)]
        matches = [match[0].rstrip("@") for form, _ in _IN_ADDRESS[1:] for match in form.finditer(value)]
        parts += [each.partition("=")[2] if each[0] in "?&;" else each for each in matches]
        values |= {form for part in parts for form in (part, unquote(part))}
    written = {form for value in values for form in (value, quote(value, safe=""), repr(value)[1:-1], value.strip())}
    return sorted((value for value in written if len(value) >= SHORTEST), key=len, reverse=True)


_PASSWORD = re.compile(r"://[^\s:/?#@]*:([^\s]*)@")


def holds_secret(text: str) -> bool:
    """True if an address, or another setting, has a secret in it."""
    return any(form.search(text) for form, _ in (*_IN_ADDRESS, *_SHAPES))


_HARMLESS = "\n\t\u200c\u200d" + "".join(map(chr, (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)))
"""Line break, tab, joiners of letters and emojis, spaces: Python calls none of them printable."""


def printable(text: str) -> str:
    """Text without control characters other than newline and tab, and without those that turn its direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in _HARMLESS else "·" for c in text)


def one_line(text: str) -> str:
    """Text that cannot break a line, nor steer the terminal: a policy may say anything. It keeps its length."""
    return printable(text).replace("\n", "⏎").replace("\t", " ")


def as_markdown(text: str) -> str:
    """Text in one line of Markdown, a cell of a table too, that shows its characters: no link, no image, no HTML.

    >>> print(as_markdown("![x](http://a) <b>"))
    !\\[x\\](http\\://a) &lt;b&gt;
    """
    text = re.sub(r"([\\`*_\[\]|~]|:(?=//)|(?<=www)\.)", r"\\\1", _in_one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_markdown_code(text: str) -> str:
    """The same as code.

    >>> print(as_markdown_code("a`b|c"))
    `a'b\\|c`
    """
    return "`" + _in_one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _in_one_line(text: str) -> str:
    return " ".join(printable(text).split())


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


def read_json(
    text: str | bytes, *, most_depth: int | None = None, as_object: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Read JSON. Raises `json.JSONDecodeError`, a `ValueError`, for whatever is wrong with it.

    With `most_depth` lists and objects in each other may be no deeper. `as_object` makes an object of keys and values.
    """
    try:
        data = json.loads(text, object_pairs_hook=as_object)
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
    """Dotted keys of a run file whose names say that a secret stands there, or whose values have its form; a key that
    names a variable may be there."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from secret_settings(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield from secret_settings({str(place): each for place, each in enumerate(value)}, f"{prefix}{key}.")
        elif isinstance(value, str) and value and (_SETTING.search(_snake(str(key))) or holds_secret(value)):
            yield f"{prefix}{key}"


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key)


def redact_logs() -> None:
    """Let no logger of this process say a secret or steer a terminal, nor an exception that is logged; once is
    enough."""
    make = logging.getLogRecordFactory()
    if getattr(make, "redacts", False):
        return

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):
            return record  # its handler complains of arguments that do not fit
        if (shown := printable(without_secrets(text))) != text:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0] is not None:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (shown := printable(without_secrets(text))) != text:
                record.exc_info, record.exc_text = None, shown  # what formatters print instead
        return record

    make_redacted.redacts = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make_redacted)
