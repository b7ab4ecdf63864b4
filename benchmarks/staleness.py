"""What bounded staleness costs and buys: the real executor and claims, simulated with heavy-tailed durations.

    python -m benchmarks.staleness docs/staleness.json          # about five minutes; --steps 60 is enough for a look

Out: a table, and the same as JSON. Attempts take log-normal times (σ = 1), a group has eight, and lasts as long as its
longest; training a step takes about an eighth of what generating its groups takes. See `tests/simulation.py`.

| column | is |
|---|---|
| busy | mean number of running groups / max_concurrent; `idle`: share of time with none |
| steps/h | simulated steps per hour, and how many times those of max_staleness = 0 |
| dropped | groups that staleness took, of those a filter had accepted |
| by length | largest difference of the acceptance in one decile of group length from the mean |
| masked, by length | share of claimed groups' tokens that is masked; the same for the share of tokens that is trained |
| over | share of the trained tokens that is over the bound |
| lag | mean and maximum of the claimed tokens, in weight updates |
| held | seconds per step for which a claim waited |
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from tests.simulation import Outcome, Scenario, simulate

_BOUNDS = (0, 0.5, 1, 2, 4, 8)
_POLICIES: list[dict[str, Any]] = [
    {"stale_policy": "strict"},
    {"stale_policy": "strict", "pace": False},
    {"stale_policy": "mask", "pace": False},
    {"stale_policy": "correct", "pace": False},
]
_REJECTING: dict[str, Any] = {"rejected": 0.4}

SECTIONS: dict[str, list[dict[str, Any]]] = {
    "defaults: batches of 64, 64 at once": [{"max_staleness": b, **policy} for b in _BOUNDS for policy in _POLICIES],
    "more at once": [
        {"max_concurrent": concurrent, "max_staleness": bound, **policy}
        for concurrent in (128, 256)
        for bound in (1, 2, 4, 8)
        for policy in (_POLICIES[0], _POLICIES[2])
    ],
    "a filter rejects 40 %": [
        {"max_staleness": bound, **_REJECTING, "dynamic_batch": dynamic, **policy}
        for dynamic in (False, True)
        for bound in (0, 1, 2, 4)
        for policy in (_POLICIES[0], _POLICIES[2])
    ],
    "four steps per weight update": [{"steps_per_update": 4, "max_staleness": bound} for bound in (0, 0.25, 1)],
    "a fixed schedule": [
        {"sigma": sigma, "max_staleness": bound, **_POLICIES[2], "schedule": schedule}
        for sigma in (1.0, 0.3)
        for bound, schedule in ((0, "free"), (1, "free"), (1, "fixed"))
    ],
    "training takes half a round": [{"train_seconds": 75.0, "max_staleness": b, **_POLICIES[2]} for b in (0, 1, 2, 4)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="?", type=Path, help="file to write")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps per scenario")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error("--steps: at least 3; what is measured lies between the first and the last")
    started, numbers = time.perf_counter(), {}
    print("busy   idle  steps/h         dropped  by length   masked  by length    over   lag          held")
    for title, scenarios in SECTIONS.items():
        print(f"── {title}")
        numbers[title] = [_measured(scenario, steps=arguments.steps) for scenario in scenarios]
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")


_LISTS = {"batches", "attempts", "claims", "owes"}
_SAME_WHEN_SYNCHRONOUS = {"max_staleness", "stale_policy", "pace", "max_concurrent", "schedule"}
_SYNCHRONOUS: dict[str, float] = {}


def _measured(changes: dict[str, Any], *, steps: int) -> dict[str, Any]:
    outcome = simulate(Scenario(steps=steps, **changes))
    kind = json.dumps({key: value for key, value in sorted(changes.items()) if key not in _SAME_WHEN_SYNCHRONOUS})
    if not outcome.scenario.max_staleness:
        _SYNCHRONOUS.setdefault(kind, outcome.steps_per_hour)
    times = outcome.steps_per_hour / _SYNCHRONOUS[kind] if kind in _SYNCHRONOUS else None
    _print(outcome, changes, times)
    fields = {name: value for name, value in dataclasses.asdict(outcome).items() if name not in _LISTS}
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}
    return {**rounded, "scenario": changes, "times_synchronous": times and round(times, 2)}


def _print(outcome: Outcome, changes: dict[str, Any], times: float | None) -> None:
    named = " ".join(f"{key}={value}" for key, value in changes.items())
    speed = f"{outcome.steps_per_hour:5.1f} {f'× {times:.1f}' if times else '':>6}"
    print(
        f"{outcome.utilisation:5.1%} {outcome.idle:5.1%}  {speed}  {outcome.drop_rate:8.2%}  {outcome.length_bias:9.1%}"
        f" {outcome.masked:8.2%}  {outcome.token_bias:9.1%}  {outcome.over_bound:6.2%}"
        f"  {outcome.lag_mean:4.2f} max {outcome.lag_max:2d} {outcome.held_seconds:6.0f}   {named}",
        flush=True,
    )


if __name__ == "__main__":
    main()
