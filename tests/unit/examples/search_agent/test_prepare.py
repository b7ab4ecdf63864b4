"""Public data sets, from small files in their layout: what is written, and what is refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.search_agent import prepare_browsecomp, prepare_hotpotqa
from examples.search_agent.agent import SearchAgent
from examples.search_agent.prepare_browsecomp import decrypt
from examples.search_agent.retrieval.passages import read_passages

_CANARY = "a sentence that nobody else writes, canary 0815"
_UP = ["Up (film)", ["Up is a film of 2009.", " Pete Docter directed it."]]
_DOWN = ["Down", ["Down is no film."]]
_HOTPOT = {
    "_id": "5a8b",
    "question": "Where was the director of Up born?",
    "answer": "Bloomington",
    "supporting_facts": [["Up (film)", 0], ["Pete Docter", 1], ["Up (film)", 1]],
    "context": [_UP, _DOWN, ["Pete Docter", ["He is a director.", " He was born in Bloomington."]]],
}
_OTHER = {
    "_id": "77aa",
    "question": "What is Down?",
    "answer": "no film",
    "supporting_facts": [["Down", 0]],
    "context": [_DOWN, ["Up", ["A direction."]]],
}


def _encrypt(text: str) -> str:
    """As the authors of the set do it: a key as long as the text, of the digest again and again."""
    data, digest = text.encode(), hashlib.sha256(_CANARY.encode()).digest()
    key = digest * (len(data) // len(digest)) + digest[: len(data) % len(digest)]
    return base64.b64encode(bytes(a ^ b for a, b in zip(data, key, strict=True))).decode()


def _doc(number: int) -> dict[str, str]:
    texts = {"docid": str(number), "text": f"Document {number} – über alles.", "url": f"http://a/{number}"}
    return {key: _encrypt(text) for key, text in texts.items()}


def _query(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "query_id": str(number),
        "query": _encrypt(f"What is in document {number}? " * 9),
        "answer": _encrypt(f"Number {number}"),
        "evidence_docs": [_doc(number), _doc(number + 10)],
        "gold_docs": [_doc(number)],
        "negative_docs": [_doc(number + 20)],
        **changes,
    }


def _written(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def _json(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def _jsonl(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


Refused = Callable[..., None]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """That a command names what is wrong and writes nothing."""

    def refused(main: Callable[[list[str]], None], *arguments: str, named: str) -> None:
        with pytest.raises(SystemExit) as ending:
            main([str(tmp_path / "out"), *arguments])
        assert ending.value.code == 2 and named in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    return refused


# --- HotpotQA ---------------------------------------------------------------------------------------------------------


def test_hotpotqa_becomes_a_folder_the_agent_reads(tmp_path: Path):
    train, test = _json(tmp_path / "t.json", [_HOTPOT, {}]), _json(tmp_path / "d.json", [_OTHER])
    prepare_hotpotqa.main([str(tmp_path / "out"), train, test, "--limit", "1"])
    passages = {passage.title: passage for passage in read_passages(tmp_path / "out" / "corpus.jsonl")}
    assert passages["Pete Docter"].text == "He is a director. He was born in Bloomington."
    assert set(passages) == {"Up (film)", "Down", "Pete Docter", "Up"}  # Down stands in both contexts
    (problem,) = _written(tmp_path / "out", "train.jsonl")
    assert problem["supporting"] == [passages["Up (film)"].id, passages["Pete Docter"].id]
    assert (problem["id"], problem["answer"], problem["hops"]) == ("5a8b", "Bloomington", 2)
    (task,) = SearchAgent(str(tmp_path / "out")).tasks("test")
    assert (task.prompt, json.loads(task.metadata["supporting"])) == ("What is Down?", [passages["Down"].id])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([_HOTPOT, {**_OTHER, "answer": ""}], "question 1 (77aa): 'answer' is missing or empty"),
        ([{key: value for key, value in _HOTPOT.items() if key != "context"}], "(5a8b): 'context' is missing"),
        ([{**_HOTPOT, "supporting_facts": [["Left", 0]]}], "'Left' is not in the context"),
        ([{**_HOTPOT, "supporting_facts": ["Down"]}], "must be a list"),
        ([{**_HOTPOT, "context": [["Up", 7]]}], "must be a list"),
        (["Up?"], "question 0: '_id' is missing"),
        ([_HOTPOT, _HOTPOT], "problem id '5a8b' occurs twice"),
        ([], "holds no list of questions"),
        ({"data": [_HOTPOT]}, "holds no list of questions"),
        ("", "is not JSON"),
        ("[{", "is not JSON"),
    ],
)
def test_a_hotpotqa_file_that_cannot_be_used_is_named(tmp_path: Path, refused: Refused, content: Any, named: str):
    train, test = _json(tmp_path / "t.json", content), _json(tmp_path / "d.json", [_OTHER])
    refused(prepare_hotpotqa.main, train, test, named=named)
    refused(prepare_hotpotqa.main, str(tmp_path / "nowhere.json"), test, named="nowhere.json")


# --- BrowseComp-Plus --------------------------------------------------------------------------------------------------


def test_decryption_by_hand():
    # sha256("abc") begins with ba 78; "Hi" is 48 69
    assert base64.b64encode(bytes([0x48 ^ 0xBA, 0x69 ^ 0x78])) == b"8hE="
    assert decrypt("8hE=", "abc") == "Hi"


def test_browsecomp_plus_becomes_a_folder_the_agent_reads(tmp_path: Path):
    queries, out = _jsonl(tmp_path / "queries.jsonl", [_query(n) for n in range(4)]), tmp_path / "out"
    arguments = [str(out), queries, "--canary", _CANARY, "--held-out", "1"]
    prepare_browsecomp.main(arguments)
    assert (len(_written(out, "train.jsonl")), len(_written(out, "test.jsonl"))) == (3, 1)
    problem = next(each for each in _written(out, "train.jsonl") + _written(out, "test.jsonl") if each["id"] == "2")
    assert (problem["question"], problem["answer"]) == ("What is in document 2? " * 9, "Number 2")
    assert problem["supporting"] == ["2", "12"]
    passages = {passage.id: passage for passage in read_passages(out / "corpus.jsonl")}
    assert set(passages) == {str(n) for start in (0, 10, 20) for n in range(start, start + 4)}
    assert (passages["12"].text, passages["12"].title) == ("Document 12 – über alles.", "http://a/12")
    assert len(SearchAgent(str(out)).tasks("test")) == 1
    # A corpus of its own replaces documents and adds others.
    rows = [{"docid": "0", "text": "Whole.", "url": "u"}, {"docid": 99, "text": "N"}]
    prepare_browsecomp.main([*arguments, "--corpus", _jsonl(tmp_path / "corpus.jsonl", rows)])
    texts = {passage.id: passage.text for passage in read_passages(out / "corpus.jsonl")}
    assert (texts["0"], texts["99"], len(texts)) == ("Whole.", "N", 13)


@pytest.mark.parametrize(
    ("rows", "arguments", "named"),
    [
        ([_query(0), _query(1, answer="")], [], "line 2: 'answer' missing"),
        ([_query(0), _query(1, answer=_encrypt(" "))], [], "query 1: the answer is empty"),
        ([_query(0), _query(1)], ["--canary", "another"], "cannot be decrypted with this canary"),
        ([_query(0), _query(1, query="not base64!")], [], "cannot be decrypted with this canary"),
        ([_query(0), _query(1, gold_docs=["7"])], [], "query 1: its documents must be objects"),
        ([_query(0), _query(1, gold_docs=[{"docid": _encrypt("7")}])], [], "query 1: its documents must be objects"),
        ([_query(0), _query(0)], [], "problem id '0' occurs twice"),
        ([_query(0), _query(1)], ["--held-out", "2"], "leaves one split empty"),
        ([], [], "has no rows"),
    ],
)
def test_a_browsecomp_file_that_cannot_be_used_is_named(
    tmp_path: Path, refused: Refused, rows: list[Any], arguments: list[str], named: str
):
    queries = _jsonl(tmp_path / "queries.jsonl", rows)
    refused(prepare_browsecomp.main, queries, "--canary", _CANARY, "--held-out", "1", *arguments, named=named)
