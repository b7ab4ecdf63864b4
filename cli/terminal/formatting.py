"""Values as people read them on a terminal.

In: numbers, sizes, policy versions, text that a policy may have written. Out: short strings without markup.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from settings.errors import all_of, counted, ranges

if TYPE_CHECKING:
    from storage.log.entries import Evaluation


def plain_table(*names: str, right: Collection[str] = (), no_wrap: bool = False, **options: Any) -> Table:
    """A table without lines: columns by name, those in `right` with numbers; without names, two of facts."""
    options = {"box": None, "pad_edge": False, "header_style": "dim", "show_header": bool(names), **options}
    table = Table(**options)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=no_wrap)
    return table


def facts_table(*, gap: int = 2) -> Table:
    """Rows of a name, to the right and dim, and what there is to say of it."""
    table = Table.grid(padding=(0, gap))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def number(value: float | None, *, digits: int = 4, missing: str = "none") -> str:
    """A number with at most so many significant digits."""
    return missing if value is None else f"{value:.{digits}g}"


def lasted(seconds: float) -> str:
    """`42 s`, `5 min 11 s`, `2 h 3 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0) + [f"{rest} s"] * (hours == 0)
    return " ".join(parts)


def ago(seconds: float) -> str:
    """`3 min ago`; of what a clock ahead of this one has written, by how much."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= length:
            return f"{abs(seconds) / length:.0f} {unit} {'ago' if seconds > 0 else 'ahead of this clock'}"
    return f"{max(0.0, seconds):.0f} s ago"


def versions_of(row: Mapping[str, Any]) -> str:
    """Policy versions that sampled a row's tokens, from its `head_version` and `tail_version`: `5` or `3–5`."""
    return ranges(range(row["head_version"], row["tail_version"] + 1))


def shortened(text: str, most: int) -> str:
    """At most so many characters, the last of them `…` if some are missing."""
    return text if len(text) <= most else text[: most - 1] + "…"


def held_out(evaluation: Evaluation) -> tuple[str, str]:
    """An evaluation's score, `held-out avg@8 0.490 ± 0.021`, and the rest: `on 200 tasks × 8 attempts, pass@1 …`.

    One in which every attempt failed has no score.
    """
    counts = ", ".join(f"{status} {count}" for status, count in evaluation.failures.items())
    if evaluation.failed:
        return "evaluation failed:", f"{all_of(evaluation.num_failed, 'attempt')} did ({counts})"
    several = evaluation.n_samples > 1
    error = "" if evaluation.standard_error is None else f" ± {evaluation.standard_error:.3f}"
    score = f"held-out {f'avg@{evaluation.n_samples} ' if several else ''}{evaluation.score:.3f}{error}"
    facts = [f"on {counted(evaluation.num_tasks, 'task')}" + (f" × {evaluation.n_samples} attempts" if several else "")]
    facts += [f"pass@{k} {chance:.3f}" for k, chance in evaluation.pass_at.items() if several]
    for name, chances in (("pass^", evaluation.pass_all), ("maj@", evaluation.maj_at)):
        facts += [f"{name}{k} {chance:.3f}" for k, chance in list(chances.items())[-1:] if several]  # of most attempts
    if evaluation.num_failed:
        facts.append(f"{evaluation.num_failed} failed" + (f" ({counts})" if counts else ""))
    return score, ", ".join([*facts, f"{evaluation.seconds:.1f} s"])
