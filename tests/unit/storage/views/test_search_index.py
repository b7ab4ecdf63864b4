"""The search index: it finds what reading everything would find, and it is only a view of the log and its shards."""

from __future__ import annotations

import os
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from storage.log.entries import Quarantine, Retire
from storage.log.run_log import RunLog
from storage.objects.object_store import StoreFull
from storage.objects.opening import open_store
from storage.records import Message, ToolCall, Trajectory
from storage.views import search_index
from storage.views.search_index import BadIndex, Match, SearchIndex, index_folder
from storage.views.search_query import Filters, SearchQuery
from storage.views.search_rows import unit_vectors
from tests.builders import a_group, a_log, a_step, a_trajectory, a_turn, commit


def _said(*texts: str, attempt: int = 0, reward: float = 1.0, **fields: object) -> Trajectory:
    messages = [Message(role="user", content=text) for text in texts]
    return a_trajectory(reward, attempt=attempt, messages=messages, **fields)


def _commit(log: RunLog, shard_id: str, *attempts: Trajectory, position: int = 0, is_eval: bool = False) -> None:
    """One shard of one group, `0.task<position>`."""
    commit(log, shard_id, a_group(position, trajectories=attempts), is_eval=is_eval)


def _words(log: RunLog, *positions: int) -> None:
    """A shard `s<position>` for each, of one attempt that is `word`."""
    for position in positions:
        _commit(log, f"s{position}", _said("word"), position=position)


def _texts(log: RunLog, *texts: str) -> None:
    _commit(log, "s0", *(_said(text, attempt=attempt) for attempt, text in enumerate(texts)))


def _hashing(texts: list[str]) -> list[list[float]]:
    """Counts of letters: texts with the same letters are near each other."""
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


EMBEDDINGS = {"my:hashing": _hashing, "my:other": _hashing}


def _index(log: RunLog, folder: Path) -> SearchIndex:
    return SearchIndex(log, folder / "index", load_embedding=EMBEDDINGS.__getitem__)


def _updated(log: RunLog, folder: Path) -> SearchIndex:
    index = _index(log, folder)
    index.update()
    return index


def _indexed(folder: Path, *texts: str) -> tuple[RunLog, SearchIndex]:
    """A run whose shard `s0` has an attempt per text, and its index, up to date."""
    log = a_log()
    _texts(log, *texts)
    return log, _updated(log, folder)


def _find(index: SearchIndex, text: str, *, count: int = 100, similar: bool = False, **filters: object) -> list[Match]:
    return index.find(SearchQuery(text), Filters(**filters), count=count, similar=similar)  # type: ignore[arg-type]


def _ids(index: SearchIndex, text: str, **filters: object) -> list[str]:
    return sorted(match.id.removeprefix("0.task") for match in _find(index, text, **filters))


def test_all_words_must_be_there_in_any_order_whatever_their_case_and_accents(tmp_path: Path) -> None:
    log, index = _indexed(tmp_path, "One is off by", "it was OFF by one!", "off by", "Zürich, off", "我喜欢编程")
    assert [match.id for match in _find(index, "off by one")] == ["0.task0/1", "0.task0/0"], "side by side first"
    assert _ids(index, "zurich") == _ids(index, "ZÜRICH,") == ["0/3"]
    assert _ids(index, "喜欢") == ["0/4"]
    assert _ids(index, "of") == [] and _ids(index, "one zebra") == []
    assert [match.id for match in _find(index, "off", count=2)] == [match.id for match in _find(index, "off")][:2]
    for text in ("", "  ", '"', '""', '" "'):
        with pytest.raises(ValueError, match="nothing to search for"):
            SearchQuery(text)


def test_a_term_with_punctuation_must_be_there_exactly(tmp_path: Path) -> None:
    texts = ["37+45=82", "08+37=\n45", "def foo_bar(): off by one", "x[i+1] != foo bar, off-by-one"]
    _, index = _indexed(tmp_path / "100% my #1", *texts, 'O\'Brien \\ 🎉 {"city": "one"} 100%')
    for attempts, queries in {
        "0": ["37+45="],
        "01": ["37 45"],
        "013": ["+"],
        "2": ["foo_bar", '"off by one"', "foo_bar, off!"],
        "23": ["foo"],
        "234": ["one?"],
        "3": ["X[I+1]", '"off-by-one"', "!="],
        "4": ["o'brien", '{"city":', "100%", "%", "\\", "🎉"],
        "": ["foo_bar, (off", "a AND (b", "'; DROP TABLE x --", "x" * 2000],
    }.items():
        for query in queries:
            assert _ids(index, query) == [f"0/{attempt}" for attempt in attempts], query


