"""The index of a corpus: built into a folder, opened into memory.

In: a JSONL corpus. Out: a folder with a LanceDB table and, written last, `index.json`; from it a `PassageIndex` that
answers queries.

    corpus ─check, digest─▶ building.json ─passages by the thousand: words, vectors─▶ table ─▶ index.json
    index.json of every shard ─▶ one table ─▶ postings, vectors in memory ─▶ `search`

A commit of the table holds whole chunks in the order of the corpus, so the number of its rows says at which passage a
killed build goes on. The table is the store. Queries are answered from arrays in memory: in LanceDB each took several
milliseconds of CPU, while here a batch of them shares one product (`benchmarks/retrieval.py --lancedb`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from examples.search_agent.retrieval.embedding import HASHING, Embedding, load_embedding, unit_vectors, words_of
from examples.search_agent.retrieval.passages import Passage, read_passages
from examples.search_agent.retrieval.ranking import Best, Postings, Ranking, Vectors, fuse

FORMAT = 1
DEPTH = 100
"""How far down each ranking is read before the two are fused; also the most a query can ask for."""

_TABLE = "passages"
_CHUNK = 4096
_PROBE = "The quick brown fox jumps over the lazy dog 0123456789."
_PROBE_TOLERANCE = 1e-3


class Mode(StrEnum):
    """How a query is compared with passages."""

    bm25 = "bm25"
    vector = "vector"
    hybrid = "hybrid"


class BadIndex(ValueError):
    """The index cannot be used; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What an index was made from."""

    corpus: str
    """Name of the file, for people."""
    corpus_sha256: str
    skip_broken: bool
    shard: int
    num_shards: int
    """Passage number i of the corpus is in shard i % num_shards."""
    num_passages: int
    """In this shard."""
    num_broken: int
    """Lines of the whole corpus that were left out."""
    embedding: str
    """Import path; empty without vectors."""
    probe: list[float]
    """The embedding's vector of a fixed text: tells another model of the same name."""
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Names corpus, part and embedding; 16 hex digits."""
        words = json.dumps(asdict(replace(self, corpus="")), sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:16]


def build_index(
    corpus: Path,
    folder: Path,
    *,
    embedding: str = HASHING,
    shard: tuple[int, int] = (0, 1),
    skip_broken: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Index a corpus, or go on with a build of it that was killed; a finished index is left as it is.

    `embedding` is an import path, empty for an index of words alone; `shard` is (i, of how many). `progress` gets
    the passages done and to do. Raises `BadCorpus` for the corpus, `BadIndex` for a folder that holds another index
    or is being built by another process, `ValueError` for the embedding, all before the first passage is embedded.
    """
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard[0]}/{shard[1]} does not exist; the first of two is 0/2")
    model = load_embedding(embedding) if embedding else None
    skipped: list[str] = []
    num_passages = sum(1 for _ in _part(read_passages(corpus, skip_broken=skip_broken, skipped=skipped), shard))
    manifest = Manifest(
        corpus=corpus.name,
        corpus_sha256=_sha256_of_file(corpus),
        skip_broken=skip_broken,
        shard=shard[0],
        num_shards=shard[1],
        num_passages=num_passages,
        num_broken=len(skipped),
        embedding=embedding,
        probe=_probe(model) if model else [],
    )
    if not manifest.num_passages:
        raise ValueError(f"shard {shard[0]}/{shard[1]} of {corpus} would be empty; use fewer shards")
    with _only_builder(folder):
        if (folder / "index.json").exists():
            _check_same(_read_manifest(folder / "index.json"), manifest, folder)
            return manifest
        if (folder / "building.json").exists():
            _check_same(_read_manifest(folder / "building.json"), manifest, folder)
        else:
            _write_atomically(folder / "building.json", manifest)
        table = _table(folder, len(manifest.probe))
        done = table.count_rows()
        progress(done, manifest.num_passages)
        passages = _part(read_passages(corpus, skip_broken=skip_broken), shard)
        for chunk in _chunks(itertools.islice(passages, done, None)):
            table.add(_rows(chunk, model, table.schema))
            done += len(chunk)
            progress(done, manifest.num_passages)
        if (rows := table.count_rows()) != manifest.num_passages or manifest.corpus_sha256 != _sha256_of_file(corpus):
            raise BadIndex(f"{corpus} changed while it was indexed ({rows} rows); delete {folder} and build it again")
        _write_atomically(folder / "index.json", manifest)
        (folder / "building.json").unlink()
    return manifest


