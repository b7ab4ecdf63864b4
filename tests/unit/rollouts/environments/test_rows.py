"""Rows of a file: text however it is encoded and whatever type it has, or refused with file and line."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.environments.rows import read_rows
from settings.errors import InvalidInput

_USER = [{"role": "user", "content": "2+3="}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (False, "false"), (True, "true"), (18, "18"), (1.5, "1.5"), (18.0, "18"), (-3, "-3"), (" a", " a")),
        *((1e23, "1" + "0" * 23), (-0.0, "0"), (_USER, "2+3=")),
        ([{"role": "user", "content": [{"type": "text", "text": "2+3="}]}], "2+3="),
        *(("[{role: user}]", "[{role: user}]"), ("a\u2028b\r", "a\u2028b\r")),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_numbers_truth_values_and_a_users_message_are_text(
    tmp_path: Path, value: object, text: str, suffix: str
) -> None:
    file = tmp_path / f"rows.{suffix}"
    row = {"answer": value, "kept": 7, "reward_model": {"ground_truth": value, "style": "rule"}, "all": [value]}
    if suffix == "jsonl":
        file.write_text(json.dumps(row))
    else:
        pq.write_table(pa.Table.from_pylist([row]), file)
    (read,) = read_rows(file, required=["answer", "reward_model.ground_truth", "all.0"])
    assert read == row | {"answer": text, "reward_model.ground_truth": text, "all.0": text}


def test_an_integer_of_any_size_is_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"answer": 10**400}))
    assert read_rows(file, required=["answer"]) == [{"answer": "1" + "0" * 400}]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([0.1], pa.float32()), "0.1"),
        (pa.array([[16777216.0]], pa.list_(pa.float32())), "16777216"),
        (pa.array([{"0": 1e-7}], pa.struct({"0": pa.float32()})), "1e-07"),
        (pa.array([Decimal("18.00")]), "18"),
        (pa.array([Decimal("100")]), "100"),
        (pa.array([Decimal("0.1234567890123456789012345678901230")]), "0.123456789012345678901234567890123"),
        (pa.array(["x"]).dictionary_encode(), "x"),
    ],
    ids=str,
)
def test_numbers_of_a_parquet_column_are_written_as_people_write_them(
    tmp_path: Path, column: pa.Array, text: str
) -> None:
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet")
    key = "a.0" if pa.types.is_nested(column.type) else "a"
    assert read_rows(tmp_path / "a.parquet", required=[key])[0][key] == text


def test_a_system_message_and_a_question_are_read_by_their_places(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief."}, *_USER]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt}))
    (row,) = read_rows(tmp_path / "a.jsonl", required=["prompt.0.content", "prompt.1.content"])
    assert row == {"prompt": prompt, "prompt.0.content": "Be brief.", "prompt.1.content": "2+3="}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", '\ufeff{"q": "é"}\n\n{"q": "答"}'.encode()),
        ("a.jsonl", '\ufeff{"q": "é"}\r\n{"q": "答"}\r\n'.encode("utf-16-le")),
        ("a.jsonl", '\ufeff{"q": "é"}\n{"q": "答"}\n'.encode("utf-16-be")),
        ("a.jsonl.gz", gzip.compress('{"q": "é"}\n{"q": "答"}'.encode())),
        ("a.jsonl.zst", pa.compress('{"q": "é"}\n{"q": "答"}'.encode(), codec="zstd", asbytes=True)),
    ],
    ids=["utf-8", "utf-16-le", "utf-16-be", "gzip", "zstd"],
)
def test_text_is_read_in_the_encoding_and_compression_it_has(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert [row["q"] for row in read_rows(tmp_path / name, required=["q"])] == ["é", "答"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.sampled_from(["utf-8", "utf-16"]))
def test_any_text_is_read_back_in_any_encoding(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], encoding: str
) -> None:
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    lines = "\n".join(json.dumps({"q": text}, ensure_ascii=False) for text in texts)
    file.write_bytes(lines.encode(encoding))
    assert [row["q"] for row in read_rows(file, required=[])] == texts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"q": 1}\n{"q": "caf\xe9"}', "line 2: byte 11 is no UTF-8: save the file as UTF-8"),
        (b'{"q": 1}\n{"q": }', r"line 2: not JSON \(Expecting value\); mend or remove the line"),
        (b"[1, 2]", "line 1: a list instead of an object"),
        (b'{"q": null}', "line 1: 'q' missing or empty"),
        (b'{"q": "  "}', "line 1: 'q' missing or empty"),
        (b'{"q": {"a": 1}}', "line 1: 'q' is a dict, not text; name a key in it, such as q.a"),
        (b'{"q": [1, 2]}', "line 1: 'q' is a list, not text; name a key in it, such as q.0"),
        (b'{"q": NaN}', "line 1: 'q' missing or empty"),
        (b'{"q": -Infinity}', "line 1: 'q' is -inf, not text; write it as text"),
        (b'{"q": []}', r"line 1: 'q' is \[\], not text"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            " is a pointer of Git LFS and not the data; `git lfs pull`",
        ),
        (
            b'{"q": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}',
            "conversation of system, user, and a prompt is one text; name its parts, such as q.0.content",
        ),
        (
            b'{"q": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, '
            b'{"role": "user", "content": "z"}]}',
            "conversation of user, assistant, user, and a prompt is one text; name its parts, such as q.0.content",
        ),
        (b'{"q": "[{\\"role\\": \\"user\\", \\"content\\": \\"x\\"}]"}', "a conversation written down as text"),
        (b"{\"q\": \"[{'role': 'user'}]\"}", "a conversation written down as text"),
        (b'{"q": {"role": "user", "content": "x"}}', "name a key in it, such as q.content"),
        (b'{"q": [{"role": "user", "content": [{"type": "image"}]}]}', "a conversation of user"),
        (b'{"q": [{"from": "human", "value": "x"}]}', "'q' is a list, not text"),
        (b'{"q": 1}{"q": 2}', r"line 1: not JSON \(Extra data\)"),
        (b'{"q": 1}\r{"q": 2}', r"line 1: not JSON \(Extra data\)"),
        ('{"q": 1}'.encode("utf-32"), "line 1: not JSON"),
        ('{"q": 1}'.encode("utf-16-be"), "line 1: not JSON"),
        (gzip.compress(b'{"q": 1}'), "line 1: byte 2 is no UTF-8"),
        (b'{"q": 1e400}', "'q' is inf, not text"),
        (b"\n\n", "has no rows"),
    ],
    ids=range(25),
)
def test_what_is_no_text_is_refused_with_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(InvalidInput, match=rf"a\.jsonl.*{message}"):
        read_rows(tmp_path / "a.jsonl", required=["q"])


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"q": 1}' * 1000)[:-20])
    with pytest.raises(InvalidInput, match=r"a\.jsonl\.gz"):
        read_rows(tmp_path / "a.jsonl.gz", required=[])
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "none.jsonl", required=[])


def test_a_name_that_is_there_twice_is_said_and_no_value_is_chosen(tmp_path: Path) -> None:
    doubled = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["k", "k"])
    tables = {
        "answer": pa.table([pa.array(["1+1"]), pa.array(["2"]), pa.array(["3"])], names=["q", "answer", "answer"]),
        "k": pa.table({"q": pa.array(["1"]), "nested": pa.ListArray.from_arrays([0, 1], doubled)}),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InvalidInput, match=rf"a\.parquet: it has the column '{name}' twice; rename one of them"):
            read_rows(tmp_path / "a.parquet", required=["q"])
    for line in ('{"q": "1+1", "answer": "2", "answer": "3"}', '{"q": "1", "s": [{"answer": 1, "answer": 1}]}'):
        (tmp_path / "a.jsonl").write_text(f'{{"q": "0"}}\n{line}')
        with pytest.raises(InvalidInput, match=r"a\.jsonl, line 2: the key 'answer' is there twice; keep one"):
            read_rows(tmp_path / "a.jsonl", required=["q"])
