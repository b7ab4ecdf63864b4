"""The page in a real browser: it draws, follows, compares, and shows what policies wrote as text."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request

from cli.ui.data import Pages
from cli.ui.report import write_report
from cli.ui.server import create_app
from infra.ports import free_port
from storage.log.entries import Quarantine
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore, StoreError
from storage.records import ToolCall
from tests.builders import a_group, a_log, a_trajectory, a_turn
from tests.unit.cli.builders import commit
from tests.unit.cli.ui.builders import NASTY, a_screen, a_trained_run, in_a_browser, opened, seen, train, train_nothing

pytestmark = [pytest.mark.server, in_a_browser]
SECTIONS = ["overview", "curves", "time", "staleness", "trajectories", "groups", "prompts", "lineage", "configuration"]


@pytest.fixture
def trained(store: LocalStore) -> RunLog:
    return a_trained_run(store)


@pytest.fixture
def address(store: LocalStore) -> Iterator[str]:
    """Where the server listens."""
    with _served(create_app(store)) as address:
        yield address


@contextlib.contextmanager
def _served(app: FastAPI) -> Iterator[str]:
    """A server in a thread, and its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


def _figures(document: str) -> list[str]:
    return re.findall(r"<figure.*?</figure>", document, re.DOTALL)


def _page(document: str) -> str:
    """What is shown, without the scripts and data that are in the file, and without marks on names of settings."""
    return re.sub(r'<script.*?</script>|<wbr>|(?<=<code) class="name"', "", document, flags=re.DOTALL)


def _assert_drawn(document: str, console: list[str]) -> None:
    assert not console
    page = _page(document)
    assert [name for name in SECTIONS if f'<section id="{name}"' not in page] == [] and "could not be drawn" not in page
    assert all("main-svg" in figure or "none" in figure or "constant" in figure for figure in _figures(page))


