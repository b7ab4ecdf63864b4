"""A run that is damaged, or a folder that is no run, is shown with the reason, and every other run is served. A store
that does not keep writers apart is refused by every command that writes a log."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cli.operate.exporter import RunCollector
from cli.ui.data import Pages
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import ConditionRefused, LocalStore
from tasks.session import producing_session, reading_session
from tests.builders import BASE, a_config
from tests.unit.cli.builders import a_run_of_one_step, printed


def an_entry(kind: str, body: Any, written_at: Any = 1.0, number: int = 1) -> bytes:
    return json.dumps({"number": number, "kind": kind, "written_at": written_at, "body": body}).encode()


ALIAS = {"name": "champion", "version": 0, "checksum": ""}
POLICY = {"path": "p", "weights_sha256": "", "parent": 2}
ENTRY = f"log/{1:020d}.json"
DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    # what it is: (file of the run, its bytes or None for a folder, the reason)
    "no run": ("notes.txt", b"groceries", "it has no run.json"),
    "document cut off": ("run.json", b'{"run_id":', "run.json cannot be read"),
    "document is a list": ("run.json", b"[1, 2]", "run.json cannot be read"),
    "document without settings": ("run.json", b"{}", "run.json cannot be read: KeyError('config')"),
    "document with wrong settings": ("run.json", b'{"config": 7}', "run.json cannot be read"),
    "document of other bytes": ("run.json", b"\xff\xfe\x00", "run.json cannot be read"),
    "document is a folder": ("run.json", None, "Is a directory"),
    "settings of another type": ("run.json", b'{"config": {"evaluation": 7}}', "its values have the wrong types"),
    "entry is empty": (ENTRY, b"", f"{ENTRY} cannot be read"),
    "entry is a number": (ENTRY, b"7", f"{ENTRY} cannot be read"),
    "entry is a list": (ENTRY, b"[]", f"{ENTRY} cannot be read"),
    "entry is a folder": (ENTRY, None, "Is a directory"),
    "entry is deep": (ENTRY, b"[" * 100_000, f"{ENTRY} cannot be read"),
    "unknown kind": (ENTRY, an_entry("poem", {}), f"{ENTRY} cannot be read: KeyError('poem')"),
    "kind is a list": (ENTRY, an_entry(["step"], {}), f"{ENTRY} cannot be read"),  # type: ignore[arg-type]
    "body is a list": (ENTRY, an_entry("alias", []), f"{ENTRY} cannot be read"),
    "value of another type": (ENTRY, an_entry("alias", ALIAS | {"version": "0"}), f"{ENTRY} cannot be read"),
    "time is a word": (ENTRY, an_entry("alias", ALIAS, "noon"), f"{ENTRY} cannot be read"),
    "time is infinite": (ENTRY, an_entry("alias", ALIAS, float("inf")), "written_at = inf is no time"),
    "time is far": (ENTRY, an_entry("alias", ALIAS, 1e300), "written_at = 1e+300 is no time"),
    "another entry": (
        ENTRY,
        an_entry("alias", ALIAS, number=7),
        f"{ENTRY} cannot be read: ValueError('it is entry 7')",
    ),
    "half a copy": (ENTRY, an_entry("alias", {"name": "champion"}), "missing required field"),
    "policy without a step": (ENTRY, an_entry("policy", {**POLICY, "version": 3}), "policy version 3 has no step"),
    "document of a hand": (
        "run.json",
        b'{"config": {"retention": 7}, "folder": []}',
        "its values have the wrong types",
    ),
    "alias of no policy": (ENTRY, an_entry("alias", ALIAS | {"version": 9}), "policy version 9 is not in this log"),
    "quarantine of no shard": (ENTRY, an_entry("quarantine", {"shard_id": "x", "reason": ""}), "is not in this log"),
    "reader is a list": ("readers/1.json", b"[]", ""),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_costs_its_own_run_alone(what: str, store: LocalStore) -> None:
    name, data, reason = DAMAGES[what]
    a_run_of_one_step(store, {}, run_id="good")
    if what != "no run":
        create_run(store, "bad", {}).append(BASE)
    path = store.root / "runs" / "bad" / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if data is None else path.write_bytes(data)

    collected = {report["run"]: report["problem"] for report in json.loads(printed("gc --json --dry-run"))}
    assert collected["good"] == "" and collected["bad"] and reason in collected["bad"]
    if what == "reader is a list":  # it concerns retention alone
        return
    listed = {run["run"]: run for run in json.loads(printed("runs --json"))}
    assert listed["good"]["step"] == 1 and listed["good"]["damaged"] is None and reason in listed["bad"]["damaged"]
    table = printed("runs")
    assert "good" in table and f"bad is damaged: {listed['bad']['damaged']}" in table
    page = {run["run"]: run for run in Pages(store).runs()["runs"]}
    assert page["good"]["step"] == 1 and reason in page["bad"]["damaged"]
    for command in ("status bad", "report bad", "traj ls bad", "lineage bad", "promote bad"):
        shown = printed(command, status=2)
        assert "error: " in shown and (reason in shown or "no run 'bad'" in shown), command
    if what != "no run":
        assert "removed run bad" in printed("rm bad --yes") and store.names("runs") == ["good"]


def test_the_exporter_says_once_which_run_is_damaged(
    log: RunLog, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("runs/bad/run.json", b"[]")
    store.put("runs/notes.txt", b"groceries")
    registry = CollectorRegistry()
    registry.register(RunCollector(store))
    for _ in range(2):
        lines = generate_latest(registry).decode().splitlines()
        assert {'millrace_damaged{run="bad"} 1.0', 'millrace_damaged{run="notes.txt"} 1.0'} <= set(lines)
        assert 'millrace_damaged{run="run"} 0.0' in lines and 'millrace_policy_version{run="run"} 0.0' in lines
    assert [record.args[0] for record in caplog.records if record.args] == ["bad", "notes.txt"]
    store.put("runs/bad/run.json", store.get("runs/run/run.json"))
    assert 'millrace_damaged{run="bad"} 0.0' in generate_latest(registry).decode()


def test_every_command_that_writes_a_log_refuses_a_store_that_keeps_no_writers_apart(
    log: RunLog, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it does anything else: the log has no entry more, and the store no file."""

    def put(self: LocalStore, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    before = [file.key for file in store.walk("")]
    monkeypatch.setattr(LocalStore, "put_if_absent", put)
    for line in ("pause run", "resume run", "promote run", "rollback run", "rescore run --reward x:y", "gc --yes"):
        assert "lets a second writer replace what the first one wrote" in printed(line, status=2), line
    run = {"config": a_config(run="run"), "store": store.uri}
    with pytest.raises(ConditionRefused, match="second writer"):
        producing_session(**run, name="elsewhere")  # `produce`
    with pytest.raises(ConditionRefused, match="second writer"):
        asyncio.run(reading_session(**run, what="evaluate").__aenter__())  # `eval`
    assert [file.key for file in store.walk("")] == before
    printed("status run"), printed("runs"), printed("gc --dry-run")  # to look needs no such thing
