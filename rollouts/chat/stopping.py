"""Ends a reply at a string that an agent asked for. The tokens up to it stay as they were sampled.

In: stop strings, and a tokenizer's decoding. Out: how many tokens a reply has, and its text before the string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MORE = 8
"""Tokens decoded before the longest stop string: the first of them may be parts of a character."""


class Stopping:
    """The stop strings of one reply; single use, because it looks at each token once."""

    def __init__(
        self,
        strings: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        *,
        also: Callable[[str], bool] | None = None,
        mark: str = "",
    ) -> None:
        """With `also` a reply ends at the first `mark` at which `also` is true of the text so far."""
        self._strings, self._decode = strings, decode
        self._also, self._mark = also, mark
        # A token has at least one byte, so the string is in at most as many tokens.
        self._window = max(len(each.encode()) for each in [*strings, mark]) + _MORE
        self._num_looked_at = 0

    def __call__(self, ids: list[int]) -> int:
        """See `rollouts.engines.engine.Until`."""
        for length in range(self._num_looked_at + 1, len(ids) + 1):
            tail = self._decode(ids[max(0, length - self._window) : length])
            if self._ends(tail, ids[:length]):
                return length
            self._num_looked_at = length
        return 0

    def _ends(self, tail: str, ids: list[int]) -> bool:
        if any(each in tail for each in self._strings):
            return True
        return self._also is not None and self._mark in tail and self._also(self._decode(ids))

    def cut(self, text: str) -> tuple[str, str]:
        """The text before the first stop string in it, and that string; the whole text and "" if it has none."""
        places = [(text.find(each), each) for each in self._strings if each in text]
        if not places:
            return text, ""
        place, string = min(places)
        return text[:place], string
