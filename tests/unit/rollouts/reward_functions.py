"""Rewards, good and bad, that child processes of the tests load by import path."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any


def length(reply: str) -> int:
    return len(reply)


def parts(reply: str) -> dict[str, float | None]:
    return {"right": 1.0, "format": -0.25, "style": None, "speed": math.nan}


def nothing(reply: str) -> Any:
    return {"none": None, "nan": math.nan, "empty": {"only": None}, "no parts": {}}[reply]


def wrong_type(reply: str) -> Any:
    return {"list": [1.0], "text": "good", "object": object(), "part": {"right": "yes"}, "infinity": math.inf}[reply]


def failing(reply: str) -> float:
    raise KeyError(reply)


def for_ever(reply: str) -> float:
    while True:
        pass


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def dying(reply: str) -> float:
    os._exit(3)


def noisy(reply: str) -> float:
    print('{"value": 99}')
    sys.stdout.write('{"value": 98}\n')
    sys.stdout.flush()
    os.write(1, b'{"value": 97}\n')
    return 1.0


def process_id(reply: str) -> int:
    return os.getpid()