class PassageIndex:
    """All shards of one or more corpora in memory, searched as one: how they were cut changes no result.

    Takes about `4 D` bytes a passage for the vectors, 8 for each different word in it, and its text. A query takes
    time in proportion to the number of passages: made for up to a few million.
    """

    def __init__(self, folders: Sequence[Path], *, mode: Mode | None = None, embedding: str = "") -> None:
        """`mode` defaults to hybrid if there are vectors; `embedding`, if given, must be the index's own.

        Raises `BadIndex` for a folder that is half built, damaged, of another embedding, or a shard without the rest.
        """
        self.manifests = [_finished(folder) for folder in folders]
        _check_together(self.manifests, folders, embedding)
        path = self.manifests[0].embedding
        self.mode = mode or (Mode.hybrid if path else Mode.bm25)
        if self.mode is not Mode.bm25 and not path:
            raise BadIndex(f"{folders[0]} was built without vectors, so it has no mode {self.mode}; use --mode bm25")
        self._model: Embedding | None = load_embedding(path) if self.mode is not Mode.bm25 else None
        self._size = len(self.manifests[0].probe)
        if self._model and not np.allclose(_probe(self._model), self.manifests[0].probe, atol=_PROBE_TOLERANCE):
            raise BadIndex(
                f"{path} does not give the vectors {folders[0]} was built with: another model by the same "
                "name. Serve with the one it was built with, or build the index again in another folder"
            )
        self._load([_opened(folder, manifest) for folder, manifest in zip(folders, self.manifests, strict=True)])

    def _load(self, tables: Sequence[Any]) -> None:
        import pyarrow as pa

        rows = pa.concat_tables(tables)
        self._ids, self._titles, self._texts = (rows[name].combine_chunks() for name in ("id", "title", "text"))
        names = np.array(self._ids.to_pylist(), dtype=object)
        if len(set(names)) != len(names):
            raise BadIndex("the same passage id is in two of the indexes; ids must be unique among all of them")
        order = np.empty(len(names), np.int64)
        order[np.argsort(names)] = np.arange(len(names))
        self._best = Best(order)
        words = rows["words"].combine_chunks()
        coded = words.flatten().dictionary_encode()
        self._postings = Postings(
            coded.dictionary.to_pylist(),
            coded.indices.to_numpy(),
            np.repeat(np.arange(len(names)), words.value_lengths().to_numpy()),
            rows["counts"].combine_chunks().flatten().to_numpy(),
            self._best,
        )
        self._vectors = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nearest")
        """Multiplies vectors while words are looked up."""
        if self.mode is not Mode.bm25:
            flat = rows["vector"].combine_chunks().flatten().to_numpy()
            self._vectors = Vectors(flat.reshape(-1, self._size), self._best)

    @property
    def digest(self) -> str:
        """Names what is searched and with which embedding; equal for replicas."""
        if len(self.manifests) == 1:
            return self.manifests[0].digest
        return hashlib.sha256(" ".join(sorted(m.digest for m in self.manifests)).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return self._best.num_rows

    def search(self, asked: Sequence[tuple[str, int]]) -> list[list[Passage]]:
        """For each query and number k ≤ `DEPTH`, at most k passages, best first; not for two threads at a time.

        A query has the same passages and scores whatever else is asked with it. One without words finds nothing.
        """
        queries = [query for query, _ in asked]
        match self.mode:
            case Mode.vector:
                rankings = self._nearest(queries, max(k for _, k in asked))
            case Mode.bm25:
                rankings = [self._postings.rank(words_of(query), k) for query, k in asked]
            case Mode.hybrid:
                beside = self._thread.submit(self._nearest, queries, DEPTH)
                matching = [self._postings.rank(words_of(query), DEPTH) for query in queries]
                pairs = zip(matching, beside.result(), asked, strict=True)
                rankings = [fuse([words, nearest], self._best, k) for words, nearest, (_, k) in pairs]
        return [
            [self._passage(row, score) for row, score in zip(rows[:k].tolist(), scores.tolist(), strict=False)]
            for (rows, scores), (_, k) in zip(rankings, asked, strict=True)
        ]

    def _nearest(self, queries: Sequence[str], count: int) -> list[Ranking]:
        assert self._model is not None and self._vectors is not None
        return self._vectors.rank(unit_vectors(self._model, queries, size=self._size), count)

    def _passage(self, row: int, score: float) -> Passage:
        return Passage(
            id=self._ids[row].as_py(), title=self._titles[row].as_py(), text=self._texts[row].as_py(), score=score
        )


def _part(passages: Iterable[Passage], shard: tuple[int, int]) -> Iterator[Passage]:
    return itertools.islice(passages, shard[0], None, shard[1])


def _chunks(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    while chunk := list(itertools.islice(passages, _CHUNK)):
        yield chunk


def _probe(model: Embedding) -> list[float]:
    vector = unit_vectors(model, [_PROBE])[0]
    if not vector.any():
        raise ValueError(f"{type(model).__name__}.embed gives zeros for a plain English sentence")
    return [round(float(number), 4) for number in vector]


def _table(folder: Path, size: int) -> Any:
    import lancedb
    import pyarrow as pa

    columns = [(name, pa.large_string()) for name in ("id", "title", "text")]
    columns += [("words", pa.large_list(pa.large_string())), ("counts", pa.large_list(pa.int32()))]
    if size:
        columns.append(("vector", pa.list_(pa.float32(), size)))
    database = lancedb.connect(str(folder.resolve()))
    return database.create_table(_TABLE, schema=pa.schema(columns), exist_ok=True)


def _rows(passages: Sequence[Passage], model: Embedding | None, schema: Any) -> Any:
    import pyarrow as pa

    whole = [f"{passage.title}\n{passage.text}" for passage in passages]
    counted = [Counter(words_of(text)) for text in whole]
    columns: dict[str, Any] = {name: [getattr(passage, name) for passage in passages] for name in schema.names[:3]}
    columns["words"] = [list(counts) for counts in counted]
    columns["counts"] = [list(counts.values()) for counts in counted]
    if model:
        size = schema.field("vector").type.list_size
        flat = pa.array(unit_vectors(model, whole, size=size).reshape(-1))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, size)
    return pa.table(columns, schema=schema)


def _opened(folder: Path, manifest: Manifest) -> Any:
    import lancedb

    fix = f"delete {folder} and build it again"
    try:
        rows = lancedb.connect(str(folder.resolve())).open_table(_TABLE).to_arrow()
    except (RuntimeError, OSError, ValueError) as error:
        raise BadIndex(f"the table in {folder} cannot be read ({str(error).splitlines()[0][:200]}); {fix}") from error
    if len(rows) != manifest.num_passages:
        raise BadIndex(f"{folder} has {len(rows)} passages, its index.json says {manifest.num_passages}; {fix}")
    return rows


def _finished(folder: Path) -> Manifest:
    if (folder / "index.json").exists():
        return _read_manifest(folder / "index.json")
    if (folder / "building.json").exists():
        corpus = _read_manifest(folder / "building.json").corpus
        raise BadIndex(f"{folder} is half built; the same build command again finishes it (its corpus was {corpus})")
    raise BadIndex(f"{folder} holds no index; `python -m examples.search_agent.retrieval.server build` makes one")


def _read_manifest(file: Path) -> Manifest:
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this server reads {FORMAT}")
        return Manifest(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise BadIndex(f"{file} cannot be read ({error}); delete {file.parent} and build it again") from error


def _check_same(recorded: Manifest, wanted: Manifest, folder: Path) -> None:
    """The folder's own corpus, part and embedding are asked for; the probe may differ in its last digits."""
    ours, theirs = asdict(wanted), asdict(recorded)
    for key in ("corpus_sha256", "skip_broken", "shard", "num_shards", "num_passages", "embedding"):
        if ours[key] != theirs[key]:
            raise BadIndex(
                f"{folder} was made from {recorded.corpus} with {key} {theirs[key]!r}, now it is {ours[key]!r}; "
                "choose another folder, or delete this one"
            )
    if len(recorded.probe) != len(wanted.probe) or not np.allclose(recorded.probe, wanted.probe, atol=_PROBE_TOLERANCE):
        raise BadIndex(f"{folder} was begun with another model behind {wanted.embedding}; delete it, or use that model")


def _check_together(manifests: Sequence[Manifest], folders: Sequence[Path], embedding: str) -> None:
    first = manifests[0]
    if embedding and embedding != first.embedding:
        raise BadIndex(
            f"{folders[0]} was built with embedding {first.embedding or 'none'}, not {embedding}; "
            "leave the option out, or build another index"
        )
    for manifest, folder in zip(manifests, folders, strict=True):
        if (manifest.embedding, manifest.probe) != (first.embedding, first.probe):
            raise BadIndex(f"{folder} and {folders[0]} were built with different embeddings; build one of them again")
    for whole in {(m.corpus_sha256, m.num_shards, m.corpus) for m in manifests}:
        given = [m.shard for m in manifests if (m.corpus_sha256, m.num_shards, m.corpus) == whole]
        if sorted(given) != list(range(whole[1])):
            raise BadIndex(
                f"{whole[2]} was cut into {whole[1]} shards, and {given} are given; serve each of them, once, "
                "in one server: statistics of words need all passages"
            )


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadIndex(f"another process is building {folder}; wait for it") from None
        yield


def _write_atomically(file: Path, manifest: Manifest) -> None:
    draft = file.with_suffix(".draft")
    with open(draft, "w") as opened:
        opened.write(json.dumps(asdict(manifest), indent=1) + "\n")
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(draft, file)


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
