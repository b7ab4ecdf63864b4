"""A real PostgreSQL for the tests: Debian's, one throw-away cluster on loopback.

In: nothing. Out: a port, a user and a password, for as long as the context lasts.

    install what is missing (Debian package, as root) ─▶ initdb ─▶ postgres ─▶ … ─▶ stopped and deleted again

PostgreSQL refuses to run as root: there it runs as the account its package made, elsewhere as the tests' own user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from infra.ports import free_port
from tests import apt

USER = "millrace"
START_SECONDS = 60


class PostgresFailed(Exception):
    """PostgreSQL is installed and does not start; the message ends with its log."""


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """Run a server in a folder of its own, which is deleted at the end.

    Raises `tests.apt.CannotInstall` where PostgreSQL cannot be had, and `PostgresFailed` where it breaks.
    """
    programs = install()
    # Not below pytest's folder: only its owner may look into that.
    folder = Path(tempfile.mkdtemp(prefix="millrace-postgres-"))
    server = Postgres(programs, folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


def install() -> Path:
    """The folder of the newest PostgreSQL's programs, after bringing the Debian package if there is none.

    Raises `tests.apt.CannotInstall`.
    """
    for attempt in range(2):
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda file: int(file.parts[-3]))
        if found:
            return found[-1].parent
        if on_path := shutil.which("initdb"):
            return Path(on_path).resolve().parent
        if attempt == 0:
            apt.install(["postgresql"])
    raise apt.CannotInstall("the package postgresql is installed and has no initdb")


class Postgres:
    """One cluster and its server."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.port = free_port()
        self.password = secrets.token_hex(24)
        self._programs = programs
        self._folder = folder
        self._account = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make the cluster and start its server; `USER` owns it and needs the password."""
        password_file = self._folder / "password"
        password_file.write_text(self.password)
        if self._account:
            for path in (self._folder, password_file):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        data = self._folder / "data"
        options = ["--auth=scram-sha-256", f"--pwfile={password_file}", "--encoding=UTF8", "--no-locale", "--no-sync"]
        self._run(str(self._programs / "initdb"), f"--pgdata={data}", f"--username={USER}", *options)
        # A test run that is killed takes its server with it.
        dies_with_us = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        command = [str(self._programs / "postgres"), "-D", str(data), "-p", str(self.port)]
        with open(self._folder / "postgres.log", "wb") as log:
            self._server = subprocess.Popen(
                [*dies_with_us, *command, *(part for setting in settings for part in ("-c", setting))],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._identity,
            )
        deadline = time.monotonic() + START_SECONDS
        ready = [str(self._programs / "pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        while subprocess.run(ready).returncode != 0:
            if self._server.poll() is not None or time.monotonic() > deadline:
                log_text = (self._folder / "postgres.log").read_text(errors="replace")
                raise PostgresFailed(f"PostgreSQL did not come up in {START_SECONDS} s\n{log_text[-2000:]}")
            time.sleep(0.05)  # polling a port: nothing would wake us

    def sql(self, statement: str, *, database: str) -> str:
        """What `psql` prints for a statement, unaligned and without headers."""
        return self._run(
            str(self._programs / "psql"),
            *("--no-psqlrc", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"),
            *("--host=127.0.0.1", f"--port={self.port}", f"--username={USER}", f"--dbname={database}"),
            f"--command={statement}",
        ).strip()

    def stop(self) -> None:
        """Stop the server and wait until it is gone."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)  # fast: open connections are closed
        try:
            self._server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    @property
    def _identity(self) -> dict[str, object]:
        if self._account is None:
            return {}
        return {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            cwd=self._folder,
            env={**os.environ, "PGPASSWORD": self.password},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            **self._identity,
        )
        if done.returncode != 0:
            raise PostgresFailed(f"{Path(program).name} failed: {done.stderr[-1000:]}")
        return done.stdout
