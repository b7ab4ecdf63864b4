"""The index: what it finds is what the formulas say, however it was built, cut, killed or asked."""

from __future__ import annotations

import fcntl
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.search_agent.retrieval import index as index_module
from examples.search_agent.retrieval.embedding import HashingEmbedding
from examples.search_agent.retrieval.index import BadIndex, Mode, PassageIndex, build_index
from examples.search_agent.retrieval.local_search import LocalSearch
from examples.search_agent.world import World
from tests.unit.examples.search_agent.retrieval.corpora import (
    bm25_by_the_letter,
    cosines_by_the_letter,
    fused_by_the_letter,
    random_passages,
    random_queries,
    same_ranking,
    write_corpus,
)

_PASSAGES = random_passages(700)
_QUERIES = random_queries(60)
_HERE = "tests.unit.examples.search_agent.retrieval.test_index"


class Model(HashingEmbedding):
    """The default, until it is told to change."""

    reverse = False

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return super().embed([text[::-1] for text in texts] if self.reverse else texts)


class OtherModel(Model):
    """Gives other vectors than the default, of the same size."""

    reverse = True


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    build_index(write_corpus(folder / "corpus.jsonl", _PASSAGES), folder / "index")
    return folder


@pytest.fixture(scope="module")
def cut(built: Path) -> list[Path]:
    """The same corpus in five shards, the last one first."""
    for number in range(5):
        build_index(built / "corpus.jsonl", built / str(number), shard=(number, 5))
    return [built / str(number) for number in reversed(range(5))]


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """100 passages, of which 40 are committed at a time."""
    monkeypatch.setattr(index_module, "_CHUNK", 40)
    return write_corpus(tmp_path / "c.jsonl", random_passages(100))


def _found(index: PassageIndex, query: str, k: int = 10) -> list[tuple[str, float]]:
    return [(passage.id, passage.score) for passage in index.search([(query, k)])[0]]


def test_every_mode_ranks_by_its_formula_over_all_passages(built):
    """Of the words, some are in most passages, which are kept in another way than rare ones."""
    words, nearest = (PassageIndex([built / "index"], mode=mode) for mode in (Mode.bm25, Mode.vector))
    hybrid = PassageIndex([built / "index"])
    assert hybrid.mode is Mode.hybrid
    for query in _QUERIES:
        same_ranking(_found(words, query), bm25_by_the_letter(_PASSAGES, query)[:10])
        rankings = (_found(words, query, 100), _found(nearest, query, 100))
        assert _found(hybrid, query) == [(n, pytest.approx(s)) for n, s in fused_by_the_letter(*rankings)[:10]]
    for query in _QUERIES[:10]:
        same_ranking(_found(nearest, query), cosines_by_the_letter(_PASSAGES, query)[:10])


@pytest.mark.parametrize("mode", list(Mode))
def test_neither_shards_nor_what_is_asked_together_change_a_result(built, cut, mode: Mode):
    index, sharded = PassageIndex([built / "index"], mode=mode), PassageIndex(cut, mode=mode)
    assert len(sharded) == len(index) == 700
    alone = {(query, k): index.search([(query, k)])[0] for query in _QUERIES for k in (1, 5, 100)}
    draw = random.Random(0)
    for _ in range(60):
        batch = draw.choices(list(alone), k=draw.randint(1, 40))
        assert index.search(batch) == sharded.search(batch) == [alone[asked] for asked in batch]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_query_without_a_known_word_finds_nothing_by_words(built, mode: Mode):
    index = PassageIndex([built / "index"], mode=mode)
    assert index.search([("", 5), (" ?! ", 5)]) == [[], []]
    assert len(index.search([("nowhere", 5)])[0]) == (0 if mode is Mode.bm25 else 5)


def test_an_index_of_words_alone_finds_no_more_passages_than_there_are(tmp_path):
    build_index(write_corpus(tmp_path / "c.jsonl", random_passages(3)), tmp_path / "index", embedding="")
    index = PassageIndex([tmp_path / "index"])
    assert index.mode is Mode.bm25 and len(index.search([("w0 w1", 100)])[0]) == 3


