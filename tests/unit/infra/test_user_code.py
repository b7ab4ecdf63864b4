"""User code loads by path, in any process; a path that does not says what is wrong and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.user_code import absolute_path, load_object, path_of, source_file, source_sha256
from rollouts.rewards.answers import exact
from rollouts.rewards.scoring import score
from rollouts.workflow import Workflow
from storage.objects.digests import sha256_of_file, sha256_of_json

FILE = """
class Game:
    class Board:
        size = 9

def reward(reply):
    return 1.0
"""


SCRIPT = """
import asyncio
from infra.user_code import load_object
from rollouts.rewards.scoring import RewardPool

double = load_object("my_rewards:double")

async def play():
    async with RewardPool(num_processes=1, timeout=30) as pool:
        return (await pool.score(double, 2)).reward

print(double(1), asyncio.run(play()))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(FILE)
    return tmp_path / "game.py"


def test_a_module_a_file_and_a_nested_name_load_each_file_once(file: Path, tmp_path: Path):
    assert load_object("rollouts.workflow:Workflow") is Workflow
    assert load_object(f"{file}:Game.Board").size == 9
    assert load_object(f"{file}:Game") is load_object(f"{file}:Game")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "game.py").write_text("class Game:\n    pass\n")
    assert load_object(f"{file}:Game") is not load_object(f"{tmp_path}/other/game.py:Game")


def test_another_process_finds_the_same_object_by_its_path(file: Path, monkeypatch: pytest.MonkeyPatch):
    reward = load_object(f"{file}:reward")
    load_object(f"{Path(__file__).parents[3]}/examples/arithmetic.py:Arithmetic")  # which lies in our own folder
    assert path_of(reward) == f"{file}:reward"
    assert path_of(exact) == "rollouts.rewards.answers:exact"
    code = f"from infra.user_code import load_object; print(load_object({path_of(reward)!r})('x'))"
    assert _python("/", "-c", code) == "1.0"
    monkeypatch.chdir(file.parent)
    assert absolute_path("game.py:Game") == f"{file}:Game"
    assert absolute_path("rollouts.workflow:Workflow") == "rollouts.workflow:Workflow"


