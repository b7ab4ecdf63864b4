"""A shard written by the first version stays readable, value for value."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.log.entries import ClaimedGroup
from storage.shards.schema import NewerSchema, content_sha256
from tests.golden.make_v1 import make
from tests.shard_files import decode_shard, file_with
from trainers.data.samples import gather_samples

FOLDER = Path(__file__).parent
EXPECTED = json.loads((FOLDER / "v1.json").read_text())


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return decode_shard((FOLDER / "v1.arrow").read_bytes(), name="v1")


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [{**row, "reward_parts": dict(row["reward_parts"])} for row in table.to_pylist()]


def _metadata(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in table.schema.metadata.items()}


def test_every_value_is_read_as_it_was_written(table: pa.Table):
    assert _rows(table) == EXPECTED["rows"]
    assert _metadata(table) == EXPECTED["metadata"]


def test_the_file_is_the_one_that_was_committed():
    digest = hashlib.sha256((FOLDER / "v1.arrow").read_bytes()).hexdigest()
    assert digest == "d779a0a152a8d12657a49340022e6a8d164db0d000528de508b567d54475c63f"


def test_the_content_digest_is_of_row_starts_then_ids_mask_logprobs_and_versions(table: pa.Table):
    """Worked out here from plain lists, byte for byte, so that another reader can be written against it."""
    rows = EXPECTED["rows"]
    starts = np.cumsum([0, *(len(row["input_ids"]) for row in rows)]).astype("<i8")
    digest = hashlib.sha256(starts.tobytes())
    for column, dtype in [("input_ids", "<i4"), ("loss_mask", "?"), ("logprobs", "<f4"), ("weight_versions", "<i4")]:
        digest.update(np.array([value for row in rows for value in row[column]], dtype=dtype).tobytes())
    assert digest.hexdigest() == content_sha256(table) == EXPECTED["metadata"]["content_sha256"]


def test_todays_writer_still_writes_version_one():
    written = decode_shard(make(), name="today")
    assert _rows(written) == EXPECTED["rows"]
    assert _metadata(written) == EXPECTED["metadata"]


def test_with_a_column_and_a_key_that_a_later_writer_adds_it_is_still_version_one(table: pa.Table):
    added = table.append_column("mood", pa.array(["calm", None, "glad", "calm"]))
    added = added.replace_schema_metadata({**table.schema.metadata, b"mood_model": b"m1"})
    read = decode_shard(file_with(added), name="later")
    assert _rows(read.drop_columns(["mood"])) == EXPECTED["rows"]
    assert read["mood"].to_pylist() == ["calm", None, "glad", "calm"]
    claimed = [ClaimedGroup(shard_id="later", group_id="2.37+45")]
    assert gather_samples(claimed, {"later": read}).num_rows == 3


def test_as_version_two_it_is_refused_with_the_way_out(table: pa.Table):
    newer = table.replace_schema_metadata({**table.schema.metadata, b"schema_version": b"2"})
    with pytest.raises(NewerSchema, match="shard later: schema version 2, this Millrace reads 1; .*upgrade"):
        decode_shard(file_with(newer), name="later")


def test_todays_trainer_can_train_on_it(table: pa.Table):
    claimed = [ClaimedGroup(shard_id="v1", group_id="2.1+1.retry1"), ClaimedGroup(shard_id="v1", group_id="2.37+45")]
    samples = gather_samples(claimed, {"v1": table})
    assert samples.num_rows == 4
    assert samples.offsets.tolist() == [0, 1, 18, 23, 28]
    assert samples.groups_B.tolist() == [0, 1, 1, 1]
    assert samples.attempts_B.tolist() == [0, 1, 2, 2]
    assert samples.rewards_B.tolist() == [-1.5, 0.5, 0.0, 0.0]
    assert samples.input_ids_T[samples.mask_T].tolist() == [151_643, 12, 7, 1, 13, 7, 5, 1, 6, 1]
    assert samples.versions_T[samples.mask_T].tolist() == [5, 3, 3, 4, 4, 4, 4, 4, 5, 5]
    assert samples.logprobs_T[~samples.mask_T].tolist() == [0.0] * 18
