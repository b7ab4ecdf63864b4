"""A forked program is to its surroundings what it is when Python is started with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from rollouts.environments.programs import Launcher, LauncherEnded, Program, start_program

Made = TypeVar("Made")

ABOUT = """
import json, os, sys
found = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "input": sys.stdin.read()}
print(json.dumps(found | {"variables": dict(os.environ), "leader": os.getpgrp() == os.getpid(), "folder": os.getcwd()}))
print("to the other", file=sys.stderr)
"""


def forked(use: Callable[[Launcher], Awaitable[Made]], *modules: str) -> Made:
    async def inside() -> Made:
        launcher = Launcher(modules)
        try:
            return await use(launcher)
        finally:
            launcher.close()

    return asyncio.run(inside())


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


def test_a_forked_program_finds_what_it_finds_when_it_is_started(tmp_path: Path):
    command = [*_script(tmp_path, ABOUT), "--word", "two words", "ß"]
    environment = {**os.environ, "OPENAI_API_KEY": "k"}

    async def both(launcher: Launcher) -> list[tuple[int, str, str]]:
        return [await _end(start(command, environment)) for start in (launcher.start, start_program)]

    (status, output, errors), started = forked(both, "json")
    assert (status, errors) == (0, "to the other\n") and (status, errors) == (started[0], started[2])
    assert json.loads(output) == json.loads(started[1])
    assert json.loads(output)["variables"]["OPENAI_API_KEY"] == "k"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no question')", 1, "no question\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_how_it_ended_is_known(tmp_path: Path, text: str, status: int, said: str):
    ended = forked(lambda launcher: _end(launcher.start(_script(tmp_path, text), dict(os.environ))))
    assert ended[0] == status and ended[2].endswith(said)


def test_what_is_preloaded_is_imported_once_and_each_program_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "slow_library.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\nused = []\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "import random, slow_library\nslow_library.used.append(1)\nprint(len(slow_library.used), random.random())"

    async def three(launcher: Launcher) -> list[tuple[int, str, str]]:
        command = _script(tmp_path, text)
        return await asyncio.gather(*(_end(launcher.start(command, dict(os.environ))) for _ in range(3)))

    lines = [output.split() for _, output, _ in forked(three, "slow_library")]
    assert (tmp_path / "imports").read_text() == "."
    assert [used for used, _ in lines] == ["1"] * 3
    assert len({drawn for _, drawn in lines}) == 3, "each draws its own random numbers"


def test_a_launcher_that_dies_takes_its_programs_with_it_and_the_next_has_another(tmp_path: Path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    text = f"import os, signal\nopen({str(gate)!r}).close()\nos.kill(os.getppid(), signal.SIGKILL)\nsignal.pause()"

    async def twice(launcher: Launcher) -> tuple[int, str, str]:
        program = await launcher.start(_script(tmp_path, text), dict(os.environ))
        await asyncio.to_thread(gate.write_text, "")  # opened once the program does so
        assert program.stdout is not None
        assert await program.stdout.read() == b"", "its output ends with it"
        with pytest.raises(LauncherEnded, match="has ended"):
            await program.wait()
        while True:
            try:
                return await _end(launcher.start(_script(tmp_path, "print('again')"), dict(os.environ)))
            except LauncherEnded:  # its end is known in a moment
                await asyncio.sleep(0)

    assert forked(twice) == (0, "again\n", "")


def test_a_module_that_is_not_there_ends_it_with_a_sentence(tmp_path: Path):
    with pytest.raises(LauncherEnded):
        forked(lambda launcher: launcher.start(_script(tmp_path, ""), dict(os.environ)), "no_such_module")


@pytest.mark.parametrize("command", [["/bin/echo", "a.py"], [sys.executable], [sys.executable, "-m", "module"]])
def test_only_a_script_of_this_python_can_be_forked(command: list[str]):
    with pytest.raises(ValueError, match="is to be"):
        forked(lambda launcher: launcher.start(command, {}))