_KILLED = """
import os, signal, sys
from pathlib import Path
from examples.search_agent.retrieval import index
index._CHUNK = 40
def progress(done, total):
    if done >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
index.build_index(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.server
def test_a_build_that_is_killed_is_refused_and_goes_on_where_it_was(tmp_path, corpus):
    folder, told = tmp_path / "index", []
    for at in (0, 80, 100):  # the last one after every passage, before the index is declared whole
        command = [sys.executable, "-c", _KILLED, str(corpus), str(folder), str(at)]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
        with pytest.raises(BadIndex, match="half built; the same build command again finishes it"):
            PassageIndex([folder])
    made = build_index(corpus, folder, progress=lambda *numbers: told.append(numbers))
    assert told == [(100, 100)]
    assert build_index(corpus, folder, progress=lambda *numbers: pytest.fail("there is nothing to do")) == made
    build_index(corpus, tmp_path / "whole", progress=lambda *numbers: told.append(numbers))
    assert told[1:] == [(0, 100), (40, 100), (80, 100), (100, 100)]
    one, other = PassageIndex([folder]), PassageIndex([tmp_path / "whole"])
    assert one.digest == other.digest
    asked = [(query, 10) for query in random_queries(20)]
    assert one.search(asked) == other.search(asked)


@pytest.mark.parametrize("half_built", [False, True])
@pytest.mark.parametrize(
    ("seed", "options"),
    [(1, {}), (0, {"embedding": f"{_HERE}:OtherModel"}), (0, {"shard": (0, 2)}), (0, {"embedding": ""})],
    ids=["corpus", "embedding", "shard", "size"],
)
def test_a_folder_of_something_else_is_refused(tmp_path, seed: int, options: dict[str, Any], half_built: bool):
    corpus, folder = write_corpus(tmp_path / "c.jsonl", random_passages(50)), tmp_path / "index"
    build_index(corpus, folder)
    if half_built:
        (folder / "index.json").rename(folder / "building.json")
    write_corpus(corpus, random_passages(50, seed=seed))
    with pytest.raises(BadIndex, match="choose another folder, or delete"):
        build_index(corpus, folder, **options)


def test_another_model_of_the_same_name_is_refused(tmp_path, corpus, monkeypatch):
    name = f"{_HERE}:Model"
    build_index(corpus, tmp_path / "index", embedding=name)
    PassageIndex([tmp_path / "index"], embedding=name)
    with pytest.raises(BadIndex, match="not .*OtherModel"):
        PassageIndex([tmp_path / "index"], embedding=f"{_HERE}:OtherModel")
    # pytest may have loaded this file under another name
    monkeypatch.setattr(sys.modules[_HERE].Model, "reverse", True)
    with pytest.raises(BadIndex, match="another model by the same name"):
        PassageIndex([tmp_path / "index"])
    with pytest.raises(BadIndex, match="another model"):
        build_index(corpus, tmp_path / "index", embedding=name)


def test_a_corpus_that_changes_while_it_is_indexed_is_noticed(tmp_path, corpus):
    def change(done: int, total: int) -> None:
        if done == 40:
            corpus.write_text(corpus.read_text() + json.dumps({"id": "new", "text": "late"}) + "\n")

    with pytest.raises(BadIndex, match="changed while it was indexed"):
        build_index(corpus, tmp_path / "index", progress=change)


def test_two_builders_of_one_folder_exclude_each_other(tmp_path, corpus):
    folder = tmp_path / "index"
    folder.mkdir()
    with open(folder / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BadIndex, match="another process is building"):
            build_index(corpus, folder)
    build_index(corpus, folder)


def test_indexes_that_cannot_be_served_together_are_refused(built, cut, tmp_path):
    for name, options in (("words", {"embedding": ""}), ("again", {})):
        build_index(write_corpus(tmp_path / f"{name}.jsonl", random_passages(9)), tmp_path / name, **options)
    for folders, words in (
        (cut[1:], r"cut into 5 shards, and \[3, 2, 1, 0\] are given"),
        ([*cut, cut[0]], r"\[4, 3, 2, 1, 0, 4\]"),
        ([built / "index", tmp_path / "words"], "different embeddings"),
        ([built / "index", tmp_path / "again"], "same passage id"),
    ):
        with pytest.raises(BadIndex, match=words):
            PassageIndex(folders)
    with pytest.raises(BadIndex, match="built without vectors"):
        PassageIndex([tmp_path / "words"], mode=Mode.hybrid)


def test_a_shard_that_does_not_exist_is_refused(tmp_path, corpus):
    for shard in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="does not exist"):
            build_index(corpus, tmp_path / "index", shard=shard)


def test_damage_is_named_with_what_to_do(tmp_path, corpus):
    with pytest.raises(BadIndex, match="holds no index"):
        PassageIndex([tmp_path])
    folder = tmp_path / "index"
    build_index(corpus, folder)
    data = next(folder.glob("*.lance/data/*"))
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadIndex, match="delete .* and build it again"):
        PassageIndex([folder])
    data.write_bytes(content)
    manifest = json.loads((folder / "index.json").read_text())
    for change, words in (
        ({"num_passages": 101}, "100 passages, its index.json says 101"),
        ({"format": 99}, "format 99"),
    ):
        (folder / "index.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(BadIndex, match=words):
            PassageIndex([folder])


# --- Search in the process -----------------------------------------------------------------------------------------


async def test_a_search_in_the_process_ranks_by_bm25_over_title_and_text():
    passages = random_passages(200)
    search = LocalSearch(passages)
    for query in ["", *random_queries(30)]:
        found = [(passage.id, passage.score) for passage in await search.search(query.upper(), k=5)]
        same_ranking(found, bm25_by_the_letter(passages, query)[:5])


def test_the_note_about_a_fact_is_the_first_one_found():
    world = World(entities=300, seed=2)
    search = LocalSearch(world.passages)
    for (subject, relation), identity in list(world.states.items())[:200]:
        assert search.best(f"{relation} of {subject}", 1)[0].id == identity
