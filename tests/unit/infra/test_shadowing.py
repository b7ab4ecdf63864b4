"""User files with the names of our packages, or of Python's modules: ours and Python's are found first, in every
process, and those with a name of ours are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace
from infra.user_code import PRODUCT, load_object, own_command
from settings.errors import OWN_PACKAGES

ENVIRONMENT = """
from millrace import Task, Workflow, exact, sandboxed

class Game(Workflow):
    def tasks(self, split):
        return [Task(id="1", prompt="1", answer="1")]

def reward(reply, answer):
    return exact(reply, answer)

@sandboxed(seconds=20)
def double(number: int) -> int:
    return 2 * number
"""
PLAY = """
import asyncio
from infra.user_code import load_object
from rollouts.rewards.scoring import RewardPool

async def play():
    async with RewardPool(num_processes=1, timeout=60) as pool:
        return (await pool.score(load_object("game:reward"), "1", "1")).reward

print(load_object("game:Game")().tasks("train")[0].id, asyncio.run(play()), load_object("game:double")(4))
"""


def _write(folder: Path, **texts: str) -> Path:
    """Files of a folder, by name without `.py`; `__` stands for a folder."""
    for name, text in texts.items():
        file = folder / (name.replace("__", "/", 1) + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def _python(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*([path] if path else []), PRODUCT]))}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.server
def test_our_imports_find_ours_in_the_driver_in_reward_processes_and_in_sandboxes(tmp_path: Path):
    wrong = "raise RuntimeError('the wrong one')\n"
    work = _write(tmp_path / "work", game=ENVIRONMENT, **{name: wrong for name in (*OWN_PACKAGES[1:], "json", "queue")})
    path = _write(tmp_path / "path", **{f"{name}____init__": wrong for name in OWN_PACKAGES[1:]})
    done = _python(work, *own_command("builtins:str")[1:-1], own_command("builtins:str")[-1] + PLAY, path=path)
    assert done.stdout == "1 1.0 8\n", done.stderr
    done = _python(work, "-P", "-m", "millrace", "status", "nothing", "--store", str(tmp_path / "store"), path=path)
    assert done.returncode == 2 and "no run 'nothing'" in done.stderr


def test_a_script_that_imported_its_own_file_first_is_told(tmp_path: Path):
    assert ("millrace", *millrace._PACKAGES) == OWN_PACKAGES
    done = _python(_write(tmp_path, settings="", script="import settings, millrace\n"), "script.py")
    assert f"ImportError: {tmp_path}/settings.py is imported as 'settings', a package of Millrace" in done.stderr


@pytest.mark.parametrize(
    ("files", "theirs"),
    [
        ({"game": "from tasks import problems\n", "tasks": "problems = []\n"}, "tasks.py"),
        ({"game": "import tasks\n", "tasks": "problems = []\n"}, "tasks.py"),
        ({"game": "import helper_of_game\n", "helper_of_game": "import tasks as t\n", "tasks": ""}, "tasks.py"),
        ({"game": "import storage.problems\n", "storage__problems": ""}, "storage"),
        ({"game": "from storage import problems\n", "storage____init__": "", "storage__problems": ""}, "storage"),
    ],
)
@pytest.mark.parametrize("by_file", [True, False])
def test_a_file_of_theirs_that_is_shadowed_is_named_with_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], theirs: str, by_file: bool
):
    _write(tmp_path, **files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("game", "helper_of_game"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError) as raised:
        load_object("game.py:Game" if by_file else "game:Game")
    named = f"{tmp_path}/{theirs} has the name of a package of Millrace, which is found first: rename it"
    assert named in str(raised.value)


def test_a_workflow_in_a_file_that_is_shadowed_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(_write(tmp_path, tasks="class Game: ...\n", flows____init__="", flows__game="class Game: ...\n"))
    monkeypatch.syspath_prepend(tmp_path)
    for path, theirs in (("tasks:Game", "tasks.py"), ("flows.game:Game", "flows")):
        named = f"{theirs} has the name of a package of Millrace.* rename it, to my_{theirs}"
        with pytest.raises(ValueError, match=named):
            load_object(path)


_MOVED = [
    "from rollouts.workflow import RolloutWorkflow",
    "from rollouts.rewards import exact",
    "import rollouts.tools",
]


@pytest.mark.parametrize("code", _MOVED)
def test_a_name_of_ours_that_has_moved_says_where_it_is(tmp_path: Path, code: str):
    (tmp_path / "rollouts").mkdir()  # of data, and no module of the user's
    file = _write(tmp_path, game=f"\n{code}\n") / "game.py"
    says = rf"'rollouts\..*in {file}, line 2; import it from `millrace`, whose names docs"
    with pytest.raises(ValueError, match=says):
        load_object(f"{file}:Game")


def test_an_import_path_of_ours_that_has_moved_says_where_it_is_or_loads_if_a_run_recorded_it():
    for path in ("rollouts.rewards:exact", "rollouts.tools:tool", "millrace:Workflows"):
        with pytest.raises(ValueError, match="import it from `millrace`"):
            load_object(path)
    assert load_object("rollouts.verifiers_environments:VerifiersWorkflow") is millrace.VerifiersWorkflow
