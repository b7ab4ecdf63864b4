"""`millrace index` and `millrace traj search` as a person uses them."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.traj.search import parse_filters, snippet
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from storage.records import Message
from storage.views.search_query import Filters, SearchQuery
from tests.builders import a_group, a_log, a_step, a_trajectory
from tests.unit.cli import builders
from tests.unit.cli.builders import commit

typed = partial(builders.typed, columns=150)


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """Two attempts at one problem, and one step."""
    log = a_log(store)
    _commit(log, 0, ("what is 37+45=\n82", 1.0), ("what is 37+45=\n83, off by one", 0.0))
    log.append(a_step(log.state, trained=["0.task0"]))
    return log


def _commit(log: RunLog, position: int, *attempts: tuple[str, float]) -> None:
    trajectories = [
        a_trajectory(reward, attempt=attempt, messages=[Message(role="user", content=text)])
        for attempt, (text, reward) in enumerate(attempts)
    ]
    commit(log, f"s{position}", a_group(position, trajectories=trajectories))


def _found(line: str) -> list[dict[str, Any]]:
    return list(json.loads(typed(f"traj search run {line} --json").stdout))


def test_a_search_makes_the_index_and_keeps_it_up_to_date(log: RunLog) -> None:
    table = typed("traj search run 'off by one' --reward '<0.5'").stdout.splitlines()
    assert table[0].split() == ["id", "score", "reward", "status", "version", "outcome", "text"]
    assert len(table) == 2 and table[1].split()[0] == "0.task0/1"
    assert "trained 1" in table[1] and "what is 37+45=⏎83, off by one" in table[1]
    _commit(log, 1, ("off by one again", -1.0))
    found = _found("'off by one'")
    assert {one["id"]: one["outcome"] for one in found} == {"0.task0/1": "trained", "0.task1/0": "pending"}
    assert "All words must be in one attempt" in typed("traj search run zebra").stdout and _found("zebra") == []


def test_json_has_everything_about_a_result(log: RunLog) -> None:
    (found,) = _found("37+45= -n 1 --version 0")
    assert found.pop("score") > 0 and found.pop("finished_at") == 0.0
    assert found == {
        "id": "0.task0/0", "reward": 1.0, "reward_parts": {}, "status": "ok", "head_version": 0, "tail_version": 0,
        "accepted": True, "outcome": "trained", "step": 1, "prompt_id": "task0", "is_eval": False, "shard_id": "s0",
        "text": "what is 37+45=\n82",
    }  # fmt: skip


def test_index_says_what_it_did_and_search_can_take_it_as_it_is(log: RunLog, home: Path) -> None:
    assert "`millrace index run` makes it" in typed("traj search run off --no-update", status=2).stderr
    output = typed("index run").stdout
    assert "run run: 1 shard added" in output and "2 rows to search, without vectors" in output
    assert str(home / "store/runs/run/index") in output
    assert "nothing new" in typed("index run").stdout
    assert "1 shard added" in typed("index run --rebuild").stdout
    _commit(log, 1, ("off by one again", -1.0))
    result = typed("traj search run off --no-update --json")
    assert [one["id"] for one in json.loads(result.stdout)] == ["0.task0/1"]
    assert "the index lacks 1 shard of the run" in result.stderr


def test_a_damaged_shard_is_a_warning(log: RunLog) -> None:
    _commit(log, 1, ("off by one again", -1.0))
    log.store.put(log.shard_key("s0"), b"cut off")
    result = typed("traj search run off --json")
    assert [one["id"] for one in json.loads(result.stdout)] == ["0.task1/0"]
    assert "left out: shard s0: its sha256 differs" in result.stderr


EMBEDDING = """
def letters(texts):
    return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
