"""JSON that others wrote: clients, servers, policies, data sets.

In: its text. Out: plain data, or one kind of error for everything that `json` says of it in several: it is no JSON, no
UTF-8, a number of five thousand digits, or nested until Python's stack ends.
"""

from __future__ import annotations

import json
from typing import Any


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
