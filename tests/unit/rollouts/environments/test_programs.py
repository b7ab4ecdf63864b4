"""A forked program is to its surroundings what it is when Python is started with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from rollouts.environments.programs import Launcher, LauncherEnded, Program, start_program

pytestmark = pytest.mark.server
ABOUT = """
import json, os, sys
found = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "input": sys.stdin.read()}
print(json.dumps(found | {"variables": dict(os.environ), "leader": os.getpgrp() == os.getpid(), "folder": os.getcwd()}))
print("to the other", file=sys.stderr)
"""


@contextlib.asynccontextmanager
async def _launcher(*modules: str) -> AsyncIterator[Launcher]:
    launcher = Launcher(modules)
    try:
        yield launcher
    finally:
        launcher.close()


async def _end(starting: Awaitable[Program]) -> tuple[int, str, str]:
    """Exit status, output and errors of a program."""
    program = await starting
    assert program.stdout is not None and program.stderr is not None
    output, errors, status = await asyncio.gather(program.stdout.read(), program.stderr.read(), program.wait())
    return status, output.decode(), errors.decode()


def _script(folder: Path, text: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(text)
    return [sys.executable, str(file)]


async def test_a_forked_program_finds_what_it_finds_when_it_is_started(tmp_path: Path):
    command = [*_script(tmp_path, ABOUT), "--word", "two words", "ß"]
    environment = {**os.environ, "OPENAI_API_KEY": "k"}
    async with _launcher("json") as launcher:
        forked, started = [await _end(start(command, environment)) for start in (launcher.start, start_program)]
    assert (forked[0], forked[2]) == (started[0], started[2]) == (0, "to the other\n")
    assert json.loads(forked[1]) == json.loads(started[1])
    assert json.loads(forked[1])["variables"]["OPENAI_API_KEY"] == "k"


async def test_how_it_ended_is_known(tmp_path: Path):
    async with _launcher() as launcher:
        for text, status, errors in [
            *(("pass", 0, ""), ("raise SystemExit(3)", 3, ""), ("raise SystemExit('no question')", 1, "no question\n")),
            ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
            ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ]:
            ended = await _end(launcher.start(_script(tmp_path, text), dict(os.environ)))
            assert ended[0] == status and ended[2].endswith(errors), text


async def test_what_is_preloaded_is_imported_once_and_each_program_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "slow_library.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\nused = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "import random, slow_library\nslow_library.used.append(1)\nprint(len(slow_library.used), random.random())"
    command = _script(tmp_path, text)
    async with _launcher("slow_library") as launcher:
        ended = await asyncio.gather(*(_end(launcher.start(command, dict(os.environ))) for _ in range(3)))
    assert (tmp_path / "imports").read_text() == "."
    used, drawn = zip(*(output.split() for _, output, _ in ended), strict=True)
    assert used == ("1", "1", "1")
    assert len(set(drawn)) == 3, "each draws its own random numbers"


async def test_a_launcher_that_dies_takes_its_programs_with_it_and_the_next_has_another(tmp_path: Path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = f"import os, signal\nopen({str(gate)!r}).close()\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()"
    async with _launcher() as launcher:
        program = await launcher.start(_script(tmp_path, text), dict(os.environ))
        await asyncio.to_thread(gate.write_text, "")  # opened once the program does so
        assert program.stdout is not None
        assert await program.stdout.read() == b"", "its output ends with it"
        with pytest.raises(LauncherEnded, match="has ended"):
            await program.wait()
        ended = None
        while ended is None:
            with contextlib.suppress(LauncherEnded):  # its end is known in a moment
                ended = await _end(launcher.start(_script(tmp_path, "print('again')"), dict(os.environ)))
            await asyncio.sleep(0)
    assert ended == (0, "again\n", "")


async def test_only_a_script_of_this_python_can_be_forked_and_only_with_modules_that_are_there(tmp_path: Path):
    async with _launcher("no_such_module") as launcher:
        for command in (["/bin/echo", "a.py"], [sys.executable], [sys.executable, "-m", "module"]):
            with pytest.raises(ValueError, match="is to be"):
                await launcher.start(command, {})
        with pytest.raises(LauncherEnded):
            await launcher.start(_script(tmp_path, ""), dict(os.environ))
