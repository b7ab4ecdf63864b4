"""Where state lives: what the run file says, else the environment, else the state folder; what libraries are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import sqlalchemy

from infra.environment import TELEMETRY_OFF, allocator, local_tracking_uri, prepare_environment, tracking_uri
from infra.user_code import PRODUCT
from settings.places.state_folder import sqlite_file, sqlite_uri, store_uri

STATED = {"MILLRACE_STORE": "s3://bucket/store", "MILLRACE_TRACKING": "http://mlflow:5000"}


@pytest.mark.parametrize(
    ("environment", "run_file", "expected"),
    [
        ({}, ("", ""), ("file://HOME/store", "sqlite:///HOME/mlflow.db")),
        (STATED, ("", ""), ("s3://bucket/store", "http://mlflow:5000")),
        ({"MILLRACE_STORE": "HOME/elsewhere"}, ("", ""), ("file://HOME/elsewhere", "sqlite:///HOME/mlflow.db")),
        (STATED, ("s3://other/store", "sqlite:///mine.db"), ("s3://other/store", "sqlite:///mine.db")),
        (STATED, ("HOME/mine", ""), ("file://HOME/mine", "http://mlflow:5000")),
    ],
)
def test_the_run_file_comes_before_the_environment_and_that_before_the_state_folder(
    environment: dict[str, str],
    run_file: tuple[str, str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    for name in STATED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("HOME", str(tmp_path)))
    store, tracking = (value.replace("HOME", str(tmp_path)) for value in run_file)
    assert (store_uri(store), tracking_uri(tracking)) == tuple(e.replace("HOME", str(tmp_path)) for e in expected)
    assert local_tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"


SHOW = """
import json, os
from pathlib import Path
{imports}
print(json.dumps(dict(os.environ)))
"""


def _environment_after(imports: str, folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a Python process in a folder after some statements."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PRODUCT), "HOME": str(folder / "home"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(imports=imports)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("imports", ["import millrace", "import flows"])
def test_importing_millrace_or_a_flow_turns_telemetry_off(imports: str, tmp_path: Path):
    """The folder of flows is imported before any module in it, and so before Prefect, which looks as it is imported."""
    imports += "\nimport sys; assert 'prefect' not in sys.modules"
    assert TELEMETRY_OFF.items() <= _environment_after(imports, tmp_path).items()
    assert _environment_after(imports, tmp_path, HF_HUB_DISABLE_TELEMETRY="0")["HF_HUB_DISABLE_TELEMETRY"] == "0"


def test_libraries_keep_their_files_in_the_state_folder_and_the_hubs_models_where_the_user_has_them(tmp_path: Path):
    prepare = "from infra.environment import prepare_environment\nprepare_environment(Path('my'))"
    (tmp_path / "my").mkdir()
    (tmp_path / "home").mkdir()
    found = _environment_after(prepare, tmp_path)
    caches = tmp_path / "my" / ".millrace" / "cache" / "libraries"
    assert (
        found["MILLRACE_HOME"] == str(tmp_path / "my" / ".millrace") == found["PREFECT_HOME"].removesuffix("/prefect")
    )
    assert found["VLLM_CACHE_ROOT"] == str(caches / "vllm") and "HF_HOME" not in found
    below = _environment_after(prepare.replace("Path('my')", ""), tmp_path, **found)
    assert below["MILLRACE_HOME"] == found["MILLRACE_HOME"], "a child process has its parent's"
    (tmp_path / "no home").touch()
    unwritable = _environment_after(prepare, tmp_path, HOME=str(tmp_path / "no home" / "x"), TRITON_CACHE_DIR="/mine")
    assert unwritable["HF_HOME"] == str(caches / "huggingface") and unwritable["TRITON_CACHE_DIR"] == "/mine"


def test_importing_prefect_makes_no_state_folder_and_says_nothing(tmp_path: Path):
    code = "from infra.environment import prepare_environment\nprepare_environment()\nimport prefect.context"
    code += "\nprefect.context.root_settings_context()"
    variables = {**os.environ, "PYTHONPATH": str(PRODUCT)}
    variables = {key: value for key, value in variables.items() if not key.startswith(("PREFECT_", "MILLRACE_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (0, "", [])


def test_a_later_call_for_another_run_file_has_its_state_folder(tmp_path: Path):
    (tmp_path / "other").mkdir()
    twice = (
        "from infra.environment import prepare_environment\nprepare_environment()\nprepare_environment(Path('other'))"
    )
    found = _environment_after(twice, tmp_path)
    assert found["PREFECT_HOME"] == str(tmp_path / "other" / ".millrace" / "prefect")
    assert _environment_after(twice, tmp_path, MILLRACE_HOME="mine")["PREFECT_HOME"] == str(
        tmp_path / "mine" / "prefect"
    )


@pytest.mark.parametrize(
    ("given", "exempt"),
    [
        ({"HTTP_PROXY": "http://proxy:3128"}, "localhost,127.0.0.1,::1"),
        ({"https_proxy": "http://proxy:3128", "NO_PROXY": "corp.example"}, "corp.example,localhost,127.0.0.1,::1"),
        ({"ALL_PROXY": "socks5://proxy", "no_proxy": "127.0.0.1, .corp"}, "127.0.0.1,.corp,localhost,::1"),
        (
            {"http_proxy": "http://proxy", "no_proxy": "", "NO_PROXY": "a.corp"},
            "a.corp,localhost,127.0.0.1,::1",
        ),
        (
            {"http_proxy": "http://proxy", "no_proxy": "b.corp", "NO_PROXY": "a.corp"},
            "b.corp,a.corp,localhost,127.0.0.1,::1",
        ),
        ({"http_proxy": "http://proxy", "NO_PROXY": "*"}, "*"),
        ({}, None),
    ],
)
def test_what_the_machine_says_to_itself_goes_to_no_proxy(
    given: dict[str, str], exempt: str | None, tmp_path: Path
) -> None:
    with patch.dict(os.environ, given, clear=True):
        for _ in range(2):
            prepare_environment(tmp_path)
        assert os.environ.get("NO_PROXY") == os.environ.get("no_proxy") == exempt


@pytest.mark.parametrize("name", ["50% off", "why?", "a%20b", "c#d", "two words"])
def test_a_database_is_where_its_folder_is_whatever_that_is_called(name: str, tmp_path: Path) -> None:
    file = tmp_path / name / "x.db"
    file.parent.mkdir()
    with sqlalchemy.create_engine(uri := sqlite_uri(file)).connect() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE numbers (number INT)"))
    assert file.stat().st_size and sqlite_file(uri) == file


_BLOCKS = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
large = b"x" * 2**28
del large
before = resident()
small = [b"x" * 2**20 for _ in range(128)]
print((resident() - before) >> 20)
"""


def test_what_was_freed_in_one_piece_serves_much_smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "MALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    environment = {**os.environ, **allocator()}
    done = subprocess.run([sys.executable, "-c", _BLOCKS], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32, "MiB, of 128 that were there"
