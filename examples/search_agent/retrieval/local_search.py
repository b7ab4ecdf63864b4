"""Search in the process itself: the retrieval server's BM25 without the server, for a corpus that fits in memory.

In: passages. Out: an object that searches like `SearchClient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from examples.search_agent.retrieval.embedding import words_of
from examples.search_agent.retrieval.passages import Passage
from examples.search_agent.retrieval.ranking import Best, Postings


class LocalSearch:
    """BM25 over title and text."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        """`passages` as `read_passages` gives them: at least one, ids unique."""
        self._passages = passages
        counts = [Counter(words_of(f"{passage.title}\n{passage.text}")) for passage in passages]
        number = {word: index for index, word in enumerate(dict.fromkeys(word for count in counts for word in count))}
        self._postings = Postings(
            list(number),
            np.array([number[word] for count in counts for word in count], np.int64),
            np.repeat(np.arange(len(counts)), [len(count) for count in counts]),
            np.array([times for count in counts for times in count.values()], np.int64),
            Best(np.arange(len(passages))),
        )

    async def search(self, query: str, k: int = 5) -> list[Passage]:
        """See `best`."""
        return self.best(query, k)

    def best(self, query: str, k: int) -> list[Passage]:
        """The `k` best passages that share a word with the query, best first; of equals, the first in the corpus."""
        rows, scores = self._postings.rank(words_of(query), k)
        return [replace(self._passages[row], score=float(score)) for row, score in zip(rows, scores, strict=True)]

    async def close(self) -> None:
        """Nothing is held."""
