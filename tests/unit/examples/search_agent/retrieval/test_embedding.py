"""Texts to vectors: the default, and what is asked of any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.search_agent.retrieval.embedding import HASHING, HashingEmbedding, load_embedding, unit_vectors, words_of


def _cosine(one: str, other: str) -> float:
    a, b = unit_vectors(HashingEmbedding(), [one, other])
    return float(a @ b)


@given(st.lists(st.text(max_size=60), max_size=8))
def test_vectors_have_length_one_and_depend_on_nothing_else_that_is_embedded(texts: list[str]):
    vectors = unit_vectors(HashingEmbedding(), texts)
    assert (vectors.shape, vectors.dtype) == ((len(texts), 256), np.float32)
    for text, vector in zip(texts, vectors, strict=True):
        # Features of one word may cancel to exactly nothing; of words there are otherwise no zeros.
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5) or not vector.any()
        assert words_of(text) or not vector.any()
        assert np.array_equal(vector, unit_vectors(HashingEmbedding(), [text])[0])


def test_vectors_are_the_same_in_another_process():
    made = "print(HashingEmbedding(8).embed(['Oslo, Norway']).tolist())"
    code = f"from examples.search_agent.retrieval.embedding import HashingEmbedding; {made}"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert printed == f"{HashingEmbedding(8).embed(['Oslo, Norway']).tolist()}\n"


def test_texts_that_share_words_or_spelling_are_nearer():
    text = "The harbour of Oslo was rebuilt in 1952"
    assert _cosine(text, "harbour Oslo rebuilt") > 0.5 > _cosine(text, "volcanoes erupted near Reykjavik")
    assert _cosine("walking", "walked") > _cosine("walking", "strolled") + 0.1
    assert _cosine("ÅNGSTRÖM", "ångström") == pytest.approx(1)
    # Frequent words are short, and weigh less.
    assert _cosine("of the harbour", "harbour") > _cosine("of the harbour", "of the")


def test_collisions_cancel_on_average():
    """Weinberger et al. 2009, lemma 2: the hashed dot product is unbiased, so unrelated texts have cosine 0 ± 1/√D."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 9)) for _ in range(600)]
    vectors = unit_vectors(HashingEmbedding(), words)
    cosines = (vectors @ vectors.T)[np.triu_indices(600, 1)]
    assert abs(cosines.mean()) < 0.002
    assert cosines.std() == pytest.approx(1 / 16, rel=0.2)


def test_words_of_any_script_are_folded_and_split():
    assert words_of("Ｆｏｏ_bar’s STRASSE, straße: 3.5") == ["foo_bar", "s", "strasse", "strasse", "3", "5"]


def test_an_embedding_comes_by_import_path_and_one_that_cannot_be_made_is_named():
    assert isinstance(load_embedding(HASHING), HashingEmbedding)
    for path in ("nothing", "no.such.module:Class", "json:Missing", "json:loads", "collections:OrderedDict", ":", ""):
        with pytest.raises(ValueError, match="embedding"):
            load_embedding(path)


class _Gives:
    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return self.vectors


@pytest.mark.parametrize(
    "vectors", [np.ones(4), np.ones((3, 4)), np.ones((2, 5)), np.array([[1, np.nan, 0, 0], [1, 0, 0, 0]])]
)
def test_vectors_that_are_none_are_an_error(vectors: np.ndarray):
    with pytest.raises(ValueError, match="_Gives.embed"):
        unit_vectors(_Gives(vectors), ["a", "b"], size=4)
