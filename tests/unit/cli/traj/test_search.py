"""`millrace index` and `millrace traj search` as a person uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cli.traj.search import parse_filters, snippet
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from storage.records import Message
from storage.shards.shards import commit_shard
from storage.views.search_query import Filters, SearchQuery
from tests.builders import SAMPLING, a_group, a_log, a_step, a_trajectory, provenance


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """A run named `run` in the default store, with two attempts at one problem, and one step."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")
    log = a_log(LocalStore(tmp_path / "store"))
    _commit(log, 0, ("what is 37+45=\n82", 1.0), ("what is 37+45=\n83, off by one", 0.0))
    log.append(a_step(log.state, trained=["0.task0"]))
    return log


def _commit(log: RunLog, position: int, *attempts: tuple[str, float]) -> None:
    group = a_group(
        position,
        trajectories=[
            a_trajectory(reward, attempt=attempt, messages=[Message(role="user", content=text)])
            for attempt, (text, reward) in enumerate(attempts)
        ],
    )
    commit_shard(log, [group], provenance=provenance(f"s{position}"), sampling=SAMPLING)


def _run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    return result


def test_a_search_makes_the_index_and_keeps_it_up_to_date(log: RunLog) -> None:
    table = _run("traj", "search", "run", "off by one", "--reward", "<0.5").stdout.splitlines()
    assert table[0].split() == ["id", "score", "reward", "status", "version", "outcome", "text"]
    assert len(table) == 2 and table[1].split()[0] == "0.task0/1"
    assert "trained 1" in table[1] and "what is 37+45=⏎83, off by one" in table[1]
    _commit(log, 1, ("off by one again", -1.0))
    found = json.loads(_run("traj", "search", "run", "off by one", "--json").stdout)
    assert {one["id"]: one["outcome"] for one in found} == {"0.task0/1": "trained", "0.task1/0": "pending"}


def test_json_has_everything_about_a_result(log: RunLog) -> None:
    (found,) = json.loads(_run("traj", "search", "run", "37+45=", "--json", "-n", "1", "--version", "0").stdout)
    assert found.pop("score") > 0 and found.pop("finished_at") == 0.0
    assert found == {
        "id": "0.task0/0",
        "reward": 1.0,
        "reward_parts": {},
        "status": "ok",
        "head_version": 0,
        "tail_version": 0,
        "accepted": True,
        "outcome": "trained",
        "step": 1,
        "prompt_id": "task0",
        "is_eval": False,
        "shard_id": "s0",
        "text": "what is 37+45=\n82",
    }


def test_without_update_the_index_is_taken_as_it_is(log: RunLog) -> None:
    assert "`millrace index run` makes it" in _run("traj", "search", "run", "off", "--no-update", code=2).stderr
    _run("index", "run")
    _commit(log, 1, ("off by one again", -1.0))
    result = _run("traj", "search", "run", "off", "--no-update", "--json")
    assert [one["id"] for one in json.loads(result.stdout)] == ["0.task0/1"]
    assert "the index lacks 1 shard of the run" in result.stderr


def test_nothing_found_says_what_a_query_means(log: RunLog) -> None:
    assert "All words must be in one attempt" in _run("traj", "search", "run", "zebra").stdout
    assert json.loads(_run("traj", "search", "run", "zebra", "--json").stdout) == []


def test_index_says_what_it_did_and_where_it_is(log: RunLog, tmp_path: Path) -> None:
    output = _run("index", "run").stdout
    assert "run run: 1 shard added" in output and "2 trajectories to search, without vectors" in output
    assert str(tmp_path / "store/runs/run/index") in output
    assert "nothing new" in _run("index", "run").stdout
    assert "1 shard added" in _run("index", "run", "--rebuild").stdout


def test_a_damaged_shard_is_a_warning(log: RunLog) -> None:
    _commit(log, 1, ("off by one again", -1.0))
    log.store.put(log.shard_key("s0"), b"cut off")
    result = _run("traj", "search", "run", "off", "--json")
    assert [one["id"] for one in json.loads(result.stdout)] == ["0.task1/0"]
    assert "left out: shard s0: its sha256 differs" in result.stderr


EMBEDDING = """
def letters(texts):
    return [[float(text.count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
"""


