"""Reading a corpus: what is a passage, and what is reported about broken lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.search_agent.retrieval.passages import BadCorpus, Passage, read_passages


def _corpus(folder: Path, *lines: Any) -> Path:
    file = folder / "corpus.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"".join(line + b"\n" for line in encoded))
    return file


_ROW, _LAST = {"id": "b", "title": "B", "text": "Text b."}, {"id": "a", "text": "Text a."}


def test_each_line_is_a_passage_in_its_order_whichever_public_format_it_has(tmp_path):
    rows = {
        "b": (_ROW, Passage(id="b", title="B", text="Text b.")),
        "a": (_LAST, Passage(id="a", title="", text="Text a.")),
        "BEIR": ({"_id": "x", "text": "T"}, Passage(id="x", title="", text="T")),
        "Pyserini": (
            {"id": 7, "contents": '"Oslo"\nA city.\nBig.'},
            Passage(id="7", title="Oslo", text="A city.\nBig."),
        ),
        "one line": ({"id": "y", "contents": "One line"}, Passage(id="y", title="", text="One line")),
        "own title": ({"id": "z", "title": "Own", "contents": "A\nB"}, Passage(id="z", title="Own", text="A\nB")),
    }
    lines = [line for row, _ in rows.values() for line in (row, b"")]
    assert list(read_passages(_corpus(tmp_path, *lines))) == [passage for _, passage in rows.values()]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops", "no JSON"),
        (b'{"id": "\xff"}', "no JSON"),
        ([1], "not an object"),
        ({"text": "T"}, "no id"),
        ({"id": True, "text": "T"}, "no id"),
        ({"id": "x", "text": " "}, "has no text"),
        ({"id": "x", "text": 5}, "`text` is int"),
        ({"id": "x", "text": "\ud800"}, "surrogate"),
        (_ROW, "id 'b' is already on line 1"),
    ],
)
def test_a_broken_line_is_named_with_its_number_and_reason(tmp_path, caplog, line: Any, reason: str):
    corpus = _corpus(tmp_path, _ROW, b"", line, _LAST)
    with pytest.raises(BadCorpus, match=f"line 3: .*{reason}"):
        list(read_passages(corpus))
    skipped: list[str] = []
    assert [p.id for p in read_passages(corpus, skip_broken=True, skipped=skipped)] == ["b", "a"]
    assert len(skipped) == 1 and skipped[0].startswith("line 3: ") and "1 broken line" in caplog.text


def test_the_first_few_broken_lines_are_named_together(tmp_path):
    with pytest.raises(BadCorpus) as error:
        list(read_passages(_corpus(tmp_path, *[b"?"] * 9, _ROW)))
    assert all(f"line {number}:" in str(error.value) for number in range(1, 6))
    assert "line 6" not in str(error.value)


@pytest.mark.parametrize("lines", [[], [b"", b" "], [b"?", b"?"]])
def test_a_corpus_without_passages_is_an_error(tmp_path, lines: list[bytes]):
    with pytest.raises(BadCorpus, match="holds no passage"):
        list(read_passages(_corpus(tmp_path, *lines), skip_broken=True))
