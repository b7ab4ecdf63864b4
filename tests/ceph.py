"""A real S3 server for the tests: Ceph's object gateway on loopback, one monitor, one OSD in memory, one gateway.

In: an empty folder. Out: the AWS variables that lead to the server, for as long as the context lasts.

    install what is missing (Debian packages, as root) ─▶ monitor ─▶ OSD ─▶ gateway ─▶ user ─▶ … ─▶ all stopped again

Ports are free ones and everything lies in the folder, so two can run at once. It takes 10 s and 200 MB of memory.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from infra.ports import free_port
from tests import apt

PACKAGE_OF = {
    "ceph-mon": "ceph-mon",
    "ceph-osd": "ceph-osd",
    "radosgw": "radosgw",
    "radosgw-admin": "radosgw",
    "ceph": "ceph-common",
    "monmaptool": "ceph-common",
}
START_SECONDS = 120
USER = "tests"


class CephFailed(Exception):
    """Ceph is installed and does not start; the message ends with its log."""


@contextlib.contextmanager
def ceph_server(folder: Path) -> Iterator[Ceph]:
    """Run a server in an empty folder.

    Raises `tests.apt.CannotInstall` where Ceph cannot be had, and `CephFailed` where it breaks.
    """
    install()
    ceph = Ceph(folder)
    try:
        ceph.start()
        yield ceph
    finally:
        ceph.stop()


def install() -> None:
    """Bring the Debian packages that are missing. Raises `tests.apt.CannotInstall`."""
    missing = {package for program, package in PACKAGE_OF.items() if not shutil.which(program)}
    if missing:
        apt.install(sorted(missing))


class Ceph:
    """One cluster and its three daemons."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": f"AK{secrets.token_hex(8).upper()}",
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons one after another and make the user."""
        monitor_port = free_port()
        cluster_id = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "run"):
            (self.folder / name).mkdir()
        (self.folder / "ceph.conf").write_text(self._configuration(cluster_id, monitor_port))

        address = f"[v1:127.0.0.1:{monitor_port}]"
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", cluster_id, "monmap")
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap")
        self._daemon("ceph-mon", "-i", "a")

        osd_id = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd_id, "0")  # waits for the monitor
        # Of its own accord the OSD enters the map too, but sometimes before it knows which cluster it is in.
        self._run("ceph", "osd", "crush", "add", "osd.0", "1", "host=here", "root=default")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id)
        self._daemon("ceph-osd", "-i", "0")
        self._wait("the OSD", self._has_an_osd)

        self._daemon("radosgw", "-n", "client.rgw")
        self._wait("the gateway", self._answers)
        keys = [self.variables["AWS_ACCESS_KEY_ID"], self.variables["AWS_SECRET_ACCESS_KEY"]]
        self.admin(
            "user", "create", f"--uid={USER}", "--display-name=tests", f"--access-key={keys[0]}", f"--secret={keys[1]}"
        )

    def admin(self, *arguments: str) -> str:
        """Run `radosgw-admin`, for users and quotas."""
        return self._run("radosgw-admin", *arguments)

    def stop(self) -> None:
        """Stop what was started, the gateway first, and wait until it is gone."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _configuration(self, cluster_id: str, monitor_port: int) -> str:
        return f"""\
[global]
fsid = {cluster_id}
mon_host = [v1:127.0.0.1:{monitor_port}/0]
mon_initial_members = a
ms_bind_msgr2 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
osd_class_update_on_start = false
osd_max_object_name_len = 256
osd_max_object_namespace_len = 64
osd_objectstore = memstore
memstore_device_bytes = 4294967296
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_max_pg_per_osd = 1000
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
run_dir = {self.folder}/run
admin_socket = {self.folder}/run/$name.asok
log_file = {self.folder}/$name.log
pid_file = {self.folder}/run/$name.pid
mon_data = {self.folder}/mon
osd_data = {self.folder}/osd
keyring = {self.folder}/keyring
rgw_data = {self.folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{self.port}
rgw_relaxed_region_enforcement = true
rgw_thread_pool_size = 32
debug_rgw = 0
debug_mon = 0
rgw_bucket_quota_ttl = 0
[mon.a]
mon_addr = 127.0.0.1:{monitor_port}
"""

    def _run(self, program: str, *arguments: str) -> str:
        command = [program, "-c", "ceph.conf", *arguments] if program != "monmaptool" else [program, *arguments]
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                done = subprocess.run(
                    command,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=START_SECONDS,
                )
            except subprocess.TimeoutExpired:
                reason = f"{program} {arguments[0]} did not end within {START_SECONDS} s"
                raise CephFailed(f"{reason}{self._logs()}") from None
            # A monitor that has just begun may say so, of a command that it has not carried out.
            if "problem getting command descriptions" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if done.returncode != 0:
            raise CephFailed(f"{program} {arguments[0]} failed: {done.stderr[-1000:]}{self._logs()}")
        return done.stdout

    def _daemon(self, program: str, *arguments: str) -> None:
        # A test run that is killed takes its daemons with it.
        dies_with_us = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with open(self.folder / f"{program}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*dies_with_us, program, "-c", "ceph.conf", *arguments, "-f"],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_there():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise CephFailed(f"{what} did not come up in {START_SECONDS} s; ended: {ended}{self._logs()}")
            time.sleep(0.1)

    def _has_an_osd(self) -> bool:
        return "1 up" in self._run("ceph", "osd", "stat")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.variables["AWS_ENDPOINT_URL"], timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "".join(f"\n== {file.name}\n{file.read_text(errors='replace')[-800:]}" for file in files)
