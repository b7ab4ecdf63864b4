"""How many prompt groups may start now, when a new policy should wait for the ones that run, and they for it.

In: counts and versions. Out: a number of groups, possibly negative; yes or no. Formula and worked values from AReaL
(https://arxiv.org/abs/2505.24298, section 5.1), in weight updates. Both only pace; the staleness bound itself is
enforced at claim, per token (`storage/log/claims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_ROUNDING = 1e-9  # (1 + 0.16) · 50 is 57.99999999999999


def capacity(
    *,
    max_concurrent: int,
    running: int,
    max_staleness: float,
    version: int,
    batch_size: int,
    accepted: int,
    steps_per_update: int = 1,
) -> int:
    """Groups that may start: min(concurrency room, staleness room).

    concurrency room = max_concurrent − running
    staleness room   = u · k · B + ⌊(1 + max_staleness) · k · B⌋ − (accepted + running)

    for batches of B groups, k steps per weight update, and u = ⌊version / k⌋ updates so far; with k = 1 and a whole
    max_staleness that is (max_staleness + version + 1) · B − (accepted + running).

    `accepted` counts groups accepted since version 0; after a resume at version v it restarts at
    v · batch_size plus what is still pending. A rejected group leaves `running` without entering `accepted`,
    so its room comes back; where a step takes attempts as they come (`dynamic_batch`), rejected ones count too.
    max_staleness = 0 is synchronous training.
    """
    window = steps_per_update * batch_size
    quota = version // steps_per_update * window + math.floor((1 + max_staleness) * window + _ROUNDING)
    return min(max_concurrent - running, quota - (accepted + running))


def stragglers(heads: Sequence[int], *, version: int, max_staleness: float, steps_per_update: int = 1) -> int:
    """How many groups policy version + 1 pushes over the bound: within it now, over it then.

    `heads` are the versions under which the groups started that no claim can take yet.
    """
    bound = math.ceil(max_staleness)
    now, then = version // steps_per_update, (version + 1) // steps_per_update
    return sum(now - head // steps_per_update <= bound < then - head // steps_per_update for head in heads)


BUSY = 0.8
"""Share of `max_concurrent` that must be running for a claim to wait. With heavy-tailed durations, waiting on for less
costs more steps than it saves groups: see benchmarks/staleness.py."""


def should_wait(
    heads: Sequence[int],
    *,
    version: int,
    running: int,
    max_concurrent: int,
    max_staleness: float,
    steps_per_update: int = 1,
) -> bool:
    """Whether a claim at `version` waits for the groups that the next version would push over the bound.

    Only as long as the engine is busy: otherwise it would idle for one long group, and so would the trainer.
    """
    late = stragglers(heads, version=version, max_staleness=max_staleness, steps_per_update=steps_per_update)
    return late > 0 and running >= BUSY * max_concurrent


AHEAD_SHARE, AHEAD_PATIENCE = 0.01, 0.1
"""Of `rollout.attempt_timeout`, for the clocks of attempts run: they begin ahead of a policy that should take no longer
than the first to make, and are called back where it has taken the second."""


def is_short(metrics: Mapping[str, float], num_steps: int, *, attempt_timeout: float) -> bool:
    """Whether attempts may begin ahead of the policy that so many steps like this one make; seconds."""
    seconds = sum(metrics.get(f"{phase}_seconds", math.inf) for phase in ("load", "train", "save"))
    return num_steps * seconds <= AHEAD_SHARE * attempt_timeout