def test_the_browser_is_listened_to(tmp_path: Path) -> None:
    """A page that breaks is seen to break; without this the tests below could not fail."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<meta http-equiv=Content-Security-Policy content=\"img-src 'none'\"><img src=x.png><script>oops()</script>"
    )
    console = opened(page.as_uri(), tmp_path)[1]
    assert any("oops is not defined" in line for line in console)
    assert any("Content Security Policy" in line for line in console)


@pytest.mark.parametrize("width", [1400, 500])
def test_every_picture_of_a_report_is_drawn_without_a_word_on_the_console(
    trained: RunLog, tmp_path: Path, width: int
) -> None:
    document, console = opened(write_report(trained, None).as_uri(), tmp_path, width=width)
    _assert_drawn(document, console)
    assert len(_figures(_page(document))) > 15 and "3 of 3 shown" in document
    assert ">Peak memory of all processes<" in document and "largest proportional set size" in document


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_nothing_to_draw_says_so(store: LocalStore, tmp_path: Path, steps: int) -> None:
    log = a_log(store)
    if steps:
        train_nothing(log)
    _assert_drawn(*opened(write_report(log, None).as_uri(), tmp_path))


def test_prompts_are_searched_sorted_and_chosen_and_curves_are_smoothed(trained: RunLog, tmp_path: Path) -> None:
    seen = _driven(
        write_report(trained, None),
        tmp_path,
        """
        const card = document.querySelector('[data-history="held-out"]'), seen = {};
        const ids = () => [...card.querySelectorAll("td.prompt code")].map(code => code.textContent);
        const search = card.querySelector("input"), kind = card.querySelector("select");
        seen.first = ids();
        card.querySelector("th button").click(); card.querySelector("th button").click(); seen.down = ids();
        kind.value = "rose"; kind.dispatchEvent(new Event("change")); seen.rose = ids();
        kind.value = ""; search.value = "Q2"; search.dispatchEvent(new Event("input")); seen.search = ids();
        search.value = "nowhere"; search.dispatchEvent(new Event("input")); seen.none = ids();
        const slider = document.querySelector("input[type=range]");
        const plot = document.querySelector("#curves .heading:nth-child(2) .plot");
        const loss = () => plot.data.at(-1).y.map(y => Number(y.toFixed(4)));
        seen.loss = loss(); slider.value = 0.5; slider.dispatchEvent(new Event("input")); seen.smooth = loss();
        const filter = document.querySelector("#curves input[type=search]");
        filter.value = "peak mem"; filter.dispatchEvent(new Event("input"));
        seen.filtered = document.querySelectorAll("#curves figure").length;
        """,
    )
    assert seen == {
        "first": ["q0", "q1", "q2"], "down": ["q2", "q1", "q0"], "rose": ["q1"], "search": ["q2"], "none": [],
        "loss": [1, 3], "smooth": [1, 2.3333], "filtered": 1,
    }  # fmt: skip


def _driven(report: Path, scratch: Path, script: str) -> Any:
    """What a script that runs in the page, once it is drawn, leaves in `seen`."""
    driver = f"setTimeout(() => {{ {script} document.body.dataset.seen = JSON.stringify(seen); }}, 3000);"
    page = report.read_text()
    digest = re.search(r"script-src ('sha256-[^']+')", page)
    assert digest is not None
    file = scratch / "driven.html"
    page = page.replace(digest[1], f"{digest[1]} {_digest(driver)}", 1)
    file.write_text(page.replace("</body>", f"<script>{driver}</script></body>"))
    document, console = opened(file.as_uri(), scratch)
    assert not console
    return json.loads(html.unescape(re.findall(r'data-seen="(.*?)"', document)[0]))


def _digest(script: str) -> str:
    from cli.ui.page import _digest

    return _digest(script)


ATTACKS = [NASTY, '"><svg onload=alert(1)>', "<b>bold</b><a href='javascript:alert(1)'>x</a>", "]]>-->'`${alert(1)}"]


def test_an_attack_on_the_page_is_text_on_it(store: LocalStore, address: str, tmp_path: Path) -> None:
    """In prompts, replies, ids, reward parts, tools, errors, reasons, environments, settings and metric names."""
    log = create_run(store, "run", {"model": ATTACKS[1], "tags": ATTACKS})
    for entry in list(a_log(store, run_id="other").entries)[:2]:
        log.append(entry.body)
    call = ToolCall(name=ATTACKS[1], arguments=ATTACKS[0], result=ATTACKS[2], failed=True, seconds=0.1)
    evil = a_trajectory(1.0, turns=[a_turn(tool_calls=[call])], reward_parts={ATTACKS[2]: 1.0})
    failed = a_trajectory(None, attempt=1, status="env_error", error=f"ValueError: {ATTACKS[3]}{ATTACKS[0]}")
    commit(log, "s0", a_group(0, group_id=f"0.{ATTACKS[2]}", trajectories=[evil, failed]))
    commit(log, "s1", seen(f"{ATTACKS[2]}/1", 1, text=ATTACKS[0]), seen(f"{ATTACKS[1]}:2", 1, text=ATTACKS[3]))
    train(
        log,
        f"0.{ATTACKS[2]}",
        f"1.{ATTACKS[2]}/1",
        f"1.{ATTACKS[1]}:2",
        **{f"reward/{ATTACKS[2]}": 0.5, ATTACKS[0]: 1.0},
    )
    commit(log, "s2", seen("b", 2))
    log.append(Quarantine(shard_id="s2", reason=ATTACKS[1]))
    report = write_report(log, None)
    for place in (report.as_uri(), f"{address}#run=run", f"{address}#compare=run,other", address):
        document, console = opened(place, tmp_path)
        assert not console
        page = _page(document)
        assert not re.search(r"<(img|b>bold|svg onload|a href=.javascript)", page), place
        if "compare" not in place and place != address:
            shown = html.unescape(page)
            assert "<img src=x onerror=alert(2)> {{ DATA }}" in shown and ATTACKS[1] in shown and ATTACKS[3] in shown


def test_the_page_of_every_run_opens_runs_and_compares_them(
    trained: RunLog, store: LocalStore, address: str, tmp_path: Path
) -> None:
    other = create_run(store, "other", {"seed": 1, "train": {"loss": {"kind": "cispo"}}})
    train_nothing_at_all = [entry.body for entry in list(trained.entries)[:2]]
    for body in train_nothing_at_all:
        other.append(body)
    create_run(store, "broken", {})
    store.put(f"runs/broken/log/{0:020d}.json", b"{")
    document, console = opened(address, tmp_path)
    page = _page(document)
    assert not console and 'href="#run=run"' in page and "0.333 → 0.667" in page
    assert "damaged" in page and f"runs/broken/log/{0:020d}.json cannot be read" in page
    document, console = opened(f"{address}#run=run", tmp_path)
    _assert_drawn(document, console)
    assert 'href="#run=run&amp;attempt=1.a%2F0"' in document and "Promote to champion" in document
    document, console = opened(f"{address}#compare=run,other", tmp_path)
    page = _page(document)
    assert not console and "<code>train.loss.kind</code>" in page and '<code>"cispo"</code>' in page
    assert re.search(r"<code>seed</code></td><td><code>0</code></td><td><code>1</code>", page)
    document, console = opened(f"{address}#run=run&attempt=0.a%2F0", tmp_path)
    assert not console and "<dialog" in document and NASTY.replace("\x00", "␀") in html.unescape(_page(document))


_AWAY_AND_BACK = """
(async () => {
  const seen = [];
  const until = async (what, is) => {
    while (!is()) await new Promise(done => setTimeout(done, 50));
    seen.push(what);
    await fetch("/toggle");
  };
  const note = () => document.querySelector("main > .note")?.textContent ?? "";
  await until("said at first", () => note() === "store s3://x: away");
  await until("drawn", () => document.querySelector("#overview[data-ready]"));
  await until("said of what is shown", () => note() === "What is shown may be old: store s3://x: away");
  await until("taken back", () => !note());
  return seen;
})()
"""


def test_a_page_says_that_the_store_is_away_and_goes_on_when_it_is_back(
    trained: RunLog, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away, version = [True], Pages.version

    def away_or(self: Pages, run: str) -> str:
        if is_away[0]:
            raise StoreError("store s3://x: away")
        return version(self, run)

    monkeypatch.setattr(Pages, "version", away_or)
    monkeypatch.setattr("cli.ui.server.is_away", lambda store, error: isinstance(error, StoreError))
    app = create_app(store)

    @app.get("/toggle")
    def toggle() -> None:
        is_away[0] = not is_away[0]

    with _served(app) as address, a_screen(tmp_path) as screen:
        told = screen(f"{address}#run=run", _AWAY_AND_BACK)
    assert told == ["said at first", "drawn", "said of what is shown", "taken back"]


_LAID_OUT = """
new Promise(done => {
  const look = () => document.querySelector(SELECTOR) ? done({
    wider: document.documentElement.scrollWidth - innerWidth,
    cut: [...document.querySelectorAll(".scroll")].some(box => box.scrollWidth > box.clientWidth + 1),
    paper: getComputedStyle(document.body).backgroundColor,
  }) : requestAnimationFrame(look);
  look();
})
"""


def test_every_page_fits_a_wide_screen_and_a_telephone_in_light_and_dark(
    trained: RunLog, store: LocalStore, address: str, tmp_path: Path
) -> None:
    """Nothing is wider than the screen; of the runs, what counts is on it without scrolling."""
    other = create_run(store, "another-run-of-this-store", {"seed": 1, "workflow": "examples/arithmetic.py:Arithmetic"})
    for entry in list(trained.entries)[:2]:
        other.append(entry.body)
    pages = {
        address: ".runs tbody tr",
        f"{address}#run=run": "#lineage .node",
        f"{address}#run=run&attempt=0.a%2F0": "dialog .talk",
        f"{address}#compare=run,another-run-of-this-store": "#settings table",
        write_report(trained, None).as_uri(): "#lineage .node",
    }
    with a_screen(tmp_path) as told:
        for (place, selector), width in itertools.product(pages.items(), (1400, 400)):
            script = _LAID_OUT.replace("SELECTOR", json.dumps(selector))
            light, dark = (told(place, script, width=width, scheme=scheme) for scheme in ("light", "dark"))
            assert light["wider"] <= 0 and dark["wider"] <= 0, (place, width)
            assert light["paper"] != dark["paper"] and (place != address or not light["cut"]), (
                place,
                width,
                light["cut"],
            )


_PROMOTED = """
new Promise(async done => {
  const frame = () => new Promise(requestAnimationFrame);
  const until = async find => { let found; while (!(found = find())) await frame(); return found; };
  const of = selector => document.querySelector(`#lineage ${selector}`), said = () => of("output")?.textContent;
  (await until(() => document.querySelector("#lineage"))).scrollIntoView();
  await until(() => of(".tools select"));
  if (VERSION !== null) {
    of("select").value = VERSION;
    of("select").dispatchEvent(new Event("change"));
    await until(() => of(".marked b")?.textContent === `policy ${VERSION}`);
  }
  const button = of("button.button"), reasons = [...document.querySelectorAll("#lineage .tools li")];
  if (BEFORE) await fetch(BEFORE);
  button?.click();
  if (button) await until(said);
  const champion = of(".finished")?.textContent ?? "";
  done({ reasons: reasons.map(li => li.textContent), button: Boolean(button), said: said() ?? "", champion });
})
"""


def test_a_policy_is_promoted_on_the_page_if_the_gate_lets_it(
    trained: RunLog, store: LocalStore, tmp_path: Path
) -> None:
    """Its reasons stand where the button would be; what comes between look and click is refused by the server."""
    commit(trained, "s2", seen("c", 0, version=2))
    train(trained, "0.c", engine_gap=1.5)
    app, asked = create_app(store), list[str]()

    @app.get("/in-between")
    def in_between() -> None:
        trained.append(Quarantine(shard_id="s1", reason="a disk broke"))

    with trainer_lock(trained), _served(app) as address, a_screen(tmp_path, asked) as told:  # MLflow hears of it later

        def click(version: str | None, *, before: str = "") -> Any:
            script = _PROMOTED.replace("VERSION", json.dumps(version)).replace("BEFORE", json.dumps(before))
            return told(f"{address}#run=run", script)

        refused = click(None)
        assert "step 3: engine and trainer differed by 1.5 nats per token" in refused["reasons"][0], refused
        assert not refused["button"] and not asked
        late = click("2", before="/in-between")
        assert asked == ["Make policy 2 of run run the champion?"] and late["reasons"] == []
        assert "step 2 trained on shard s1, quarantined since: a disk broke" in late["said"] and not late["champion"]
        assert "champion" not in trained.refresh().aliases
        passed = click("0")
        assert asked[1:] == ["Make policy 0 of run run the champion?"]
        assert passed["champion"] == "this is the champion" and "with its next step" in passed["said"]
        assert trained.refresh().aliases["champion"].version == 0


def test_the_token_of_the_address_opens_the_page_and_without_it_the_page_asks(
    store: LocalStore, tmp_path: Path
) -> None:
    create_run(store, "run", {})
    with _served(create_app(store, token="a-long-token")) as address:
        document, _ = opened(address, tmp_path)
        assert "wants the token" in _page(document) and "#run=run" not in _page(document)
        document, _ = opened(f"{address}#token=a-long-token", tmp_path)
        assert 'href="#run=run"' in _page(document) and "a-long-token" not in document


def test_the_page_follows_a_run_that_grows(trained: RunLog, store: LocalStore, tmp_path: Path) -> None:
    """The run takes a step whenever the page looks at it again."""
    looks, app = 0, create_app(store)

    @app.middleware("http")
    async def grow(request: Request, answer: Callable[[Request], Any]) -> Any:
        nonlocal looks
        if request.url.path.endswith("/overview"):
            looks += 1
            if 1 < looks <= 4:
                commit(trained, f"s{looks}", seen(f"new{looks}", 0))
                train(trained, f"0.new{looks}", loss=4.0)
        return await answer(request)

    with _served(app) as address:
        document, console = opened(f"{address}#run=run", tmp_path)
    _assert_drawn(document, console)
    steps = re.search(r"optimizer steps</span><b>(\d+)</b>", document)
    assert steps is not None and 2 < int(steps[1]) <= trained.refresh().step