def _python(folder: Path | str, *arguments: str, path: str = "") -> str:
    """What a fresh Python process in a folder prints."""
    environment = {"PYTHONPATH": f"{path}:{Path(__file__).parents[3]}", "PATH": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("path", ["", "rollouts.workflow", "rollouts.workflow:", ":Name", ".py", ".sibling:Name"])
def test_what_is_no_import_path_says_how_one_looks(path: str):
    with pytest.raises(ValueError, match="write package.module:Name or path/to/file.py:Name"):
        load_object(path)


@pytest.mark.parametrize("path", ["no.such.module:Name", "examples.nothing:Name", "/no/such/file.py:Name"])
def test_a_missing_module_or_file_is_named_with_the_likely_reason(path: str):
    with pytest.raises(ValueError, match="cannot be imported.*(run from the folder that holds it|relative to it)"):
        load_object(path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (FILE, "has no 'Chess'; it has Game, reward$"),
        ("BOARD = 1\ndef reward(:\n", r"cannot be imported: .* in {file}, line 2$"),
        ("BOARD = 1\n\n  x = 1\n", r"cannot be imported: .* in {file}, line 3$"),
        ("import no_such_library\n", "No module named 'no_such_library'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(file: Path, code: str, message: str):
    file.write_text(code)
    with pytest.raises(ValueError, match=message.format(file=file)):
        load_object(f"{file}:Chess")


@pytest.mark.server
def test_a_module_in_the_working_directory_loads_in_a_console_script_and_in_reward_processes(tmp_path: Path):
    """A script has its own folder at the front of `sys.path`, and the working directory nowhere."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my_rewards.py").write_text("def double(number):\n    return 2.0 * number\n")
    (tmp_path / "bin" / "script.py").write_text(SCRIPT)
    assert _python(tmp_path / "work", str(tmp_path / "bin" / "script.py")) == "2.0 4.0"


def test_an_error_in_the_users_file_is_raised_as_it_is_every_time(file: Path):
    file.write_text("BOARD = 1 / 0\nclass Game:\n    pass\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object(f"{file}:Game")
    file.write_text(FILE)
    assert load_object(f"{file}:Game.Board").size == 9


PLAY_SIBLINGS = """
import asyncio, sys
from infra.user_code import load_object, path_of
from rollouts.rewards.rescoring import load_reward
from rollouts.rewards.scoring import RewardPool

game = load_object(sys.argv[1] + ":Game")

async def play():
    async with RewardPool(num_processes=1, timeout=60) as pool:
        return (await pool.score(game.reward, 2, 1)).reward

rescore = load_reward(path_of(game.reward))[0](2, 1)
print(game.__module__, game.double.__module__, asyncio.run(play()), rescore, game.doubled(4))
"""


@pytest.mark.parametrize(
    ("imports", "files", "modules"),
    [
        ("import helpers\nfrom helpers import double, reward", "game.py helpers.py", "game helpers"),
        ("from . import helpers\nfrom .helpers import double, reward", "__init__.py", "my.game my.helpers"),
        ("from my import helpers\nfrom my.helpers import double, reward", "__init__.py", "my.game my.helpers"),
        ("import helpers\nfrom helpers import double, reward", "__init__.py", "my.game helpers"),
    ],
)
def test_a_file_imports_what_lies_beside_it_and_so_do_reward_processes_and_sandboxes(
    tmp_path: Path, imports: str, files: str, modules: str
):
    folder = tmp_path / "my"
    folder.mkdir()
    for file in files.split():
        (folder / file).touch()
    game = "class Game:\n    double, reward, doubled = map(staticmethod, (double, reward, helpers.doubled))\n"
    (folder / "game.py").write_text(f"{imports}\n{game}")
    (folder / "helpers.py").write_text(
        "from millrace import sandboxed\n\ndef double(n):\n    return 2.0 * n\n\ndef reward(reply, answer):\n"
        "    return double(reply) + answer\n\n@sandboxed(seconds=20)\ndef doubled(n: int) -> float:\n"
        "    return double(n)\n"
    )
    (tmp_path / "elsewhere").mkdir()
    printed = _python(tmp_path / "elsewhere", "-c", PLAY_SIBLINGS, str(folder / "game.py"))
    assert printed == f"{modules} 5.0 5.0 8.0"


def test_files_of_two_folders_have_their_own_siblings_and_a_taken_name_is_no_obstacle(tmp_path: Path):
    values = []
    for place in ("a", "b", "c/tasks", "d/json"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        package = "." if "/" in place else ""
        (folder / "siblings.py").write_text(f"PLACE = {place!r}\n")
        (folder / "places.py").write_text(f"from {package}siblings import PLACE\n\nclass Place:\n    name = PLACE\n")
        if package:
            (folder / "__init__.py").touch()
    for place in ("a", "b", "a", "c/tasks", "d/json"):
        values.append(load_object(f"{tmp_path}/{place}/places.py:Place").name)
    assert values == ["a", "b", "a", "c/tasks", "d/json"]
    found = PathFinder.find_spec("json", sys.path)
    assert found is not None and found.origin == json.__file__, "child processes are given this path"


WORKFLOW = """
import json
from importlib.util import find_spec
from json import dumps

import judge
import numpy as np
from judge import fair

class Game:
    def play(self):
        return fair("x"), dumps({}), np.zeros(1)
"""


def _digest(folder: Path) -> str:
    """The digest as a fresh process computes it: here modules stay loaded."""
    code = f"from infra.user_code import source_sha256; print(source_sha256({str(folder / 'game.py') + ':Game'!r}))"
    return _python(folder, "-c", code, path=str(folder))


def _game(folder: Path) -> Path:
    folder.mkdir()
    (folder / "game.py").write_text(WORKFLOW)
    (folder / "judge.py").write_text("from rules import strict\n\ndef fair(reply):\n    return strict(reply)\n")
    (folder / "rules.py").write_text("def strict(reply):\n    return 1.0\n")
    return folder


def test_the_digest_of_a_workflow_covers_its_file_and_the_functions_it_uses(tmp_path: Path):
    folder = _game(tmp_path / "a")
    digest = _digest(folder)
    assert len(digest) == 64 and digest == _digest(folder)
    assert digest == _digest(_game(tmp_path / "b")), "wherever it lies"
    (folder / "other.py").write_text("NOTHING = 1\n")
    assert digest == _digest(folder)
    (folder / "judge.py").write_text("def fair(reply):\n    return 0.0\n")
    edited = _digest(folder)
    (folder / "game.py").write_text(WORKFLOW + "\n")
    assert len({digest, edited, _digest(folder)}) == 3


def test_the_digest_of_our_example_covers_its_reward():
    example, reward = source_file(load_object("examples.arithmetic:Arithmetic")), source_file(exact)
    assert source_sha256("examples.arithmetic:Arithmetic") == sha256_of_json(
        sorted(sha256_of_file(file) for file in (example, reward, source_file(score)))
    )


def test_what_python_is_made_of_has_no_source_file():
    for function in (len, find_spec):  # the second one's module is frozen into the interpreter
        with pytest.raises(ValueError, match="no source file"):
            source_file(function)
