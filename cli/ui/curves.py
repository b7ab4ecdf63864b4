"""What the page draws from a run's log alone: metrics over steps, rewards per environment, who worked when.

In: a log. Out: plain lists. `Curves` reads each step once, so that following a long run costs what is new.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from storage.log.entries import Alias, End, Session, Shard, Step
from storage.log.run_log import RunLog

MOST_STEPS = 2500
"""Points of a curve; more steps than this are averaged in spans of equal width."""
MOST_ENVIRONMENTS = 20
"""With more beginnings of task ids than this, they do not name environments."""
MOST_ROUNDS = 40
"""Rounds in the picture of who worked when."""

TIME = ("generate", "reward", "commit", "wait", "load", "train", "save", "publish", "idle")
"""Phases of a round in the order they are stacked; each is a metric `<phase>_seconds`, and together they are it."""

Curve = dict[str, list[float]]
"""`mean`, and for spans of several steps `low` and `high`, per span; NaN if no step has a value."""


def width_of(num_steps: int, most: int = MOST_STEPS) -> int:
    """Steps per point, so that there are at most `most` points. Example: 1,000 steps in 240 points are 5 each."""
    return max(1, math.ceil(num_steps / most))


def spans_of(num_steps: int, width: int) -> list[tuple[int, int]]:
    """First and last step of every point, from step 1 on."""
    return [(first, min(first + width - 1, num_steps)) for first in range(1, num_steps + 1, width)]


def averaged(values: Sequence[float] | np.ndarray, width: int) -> Curve:
    """Mean, low and high of the finite values of every span; NaN without any."""
    values = np.asarray(values, dtype=float)
    there = np.isfinite(values)
    values = np.where(there, values, np.nan)
    if width == 1 or not len(values):
        return {"mean": short(values)}
    starts = np.arange(0, len(values), width)
    count = np.add.reduceat(there.astype(int), starts)
    total = np.add.reduceat(np.where(there, values, 0.0), starts)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return {
        "mean": short(mean),
        "low": short(np.fmin.reduceat(values, starts)),
        "high": short(np.fmax.reduceat(values, starts)),
    }


def short(values: np.ndarray) -> list[float]:
    """Six significant digits: a picture shows no more, and the page stays small."""
    return [float(f"{value:.6g}") for value in values.tolist()]


class Curves:
    """Every metric of a run's steps as a column; NaN if a step lacks it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each step was committed, in Unix seconds."""
        self.metrics: dict[str, list[float]] = {}
        self._environments: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._num_sorted = 0

    def update(self, log: RunLog) -> None:
        """Read the steps that are new."""
        for number in log.state.steps.numbers[len(self.times) :]:
            entry = log.entries[number]
            assert isinstance(entry.body, Step)
            for name, value in entry.body.metrics.items():
                column = self.metrics.setdefault(name, [])
                column += itertools.repeat(math.nan, len(self.times) - len(column))
                column.append(value)
            self.times.append(entry.written_at)

    def column(self, name: str) -> np.ndarray:
        """One metric, a value per step; all NaN if no step has it."""
        return np.array(self._values(name), dtype=float)

    def _values(self, name: str, first: int = 0) -> list[float]:
        values = self.metrics.get(name, [])[first:]
        return values + [math.nan] * (len(self.times) - first - len(values))

    def total(self, name: str) -> float:
        """The sum of a metric over all steps."""
        return float(np.nansum(self.column(name)))

    def part(self, *, first: int = 0, width: int = 0) -> dict[str, Any]:
        """Points from `first` on, for a reader that has those before, of `width` steps each.

        If the width is another one by now, or with 0, all points are in it; `first` says where they begin.
        """
        count = len(self.times)
        now = width_of(count)
        first = max(0, min(first, -(-count // now)) - (now > 1)) if width == now else 0  # the last span may have grown
        spans = spans_of(count, now)[first:]
        return {
            "first": first,
            "width": now,
            "spans": spans,
            "times": [self.times[last - 1] for _, last in spans],
            "metrics": {name: averaged(self._values(name, first * now), now) for name in self.metrics},
        }

    def environments(self, log: RunLog) -> dict[str, Any]:
        """Mean reward of the trained groups of each environment, over steps.

        An environment is what stands before the first `/` or `:` of a task's id. Without it, or with more than
        `MOST_ENVIRONMENTS`, a run has one, which its reward shows. A group's id is `<epoch>.<task id>`, so that only of
        runs with several the shards' entries are read.
        """
        names = {environment_of(group_id.partition(".")[2]) for group_id in log.state.step_of}
        if not 1 < len(names) <= MOST_ENVIRONMENTS:
            return {}
        for step in log.state.steps[self._num_sorted :]:
            summaries = {
                group.id: group for shard_id in step.shard_sha256 for group in log.state.shards[shard_id].groups
            }
            for claimed in step.claim.trained:
                if (group := summaries.get(claimed.group_id)) and group.mean_reward is not None:
                    self._environments[environment_of(group.prompt_id)][step.claim.step].append(group.mean_reward)
            self._num_sorted = step.claim.step
        count = self._num_sorted
        width, rewards = width_of(count), {}
        for name, steps in sorted(self._environments.items()):
            column = np.full(count, np.nan)
            column[[step - 1 for step in steps]] = [sum(each) / len(each) for each in steps.values()]
            rewards[name] = averaged(column, width)
        return {"spans": spans_of(count, width), "rewards": rewards}


def environment_of(task_id: str) -> str:
    """What stands before the first `/` or `:`; empty if there is neither."""
    places = [place for mark in "/:" if (place := task_id.find(mark)) > 0]
    return task_id[: min(places)] if places else ""


def time_budget(curves: Curves) -> dict[str, Any]:
    """Seconds by phase over the whole run, beside the rounds' wall-clock."""
    phases = [(name, curves.total(f"{name}_seconds")) for name in TIME]
    together, rounds = sum(seconds for _, seconds in phases), curves.total("round_seconds")
    return {"phases": phases, "round": rounds, "sum": together, "overlap": together > 1.02 * rounds}


def lanes(log: RunLog) -> dict[str, Any]:
    """What trainer, engines and each rollout worker did in the last `MOST_ROUNDS` rounds: bars of start and seconds.

    A shard's bar ends when it was committed. A step's parts end with its commit, in their order; a policy that the
    engines loaded ends with its alias. What other commands did after a session's end, such as evaluations, is left out,
    and so is the time from the end of the work of a session to the first work of the next.
    """
    steps = log.state.steps.numbers[-MOST_ROUNDS - 1 :]
    bars: dict[str, list[dict[str, Any]]] = {"trainer": [], "engines": []}
    publishing: dict[int, float] = {}
    is_over = False
    for entry in log.entries[steps[0] + 1 if len(steps) > MOST_ROUNDS else 0 :]:
        end = entry.written_at
        is_over = isinstance(entry.body, End) or (is_over and not isinstance(entry.body, Session))
        if is_over:
            continue
        match entry.body:
            case Step(claim=claim, metrics=metrics):
                publishing[claim.base_version] = metrics.get("publish_seconds", 0.0)
                for phase in ("save", "train", "load"):
                    seconds = metrics.get(f"{phase}_seconds", 0.0)
                    end -= seconds
                    bars["trainer"].append(_bar(phase, end, seconds, f"step {claim.step}"))
            case Shard(is_eval=is_eval, seconds=parts) as shard:
                seconds = sum(parts.values())
                what = "evaluate" if is_eval else "generate"
                label = f"shard {shard.id}, {shard.num_tokens:,} tokens"
                bars.setdefault(shard.producer, []).append(_bar(what, end - seconds, seconds, label))
            case Alias(name="rollout", transfer=transfer) as alias if transfer:
                bars["engines"].append(_bar("publish", end, 0.0, f"policy {alias.version}") | {"policy": alias.version})
            case Session():
                bars["trainer"].append(_bar("session", end, 0.0, "a session begins"))
    for bar in bars["engines"]:
        bar["seconds"] = publishing.get(bar["policy"], 0.0)
        bar["start"] -= bar["seconds"]
    _leave_out_pauses([bar for each in bars.values() for bar in each])
    last = log.state.step
    first = max(1, last - MOST_ROUNDS + 1)
    named = [{"name": name, "bars": each} for name, each in bars.items() if each]
    return {"first": first, "last": last, "lanes": named}


def _leave_out_pauses(bars: Sequence[dict[str, Any]]) -> None:
    """Move bars to the right, in place, so that the work of a session ends where that of the next begins, and marks to
    where work begins: making a base model may take minutes, and a stopped run goes on after days."""
    marks = sorted((bar for bar in bars if bar["what"] == "session"), key=itemgetter("start"))
    for mark in marks:
        begin = mark["start"]
        if works := [bar["start"] for bar in bars if bar["what"] != "session" and bar["start"] >= begin]:
            mark["start"] = min(works)
            earlier = [bar for bar in bars if bar["start"] < begin]
            ended = max((bar["start"] + bar["seconds"] for bar in earlier), default=mark["start"])
            for bar in earlier:
                bar["start"] = round(bar["start"] + max(0.0, mark["start"] - ended), 3)


def _bar(what: str, start: float, seconds: float, label: str) -> dict[str, Any]:
    return {"what": what, "start": round(start, 3), "seconds": round(seconds, 4), "label": label}
