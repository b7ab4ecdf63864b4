"""What to search for: the words of a query, and the filters beside them.

In: text as a user types it, filters as values. Out: words and phrases for the full-text index, and SQL conditions.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

import numpy as np

from settings.errors import InvalidInput
from settings.places.hints import command

Operator = Literal["<", "<=", ">", ">=", "=", "!="]

_TERM = re.compile(r'"([^"]*)"|(\S+)')
_WORD = re.compile(r"[^\W_]+")
_SENTENCE = ".,;:!?"
"""Punctuation that is ignored at the end of a word."""


@dataclass(frozen=True)
class SearchQuery:
    """A query: a text must have all its words, in any order; case and accents are ignored.

    A term with punctuation inside (`37+45=`, `foo_bar`, `x[i]`) or in double quotes must be there as whole words and
    character by character; only case is ignored. So `off by one` matches "one is off by"; `"off by one"` does not.
    """

    text: str
    """As it was typed. Raises `InvalidInput` if it has nothing to search for."""

    def __post_init__(self) -> None:
        if not self._terms:
            look = command("traj", "ls", "RUN")
            raise InvalidInput(f"{self.text!r}: nothing to search for; give a word, or take what `{look}` lists")

    @functools.cached_property
    def _terms(self) -> list[tuple[str, bool]]:
        """Every term, and True if all its characters must match."""
        terms = []
        for quoted, bare in _TERM.findall(self.text):
            end = bare.rstrip(_SENTENCE)
            term = quoted.strip() or (end if _WORD.search(end) else bare)
            if term.strip('"'):
                terms.append((term, not _WORD.fullmatch(term)))
        return terms

    @property
    def words(self) -> list[str]:
        """Terms of letters and digits alone."""
        return [term for term, exactly in self._terms if not exactly]

    @property
    def phrases(self) -> list[str]:
        """Terms whose words must follow one another; `sql` compares their punctuation, which the index lacks."""
        return [term for term, exactly in self._terms if exactly and _WORD.search(term)]

    def sql(self, filters: Filters) -> str:
        """Condition of a row: the filters, and every term whose characters must all match."""
        exact = [term for term, exactly in self._terms if exactly]
        return " AND ".join([filters.sql(), *(f"contains(lower(text), lower({sql_text(term)}))" for term in exact)])

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of every match in `text`; in order, not overlapping."""
        patterns = [
            re.escape(folded(term)) if exactly else rf"(?<![^\W_]){re.escape(folded(term))}(?![^\W_])"
            for term, exactly in sorted(self._terms, key=lambda term: -len(term[0]))
        ]
        return [match.span() for match in re.finditer("|".join(patterns), folded(text))]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which attempts match, beside the words; None and empty leave a filter out."""

    reward: tuple[Operator, float] | None = None
    """Compared with the total reward."""
    status: str = ""
    """How the attempt ended."""
    first_version: int | None = None
    """At least one token was sampled by this policy version or a later one."""
    last_version: int | None = None
    """At least one token was sampled by this policy version or an earlier one."""
    step: int | None = None
    """The optimizer step that took the group."""
    outcome: str = ""
    """`pending`, or one of `storage.log.entries.OUTCOMES`."""
    include_eval: bool = False
    """Held-out attempts too."""

    def sql(self) -> str:
        """Condition of a row, without step and outcome, which are in the log."""
        conditions = [] if self.include_eval else ["NOT is_eval"]
        if self.reward:
            operator, value = self.reward
            conditions.append(f"reward {operator} {float(np.float32(value))!r}")  # 0.1 as the shards have it
        if self.status:
            conditions.append(f"status = {sql_text(self.status)}")
        if self.first_version is not None:
            conditions.append(f"tail_version >= {self.first_version}")
        if self.last_version is not None:
            conditions.append(f"head_version <= {self.last_version}")
        return " AND ".join(conditions) or "true"


def sql_text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("'", "''") + "'"


def folded(text: str) -> str:
    """`text` without case and accents, as the index compares words; every character keeps its place."""
    return "".join(unicodedata.normalize("NFKD", character)[0].lower()[:1] for character in text)
