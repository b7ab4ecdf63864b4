"""How many prompt groups may start now, so that production neither starves nor outruns training.

In: counts. Out: a number of groups, possibly negative. Formula and worked values from AReaL
(https://arxiv.org/abs/2505.24298, section 5.1). It paces admission; the staleness bound itself is enforced at
claim, per token (`storage/claims.py`).
"""

from __future__ import annotations

import math


def capacity(
    *, max_concurrent: int, running: int, max_staleness: float, version: int, batch_size: int, accepted: int
) -> int:
    """Groups that may start: min(concurrency room, staleness room).

    concurrency room = max_concurrent − running
    staleness room   = (max_staleness + version + 1) · batch_size − (accepted + running)

    `accepted` counts groups accepted since version 0; after a resume at version v it restarts at
    v · batch_size plus what is still pending. A rejected group leaves `running` without entering `accepted`,
    so its room comes back. max_staleness = 0 is synchronous training.
    """
    return min(max_concurrent - running, math.floor((max_staleness + version + 1) * batch_size) - (accepted + running))