@pytest.mark.parametrize("most_unindexed", [0, 1000])
def test_it_finds_what_reading_everything_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_unindexed: int
) -> None:
    """Shard by shard: the later ones are merged into the full-text index, or wait beside it."""
    monkeypatch.setattr(search_index, "_MOST_UNINDEXED", most_unindexed)
    draw = random.Random(5)
    words = ["carry", "Carry", "37", "45", "3", "off", "by", "one", "Über", "x1", "the"]
    log, texts = a_log(), {}
    index = _index(log, tmp_path)
    for shard in range(3):
        attempts = []
        for attempt in range(100):
            pairs = zip(draw.choices(words, k=draw.randint(1, 9)), draw.choices(" +=_\n,", k=9), strict=False)
            texts[f"{shard}/{attempt}"] = text = "".join(word + sign for word, sign in pairs)
            attempts.append(_said(text, attempt=attempt))
        _commit(log, f"s{shard}", *attempts, position=shard)
        index.update()
    table = lancedb.connect(str(tmp_path / "index")).open_table("trajectories")
    assert table.index_stats("text_idx").num_unindexed_rows == (200 if most_unindexed else 0)
    for _ in range(30):
        asked = draw.choices(["carry", "37", "45", "3", "off", "one", "über", "x1", "the"], k=draw.randint(1, 3))
        having_all = [n for n, text in texts.items() if {*asked} <= {*re.findall(r"[^\W_]+", text.lower())}]
        assert _ids(index, " ".join(asked), count=1000) == sorted(having_all), asked
        literal = "+".join(asked[:2])
        whole = re.compile(rf"(?<![^\W_]){re.escape(literal)}(?![^\W_])")
        having_literal = [n for n, text in texts.items() if whole.search(text.lower())]
        assert _ids(index, f'"{literal}"', count=1000) == sorted(having_literal), literal


def test_an_attempt_is_one_row_with_its_messages_and_tool_calls(tmp_path: Path) -> None:
    log = a_log()
    call = ToolCall(name="get_weather", arguments='{"city": "Paris"}', result="rain tomorrow")
    turns = [a_turn(versions=3, tool_calls=[call]), a_turn(versions=4, sequence_idx=1)]
    parts = {"style": 0.5, "none": None}
    _commit(log, "s0", _said("hello", "rain tomorrow", turns=turns, reward_parts=parts, finished_at=9.0))
    index = _index(log, tmp_path)
    assert index.update().trajectories == 1
    (match,) = _find(index, "get_weather paris hello tomorrow")
    assert match.text == 'hello\nrain tomorrow\nget_weather {"city": "Paris"}'
    assert (match.id, match.shard_id, match.prompt_id) == ("0.task0/0", "s0", "task0")
    assert (match.head_version, match.tail_version, match.reward, match.finished_at) == (3, 4, 1.0, 9.0)
    assert match.reward_parts == parts
    assert match.accepted and not match.is_eval and match.score is not None and match.score > 0


