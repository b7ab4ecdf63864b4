"""What a tool returned, as data that JSON has, and as the text that the policy reads."""

from __future__ import annotations

import json
from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

from pydantic_core import to_jsonable_python

from settings.redaction import well_formed_data


def plain(value: Any) -> Any:
    """Members of an Enum, pydantic models, dataclasses, dates, sets, arrays of numpy or torch as JSON has them.

    Anything else is its text. Raises `ValueError` for an object that contains itself.

    >>> plain({"colour": enum.Enum("Colour", {"RED": "red"}).RED})
    {'colour': 'red'}
    """
    try:
        return to_jsonable_python(value, fallback=_plain)
    except UnicodeDecodeError:  # bytes that are no text
        return to_jsonable_python(value, bytes_mode="base64", fallback=_plain)
    except UnicodeEncodeError:  # half of a surrogate pair
        return well_formed_data(json.loads(json.dumps(value, default=_plain)))


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    if isinstance(value, str):
        return str.__str__(value)  # of a member of an Enum, its value
    return json.dumps(plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, range | KeysView | ValuesView | ItemsView):
        return [*value]
    return value.tolist() if hasattr(value, "tolist") else str(value)
