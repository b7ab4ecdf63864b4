"""The rounds of a run as a table of at most 80 columns, for `millrace train` and `millrace status --follow`.

In: committed steps. Out: a rich table; one row of it stands under the header of another, for rows that come one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from storage.log.entries import Evaluation, Step

LEGEND = "time in % of a round: waited for generate, reward, commit; train; publish; idle"
_PHASES = {
    "gen": ("generate",),
    "rew": ("reward",),
    "com": ("commit",),
    "tra": ("load", "train", "save"),
    "pub": ("publish",),
    "idle": ("wait", "idle"),
}
_WIDTHS = {"reward": 6, "held-out": 8, "staleness": 9, "tokens/s": 8, "round": 6}


def rounds_table(steps: Iterable[Step], scores: Sequence[Evaluation], *, wanted: int, header: bool = True) -> Table:
    """A row for each step, with the held-out score that the run had by then; `wanted` is how many steps there will be,
    0 if that is not known, and `scores` are by ascending version.

    The phases are shares of the round's seconds, and add up to 100.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=header, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True, min_width=max(4, 2 * len(str(wanted)) + 1 if wanted else 4))
    for name, width in {**_WIDTHS, **{name: max(3, len(name)) for name in _PHASES}}.items():
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for step in steps:
        so_far = [evaluation.score for evaluation in scores if evaluation.version <= step.claim.base_version]
        table.add_row(*_cells(step, wanted=wanted, score=so_far[-1] if so_far else None))
    return table


def _cells(step: Step, *, wanted: int, score: float | None) -> list[str]:
    metrics = step.metrics
    reward, staleness = "-", step.claim.fallback.replace("_", " ") or "-"  # a step with nothing to train has neither
    if "reward" in metrics:
        reward = f"{metrics['reward']:.3f}"
    if "staleness_mean" in metrics:
        staleness = f"{metrics['staleness_mean']:.1f} max {metrics['staleness_max']:.0f}"
    return [
        f"{step.claim.step}/{wanted}" if wanted else str(step.claim.step),
        reward,
        "-" if score is None else f"{score:.3f}",
        staleness,
        f"{metrics['tokens_per_second']:.0f}" if "tokens_per_second" in metrics else "-",
        f"{metrics['round_seconds']:.1f}s",
        *_shares(metrics),
    ]


def _shares(metrics: Mapping[str, float]) -> list[str]:
    # A step of before `wait` and `load` were measured has neither.
    seconds = (sum(metrics.get(f"{part}_seconds", 0.0) for part in parts) for parts in _PHASES.values())
    return [f"{100 * value / max(metrics['round_seconds'], 1e-9):.0f}" for value in seconds]
