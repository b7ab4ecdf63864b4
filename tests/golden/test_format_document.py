"""docs/shard_format.md says what the code does: column by column, and byte by byte in its example."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pyarrow as pa
import pytest

from storage.shards.failed_attempts import SCHEMA as FAILURES
from storage.shards.reward_sets import SCHEMA as REWARDS
from storage.shards.schema import CALL, MESSAGE, OPTIONAL, REQUEST, SCHEMA, TURN, content_sha256, routes_type
from tests.shard_files import decode_shard

FOLDER = Path(__file__).parent
DOCUMENT = (FOLDER.parents[1] / "docs" / "shard_format.md").read_text()
STRUCTS = {"Turn": TURN, "ToolCall": CALL, "Message": MESSAGE, "Sampling": SCHEMA.field("sampling").type}
STRUCTS["Request"] = REQUEST


def _spelled(kind: pa.DataType) -> str:
    """A type as the document writes it."""
    for name, struct in STRUCTS.items():
        if kind == struct:
            return name
    if pa.types.is_list(kind) and pa.types.is_fixed_size_list(kind.value_type):  # of the model's sizes
        return "list<fixed_size_list<fixed_size_list<uint8 or uint16>[choices]>[layers]>"
    if pa.types.is_map(kind):
        return f"map<{_spelled(kind.key_type)}, {_spelled(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"list<{_spelled(kind.value_type)}>"
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _table_after(heading: str) -> list[tuple[str, str]]:
    """Name and type in each line of the first table after some words."""
    lines = DOCUMENT[DOCUMENT.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not (match := re.match(r"^\| `(\w+)` \| ([^|]+) \|", line)):
            break
        rows.append((match[1], match[2].strip()))
    return rows


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("## Columns", list(SCHEMA)),
        ("| Optional column |", [*OPTIONAL, pa.field("routes", routes_type(layers=2, choices=3, id_bytes=1))]),
        ("| Failure column |", list(FAILURES)),
        ("| Reward column |", list(REWARDS)),
        *((f"`{name}`, a struct", list(kind)) for name, kind in STRUCTS.items()),
    ],
)
def test_the_document_has_every_column_with_its_type(heading: str, fields: list[pa.Field]):
    assert _table_after(heading) == [(field.name, _spelled(field.type)) for field in fields]


def test_the_document_has_every_key_of_the_metadata():
    table = DOCUMENT[DOCUMENT.index("## Metadata") : DOCUMENT.index("## Digests")]
    named = {
        key
        for line in table.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    written = decode_shard((FOLDER / "v1.arrow").read_bytes(), name="v1").schema.metadata
    assert named == {key.decode() for key in written}


def test_the_example_of_the_content_digest_is_right():
    example = DOCUMENT[DOCUMENT.index("00000000 00000000 04000000") :].split("```")[0]
    *lines, last = example.strip().splitlines()
    spelled = bytes.fromhex("".join(line.split("   ")[0] for line in lines))
    rows = pa.table(
        {
            "input_ids": pa.array([[2, 8, 12, 1], [5]], pa.list_(pa.int32())),
            "loss_mask": [[False, False, True, True], [True]],
            "logprobs": pa.array([[0, 0, -0.5, -0.25], [-1]], pa.list_(pa.float32())),
            "weight_versions": pa.array([[-1, -1, 3, 3], [4]], pa.list_(pa.int32())),
        }
    )
    assert last.removeprefix("sha256 = ") == hashlib.sha256(spelled).hexdigest() == content_sha256(rows)
