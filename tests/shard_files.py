"""Shard files that no log vouches for: written from groups, or from a table, and read with every rule checked."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from storage.objects.tables import ipc_bytes
from storage.records import RolloutGroup, Sampling
from storage.shards.codec import COMPRESSION, Provenance, open_shard, shard_table
from storage.shards.schema import BadShard, check, content_sha256


def encode_shard(
    groups: Sequence[RolloutGroup], *, provenance: Provenance, sampling: Sampling, is_eval: bool = False
) -> bytes:
    """The file that `commit_shard` writes for these groups."""
    table = shard_table(groups, provenance=provenance, sampling=sampling, is_eval=is_eval)
    return ipc_bytes(table, compression=COMPRESSION)


def decode_shard(data: bytes, *, name: str) -> pa.Table:
    """The table in some shard bytes. Raises `BadShard` for a broken rule or another content digest."""
    table = open_shard(data, name=name)
    check(table, name=name)
    if table.schema.metadata.get(b"content_sha256") != content_sha256(table).encode():
        raise BadShard(f"shard {name}: the token columns differ from content_sha256 in its metadata")
    return table


def file_with(table: pa.Table, **metadata: str) -> bytes:
    """The file of a table, some of its metadata replaced; an empty value removes the key."""
    merged = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()} | metadata
    kept = {key: value for key, value in merged.items() if value}
    return ipc_bytes(table.replace_schema_metadata(kept), compression=None)
