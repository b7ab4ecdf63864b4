"""The report of a run, and the data that the page shows: the numbers in it, odd runs, untrusted text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.ui import prompts
from cli.ui.contents import MOST_LAGS, lag_bars
from cli.ui.conversations import snippet
from cli.ui.curves import Curves, _leave_out_pauses, averaged, spans_of, width_of
from cli.ui.data import Pages, reported
from cli.ui.page import plotly_js
from cli.ui.report import write_report
from storage.log.entries import End, Quarantine, Retire, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from storage.records import Message
from tests.builders import a_group, a_log, a_trajectory, a_turn
from tests.unit.cli.builders import an_evaluation, commit, printed
from tests.unit.cli.ui.builders import NASTY, a_trained_run, evaluate, seen, train, train_nothing


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """A session and a base policy."""
    return a_log(store)


@pytest.fixture
def trained(store: LocalStore) -> RunLog:
    return a_trained_run(store)


def _part(log: RunLog, part: str, **asked: str) -> Any:
    return Pages(log.store).get(log.run_id, part, **asked)


def _page(log: RunLog) -> str:
    return write_report(log, None).read_text()


def _elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Every element as a browser would see it, with its attributes."""
    found: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Reader().feed(page)
    return found


def _data(page: str) -> dict[str, Any]:
    """What the page's script is given."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return dict(json.loads(text))


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_other_script(trained: RunLog) -> None:
    page = _page(trained)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert scripts[0] == plotly_js() and "</script" not in plotly_js()
    allowed = f"default-src 'none'; script-src {_digest(scripts[0])} {_digest(scripts[1])}; style-src 'unsafe-inline'"
    assert f"{allowed}; img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'" in page
    names = ("src", "href", "srcset", "action", "data")
    links = [attributes[name] for _, attributes in _elements(page) for name in names if name in attributes]
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", scripts[1])


def test_curves_lags_and_time_are_those_of_the_steps(trained: RunLog) -> None:
    data = {key.rsplit("/")[-1]: value for key, value in reported(trained.store, "run").items()}
    steps, found, overview = data["steps"], data["contents"], data["overview"]
    assert steps["metrics"]["loss"]["mean"] == [1.0, 3.0] and steps["spans"] == [(1, 1), (2, 2)]
    assert steps["times"] == [entry.written_at for entry in trained.entries if entry.kind == "step"]
    # Step 1 trains 4 tokens of version 0 on version 0; step 2 trains on version 1: 4 of version 0, 4 of version 1.
    assert [(bar["label"], bar["tokens"], bar["over"]) for bar in found["lags"]] == [("0", 8, False), ("1", 4, True)]
    assert found["staleness"]["mean"] == pytest.approx(4 / 12) and found["staleness"]["over"] == 4
    assert found["shards"] == {
        "width": [1], "head": [0, 1], "tail": [0, 1], "trained_first": [0, 1], "trained_last": [1, 1],
    }  # fmt: skip
    assert dict(overview["time"]["phases"])["idle"] == 4.0 and overview["time"]["round"] == 20.0
    assert overview["time"]["sum"] == 20.0 and not overview["time"]["overlap"]
    assert found["lengths"]["reply_length"]["mean"] == [2.0, 2.0] and overview["trained_tokens"] == 12.0
    assert [(e["version"], e["score"]) for e in overview["scores"]] == [
        (0, pytest.approx(1 / 3)),
        (2, pytest.approx(2 / 3)),
    ]
    assert [name for name, _ in overview["terms"]] == ["trained", "filtered", "stale", "failed", "cancelled", "pending"]
    assert sum(number for _, number in overview["terms"]) == overview["counters"]["submitted"] == 3
    assert data["settings"]["settings"] == [("seed", "0")] and data["settings"]["num_sessions"] == 1


def test_lanes_end_where_the_log_says_and_hold_every_part_of_a_step(trained: RunLog) -> None:
    lanes = {lane["name"]: lane["bars"] for lane in _part(trained, "lanes")["lanes"]}
    [save, train, load] = [bar for bar in lanes["trainer"] if bar["label"] == "step 2"]
    [end] = [e.written_at for e in trained.entries if e.kind == "step" and e.body.claim.step == 2]
    assert save["start"] + save["seconds"] == pytest.approx(end, abs=0.01)
    assert [bar["what"] for bar in (save, train, load)] == ["save", "train", "load"]
    assert load["start"] == pytest.approx(end - 3.0, abs=0.01)
    assert [bar["what"] for bar in lanes["rollout-0"]].count("evaluate") == 6 and len(lanes["rollout-0"]) == 8


def test_lanes_leave_out_pauses_between_sessions_and_before_the_first_work() -> None:
    def bar(what: str, start: float, seconds: float = 0.0) -> dict[str, Any]:
        return {"what": what, "start": start, "seconds": seconds}

    bars = [
        bar("session", 0),
        bar("generate", 170, 5),
        bar("train", 176, 4),
        bar("session", 9000),
        bar("train", 9020, 2),
    ]
    _leave_out_pauses(bars)
    assert [each["start"] for each in bars] == [9010, 9010, 9016, 9020, 9020]
    alone = [bar("session", 7)]
    _leave_out_pauses(alone)
    assert alone == [bar("session", 7)]


def test_lanes_leave_out_what_other_commands_did_after_the_end(trained: RunLog) -> None:
    trained.append(Session(id="a", code_version=""))
    before = _part(trained, "lanes")["lanes"]
    trained.append(End(session_id="a", outcome="finished"))
    evaluate(trained, 1, [1.0])
    assert _part(trained, "lanes")["lanes"] == before
    trained.append(Session(id="b", code_version=""))
    evaluate(trained, 0, [1.0])
    assert [len(lane["bars"]) for lane in _part(trained, "lanes")["lanes"]] != [len(lane["bars"]) for lane in before]


def test_environments_are_the_beginnings_of_task_ids(log: RunLog) -> None:
    commit(log, "s0", seen("math/1", 0, rewards=[1.0, 0.0]), seen("math/2", 0), seen("code:1", 0, rewards=[0.0, 0.0]))
    train(log, "0.math/1", "0.math/2", "0.code:1")
    assert _part(log, "environments")["rewards"] == {"code": {"mean": [0.0]}, "math": {"mean": [0.5]}}
    commit(log, "s1", *(seen(f"{number}/x", 1) for number in range(20)))
    train(log, *(f"1.{number}/x" for number in range(20)))
    assert _part(log, "environments") == {}, "so many beginnings are no environments"


def test_lists_of_groups_follow_their_definitions(log: RunLog) -> None:
    def attempts(*pairs: tuple[float, float]) -> list[Any]:
        """Rewards, with the logprob of each of two tokens."""
        return [a_trajectory(r, attempt=n, turns=[a_turn(logprobs=[lp, lp])]) for n, (r, lp) in enumerate(pairs)]

    rare, likely = math.log(0.1), math.log(0.9)
    commit(
        log,
        "s0",
        a_group(0, trajectories=attempts((1.0, likely), (1.0, likely))),
        a_group(1, trajectories=attempts((0.0, rare), (0.0, likely))),
        a_group(2, trajectories=attempts((0.0, rare), (1.0, rare), (0.0, rare))),  # 2/3 × 0.9 and 1/3 × 0.1
        a_group(3, trajectories=attempts((1.0, likely), (1.0, likely), (0.0, likely))),  # 1/3 × 0.1 and 2/3 × 0.9
    )
    lists = {one["key"]: one["groups"] for one in _part(log, "groups")["lists"]}
    assert [card["id"] for card in lists["best"]] == ["0.task0/0", "0.task3/0", "0.task2/1", "0.task1/0"]
    assert [card["id"] for card in lists["worst"]] == ["0.task1/0", "0.task2/0", "0.task3/2", "0.task0/0"]
    assert [card["id"] for card in lists["surprise"]] == ["0.task2/1", "0.task3/0"]
    assert [card["id"] for card in lists["overconfidence"]] == ["0.task3/2", "0.task2/0"]
    assert lists["surprise"][0]["p"] == pytest.approx(0.1, rel=1e-5)
    assert [other["reward"] for other in lists["surprise"][0]["attempts"]] == [0.0, 1.0, 0.0]


def test_a_failed_evaluation_is_a_note_and_no_point_of_the_curve(trained: RunLog) -> None:
    failures = {"num_failed": 4, "failures": {"env_error": 4}, "last_error": "KeyError: 'answer'"}
    trained.append(an_evaluation(3, 0.0, num_tasks=2, n_samples=2, seconds=2.0, **failures))
    found = _part(trained, "overview")
    assert [e["version"] for e in found["scores"]] == [0, 2] and found["evaluation_seconds"] == 4.0
    [note] = [note for note in found["notes"] if "evaluation" in note]
    assert note.startswith("The evaluation of policy 3") and "env_error 4" in note and "KeyError: 'answer'" in note


def test_histories_say_what_became_of_each_prompt(log: RunLog) -> None:
    fates = {"never": [0, 0, 0], "always": [1, 1, 1], "rose": [0, 0, 1], "fell": [1, 0, 0], "same": [0, 1, 0]}
    for epoch in range(3):
        groups = [
            seen(name, epoch, rewards=[rewards[epoch]] * 2, text=f"what is {name}?") for name, rewards in fates.items()
        ]
        commit(log, f"s{epoch}", *groups, *([seen("once", 0)] if not epoch else []))
    commit(log, "s3", seen("rose", 3, rewards=[None, None]))
    commit(log, "s4", seen("fell", 3, rewards=[0, 0]))
    log.append(Quarantine(shard_id="s4", reason="a disk broke"))  # nothing had used it: that visit never was
    evaluate(log, 0, [0.0, 0.0])
    evaluate(log, 2, [1.0, 1.0])
    held_out, history = _part(log, "prompts")["histories"]
    assert (history["prompts"], history["repeated"], history["columns"]) == (6, 5, ["0", "1", "2", "3"])
    assert history["kinds"] == dict.fromkeys(fates, 1)
    rows = {row["id"]: row for row in history["rows"]}
    assert {name: row["kind"] for name, row in rows.items()} == {name: name for name in fates}
    assert rows["rose"]["cells"] == [0, 0, 1, "x"] and rows["rose"]["change"] == 1
    assert rows["fell"]["cells"] == [1, 0, 0, None] and rows["fell"]["text"] == "what is fell?"
    assert held_out["columns"] == ["0", "2"] and held_out["kinds"]["rose"] == 2, "every shard of an evaluation is read"
    assert [(row["id"], row["cells"]) for row in held_out["rows"]] == [("q0", [0.0, 1.0]), ("q1", [0.0, 1.0])]


def test_a_history_keeps_what_changed_most_and_counts_the_rest(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 1)
    monkeypatch.setattr(prompts, "MOST_COLUMNS", 2)
    for epoch in range(3):
        commit(log, f"s{epoch}", seen("flat", epoch, rewards=[0.5]), seen("moves", epoch, rewards=[0.5 * epoch]))
    history = _part(log, "prompts")["histories"][1]
    assert (history["repeated"], history["shown"]) == (2, 1)
    assert history["columns"] == ["0–1", "2"] and [row["cells"] for row in history["rows"]] == [[0.25, 1.0]]


@given(num_steps=st.integers(1, 700), most=st.integers(1, 60))
def test_spans_hold_every_step_once(num_steps: int, most: int) -> None:
    spans = spans_of(num_steps, width_of(num_steps, most))
    assert len(spans) <= most
    assert [step for first, last in spans for step in range(first, last + 1)] == list(range(1, num_steps + 1))


def test_many_steps_are_averaged_and_nan_enters_no_mean() -> None:
    found = averaged(np.array([1.0, 3.0, np.nan, 5.0, np.nan]), 2)
    assert found["mean"][:2] == [2.0, 5.0] and math.isnan(found["mean"][2])
    assert (found["low"][0], found["high"][0]) == (1.0, 3.0)


@given(values=st.lists(st.floats(0, 1), max_size=60), most=st.integers(1, 9), cuts=st.lists(st.integers(0, 60)))
def test_following_a_run_gives_the_points_of_reading_it_at_once(
    values: list[float], most: int, cuts: list[int]
) -> None:
    """The page keeps the points before `first` and adds the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cli.ui.curves.width_of", lambda count: width_of(count, most))
        points, width, curves = list[float](), 0, Curves()
        for cut in [*sorted(cuts), 60]:
            for value in values[len(curves.times) : cut]:
                curves.times.append(float(len(curves.times)))
                curves.metrics.setdefault("loss", []).append(value)
            part = curves.part(first=len(points), width=width)
            width = part["width"]
            points[part["first"] :] = part["metrics"].get("loss", {"mean": []})["mean"]
            assert len(part["spans"]) == len(part["times"]) == len(points) - part["first"]
        assert points == (averaged(values, width)["mean"] if values else [])


