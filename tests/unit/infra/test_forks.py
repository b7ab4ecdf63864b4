"""Workers as forks: they are what who asked for them would be, and end with the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra import forks
from infra.forks import SOURCE, imported_early

_ASKS = [sys.executable, str(Path(forks.__file__).parent / "ray" / "forked_worker.py")]
_WORKER = """
import json, multiprocessing, os, sys, tempfile
from infra.forks import become_fork_server

def allocator():
    return "jemalloc" if "libjemalloc" in open("/proc/self/maps").read() else "glibc"

def child(queue):
    queue.put(["early" in sys.modules, os.getpgrp(), tempfile.gettempdir(), allocator()])

if __name__ == "__main__":
    facts = {"early": "early" in sys.modules, "ray": "ray" in sys.modules, "argv": sys.argv[1:], "folder": os.getcwd()}
    facts |= {"allocator": allocator(), "preloaded": os.environ.get("LD_PRELOAD")}
    facts |= {"X": os.environ["X"], "pid": os.getpid(), "source": os.getppid(), "served": become_fork_server()}
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    print(json.dumps(facts | {"child": queue.get(), "exit": process.exitcode, "group": os.getpgrp()}), flush=True)
    sys.stdin.read()
"""


def test_a_worker_and_its_children_have_what_the_source_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(_WORKER)
    (tmp_path / "early.py").write_text("import tempfile\ntempfile.gettempdir()")
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{Path(forks.__file__).parents[1]}{os.pathsep}{tmp_path}")
    environment = {**os.environ, "X": "y", "TMPDIR": str(scratch)}
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")  # as vLLM and users set it: jemalloc comes behind
    environment["LD_PRELOAD"] = "libm.so.6"
    read, write = os.pipe()
    with imported_early(["early"], log=tmp_path / "imports.log"):
        asking = [*_ASKS, str(tmp_path / "worker.py"), "--a=b", "--serialized-runtime-env-context={}", "--language=P"]
        environment[SOURCE] = os.environ[SOURCE]
        subprocess.run(asking, env=environment, cwd=tmp_path, stdout=write, stdin=subprocess.PIPE, check=True)
        os.close(write)
        with os.fdopen(read) as output:
            facts = json.loads(output.readline())
        source, group = psutil.Process(facts["source"]), facts.pop("group")
        assert source.ppid() == os.getpid()
    assert not source.is_running() and SOURCE not in os.environ
    assert group == facts.pop("pid") != facts.pop("source"), "a group of its own: Ray kills that of an ended worker"
    assert facts == {
        **{"early": True, "ray": False, "argv": ["--a=b"], "folder": str(tmp_path), "X": "y", "served": True},
        **{
            "allocator": "jemalloc",
            "preloaded": "libm.so.6",
            "child": [True, group, str(scratch), "jemalloc"],
            "exit": 0,
        },
    }


@pytest.mark.parametrize("name", [{}, {SOURCE: "millrace/forks/nobody"}])
def test_without_a_source_rays_own_file_runs(name: dict[str, str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != SOURCE} | name
    done = subprocess.run([*_ASKS, "--help"], env=environment, capture_output=True, text=True)
    assert "launch the worker" in done.stdout and "--language LANGUAGE" in done.stdout, done
