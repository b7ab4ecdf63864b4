"""Text to vectors.

In: texts. Out: float32 [N, D] of length 1, so that a dot product is a cosine; a text without words is all zeros.

The default needs no model and no download: signed feature hashing of words and their character n-grams. It knows
spelling, not meaning: `walked` is near `walking`, not near `strolled`. A model comes by import path.
"""

from __future__ import annotations

import functools
import importlib
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

HASHING = "examples.search_agent.retrieval.embedding:HashingEmbedding"

_WORD = re.compile(r"\w+")
_NGRAMS = (3, 4)
_FULL_WEIGHT_LETTERS = 8
_WORDS_REMEMBERED = 2**17


class Embedding(Protocol):
    """A class that is made without arguments."""

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of texts, float32 [N, D]; the same text always gives the same vector."""


class HashingEmbedding:
    """Signed feature hashing (Weinberger et al. 2009) of words and their character 3- and 4-grams, `size` numbers.

    Each feature adds ± its weight to one of `size` buckets; the sign makes what collides cancel on average. The n-grams
    of a word, with marks at its ends (Bojanowski et al. 2017), weigh together as much as the word. A text is embedded
    on its own, so rarity is unknown; a word of n < 8 letters weighs n/8, since frequent words are
    short (Zipf 1949), and its c-th repetition adds √c − √(c − 1).
    """

    def __init__(self, size: int = 256) -> None:
        self.size = size
        self._features = functools.lru_cache(_WORDS_REMEMBERED)(self._hashed)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of texts, float32 [N, size]."""
        vectors = np.zeros((len(texts), self.size), np.float32)
        for row, text in enumerate(texts):
            if counts := Counter(words_of(text)):
                features = [self._features(word) for word in counts]
                buckets = np.concatenate([bucket for bucket, _ in features])
                weights = np.concatenate(
                    [weight * c**0.5 for (_, weight), c in zip(features, counts.values(), strict=True)]
                )
                vectors[row] = np.bincount(buckets, weights, minlength=self.size)
        return vectors

    def _hashed(self, word: str) -> tuple[np.ndarray, np.ndarray]:
        """Buckets and signed weights of a word's features."""
        marked = f"<{word}>"
        ngrams = [marked[at : at + n] for n in _NGRAMS for at in range(len(marked) - n + 1)]
        codes = np.array([zlib.crc32(feature.encode()) for feature in [f"={word}", *ngrams]], np.uint64)
        # CRC is linear in its input: a multiplication (Knuth 1973, 6.4) makes bucket and sign independent.
        mixed = (codes * np.uint64(2654435761) >> np.uint64(8)) & np.uint64(0xFFFFFF)
        weights = np.where(mixed >> np.uint64(23), 1.0, -1.0)
        weights[1:] /= np.sqrt(max(len(ngrams), 1))
        weights *= min(len(word), _FULL_WEIGHT_LETTERS) / _FULL_WEIGHT_LETTERS
        return (mixed & np.uint64(0x7FFFFF)).astype(np.int64) % self.size, weights


def words_of(text: str) -> list[str]:
    """Words as they are compared: compatibility forms and case folded, split at what is neither letter nor digit.

    >>> words_of("Ångström's Café, №5")
    ['ångström', 's', 'café', 'no5']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def load_embedding(path: str) -> Embedding:
    """The embedding `package.module:Class`. Raises `ValueError` naming what is missing."""
    module, _, name = path.partition(":")
    try:
        model: Any = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"embedding {path!r} cannot be made ({error}); it must be `package.module:Class`") from error
    if not callable(getattr(model, "embed", None)):
        raise ValueError(f"embedding {path!r} has no method `embed(texts)` that returns float32 [N, D]")
    return model


def unit_vectors(embedding: Embedding, texts: Sequence[str], *, size: int | None = None) -> np.ndarray:
    """The embedding's vectors at length 1, float32 [N, D]; one of zeros stays zeros.

    Raises `ValueError` unless they are N rows of `size` finite numbers.
    """
    vectors = np.asarray(embedding.embed(texts), np.float32)
    name = type(embedding).__name__
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(f"{name}.embed gave {vectors.shape} for {len(texts)} texts, it must be [N, D]")
    if size is not None and vectors.shape[1] != size:
        raise ValueError(f"{name}.embed gives {vectors.shape[1]} numbers a text, the index holds {size}")
    if not np.isfinite(vectors).all():
        raise ValueError(f"{name}.embed gave NaN or infinity")
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