def test_long_lags_share_the_last_bar() -> None:
    bars = lag_bars([(0, 5), (14, 1), (15, 2), (400, 4)], bound=20)
    assert len(bars) == MOST_LAGS and sum(bar["tokens"] for bar in bars) == 12
    assert bars[-2:] == [{"label": "14", "tokens": 1, "over": False}, {"label": "15+", "tokens": 6, "over": True}]


def test_no_text_of_a_run_ends_the_element_that_holds_it(trained: RunLog) -> None:
    page = _page(trained)
    names = [name for name, _ in _elements(page)]
    assert names.count("script") == 3 and "img" not in names
    assert "alert(1)" in page and "<script>alert" not in page
    data = _data(page)
    assert [row["text"] for row in data["runs/run/prompts"]["histories"][1]["rows"]] == [snippet(NASTY)]
    [said] = {row["messages"][0]["content"] for row in data["runs/run/groups"]["lists"][1]["groups"]} - {"3"}
    assert said == NASTY, "given to the script unharmed"


def test_a_huge_conversation_is_shortened(log: RunLog) -> None:
    turn = a_turn([12] * 50_000)
    said = [Message(role="user", content="x" * 1_000_000), Message(role="tool", content="y" * 1_000_000)] * 20
    commit(log, "s0", a_group(0, trajectories=[a_trajectory(attempt=n, turns=[turn], messages=said) for n in (0, 1)]))
    page = _page(log)
    assert len(page) < len(plotly_js()) + 700_000
    card = _data(page)["runs/run/groups"]["lists"][0]["groups"][0]
    assert "998,500 characters left out" in card["messages"][0]["content"] and card["left_out"] == 24
    assert card["turns"][0]["left_out"] == 49_400 and len(card["turns"][0]["texts"]) == 600


