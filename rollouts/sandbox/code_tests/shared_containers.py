"""Lists, dictionaries, sets and arrays that two processes have: what one changes, the other one sees.

In: containers that cross. Out: numbers for them, the same at both ends; what changed since the other end heard of it;
and which ones are of no use any more, because one end has let go of them.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from operator import is_
from typing import Any

KINDS: dict[str, type] = {
    **{kind.__name__: kind for kind in (OrderedDict, defaultdict, Counter)},
    **{kind.__name__: kind for kind in (dict, list, set, deque, bytearray)},
}
"""The first that fits is a container's kind; arrays have their own."""
_ARRAY_KINDS = "biufcSUmM"


def is_array(value: Any) -> bool:
    """True for an array of numpy's that holds numbers, texts or times, and not objects."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy" and value.dtype.kind in _ARRAY_KINDS


def kind_of(value: Any) -> str:
    """Empty for what is no container."""
    return next((name for name, kind in KINDS.items() if isinstance(value, kind)), "array" if is_array(value) else "")


def facts_of(value: Any) -> Any:
    """What an empty container of this kind needs besides."""
    if is_array(value):
        return value.dtype.str, value.shape
    return getattr(value, "default_factory", getattr(value, "maxlen", None))


def empty(kind: str, facts: Any) -> Any:
    """A container without its contents."""
    match kind:
        case "array":
            import numpy as np

            if np.dtype(facts[0]).kind not in _ARRAY_KINDS:
                raise TypeError(f"an array of {facts[0]} does not cross")
            return np.zeros(facts[1], facts[0])
        case "defaultdict":
            return defaultdict(facts)
        case "deque":
            return deque(maxlen=facts)
    return KINDS[kind]()


def contents(container: Any) -> list[Any]:
    """What it holds; of a dictionary, keys and values in turn."""
    if is_array(container):
        return container.ravel().tolist()
    return [*itertools.chain(*container.items())] if isinstance(container, dict) else [*container]


def fill(container: Any, held: list[Any]) -> None:
    """Make it hold this, and nothing else."""
    if is_array(container):
        container.flat = held
    elif isinstance(container, list | bytearray):
        container[:] = held
    else:
        container.clear()
        if isinstance(container, dict):
            for key, value in zip(held[::2], held[1::2], strict=True):
                container[key] = value
        else:
            (deque.extend if isinstance(container, deque) else set.update)(container, held)


class Shared:
    """One end's table of the containers that both have."""

    def __init__(self, parity: int) -> None:
        """`parity`: 0 at one end, 1 at the other, so that both number what they make."""
        self._parity = parity
        self._numbers = itertools.count(parity, 2)
        self._containers: dict[int, Any] = {}
        self._number_of: dict[int, int] = {}
        """Identity → number; the table keeps the containers, so none has the identity of another."""
        self._held: dict[int, list[Any]] = {}
        """Contents, as the other end knows them."""
        self._new: list[int] = []
        self._forgotten: list[int] = []

    def number_of(self, container: Any) -> tuple[int, bool]:
        """Its number, and whether it was given just now."""
        if (number := self._number_of.get(id(container))) is not None:
            return number, False
        number = next(self._numbers)
        self._new.append(number)
        self._keep(number, container)
        return number, True

    def get(self, number: int) -> Any:
        """Raises `KeyError`."""
        return self._containers[number]

    def meet(self, number: int, kind: str, facts: Any) -> Any:
        """A container that the other end has sent, without its contents if it is new."""
        if number not in self._containers:
            if number % 2 == self._parity:
                raise ValueError(f"container {number} would be one of this end")
            self._keep(number, empty(kind, facts))
        return self._containers[number]

    def _keep(self, number: int, container: Any) -> None:
        self._containers[number] = container
        self._number_of[id(container)] = number

    def hold(self, number: int) -> list[Any]:
        """The contents, which the other end knows from now on."""
        self._held[number] = contents(self._containers[number])
        return self._held[number]

    def changed(self) -> list[int]:
        """Numbers of the containers whose contents the other end does not know."""
        return [number for number in self._containers if number not in self._new and self._has_changed(number)]

    def _has_changed(self, number: int) -> bool:
        before, now = self._held[number], contents(self._containers[number])
        is_same = len(before) == len(now) and all(map(is_, before, now))
        return not is_same and not (is_array(self._containers[number]) and before == now)

    def sent(self) -> list[int]:
        """Call it when a message is complete; the numbers that this end has let go of since the last one."""
        self._new.clear()
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def unsent(self) -> None:
        """Call it when a message cannot be completed."""
        self.forget(self._new)
        self._new.clear()

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in self._containers:
                del self._number_of[id(self._containers.pop(number))]
                self._held.pop(number, None)

    def let_go(self) -> None:
        """Forget what only this table has and the other end knows, first what holds the others."""
        while alone := [number for number in self._containers if self._is_alone(number)]:
            self.forget(alone)
            self._forgotten += alone

    def _is_alone(self, number: int) -> bool:
        return _references(self._containers, number) == _ALONE and not self._has_changed(number)


def _references(containers: dict[int, Any], number: int) -> int:
    return sys.getrefcount(containers[number])


_ALONE = _references({0: []}, 0)
