"""Where the wall-clock of a round goes: parts that add up to it, whatever ran beside.

In: what the driver waited for, what the producers say of the shards a step takes, and the trainer's own clocks.
Out: metrics in seconds.

    previous step ─▶ publish ─▶ wait for a batch ─▶ load ─▶ train ─▶ save ─▶ this step      the rest: idle
                                 └ generate, reward, commit; wait: where no producer accounts for it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from storage.log.entries import Shard

PRODUCING = ("generate", "reward", "commit")
"""What a producer does for a shard."""
PHASES = ("publish", *PRODUCING, "wait", "load", "train", "save")
"""The parts of a round that are measured, each a metric `<phase>_seconds`; `idle_seconds` is what is left of it."""


def split_wait(waited: float, shards: Iterable[Shard], *, num_producers: int) -> dict[str, float]:
    """What became of the seconds the driver waited for a batch, and how long its producers worked for it.

    The busiest producer's seconds, and never more than were waited, are split in the proportion of what all of them
    did; the rest is `wait_seconds`. `rollout_seconds` is a producer's mean, over at least `num_producers` of them.
    """
    busy: defaultdict[str, float] = defaultdict(float)
    done = dict.fromkeys(PRODUCING, 0.0)
    for shard in shards:
        for phase in PRODUCING:
            seconds = max(0.0, shard.seconds.get(phase, 0.0))
            done[phase] += seconds
            busy[shard.producer] += seconds
    together = sum(done.values())
    explained = min(waited, max(busy.values(), default=0.0))
    parts = {f"{phase}_seconds": explained * done[phase] / together if together else 0.0 for phase in PRODUCING}
    mean = together / max(1, num_producers, len(busy))
    return {**parts, "wait_seconds": max(0.0, waited - explained), "rollout_seconds": mean}


def time_budget(phases: Mapping[str, float], *, wall_seconds: float) -> dict[str, float]:
    """The parts, `idle_seconds` for the rest, and their sum as `round_seconds`; shares of it that two sides idled. A
    round takes no less than its parts. No part is negative."""
    parts = {f"{phase}_seconds": max(0.0, phases.get(f"{phase}_seconds", 0.0)) for phase in PHASES}
    measured = sum(parts.values())
    round_seconds = max(wall_seconds, measured)
    budget = {**parts, "idle_seconds": round_seconds - measured, "round_seconds": round_seconds}
    if round_seconds > 0:
        training = sum(parts[f"{phase}_seconds"] for phase in ("load", "train", "save"))
        training += phases.get("streamed_seconds", 0.0)
        budget["trainer_idle_fraction"] = max(0.0, 1 - training / round_seconds)
        if "rollout_seconds" in phases:
            budget["rollout_idle_fraction"] = max(0.0, 1 - phases["rollout_seconds"] / round_seconds)
    return budget
