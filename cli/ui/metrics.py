"""What a metric is: its title, unit and meaning, read from docs/metrics.md, so that page and document say the same.

In: the document's tables, `| names | titles (unit) | meaning |`. Out: `described()`, a section per heading.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

_DOCUMENT = Path(__file__).with_name("metrics.md")
"""A link to docs/metrics.md, so that it is installed with the code."""
_SCALES = {"%": 100.0, "GiB": 2.0**-30, "MiB": 2.0**-20, "TFLOP": 1e-12, "TFLOP/s": 1e-12}
"""Factor from a metric's own number, a share, bytes or operations, to the unit in its title."""
FOLDED = "The machine"
"""The heading whose metrics are of the machine and not of the run."""


@functools.cache
def described() -> list[dict[str, Any]]:
    """Headings in the document's order, each with its metrics: `match` is a regular expression for the whole name."""
    sections: list[dict[str, Any]] = []
    for line in _DOCUMENT.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"#+ (.+)", line):
            sections.append({"title": heading[1], "folded": heading[1] == FOLDED, "metrics": []})
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            names, titles = re.findall(r"`([^`]+)`", cells[0]), cells[1].split("; ")
            for name, title in zip(names, titles, strict=True):
                sections[-1]["metrics"].append(_metric(name, title, cells[2]))
    return [section for section in sections if section["metrics"]]


def _metric(name: str, title: str, meaning: str) -> dict[str, Any]:
    """Example: `tool_seconds`, `Tools, all calls (s)` → title `Tools, all calls`, unit `s`."""
    words, _, unit = title.removesuffix(")").partition(" (") if title.endswith(")") else (title, "", "")
    words = words.replace("`", "")
    pattern = re.sub(r"<\w+>", "(.+)", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))
    return {
        "match": pattern,
        "title": words,
        "unit": unit,
        # MLflow's monitors write percentages as such.
        "factor": 1.0 if name.startswith("system/") else _SCALES.get(unit, 1.0),
        "meaning": re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", meaning).replace("`", "").replace(r"\|", "|"),
    }
