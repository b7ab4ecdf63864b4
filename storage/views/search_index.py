"""Full-text and vector search over a run's trajectories: a LanceDB table derived from the committed shards.

In: a run's log and its shards. Out: one row per attempt in a local folder, and the attempts that match a query.
Nothing else depends on that folder: it is safe to delete, and `update` makes it again.

    log ──shards the table does not hold──▶ rows ──whole shards in one commit──▶ table ──▶ full-text index
    query ─▶ words, phrases, filters ─▶ table ─▶ hits ─▶ outcome and step from the log ─▶ `Match`, best first

A commit of the table holds whole shards, so a shard in the table is complete, whatever was killed. Outcome, step and
quarantine change after a shard is committed: they are read from the log.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from settings.errors import InvalidInput, NotFound, is_disk_full, nearest_existing
from settings.places.hints import command
from storage.log.entries import Shard, claimed_groups
from storage.log.run_log import RunLog
from storage.objects.digests import sha256_of
from storage.objects.object_store import LocalStore, StoreError, room_for, writable
from storage.shards.shards import DamagedShard, read_shard
from storage.views.search_query import Filters, SearchQuery, sql_text
from storage.views.search_rows import EMBEDDING, ROW, Embed, attempt_rows, unit_vectors

SCHEMA_VERSION = "1"

_TABLE, _LOCK = "trajectories", "lock"
_READ_AT_ONCE = 8
_COMMIT_BYTES = 64 * 2**20
"""Rows in memory are committed once they are this large."""
_MOST_UNINDEXED = 2000
"""Rows, beside 2 % of all, that may stay outside the full-text index. A query reads them one by one, in 0.2 s, while
merging them takes time in proportion to the whole index."""
_OLD_VERSIONS = datetime.timedelta(minutes=10)
"""How long another process may still read a version of the table that was replaced."""


class BadIndex(StoreError):
    """The index cannot be used; the message says how to make it again."""


@dataclass(kw_only=True)
class Update:
    """The result of an update."""

    shards_added: int = 0
    shards_removed: int = 0
    """Quarantined, retired, or of an earlier run of the same name."""
    trajectories: int = 0
    """Rows of the index now."""
    embedding: str = ""
    """Import path of the embedding; empty without vectors."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Shard id → why it was left out; the next update tries again."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One attempt that matches."""

    id: str
    score: float | None
    """BM25 for words, cosine for `similar`, higher is better; None if only filters or punctuation decided."""
    reward: float | None
    reward_parts: dict[str, float | None]
    status: str
    head_version: int
    tail_version: int
    accepted: bool
    outcome: str | None
    """Outcome of its group; None for held-out attempts."""
    step: int | None
    """The optimizer step that took its group."""
    prompt_id: str
    is_eval: bool
    finished_at: float
    shard_id: str
    text: str
    """Messages, then tool calls, a line each."""


def index_folder(log: RunLog, cache: Path) -> Path:
    """Folder of a run's index: beside its shards in a local store; under `cache` for S3, and for a store that this user
    may not write.

    It is not in the bucket: Lance would need the credentials in its own form, and two indexers would lose each other's
    rows on a server that ignores conditional writes. A copy per machine has neither problem, and is fast.
    """
    if isinstance(log.store, LocalStore):
        beside = log.store.root / log.key("index")
        if os.access(nearest_existing(beside / _LOCK), os.W_OK):
            return beside
    return cache / "index" / sha256_of(log.store.uri.encode())[:16] / log.run_id


class SearchIndex:
    """The index of one run. `load_embedding` turns an import path into the function behind it."""

    def __init__(self, log: RunLog, folder: Path, *, load_embedding: Callable[[str], Embed]) -> None:
        self.log = log
        self.folder = folder
        self._load_embedding = load_embedding

    def update(
        self,
        *,
        embedding: str = "",
        rebuild: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Update:
        """Add the shards that the index lacks and drop those that are gone; `rebuild` starts from nothing.

        `embedding` is an import path; empty keeps that of the index. `progress` gets the shards done and in all. A
        second call, also after a kill, ends in the same rows. Raises `BadIndex` for an index that is damaged or was
        made by another Millrace or with another embedding, `InvalidInput` if the embedding does not return vectors,
        `StoreFull` if it does not fit on its disk.
        """
        what = f"the disk of the search index {self.folder}"
        with room_for(0, self.folder, reserve=0, what=what, remedy="Make room there"), self._lock():
            table = self._create(embedding) if rebuild or not self.exists else self._open()
            recorded = _embedding_of(table)
            if embedding and embedding != recorded:
                raise BadIndex(
                    f"the index of run {self.log.run_id!r} was made "
                    f"{f'with embedding {recorded}' if recorded else 'without vectors'}; "
                    f"{self._again(embedding)} makes it with {embedding}"
                )
            report = Update(embedding=recorded)
            held = self._held(table)
            if gone := held - set(self._live_shards()):
                with self._damage_named():
                    table.delete(_in_shards(gone))
                report.shards_removed = len(gone)
            self._add(table, self._missing(held), report, progress)
            with self._damage_named():
                report.trajectories = table.count_rows()
                if not table.list_indices():
                    self._create_text_index(table)
                elif table.index_stats("text_idx").num_unindexed_rows > _MOST_UNINDEXED + report.trajectories // 50:
                    table.optimize(cleanup_older_than=_OLD_VERSIONS)
            return report

    def behind(self) -> int:
        """Number of committed shards that the index lacks. Raises `NotFound` without an index, `BadIndex`."""
        return len(self._missing(self._held(self._open())))

    def find(self, query: SearchQuery, filters: Filters, *, count: int, similar: bool = False) -> list[Match]:
        """At most `count` attempts that match, best first.

        `similar` compares the whole text by the index's embedding instead of its words. Raises `NotFound` without an
        index, `InvalidInput` for `similar` without vectors, and `BadIndex`.
        """
        table = self._open()
        search = self._similar(table, query) if similar else _with_words(table, query)
        where = filters.sql() if similar else query.sql(filters)
        if filters.step is not None:  # a row of the step is in a shard that has a group which the step took
            steps = self.log.state.steps
            claimed = claimed_groups(steps[filters.step - 1]) if 1 <= filters.step <= len(steps) else []
            where = f"({where}) AND {_in_shards({group.shard_id for _, group in claimed})}"
        search = search.where(where, prefilter=True).with_row_id(True)
        fetched = 8 * count
        while True:
            with self._damage_named():
                hits = search.limit(fetched).to_arrow().to_pylist()
            kept = [hit for hit in hits if self._passes(hit, filters)]
            if len(kept) >= count or len(hits) < fetched:
                return self._read(table, kept[:count])
            fetched *= 8

    @property
    def _path(self) -> Path:
        return self.folder / f"{_TABLE}.lance"

    def _again(self, embedding: str = "") -> str:
        options = ["--rebuild", *(["--embedding", embedding] if embedding else [])]
        return f"`{command('index', self.log.run_id, *options, store=self.log.store.uri)}`"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Only one process at a time updates an index; the next one has nothing left to do."""
        with writable(self.folder / _LOCK):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / _LOCK, "a")  # noqa: SIM115 - it is closed below
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        """LanceDB reports a missing or broken file by its reader's error; add the way out."""
        try:
            yield
        except (RuntimeError, OSError, ValueError, pa.ArrowException) as error:
            if is_disk_full(error):
                raise
            reason = re.sub(r",? /\S+\.rs:\d+\S*", "", str(error))  # lines of Lance's own source
            raise BadIndex(
                f"the index at {self.folder} cannot be used ({reason}); it is derived from the shards and safe to "
                f"delete: {self._again()} makes it again"
            ) from error

    @property
    def exists(self) -> bool:
        """True if a version of the table is committed."""
        return any((self._path / "_versions").glob("*.manifest"))

    def _create(self, embedding: str) -> Any:
        import lancedb

        schema = ROW.with_metadata({"millrace_index": SCHEMA_VERSION, "embedding": embedding})
        if embedding:
            length = unit_vectors(self._load_embedding(embedding), ["millrace"], name=embedding).shape[1]
            schema = schema.append(pa.field("vector", pa.list_(pa.float32(), length)))
        shutil.rmtree(self._path, ignore_errors=True)
        with self._damage_named():
            return lancedb.connect(str(self.folder)).create_table(_TABLE, schema=schema)

    def _create_text_index(self, table: Any) -> None:
        from lancedb.index import FTS

        # Words of any script as they are written, split at punctuation too (`foo_bar` is two): in code and sums every
        # word counts. 128 characters are enough for digests.
        words = FTS(
            base_tokenizer="icu/split", with_position=True, stem=False, remove_stop_words=False, max_token_length=128
        )
        table.create_index("text", config=words)

    def _open(self) -> Any:
        import lancedb

        if not self.exists:
            index = command("index", self.log.run_id, store=self.log.store.uri)
            raise NotFound(f"run {self.log.run_id!r} has no search index; `{index}` makes it")
        with self._damage_named():
            table = lancedb.connect(str(self.folder)).open_table(_TABLE)
            version = (table.schema.metadata or {}).get(b"millrace_index", b"none").decode()
            names = set(table.schema.names)
        if version != SCHEMA_VERSION or not set(ROW.names) <= names:
            raise BadIndex(
                f"the index at {self.folder} has schema {version}, this Millrace uses {SCHEMA_VERSION}; "
                f"{self._again()} makes it again, and the folder is safe to delete"
            )
        return table

    def _held(self, table: Any) -> set[str]:
        with self._damage_named():
            return set(pc.unique(table.search().select(["shard_id"]).to_arrow()["shard_id"]).to_pylist())

    def _live_shards(self) -> list[str]:
        state = self.log.state
        return [s for s in state.shards if s not in state.quarantined and s not in state.retired_shards]

    def _missing(self, held: set[str]) -> list[Shard]:
        shards = self.log.state.shards
        missing = [shards[shard_id] for shard_id in self._live_shards() if shard_id not in held]
        return [shard for shard in missing if shard.num_rows]

    def _add(self, table: Any, shards: Sequence[Shard], report: Update, progress: Callable[[int, int], None]) -> None:
        waiting: list[pa.Table] = []
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            for start in range(0, len(shards), _READ_AT_ONCE):
                progress(start, len(shards))
                chunk = shards[start : start + _READ_AT_ONCE]
                for shard, reading in [(shard, pool.submit(self._shard_rows, shard)) for shard in chunk]:
                    try:
                        waiting.append(reading.result())
                        report.shards_added += 1
                    except DamagedShard as error:
                        report.damaged[shard.id] = error.reason
                is_last = start + len(chunk) == len(shards)
                if waiting and (is_last or sum(rows.nbytes for rows in waiting) >= _COMMIT_BYTES):
                    self._commit(table, pa.concat_tables(waiting))
                    waiting = []
            progress(len(shards), len(shards))

    def _commit(self, table: Any, rows: pa.Table) -> None:
        if embedding := _embedding_of(table):
            vectors = unit_vectors(self._load_embedding(embedding), rows["text"].to_pylist(), name=embedding)
            column = table.schema.field("vector")
            if vectors.shape[1] != column.type.list_size:
                raise InvalidInput(
                    f"embedding {embedding} returns {vectors.shape[1]} numbers a text, the index holds "
                    f"{column.type.list_size}; {self._again(embedding)} makes it again"
                )
            flat = pa.array(vectors.reshape(-1), type=pa.float32())
            rows = rows.append_column("vector", pa.FixedSizeListArray.from_arrays(flat, column.type.list_size))
        with self._damage_named():
            table.add(rows)

    def _shard_rows(self, shard: Shard) -> pa.Table:
        return attempt_rows(read_shard(self.log, shard), shard_id=shard.id)

    def _similar(self, table: Any, query: SearchQuery) -> Any:
        embedding = _embedding_of(table)
        if not embedding:
            raise InvalidInput(
                f"the index of run {self.log.run_id!r} has no vectors; {self._again('module:function')} adds them; "
                f"{EMBEDDING}"
            )
        vector = unit_vectors(self._load_embedding(embedding), [query.text], name=embedding)[0]
        search = table.search(vector, vector_column_name="vector").distance_type("dot")
        return search.select(["group_id", "shard_id", "_distance"])

    def _passes(self, hit: dict[str, Any], filters: Filters) -> bool:
        """True if a hit passes the filters that need the log."""
        state, group_id, shard_id = self.log.state, hit["group_id"], hit["shard_id"]
        return (
            not (shard_id in state.quarantined or shard_id in state.retired_shards)
            and filters.step in (None, state.step_of.get(group_id))
            and filters.outcome in ("", self._outcome(group_id))
        )

    def _outcome(self, group_id: str) -> str | None:
        state = self.log.state
        return "pending" if group_id in state.pending else state.outcomes.get(group_id)

    def _read(self, table: Any, hits: Sequence[dict[str, Any]]) -> list[Match]:
        if not hits:
            return []
        with self._damage_named():
            selected = table.take_row_ids([hit["_rowid"] for hit in hits]).select(ROW.names).with_row_id()
            rows = {row.pop("_rowid"): row for row in selected.to_arrow().to_pylist()}  # in another order
        matches = []
        for hit in hits:
            row = rows[hit["_rowid"]]
            group_id = row.pop("group_id")
            row |= {"outcome": self._outcome(group_id), "step": self.log.state.step_of.get(group_id)}
            row["reward_parts"] = json.loads(row["reward_parts"])
            row["score"] = 1.0 - hit["_distance"] if "_distance" in hit else hit.get("_score")
            matches.append(Match(**row))
        return matches


def _with_words(table: Any, query: SearchQuery) -> Any:
    from lancedb.query import BooleanQuery, FullTextOperator, MatchQuery, Occur, PhraseQuery

    words = " ".join(query.words)
    clauses = [(Occur.MUST, PhraseQuery(phrase, "text")) for phrase in query.phrases]
    if words:
        clauses.append((Occur.MUST, MatchQuery(words, "text", operator=FullTextOperator.AND)))
    if len(query.words) > 1:  # any order matches; side by side first
        clauses.append((Occur.SHOULD, PhraseQuery(words, "text")))
    if not clauses:  # no index has punctuation
        return table.search().select(["group_id", "shard_id"])
    return table.search(BooleanQuery(clauses)).select(["group_id", "shard_id", "_score"])


def _in_shards(shard_ids: set[str]) -> str:
    return f"shard_id IN ({', '.join(map(sql_text, sorted(shard_ids)))})" if shard_ids else "false"


def _embedding_of(table: Any) -> str:
    return str((table.schema.metadata or {}).get(b"embedding", b"").decode())