def test_filters_leave_only_what_they_name(tmp_path: Path) -> None:
    log = a_log()
    for position, (reward, status, versions) in enumerate(
        [(0.1, "ok", [0, 0]), (0.5, "truncated", [1, 3]), (1.0, "max_turns", [4, 4]), (-1.0, "ok", [2, 2])]
    ):
        turn = a_turn(sampled=[5, 6], versions=versions)
        _commit(log, f"s{position}", _said("word", reward=reward, status=status, turns=[turn]), position=position)
    _commit(log, "held-out", _said("word"), position=9, is_eval=True)
    log.append(a_step(log.state, trained=["0.task0"], filtered=["0.task1"]))
    log.append(a_step(log.state, trained=["0.task2"]))
    index = _updated(log, tmp_path)
    filters_of: dict[str, list[dict[str, Any]]] = {
        "0": [{"reward": ("=", 0.1)}, {"step": 1, "outcome": "trained"}],
        "01": [{"last_version": 1}, {"step": 1}],
        "012": [{"reward": (">=", 0.1)}],
        "0123": [{}],
        "01239": [{"include_eval": True}],
        "013": [{"reward": ("<=", 0.5)}],
        "02": [{"outcome": "trained"}],
        "03": [{"reward": ("<", 0.5)}, {"status": "ok"}],
        "1": [{"outcome": "filtered"}],
        "12": [{"reward": (">", 0.1)}, {"first_version": 3}],
        "123": [{"reward": ("!=", 0.1)}],
        "13": [{"first_version": 2, "last_version": 2}],
        "29": [{"include_eval": True, "reward": ("=", 1.0)}],
        "3": [{"reward": ("<", -0.5)}, {"outcome": "pending"}],
        "": [{"outcome": "stale"}, {"step": 2, "reward": (">", 5.0)}],
    }
    for positions, all_filters in filters_of.items():
        for filters in all_filters:
            for query in ("word", '"word"'):
                assert _ids(index, query, **filters) == [f"{position}/0" for position in positions], filters
            assert _ids(index, "w", **filters) == []


