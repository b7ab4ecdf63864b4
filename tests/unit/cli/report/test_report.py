"""The report of a run: the numbers in it, odd runs, untrusted text, and the page in a real browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.report import report_prompts
from cli.report.report import write_report
from cli.report.report_curves import MOST_LAGS, TIME, curves, lag_bars, spans_of
from cli.report.report_page import gather
from cli.report.report_prompts import snippet
from storage.log.entries import Quarantine, Retire
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from storage.records import Message, RolloutGroup, Task
from tests.builders import a_group, a_log, a_step, a_trajectory, a_turn
from tests.unit.cli.builders import an_evaluation, commit, printed

SECTIONS = ("overview", "curves", "time", "staleness", "groups", "prompts", "configuration")
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} {% raw %} \u202e\x00\u2028 \"'&"


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """A session and a base policy."""
    return a_log(store)


@pytest.fixture
def trained(log: RunLog) -> RunLog:
    """Two steps, two evaluations; in step 2 one of two groups is a version behind, and one prompt comes again."""
    _evaluate(log, 0, [0.0, 0.0, 1.0])
    commit(log, "s0", _seen("a", 0, rewards=[0.0, 0.0], text=NASTY), _seen("b", 0, rewards=[1.0, 0.0]))
    _train(log, "0.a", loss=1.0)
    commit(log, "s1", _seen("a", 1, rewards=[1.0, 0.0], version=1, text=NASTY))
    _train(log, "0.b", "1.a", loss=3.0)
    _evaluate(log, 2, [0.0, 1.0, 1.0])
    return log


def _seen(prompt: str, epoch: int, *, text: str = "3", **fields: Any) -> RolloutGroup:
    """The group of a prompt in an epoch, and what its attempts were asked."""
    position = 100 * epoch + sum(prompt.encode()) % 100
    group = a_group(position, group_id=f"{epoch}.{prompt}", **fields)
    said = [Message(role="user", content=text), Message(role="assistant", content="7", is_completion=True)]
    return dataclasses.replace(
        group,
        epoch=epoch,
        task=Task(id=prompt, prompt=text),
        trajectories=[dataclasses.replace(t, messages=said) for t in group.trajectories],
    )


def _train(log: RunLog, *group_ids: str, **metrics: float) -> None:
    seconds = {**{f"{phase}_seconds": 1.0 for phase in TIME}, "idle_seconds": 2.0, "round_seconds": 10.0}
    facts = {"reward": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0, "peak_memory_bytes": 2.0**30}
    log.append(dataclasses.replace(a_step(log.state, trained=group_ids), metrics={**facts, **seconds, **metrics}))


def _evaluate(log: RunLog, version: int, rewards: Sequence[float]) -> None:
    """One shard for each task."""
    for number, reward in enumerate(rewards):
        group = _seen(f"q{number}", version, rewards=[reward], version=version)
        commit(log, f"e{version}" + (f"-{number}" if number else ""), group, is_eval=True)
    score, count = sum(rewards) / len(rewards), len(rewards)
    log.append(an_evaluation(version, score, num_tasks=count, num_shards=count))


def _train_nothing(log: RunLog) -> None:
    """A step that filtered one group, failed another and has a metric that is no number."""
    commit(log, "s0", a_group(0, accepted=False), a_group(1, rewards=[None, None]))
    step = a_step(log.state, filtered=["0.task0"], failed=["0.task1"])
    log.append(dataclasses.replace(step, metrics={"grad_norm": math.nan, "loss": math.inf}))


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


def test_the_page_has_every_section_and_needs_nothing_from_elsewhere(trained: RunLog) -> None:
    page = _page(trained)
    assert all(f'<section id="{name}">' in page for name in SECTIONS)
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    names = ("src", "href", "srcset", "action", "data")
    links = [attributes[name] for _, attributes in _elements(page) for name in names if name in attributes]
    assert all(link.startswith(("#", "data:")) for link in links)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {_digest(script)}" in page


def test_curves_lags_and_time_are_those_of_the_steps(trained: RunLog) -> None:
    found = gather(trained)
    data = found["data"]
    assert data["metrics"]["loss"]["mean"] == [1.0, 3.0] and data["spans"] == [(1, 1), (2, 2)]
    # Step 1 trains 4 tokens of version 0 on version 0; step 2 trains on version 1: 4 of version 0, 4 of version 1.
    assert [(bar["label"], bar["tokens"], bar["over"]) for bar in data["lags"]] == [("0", 8, False), ("1", 4, True)]
    assert found["staleness"]["mean"] == pytest.approx(4 / 12) and found["staleness"]["over"] == 4
    assert data["shards"] == {
        "width": [1], "head": [0, 1], "tail": [0, 1], "trained_first": [0, 1], "trained_last": [1, 1],
    }  # fmt: skip
    assert dict(found["time"]["phases"])["idle"] == 4.0 and found["time"]["round"] == found["time"]["sum"] == 20.0
    assert not found["time"]["overlap"]
    assert data["metrics"]["reply_length"]["mean"] == [2.0, 2.0]
    assert [(e["x"], e["y"]) for e in data["held_out"]] == [(0, pytest.approx(1 / 3)), (2, pytest.approx(2 / 3))]
    assert [name for name, _ in found["terms"]] == ["trained", "filtered", "stale", "failed", "cancelled", "pending"]
    assert sum(number for _, number in found["terms"]) == found["counters"]["submitted"] == 3


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
    lists = {one["key"]: one["groups"] for one in gather(log)["lists"]}
    assert [card["id"] for card in lists["best"]] == ["0.task0/0", "0.task3/0", "0.task2/1", "0.task1/0"]
    assert [card["id"] for card in lists["worst"]] == ["0.task1/0", "0.task2/0", "0.task3/2", "0.task0/0"]
    assert [card["id"] for card in lists["surprise"]] == ["0.task2/1", "0.task3/0"]
    assert [card["id"] for card in lists["overconfidence"]] == ["0.task3/2", "0.task2/0"]
    assert lists["surprise"][0]["p"] == pytest.approx(0.1, rel=1e-5)
    assert [other["reward"] for other in lists["surprise"][0]["attempts"]] == [0.0, 1.0, 0.0]


def test_a_failed_evaluation_is_a_note_and_no_point_of_the_curve(trained: RunLog) -> None:
    failures = {"num_failed": 4, "failures": {"env_error": 4}, "last_error": "KeyError: 'answer'"}
    trained.append(an_evaluation(3, 0.0, num_tasks=2, n_samples=2, seconds=2.0, **failures))
    found = gather(trained)
    assert [e["x"] for e in found["data"]["held_out"]] == [0, 2]
    assert "evaluations took 4.0 s" in _page(trained)
    [note] = [note for note in found["notes"] if "evaluation" in note]
    assert note.startswith("The evaluation of policy 3") and "env_error 4" in note and "KeyError: 'answer'" in note


def test_histories_say_what_became_of_each_prompt(log: RunLog) -> None:
    fates = {"never": [0, 0, 0], "always": [1, 1, 1], "rose": [0, 0, 1], "fell": [1, 0, 0], "same": [0, 1, 0]}
    for epoch in range(3):
        groups = [
            _seen(name, epoch, rewards=[rewards[epoch]] * 2, text=f"what is {name}?") for name, rewards in fates.items()
        ]
        commit(log, f"s{epoch}", *groups, *([_seen("once", 0)] if not epoch else []))
    commit(log, "s3", _seen("rose", 3, rewards=[None, None]))
    commit(log, "s4", _seen("fell", 3, rewards=[0, 0]))
    log.append(Quarantine(shard_id="s4", reason="a disk broke"))  # nothing had used it: that visit never was
    _evaluate(log, 0, [0.0, 0.0])
    _evaluate(log, 2, [1.0, 1.0])
    held_out, history = gather(log)["histories"]
    assert (history["prompts"], history["repeated"], history["columns"]) == (6, 5, ["0", "1", "2", "3"])
    assert history["kinds"] == dict.fromkeys(fates, 1)
    rows = {row["id"]: row for row in history["rows"]}
    assert {name: row["kind"] for name, row in rows.items()} == {name: name for name in fates}
    assert rows["rose"]["cells"] == [0, 0, 1, "x"] and rows["rose"]["change"] == 1
    assert rows["fell"]["cells"] == [1, 0, 0, None] and rows["fell"]["text"] == "what is fell?"
    assert held_out["columns"] == ["0", "2"] and held_out["kinds"]["rose"] == 2, "every shard of an evaluation is read"
    assert [(row["id"], row["cells"]) for row in held_out["rows"]] == [("q0", [0.0, 1.0]), ("q1", [0.0, 1.0])]


def test_a_history_keeps_what_changed_most_and_counts_the_rest(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_prompts, "MOST_PROMPTS", 1)
    monkeypatch.setattr(report_prompts, "MOST_COLUMNS", 2)
    for epoch in range(3):
        commit(log, f"s{epoch}", _seen("flat", epoch, rewards=[0.5]), _seen("moves", epoch, rewards=[0.5 * epoch]))
    history = gather(log)["histories"][1]
    assert (history["repeated"], history["shown"]) == (2, 1)
    assert history["columns"] == ["0–1", "2"] and [row["cells"] for row in history["rows"]] == [[0.25, 1.0]]
    assert "the other 1 are left out" in _page(log)


@given(num_steps=st.integers(1, 700), most=st.integers(1, 60))
def test_spans_hold_every_step_once(num_steps: int, most: int) -> None:
    spans = spans_of(num_steps, most)
    assert len(spans) <= most
    assert [step for span in spans for step in span] == list(range(1, num_steps + 1))


def test_many_steps_are_averaged_and_nan_enters_no_mean() -> None:
    import numpy as np

    found = curves({"loss": np.array([1.0, 3.0, np.nan, 5.0, np.nan])}, spans_of(5, 3))["loss"]
    assert found["mean"][:2] == [2.0, 5.0] and math.isnan(found["mean"][2])
    assert (found["low"][0], found["high"][0]) == (1.0, 3.0)


def test_long_lags_share_the_last_bar() -> None:
    bars = lag_bars([(0, 5), (14, 1), (15, 2), (400, 4)], bound=20)
    assert len(bars) == MOST_LAGS and sum(bar["tokens"] for bar in bars) == 12
    assert bars[-2:] == [{"label": "14", "tokens": 1, "over": False}, {"label": "15+", "tokens": 6, "over": True}]


def test_what_prompts_say_is_text_and_nothing_else(trained: RunLog) -> None:
    page = _page(trained)
    names = [name for name, _ in _elements(page)]
    assert names.count("script") == 2 and "img" not in names
    assert NASTY.replace("\x00", "␀") in html.unescape(page), "shown as it is, control characters made visible"
    shown = [row["text"] for row in _data(page)["histories"]["training"]["rows"]]
    assert shown == [snippet(NASTY)], "given to the script unharmed"


def test_a_huge_conversation_is_shortened(log: RunLog) -> None:
    turn = a_turn([12] * 50_000)
    said = [Message(role="user", content="x" * 1_000_000), Message(role="tool", content="y" * 1_000_000)] * 20
    commit(log, "s0", a_group(0, trajectories=[a_trajectory(attempt=n, turns=[turn], messages=said) for n in (0, 1)]))
    page = _page(log)
    assert len(page) < 600_000
    assert "998,500 characters left out" in page and "49,400 tokens left out" in page and "24 messages left out" in page


def test_failures_are_counted_by_kind_with_an_example_and_its_frames(log: RunLog) -> None:
    error = "KeyError: '<{}>'\n  at my/env.py:31 in run: f()"
    failed = [a_trajectory(None, attempt=n, status="env_error", error=error.format(n)) for n in range(3)]
    commit(log, "s0", a_group(0, trajectories=[*failed, a_trajectory(attempt=3)]))
    page = _page(log)
    assert "3 attempts: KeyError: &#39;&lt;2&gt;&#39; at my/env.py:31</summary>" in page
    assert "<dt>0.task0/2</dt>" in page and "at my/env.py:31 in run: f()</dd>" in page


def test_runs_with_little_in_them_have_a_page(store: LocalStore, log: RunLog) -> None:
    page = _page(create_run(store, "empty", {}))
    assert "not evaluated" in page and "not started" in page and _data(page)["spans"] == []
    _train_nothing(log)
    found = gather(log)
    assert found["losses"] == [("attempt: env_error", 2), ("group: uniform reward 1", 1)]
    assert found["data"]["lags"] == [] and found["data"]["levels"]["shares"] == []
    assert math.isnan(found["data"]["metrics"]["grad_norm"]["mean"][0])
    assert _data(_page(log))["metrics"]["grad_norm"]["mean"] == [None]


def test_what_cannot_be_read_is_left_out_and_said(log: RunLog) -> None:
    for number in range(4):
        commit(log, f"s{number}", a_group(number))
        _train(log, f"0.task{number}")
    log.store.delete([log.shard_key("s0")])
    log.append(Quarantine(shard_id="s1", reason="a disk <b>broke</b>"))
    log.append(Retire(shard_ids=["s2"], policy_versions=[1], state_paths=[], reason="old"))
    page = _page(log)
    assert "shard s0 is left out: the file is missing" in page
    assert "shard s1 is left out: quarantined: a disk &lt;b&gt;broke&lt;/b&gt;" in page
    assert "removed the files of 1 shard, and the weights of 1 policy version." in page
    assert {card.split("/")[0] for card in re.findall(r'<code class="id">(.*?)</code>', page)} == {"0.task3"}
    assert _data(page)["metrics"]["reward"]["mean"] == [0.5] * 4, "the log's facts are all there"


def test_the_command_writes_the_page_and_says_where(trained: RunLog, home: Path) -> None:
    assert (home / "reports/run.html").as_uri() in printed("report run")
    elsewhere = home / "new folder" / "page.html"
    printed("report run --out", str(elsewhere))
    assert [f.name for f in elsewhere.parent.iterdir()] == ["page.html"]
    assert "runs there: run" in printed("report nothing", status=2)
    under_a_file = home / "store/runs/run/run.json/page.html"
    assert "there is no folder" in printed("report run --out", str(under_a_file), status=2)


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────────────────────

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on PATH to open the page in")


def _open(page: Path, scratch: Path, *, width: int = 1200) -> tuple[str, list[str]]:
    """The document after its script ran, and everything the browser wrote to the console."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    limits = ["--virtual-time-budget=5000", f"--window-size={width},900", f"--user-data-dir={scratch / 'profile'}"]
    done = subprocess.run(
        [CHROMIUM, *options, *limits, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@in_a_browser
def test_the_browser_is_listened_to(tmp_path: Path) -> None:
    """A page that breaks is seen to break; without this the tests below could not fail."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<meta http-equiv=Content-Security-Policy content=\"img-src 'none'\"><img src=x.png><script>oops()</script>"
    )
    console = _open(page, tmp_path)[1]
    assert any("oops is not defined" in line for line in console)
    assert any("Content Security Policy" in line for line in console)


@in_a_browser
@pytest.mark.parametrize("width", [1200, 500])
def test_every_picture_is_drawn_without_a_word_on_the_console(trained: RunLog, tmp_path: Path, width: int) -> None:
    document, console = _open(write_report(trained, None), tmp_path, width=width)
    assert not console
    assert all(f'<section id="{name}">' in document for name in SECTIONS)
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    assert len(figures) > 6 and all(re.search(r'<svg.*<text|class="constant"', f, re.DOTALL) for f in figures)
    assert document.count("<tr>") > 10 and "3 of 3 shown" in document


@in_a_browser
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_nothing_to_draw_says_so(log: RunLog, tmp_path: Path, steps: int) -> None:
    if steps:
        _train_nothing(log)
    document, console = _open(write_report(log, None), tmp_path)
    assert not console
    figures = re.findall(r"<figure.*?</figure>", document, re.DOTALL)
    assert figures and all('class="none"' in f or "<svg" in f for f in figures)


@in_a_browser
def test_prompts_are_searched_sorted_and_chosen_and_pictures_tell_their_numbers(
    trained: RunLog, tmp_path: Path
) -> None:
    file = write_report(trained, None)
    driver = """
    const card = document.querySelector('[data-history="held-out"]'), seen = {};
    const ids = () => [...card.querySelectorAll("td.prompt code")].map(code => code.textContent);
    const search = card.querySelector("input"), kind = card.querySelector("select");
    seen.first = ids();
    card.querySelector("th button").click(); card.querySelector("th button").click(); seen.down = ids();
    kind.value = "rose"; kind.dispatchEvent(new Event("change")); seen.rose = ids();
    kind.value = ""; search.value = "Q2"; search.dispatchEvent(new Event("input")); seen.search = ids();
    search.value = "nowhere"; search.dispatchEvent(new Event("input")); seen.none = ids();
    const picture = document.querySelector('[data-chart="progress"] svg'), box = picture.getBoundingClientRect();
    picture.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 15, clientY: box.top + 50 }));
    seen.tip = document.getElementById("tip").textContent.split("\\n");
    document.body.dataset.seen = JSON.stringify(seen);
    """
    page = file.read_text().replace("script-src ", f"script-src {_digest(driver)} ")
    file.write_text(page.replace("</body>", f"<script>{driver}</script></body>"))
    document, console = _open(file, tmp_path)
    assert not console
    seen = json.loads(html.unescape(re.findall(r'data-seen="(.*?)"', document)[0]))
    assert seen == {
        "first": ["q0", "q1", "q2"], "down": ["q2", "q1", "q0"], "rose": ["q1"], "search": ["q2"], "none": [],
        "tip": ["step 2: reward 0.5", "policy 2: held-out 0.667 on 3 tasks, 1.0 s"],
    }  # fmt: skip
