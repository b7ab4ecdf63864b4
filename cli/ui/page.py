"""The page's HTML: one file for the server and for a report. Its scripts are named by digest in its security policy.

In: the data that is inlined, if it is to be a report. Out: HTML.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from cli.ui.data import as_json

SCRIPTS = ("drawing.js", "curves.js", "attempts.js", "page.js")
_FOLDER = Path(__file__).parent
PLOTLY = "/plotly.js"
"""Where the server has the library of charts."""


def render(inlined: dict[str, Any] | None = None) -> str:
    """The page; with data, whole in one file that loads nothing. No text of the data can end its element."""
    data = as_json(inlined).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    script = "\n".join(_text(name) for name in SCRIPTS)
    if inlined is None:
        plotly, sources, connections = f'<script async src="{PLOTLY}" id="plotly"></script>', "'self'", "'self'"
    else:
        plotly, sources, connections = f"<script>{plotly_js()}</script>", _digest(plotly_js()), "'none'"
    policy = (
        f"default-src 'none'; script-src {sources} {_digest(script)}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {connections}; base-uri 'none'; form-action 'none'"
    )
    parts = {"POLICY": policy, "STYLE": _text("page.css"), "PLOTLY": plotly, "DATA": data, "SCRIPT": script}
    before, *rest = _text("page.html").split("{{")
    pieces = [piece.split("}}", 1) for piece in rest]
    return before + "".join(parts[name.strip()] + after for name, after in pieces)


@functools.cache
def plotly_js() -> str:
    """plotly.js, as the package `plotly` brings it."""
    from importlib.util import find_spec

    package = find_spec("plotly")  # importing it would take a second
    assert package is not None and package.origin is not None
    return Path(package.origin).with_name("package_data").joinpath("plotly.min.js").read_text(encoding="utf-8")


@functools.cache
def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@functools.cache
def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