def test_failures_are_counted_by_kind_with_an_example_and_its_frames(log: RunLog) -> None:
    error = "KeyError: '<{}>'\n  at my/env.py:31 in run: f()"
    failed = [a_trajectory(None, attempt=n, status="env_error", error=error.format(n)) for n in range(3)]
    commit(log, "s0", a_group(0, trajectories=[*failed, a_trajectory(attempt=3)]))
    assert _part(log, "contents")["failures"] == [{"number": 3, "id": "0.task0/2", "error": error.format(2)}]


def test_runs_with_little_in_them_have_a_page(store: LocalStore, log: RunLog) -> None:
    empty = _data(_page(create_run(store, "empty", {})))
    assert empty["runs/empty/overview"]["after"] is None and empty["runs/empty/steps"]["spans"] == []
    assert empty["runs/empty/lineage"] == {} and empty["runs/empty/lanes"]["lanes"] == []
    train_nothing(log)
    found = _part(log, "contents")
    assert found["losses"] == [("attempt: env_error", 2), ("group: uniform reward 1", 1)]
    assert found["lags"] == [] and found["levels"]["shares"] == []
    assert _data(_page(log))["runs/run/steps"]["metrics"]["grad_norm"]["mean"] == [None]


def test_what_cannot_be_read_is_left_out_and_said(log: RunLog) -> None:
    for number in range(4):
        commit(log, f"s{number}", a_group(number))
        train(log, f"0.task{number}")
    log.store.delete([log.shard_key("s0")])
    log.append(Quarantine(shard_id="s1", reason="a disk <b>broke</b>"))
    log.append(Retire(shard_ids=["s2"], policy_versions=[1], state_paths=[], reason="old"))
    data = _data(_page(log))
    notes = data["runs/run/overview"]["notes"] + data["runs/run/contents"]["notes"]
    assert "shard s0 is left out: the file is missing" in notes
    assert "shard s1 is quarantined: a disk <b>broke</b>" in notes
    assert any("removed the files of 1 shard, and the weights of 1 policy version." in note for note in notes)
    cards = [card for one in data["runs/run/groups"]["lists"] for card in one["groups"]]
    assert {card["id"].split("/")[0] for card in cards} == {"0.task3"}
    assert data["runs/run/steps"]["metrics"]["reward"]["mean"] == [0.5] * 4, "the log's facts are all there"


def test_the_command_writes_the_page_and_says_where(trained: RunLog, home: Path) -> None:
    assert (home / "reports/run.html").as_uri() in printed("report run")
    elsewhere = home / "new folder" / "page.html"
    printed("report run --out", str(elsewhere))
    assert [f.name for f in elsewhere.parent.iterdir()] == ["page.html"]
    assert "runs there: run" in printed("report nothing", status=2)
    assert "only .html is written; name it" in printed("report run --out", str(home / "page.pdf"), status=2)
    under_a_file = home / "store/runs/run/run.json/page.html"
    assert "there is no folder" in printed("report run --out", str(under_a_file), status=2)