def test_similar_searches_by_an_embedding_from_a_file(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _commit(log, 1, ("listen", 1.0), ("zebra", 0.0))
    refused = _run("traj", "search", "run", "enlist", "--similar", code=2).stderr
    assert "no vectors; `millrace index run --rebuild --embedding module:function` adds them" in refused
    (tmp_path / "my_embedding.py").write_text(EMBEDDING)
    monkeypatch.chdir(tmp_path)
    output = _run("index", "run", "--rebuild", "--embedding", "my_embedding.py:letters").stdout
    assert f"vectors by {tmp_path / 'my_embedding.py'}:letters" in output
    monkeypatch.chdir("/")
    table = _run("traj", "search", "run", "enlist", "--similar").stdout.splitlines()
    assert table[1].split()[:2] == ["0.task1/0", "1.00"]
    assert "made with embedding" in _run("index", "run", "--embedding", "json:dumps", code=2).stderr


def test_an_embedding_that_cannot_be_imported_is_refused_before_anything_is_made(log: RunLog, tmp_path: Path) -> None:
    assert "cannot be imported" in _run("index", "run", "--embedding", "nowhere:x", code=2).stderr
    assert not (tmp_path / "store/runs/run/index").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--reward", "low"], "--reward 'low': write a comparison in quotes"),
        (["--reward", "<"], "write a comparison"),
        (["--reward", "=<1"], "write a comparison"),
        (["--reward", "<nan"], "write a comparison"),
        (["--reward", "<1e999"], "write a comparison"),
        (["--status", "timeout"], "--status 'timeout': attempts are kept when they ended in one of"),
        (["--version", "7..3"], "7 comes after 3"),
        (["--version", ".."], "write a policy version or a range"),
        (["--version", "3 7"], "write a policy version or a range"),
        (["--version", "new"], "write a policy version or a range"),
        (["--outcome", "won"], "--outcome 'won': write one of trained, filtered, stale, failed, cancelled, pending"),
        (["--step", "2"], "--step 2: the run has steps 1 to 1"),
        (["--step", "0"], "--step 0: the run has steps 1 to 1"),
    ],
)
def test_a_bad_filter_is_one_sentence_before_anything_is_indexed(
    log: RunLog, tmp_path: Path, options: list[str], sentence: str
) -> None:
    result = _run("traj", "search", "run", "off", *options, code=2)
    assert sentence in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "store/runs/run/index").exists()


def test_a_query_without_text_is_refused(log: RunLog) -> None:
    assert "nothing to search for" in _run("traj", "search", "run", " ", code=2).stderr


@pytest.mark.parametrize(
    ("typed", "filters"),
    [
        ({}, Filters()),
        ({"reward": "<0.5"}, Filters(reward=("<", 0.5))),
        ({"reward": " >= -1e-3 "}, Filters(reward=(">=", -0.001))),
        ({"reward": "==.5"}, Filters(reward=("=", 0.5))),
        ({"reward": "1"}, Filters(reward=("=", 1.0))),
        ({"reward": "!=0"}, Filters(reward=("!=", 0.0))),
        ({"version": "5"}, Filters(first_version=5, last_version=5)),
        ({"version": "3..7"}, Filters(first_version=3, last_version=7)),
        ({"version": "3.."}, Filters(first_version=3)),
        ({"version": "..7"}, Filters(last_version=7)),
        ({"status": "truncated", "outcome": "pending"}, Filters(status="truncated", outcome="pending")),
        ({"include_eval": True}, Filters(include_eval=True)),
    ],
)
def test_filters_are_read_as_typed(typed: dict[str, Any], filters: Filters) -> None:
    options = {"reward": "", "status": "", "version": "", "step": None, "outcome": "", "include_eval": False, **typed}
    assert parse_filters(a_log().state, **options) == filters


def _marked(text: str, query: str) -> str:
    """The snippet with its highlighted stretches in brackets."""
    shown = snippet(text, SearchQuery(query))
    marks = sorted((span.start, span.end) for span in shown.spans if "bold" in str(span.style))
    marked = shown.plain
    for start, end in reversed(marks):
        marked = f"{marked[:start]}[{marked[start:end]}]{marked[end:]}"
    return marked


def test_matches_are_highlighted() -> None:
    assert _marked("One is off, by ones", "off one") == "[One] is [off], by ones"
    assert _marked("in Zürich\nnow", "zurich") == "in [Zürich]⏎now"
    assert _marked("08+37= and 37+45=82", "37+45=") == "08+37= and [37+45=]82"
    assert _marked("the [bold]markup[/] stays", "markup") == "the [bold][markup][/] stays"
    assert _marked("no match in here", "zebra") == "no match in here"


def test_a_long_text_is_cut_around_its_first_match() -> None:
    text = "a " * 500 + "needle" + " b" * 500
    shown = _marked(text, "needle")
    assert shown.startswith("…") and shown.endswith("…") and "a [needle] b" in shown and len(shown) < 130
    assert _marked("needle" + " b" * 500, "needle").startswith("[needle] b")
    assert _marked("a " * 30 + "needle", "needle") == "…" + ("a " * 30 + "[needle]")[60 - 30 :]
