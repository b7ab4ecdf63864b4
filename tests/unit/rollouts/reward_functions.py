"""Rewards, good and bad, that child processes of the tests load by import path."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any


def length(reply: str) -> int:
    return len(reply)


def parts(reply: str) -> dict[str, float | None]:
    return {"right": 1.0, "format": -0.25, "style": None, "speed": math.nan}


def nothing(reply: str) -> Any:
    return {"none": None, "nan": math.nan, "empty": {"only": None}, "no parts": {}, "infinity": math.inf}[reply]


def number_like(reply: str) -> Any:
    import numpy as np  # both start threads
    import sympy
    import torch

    numbers = [np.float32(0.5), np.bool_(True), np.array(0.5), torch.tensor(0.5, requires_grad=True), Decimal("0.5")]
    numbers += [Fraction(1, 2), True, np.int64(3), 10**400, torch.tensor(math.nan), Decimal("sNaN"), 1e39]
    numbers += [np.ma.masked, sympy.nan, sympy.oo, sympy.sqrt(4)]
    return {str(place): number for place, number in enumerate(numbers)}


def wrong_type(reply: str) -> Any:
    return {"list": [1.0], "text": "good", "object": object(), "part": {"right": "yes"}, "digits": "1"}[reply]


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


def meeting(folder: str, people: int) -> int:
    """Returns once that many calls are inside at the same time."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < people:
        time.sleep(0.01)
    return people


def burning(seconds: float) -> float:
    """Computes without a pause, as long as that."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(1000))
    return seconds


def regex_bomb(reply: str) -> float:
    """Inside C code that never looks at Python's signals, and deaf to polite ones."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is not None)


def memory_hog(reply: str) -> float:
    kept = [bytearray(2**24) for _ in range(4096)]
    return float(len(kept))


def closing(reply: str) -> float:
    """Closes every standard stream, by name and by number."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return 1.0


def leaving(reply: str) -> float:
    sys.exit(0)


def panicking(reply: str) -> float:
    raise type("Panic", (BaseException,), {})("index out of range")


def shouting(reply: str) -> float:
    """Writes what looks like an answer into everything that is open."""
    for descriptor in range(3, 32):
        try:
            os.write(descriptor, b'{"value": 96.0}\n')
        except OSError:
            continue
    return 1.0


def shouting_later(reply: str) -> int:
    """Answers first; the next question finds its answer already there."""
    threading.Timer(0.05, shouting, [reply]).start()
    return os.getpid()


def dying_later(reply: str) -> int:
    threading.Timer(0.05, os._exit, [3]).start()
    return os.getpid()


def endless_answer(reply: str) -> dict[str, float]:
    return {"x" * 2**25: 1.0}


def with_children(file: str, then: str) -> float:
    """Starts processes, one of which starts another, writes down their numbers, and goes on for ever or dies."""
    one = subprocess.Popen(["sleep", "600"])
    two = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE)
    assert two.stdout is not None
    ids = [one.pid, two.pid, int(two.stdout.readline())]
    for _ in range(50 if then == "for ever" else 0):  # a fork bomb with a bound, for the sake of this machine
        ids.append(os.fork())
        if ids[-1] == 0:
            time.sleep(600)
    temporary = Path(f"{file}.part")
    temporary.write_text(" ".join(map(str, ids)))
    temporary.rename(file)
    return for_ever("") if then == "for ever" else dying("")
