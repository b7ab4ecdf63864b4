"""What a run leaves for other users of the machine: no secret, no open port, no file outside of its state folder."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import re
import secrets
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from tests.conftest import PROJECT, SCRIPTED, Home
from tests.flows.indiscreet import CRASHES, PLANTED

NAMES = [
    *("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "GITHUB_PAT", "PGPASS", "PGPASSWORD"),
    *("GPG_PASSPHRASE", "DB_PASSWORD_PROD", "SMTP_PASS", "MLFLOW_TRACKING_PASSWORD", "WEBHOOK_SECRET", "AUTH_COOKIE"),
    *("SLACK_WEBHOOK_URL", "SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "STORAGE_SAS", "API_TOKEN_2"),
    *("SIGNING_PRIVATE_KEY", "DATABASE_URL", "MIRROR", "MILLRACE_TRACKING"),
]


class Watched:
    """The ports on which the processes of a command have listened."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.listening: set[tuple[str, str]] = set()
        """Kind of process, as the table in docs/security.md names it, and address."""

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run `millrace …` to its end; its status and what it said."""
        process = self._home.start(*arguments)
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(process, ended))
        watching.start()
        process.wait(600)
        ended.set()
        watching.join()
        return process.returncode, (self._home.path / "output.txt").read_text()

    def _watch(self, process: subprocess.Popen[str], ended: threading.Event) -> None:
        while not ended.wait(0.2):  # a sample: what listens, does so for seconds
            with contextlib.suppress(psutil.Error):
                self.look(psutil.Process(process.pid))

    def look(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            driver = process.cmdline()
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    ips = [c.laddr.ip for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                    words = member.cmdline()
                    # Of a process that ends, the kernel takes the words before the sockets; one that was just forked
                    # has both from its parent, until it executes its own program.
                    if words and (member == process or words != driver):
                        self.listening |= {(_kind(member.name(), words, driver), str(ip)) for ip in ips}


def _kind(name: str, words: list[str], driver: list[str]) -> str:
    if name in ("gcs_server", "raylet"):
        return {"gcs_server": "Ray's GCS", "raylet": "raylet"}[name]
    line = " ".join(words)
    marks = {
        "ray::Host": "worker",
        "ray::": "Ray's agents and idle workers",
        "ray/": "Ray's agents and idle workers",
    }
    marks |= {"prefect": "Prefect's server", "mlflow": "MLflow's server"}
    return next((kind for mark, kind in marks.items() if mark in line), "driver" if words == driver else line)


def _written(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file and what it says; databases row by row, and shards column by column."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        text = path.read_bytes().decode("latin-1")
        if text.startswith("SQLite format 3"):
            with contextlib.closing(sqlite3.connect(path)) as database:
                text += "\n".join(database.iterdump())
        if path.parent.name == "storage":  # errors that Prefect pickles
            text += base64.b64decode(text).decode("latin-1")
        if path.suffix == ".arrow":
            digest = 32 if path.parent.name == "segments" else 0  # bytes in front of the log's segments
            table = pa.ipc.open_file(pa.BufferReader(path.read_bytes()[digest:])).read_all()
            text += repr(table.to_pylist()) + repr(table.schema.metadata)
        yield path, text


@pytest.mark.server
def test_a_run_a_crash_and_a_report_write_no_secret_open_no_port_and_leave_nothing_outside(
    home: Home, services_home: Path, base_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    marks = [f"{name.lower().replace('_', '')}x{secrets.token_hex(8)}" for name in NAMES]
    values = dict(zip(NAMES, marks, strict=True))
    values["SIGNING_PRIVATE_KEY"] = f"-----BEGIN PRIVATE KEY-----\n{marks[-4]}\n-----END PRIVATE KEY-----"
    values["DATABASE_URL"] = f"postgresql://me:{marks[-3]}/with@slash@db.invalid/x"
    values["MIRROR"] = f"https://mirror.invalid/file?X-Amz-Signature={marks[-2]}&X-Amz-Expires=60"
    mlflow = next(s for s in json.loads((services_home / "services.json").read_text()) if s["name"] == "mlflow")
    values["MILLRACE_TRACKING"] = mlflow["url"].replace("://", f"://me:{marks[-1]}%2Fwith@", 1)
    elsewhere = [tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("t")]
    home.environment |= {**values, PLANTED: json.dumps(NAMES)}
    home.environment |= {"HOME": str(elsewhere[0]), "TMPDIR": str(elsewhere[1])}
    watched = Watched(home.alone())  # looks at what is below the command
    train = ["train", str(SCRIPTED), f"model={base_model}", "workflow=tests.flows.indiscreet:Indiscreet", "run=told"]
    train += [
        "batch_size=2",
        "evaluation.every=0",
        "train.loss.kind=custom",
        "train.loss.path=tests.flows.indiscreet:loss",
    ]

    assert watched.run(*train, "steps=1")[0] == 0, home.said()
    home.environment[CRASHES] = "yes"
    status, said = watched.run(*train, "steps=2")
    assert status != 0
    for command in ("status", "report", "traj ls --failed"):
        said += home.run(*command.split(), "told").stdout

    places = [home.path, services_home, *elsewhere]
    written = [(path, text) for place in places for path, text in _written(place)]
    assert not [(str(path), mark) for path, text in written for mark in marks if mark in text]
    assert not [mark for mark in marks if mark in said]
    told = {path.suffix for path, text in written if "refused: ***" in text}
    assert {".txt", ".arrow"} <= told, "the rest was said: on the terminal, and with the failed attempts"

    for service in json.loads((services_home / "services.json").read_text()):
        watched.look(psutil.Process(service["pid"]))
    table = re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \| (?:every run|`millrace up`) \|", (PROJECT / "docs/security.md").read_text(), re.M
    )
    assert {kind for kind, _ in watched.listening} == {kind for kind, _ in table}
    assert all(ipaddress.ip_address(a.removeprefix("::ffff:")).is_loopback for _, a in watched.listening), (
        watched.listening
    )

    for keys in (services_home / "prefect", home.path / "prefect"):
        assert keys.stat().st_mode & 0o077 == 0

    left = [path for folder in elsewhere for path in folder.rglob("*")]
    assert not left, "the run takes away what it has there"