def test_filters_come_before_the_count_and_a_step_looks_at_its_own_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only attempt that passes ranks last of 401: looking for it among all takes several looks, each larger."""
    log = a_log()
    _commit(log, "s0", *[_said("word word word", attempt=attempt, reward=0.0) for attempt in range(400)])
    _commit(log, "s1", _said("word and much else that makes it rank last", reward=1.0), position=1)
    log.append(a_step(log.state, trained=["0.task0"]))
    index = _updated(log, tmp_path)
    hits: list[str] = []
    is_wanted = index._passes
    monkeypatch.setattr(index, "_passes", lambda hit, filters: hits.append(hit) or is_wanted(hit, filters))
    for filters in ({"reward": (">", 0.5)}, {"outcome": "pending"}):
        assert [match.id for match in _find(index, "word", count=1, **filters)] == ["0.task1/0"]
    log.append(a_step(log.state, trained=["0.task1"]))
    assert len(hits) > 8
    hits.clear()
    assert [match.id for match in _find(index, "word", count=1, step=2)] == ["0.task1/0"]
    assert len(hits) == 1
    for nowhere in (0, 3):
        assert _find(index, "word", step=nowhere) == []


def test_only_new_shards_are_read_and_a_damaged_one_is_left_out_until_it_is_mended(tmp_path: Path) -> None:
    log, index = _indexed(tmp_path, "word")
    log.store.delete([log.shard_key("s0")])  # reading it again would find it damaged
    _words(log, 1, 2)
    whole = log.store.get(log.shard_key("s2"))
    log.store.put(log.shard_key("s2"), whole[:100])
    assert index.behind() == 2
    report = index.update()
    assert (report.shards_added, report.trajectories, list(report.damaged)) == (1, 2, ["s2"])
    assert "sha256" in report.damaged["s2"] and _ids(index, "word") == ["0/0", "1/0"]
    log.store.put(log.shard_key("s2"), whole)
    assert index.update().damaged == {} and _ids(index, "word") == ["0/0", "1/0", "2/0"] and index.behind() == 0
    _commit(log, "s3", a_trajectory(None, status="env_error"), position=3)
    assert index.update().shards_added == 0 and index.behind() == 0, "a shard without rows is never behind"


def test_killed_half_way_and_run_again_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_log()
    _words(log, *range(20))
    monkeypatch.setattr(search_index, "_COMMIT_BYTES", 1)
    for killed_at in (0, 8, 16, 20):

        def stop(done: int, total: int, killed_at: int = killed_at) -> None:
            if done == killed_at:
                raise KeyboardInterrupt

        index = _index(log, tmp_path / str(killed_at))
        with pytest.raises(KeyboardInterrupt):
            index.update(progress=stop)
        assert index.behind() == 20 - killed_at, "what was committed is kept"
        assert index.update().shards_added == 20 - killed_at
        assert _ids(index, "word") == sorted(f"{position}/0" for position in range(20))


def test_two_updates_at_once_hold_every_attempt_once(tmp_path: Path) -> None:
    log = a_log()
    _words(log, *range(10))
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(lambda _: _index(log, tmp_path).update(), range(3)))
    assert sorted(report.shards_added for report in reports) == [0, 0, 10]
    assert len(_find(_index(log, tmp_path), "word")) == 10
    another = a_log()  # a later run of the same name
    _commit(another, "s-later", _said("other"))
    index = _index(another, tmp_path)
    assert index.update().shards_removed == 10
    assert _find(index, "word") == [] and len(_find(index, "other")) == 1


def test_outcomes_quarantine_and_retirement_are_asked_of_the_log(tmp_path: Path) -> None:
    log = a_log()
    _words(log, 0, 1, 2)
    index = _updated(log, tmp_path)
    assert {(match.outcome, match.step) for match in _find(index, "word")} == {("pending", None)}
    log.append(a_step(log.state, trained=["0.task1"], stale=["0.task2"]))
    log.append(Quarantine(shard_id="s0", reason="damaged"))
    log.append(Retire(shard_ids=["s1"], policy_versions=[], state_paths=[], reason="old"))
    [match] = _find(index, "word")
    assert (match.id, match.outcome, match.step) == ("0.task2/0", "stale", 1), "at once, before the next update"
    report = index.update()
    assert (report.shards_removed, report.trajectories) == (2, 1)
    assert _ids(index, "word") == ["2/0"]


def _overwrite(folder: Path, data: bytes) -> None:
    for file in folder.iterdir():
        file.write_bytes(data)


def test_a_damaged_index_says_how_to_make_it_again(tmp_path: Path) -> None:
    _, index = _indexed(tmp_path, "a word")
    table = tmp_path / "index" / "trajectories.lance"
    for damage in (
        lambda: _overwrite(table / "_versions", b"not a manifest at all"),
        lambda: _overwrite(table / "data", b"LANC"),
        lambda: shutil.rmtree(table / "data"),
        lambda: shutil.rmtree(table / "_indices"),
    ):
        damage()
        with pytest.raises(BadIndex, match=r"safe to delete: `millrace index run --rebuild --store .*`"):
            _find(index, "word")
        assert index.update(rebuild=True).shards_added == 1
        assert _ids(index, "word") == ["0/0"]


def test_an_index_of_another_schema_is_refused_and_without_one_nothing_is_lost(tmp_path: Path) -> None:
    _, index = _indexed(tmp_path, "a word")
    newer = pa.schema([("id", pa.string())], metadata={"millrace_index": "99"})
    lancedb.connect(str(tmp_path / "index")).create_table("trajectories", schema=newer, mode="overwrite")
    for use in (index.update, lambda: _find(index, "word")):
        with pytest.raises(BadIndex, match=r"this Millrace uses 1; `millrace index run --rebuild --store .*`"):
            use()
    assert index.update(rebuild=True).trajectories == 1
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index" / "trajectories.lance" / "_versions").mkdir(parents=True)  # killed while it was being made
    assert index.update().shards_added == 1 and _ids(index, "word") == ["0/0"]


def test_similar_finds_the_nearest_first(tmp_path: Path) -> None:
    log = a_log()
    texts = ["listen", "silence", "a zebra", "", "9"]
    _commit(log, "s0", *(_said(text, attempt=attempt, reward=attempt) for attempt, text in enumerate(texts)))
    index = _index(log, tmp_path)
    assert index.update(embedding="my:hashing").embedding == "my:hashing"
    scores = {match.text: match.score for match in _find(index, "enlist", similar=True)}
    assert list(scores)[:2] == ["listen", "silence"] and len(scores) == 5
    enlist, *others = (np.array(vector) / np.linalg.norm(vector) for vector in _hashing(["enlist", *texts[:3]]))
    assert [scores[text] for text in texts[:3]] == pytest.approx([other @ enlist for other in others])
    assert scores[""] == scores["9"] == 0.0, "a vector of zeros is like nothing"
    assert [match.text for match in _find(index, "enlist", similar=True, reward=(">", 0.5), count=1)] == ["silence"]
    assert _find(index, "enlist") == [], "words are still words"


def test_an_index_keeps_its_embedding_until_it_is_made_again(tmp_path: Path) -> None:
    log = a_log()
    _texts(log, "listen")
    _index(log, tmp_path).update(embedding="my:hashing")
    _commit(log, "s1", _said("zebra"), position=1)
    index = _index(log, tmp_path)
    assert index.update().embedding == "my:hashing"
    assert [one.text for one in _find(index, "braze", similar=True)] == ["zebra", "listen"]
    assert index.update(embedding="my:hashing").shards_added == 0
    with pytest.raises(
        BadIndex, match="made with embedding my:hashing; `millrace index run --rebuild --embedding my:o"
    ):
        index.update(embedding="my:other")
    _commit(log, "s2", _said("zebra"), position=2)
    other = SearchIndex(log, tmp_path / "index", load_embedding=lambda name: lambda texts: [[1.0, 2.0]] * len(texts))
    with pytest.raises(ValueError, match="returns 2 numbers a text, the index holds 26; `millrace index run --rebuild"):
        other.update()
    assert index.update(embedding="my:other", rebuild=True).embedding == "my:other"
    assert index.update(rebuild=True).embedding == ""
    with pytest.raises(BadIndex, match="made without vectors"):
        index.update(embedding="my:other")


def test_an_embedding_that_returns_no_vectors_is_refused_and_the_old_index_stays(tmp_path: Path) -> None:
    log, _ = _indexed(tmp_path, "a word")
    replies_of: dict[str, list[Any]] = {
        "answers 1 texts with shape": [[[1.0], [1.0]], [1.0], [[]]],
        "all equally long": [[[1.0], [1.0, 2.0]], ["word"], None],
        "not finite": [[[float("nan")]]],
    }
    for sentence, replies in replies_of.items():
        for reply in replies:
            index = SearchIndex(log, tmp_path / "index", load_embedding=lambda name, reply=reply: lambda texts: reply)
            with pytest.raises(ValueError, match=f"embedding my:bad.*{sentence}"):
                index.update(embedding="my:bad", rebuild=True)
            assert _ids(index, "word") == ["0/0"]


def test_many_texts_are_embedded_in_bounded_batches() -> None:
    sizes: list[int] = []

    def watched(texts: list[str]) -> list[list[float]]:
        sizes.append(len(texts))
        return _hashing(texts)

    assert unit_vectors(watched, ["word"] * 600, name="my:watched").shape == (600, 26)
    assert sizes == [256, 256, 88]


def test_the_index_of_a_store_that_this_user_may_not_write_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = a_log(open_store(str(tmp_path / "others")))
    _words(log, 0, 1)
    beside = tmp_path / "others" / log.key("index")
    assert index_folder(log, tmp_path / "mine") == beside
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(tmp_path / "others"))
    folder = index_folder(log, tmp_path / "mine")
    assert folder.is_relative_to(tmp_path / "mine")
    assert SearchIndex(log, folder, load_embedding=EMBEDDINGS.__getitem__).update().shards_added == 2
    assert not beside.exists()


def test_a_full_disk_is_named_and_the_library_that_met_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("lance error: LanceError(IO): Unable to copy data: No space left on device (os error 28)")

    log, index = _indexed(tmp_path, "a word")
    _commit(log, "s1", _said("zebra"), position=1)
    monkeypatch.setattr("lancedb.table.LanceTable.add", fail)
    with pytest.raises(StoreFull, match=f"^the disk of the search index {tmp_path / 'index'} is full: (?!.*[Ll]ance)"):
        index.update()
    monkeypatch.undo()
    assert index.update().shards_added == 1


@pytest.mark.server
def test_on_s3_each_machine_has_an_index_of_its_own(bucket: str, tmp_path: Path) -> None:
    log = a_log(open_store(f"s3://{bucket}/prefix"))
    _words(log, 0, 1)
    keys = [file.key for file in log.store.walk("runs")]
    folders = [index_folder(log, tmp_path / machine) for machine in ("here", "there")]
    for folder in folders:
        index = SearchIndex(log, folder, load_embedding=EMBEDDINGS.__getitem__)
        assert index.update().shards_added == 2
    assert [file.key for file in log.store.walk("runs")] == keys
    assert folders[0].is_relative_to(tmp_path / "here")
    assert folders[0] != index_folder(a_log(open_store(f"s3://{bucket}/other")), tmp_path / "here")
