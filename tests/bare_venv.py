"""A virtual environment with exactly the packages of some of our extras, without a network.

In: extras of pyproject.toml. Out: a Python whose packages are links to the files of those that the tests run on.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1]
_INSTALLED = {canonicalize_name(found.name): found for found in list(distributions())[::-1]}
_ABOUT = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def packages(*extras: str) -> set[str]:
    """Names of all packages that `pip install -e ".[extras]"` brings, ours left out."""
    closure: dict[str, set[str]] = {}
    waiting = [("millrace", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if extra not in closure.setdefault(name, set()):
            closure[name].add(extra)
            for needed in _requirements(name):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting += [(canonicalize_name(needed.name), wanted) for wanted in ("", *needed.extras)]
    return closure.keys() - {"millrace"}


def make_venv(folder: Path, *extras: str) -> Path:
    """Make the environment; returns its Python, which imports this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "checkout.pth").write_text(f"{PROJECT}\n")
    about = site / f"millrace-{_ABOUT['version']}.dist-info" / "METADATA"
    about.parent.mkdir()
    rows = [f"Requires-Dist: {requirement}\n" for requirement in _requirements("millrace")]
    about.write_text(f"Metadata-Version: 2.4\nName: millrace\nVersion: {_ABOUT['version']}\n{''.join(rows)}")
    owners = collections.defaultdict(set)
    for name, package in _INSTALLED.items():
        for top in _tops(package):
            owners[top].add(name)
    here = Path(sysconfig.get_path("purelib"))
    for name in packages(*extras):
        for file in _INSTALLED[name].files or ():
            shared = len(owners[file.parts[0]]) > 1
            link = site / (file if shared else file.parts[0])
            if file.parts[0] not in ("..", "__pycache__") and file.suffix != ".pth" and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(here / link.relative_to(site))
    return folder / "bin" / "python"


def _requirements(name: str) -> list[Requirement]:
    if name != "millrace":
        return [Requirement(row) for row in _INSTALLED[name].requires or ()]
    extras = _ABOUT["optional-dependencies"].items()
    rows = [f'{row} ; extra == "{extra}"' for extra, rows in extras for row in rows]
    return [Requirement(row) for row in (*_ABOUT["dependencies"], *rows)]


def _tops(package: Distribution) -> set[str]:
    return {file.parts[0] for file in package.files or ()}