"""


def test_similar_searches_by_an_embedding_from_a_file(log: RunLog, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _commit(log, 1, ("listen", 1.0), ("zebra", 0.0))
    assert "cannot be imported" in typed("index run --embedding nowhere:x", status=2).stderr
    assert not (home / "store/runs/run/index").exists()
    refused = typed("traj search run enlist --similar", status=2).stderr
    assert "no vectors; `millrace index run --rebuild --embedding module:function` adds them" in refused
    (home / "my_embedding.py").write_text(EMBEDDING)
    monkeypatch.chdir(home)
    output = typed("index run --rebuild --embedding my_embedding.py:letters").stdout
    assert f"vectors by {home / 'my_embedding.py'}:letters" in output
    monkeypatch.chdir("/")
    table = typed("traj search run enlist --similar").stdout.splitlines()
    assert table[1].split()[:2] == ["0.task1/0", "1.00"]
    assert "made with embedding" in typed("index run --embedding json:dumps", status=2).stderr


def test_a_bad_filter_is_one_sentence_before_anything_is_indexed(log: RunLog, home: Path) -> None:
    refused = {
        "--reward low": "--reward 'low': write a comparison in quotes",
        "--status timeout": "--status 'timeout': attempts are kept when they ended in one of",
        "--version 7..3": "7 comes after 3",
        "--outcome won": "--outcome 'won': write one of trained, filtered, stale, failed, cancelled, pending",
        "--step 2": "--step 2: the run has steps 1 to 1",
        "--step 0": "--step 0: the run has steps 1 to 1",
    }
    refused |= {f"--reward '{text}'": "write a comparison" for text in ("<", "=<1", "<nan", "<1e999")}
    refused |= {f"--version '{text}'": "write a policy version or a range" for text in ("..", "3 7", "new", "9" * 5000)}
    for options, sentence in refused.items():
        stderr = typed(f"traj search run off {options}", status=2).stderr
        assert sentence in stderr and len(stderr.splitlines()) == 1
    refused = typed("traj search run ' '", status=2).stderr
    assert "nothing to search for" in refused and re.search(r"millrace traj ls RUN` lists", refused)
    assert not (home / "store/runs/run/index").exists()


def test_filters_are_read_as_typed() -> None:
    def read(*, reward: str = "", version: str = "", **others: Any) -> Filters:
        return parse_filters(a_log().state, reward=reward, version=version, **others)

    operators = {
        "<0.5": ("<", 0.5),
        " >= -1e-3 ": (">=", -0.001),
        "==.5": ("=", 0.5),
        "1": ("=", 1.0),
        "!=0": ("!=", 0),
    }
    assert {text: read(reward=text).reward for text in operators} == operators
    ranges = {"5": (5, 5), "3..7": (3, 7), "3..": (3, None), "..7": (None, 7), "": (None, None)}
    assert {text: (read(version=text).first_version, read(version=text).last_version) for text in ranges} == ranges
    others: dict[str, Any] = {"status": "truncated", "outcome": "pending", "include_eval": True}
    assert read(**others) == Filters(**others) and read() == Filters()


def _marked(text: str, query: str) -> str:
    """The snippet with its highlighted stretches in brackets."""
    shown = snippet(text, SearchQuery(query))
    marks = sorted((span.start, span.end) for span in shown.spans if "bold" in str(span.style))
    marked = shown.plain
    for start, end in reversed(marks):
        marked = f"{marked[:start]}[{marked[start:end]}]{marked[end:]}"
    return marked


def test_matches_are_highlighted_and_a_long_text_is_cut_around_the_first() -> None:
    assert _marked("One is off, by ones", "off one") == "[One] is [off], by ones"
    assert _marked("in Zürich\nnow", "zurich") == "in [Zürich]⏎now"
    assert _marked("08+37= and 37+45=82", "37+45=") == "08+37= and [37+45=]82"
    assert _marked("the [bold]markup[/] stays", "markup") == "the [bold][markup][/] stays"
    assert _marked("no match in here", "zebra") == "no match in here"
    shown = _marked("a " * 500 + "needle" + " b" * 500, "needle")
    assert shown.startswith("…") and shown.endswith("…") and "a [needle] b" in shown and len(shown) < 130
    assert _marked("needle" + " b" * 500, "needle").startswith("[needle] b")
    assert _marked("a " * 30 + "needle", "needle") == "…" + ("a " * 30 + "[needle]")[60 - 30 :]
