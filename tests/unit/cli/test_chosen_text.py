"""What a policy, a task or a store's writer chose is shown as its characters: on a terminal, on a page, in Markdown."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from settings.redaction import as_markdown, as_markdown_code, printable
from storage.log.entries import Alias, End, Pause, Policy, Quarantine, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.digests import DIGEST_FILE, verify_folder
from storage.objects.object_store import LocalStore
from storage.records import Message, ToolCall
from storage.tracking.descriptions import describe_policy, describe_run
from tasks.prefect.run_page import summary
from tests.builders import a_group, a_step, a_trajectory, a_turn
from tests.unit.cli.builders import an_evaluation, commit, typed

SHOWN = "[bold blue on white]MARK[/] :skull: <script>![x](http://x)|`"
CHOSEN = f"\x1b]0;title\x07\x1b[2J\x9b5m\u202e{SHOWN}\r\x08"
OWN_COLOURS = re.compile(
    r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\|\x1b\[\?25[hl]|\x1b\[[0-9]*[AK]|\r(?=\x1b)|\x1b\[1A\x1b\[2K"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> RunLog:
    """A run whose every text says `CHOSEN`, in a folder whose name is markup."""
    store = LocalStore(tmp_path_factory.mktemp("hostile") / "store")
    store.put_folder(base_model, "models/base", last=DIGEST_FILE)
    log = create_run(store, "run", {"workflow": CHOSEN, "model": CHOSEN})
    log.append(Session(id=CHOSEN, code_version=CHOSEN, host=CHOSEN))
    digest = verify_folder(store.root / "models" / "base")
    log.append(Policy(version=0, path="models/base", weights_sha256=digest, parent=None))
    said = [Message(role=role, content=CHOSEN, is_completion=role == "assistant") for role in ("user", "assistant")]
    call = ToolCall(name=CHOSEN, arguments=CHOSEN, result=CHOSEN, seconds=1.0, failed=True)
    turns, parts = [a_turn(tool_calls=[call]), a_turn(sequence_idx=1)], {CHOSEN: 1.0}
    good = [
        a_trajectory(reward, attempt=attempt, turns=turns, messages=said, reward_parts=parts)
        for attempt, reward in enumerate((1.0, 0.0))
    ]
    failed = a_trajectory(None, attempt=2, turns=[], status="env_error", error=CHOSEN)
    commit(log, "s0", a_group(0, trajectories=[*good, failed]))
    step = a_step(log.state, trained=["0.task0"])
    log.append(dataclasses.replace(step, metrics={"peak_memory_bytes": 1.0, "reward": 0.5}))
    commit(log, "s1", a_group(1))
    log.append(Quarantine(shard_id="s1", reason=CHOSEN))
    log.append(Alias(name=CHOSEN, version=1, checksum=CHOSEN))
    log.append(an_evaluation(split=CHOSEN, failures={CHOSEN: 1}, num_failed=1))
    log.append(Pause(reason=CHOSEN))
    log.append(End(outcome="failed", reason=CHOSEN, session_id=CHOSEN))
    (store.root / "runs" / "[bold blue on white]MARK[/]" / "log").mkdir(parents=True)
    return log


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        *("runs", "status run", "gc run --dry-run", "lineage run --policy 0", "lineage run --policy 1"),
        *("lineage run --prompt task0", "pause run", "traj ls run", "traj ls run --failed", "traj show run 0.task0/0"),
        *("traj show run 0.task0/2", "traj diff run 0.task0/0 0.task0/1", "traj stats run --by status"),
        *("traj stats run --json", "traj sql run 'FROM trajectories'", "traj sql run 'FROM turns' --json"),
        *("traj sql run 'SELECT error FROM nowhere'", "status run --json", "runs --json"),
    ],
)
def test_chosen_text_neither_steers_a_terminal_nor_is_markup(
    hostile: RunLog, line: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MILLRACE_STORE", hostile.store.uri)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    shown = typed(line, status=2 if "nowhere" in line else 0, columns=200 if is_terminal else None).output
    plain = OWN_COLOURS.sub("", shown) if is_terminal else shown
    assert printable(plain) == plain
    assert "\x1b[1;34;47m" not in shown and "💀" not in shown
    if not is_terminal:
        assert plain.count("MARK") == plain.count("[bold blue on white]MARK[")
        assert "MARK" in plain or "nowhere" in line or "json" in line or "--policy" in line


def test_an_error_is_shown_as_its_characters():
    shown = typed("status", f"x{CHOSEN}", status=2).output
    assert printable(shown) == shown and "[bold blue on white]MARK[/]" in shown.replace("\n", "")


def test_markdown_shows_chosen_text_as_it_is(hostile: RunLog):
    config = {"workflow": CHOSEN, "model": CHOSEN}
    session = Session(id="s", code_version=CHOSEN)
    pages = [
        summary(hostile, config, steps=3, mlflow="", mlflow_run=""),
        describe_run(hostile, config),
        describe_policy(hostile, 1, session=session, config_sha256="0"),
    ]
    for page in pages:
        assert "MARK" in page and printable(page) == page
        outside = re.sub(r"`[^`]*`", "", re.sub(r"\\.", "", page))  # neither what is escaped nor code
        assert "<script>" not in outside and "](http" not in outside


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b *c* [d](http://e) <img src=x> | `f`", r"a\_b \*c\* \[d\](http\://e) &lt;img src=x&gt; \| \`f\`"),
        ("two\nlines\x1b", "two lines·"),
        ("www.x.org ~~no~~ \\", r"www\.x.org \~\~no\~\~ \\"),
    ],
)
def test_text_of_markdown(text: str, shown: str):
    assert as_markdown(text) == shown


def test_spaces_and_joined_letters_stay():
    text = "1\u00a0000 \u3000 \u06cc\u200c\u0647 \U0001f469\u200d\U0001f52c\n\t"
    assert printable(text) == text
    assert printable("\u202ea\u2066b\ufeffc\u2028d\x7f\x85") == "·a·b·c·d··"


def test_code_of_markdown_cannot_be_left():
    assert as_markdown_code("a` | <b>\n") == "`a' \\| <b>`"
