"""The `millrace` command, with an engine and a trainer that take turns although there is no GPU to share.

    python -m tests.flows.in_turns train RUNFILE …

What each side gives back is nothing, and all else is as on a GPU: who waits for whom, who wakes, who is replaced.
"""

from __future__ import annotations

from typing import Any

import tasks.session
from cli.main import app
from settings.run_file import RunConfig


def _in_turns(config: RunConfig, *_: Any, **__: Any) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"share": "phases"})})


if __name__ == "__main__":
    tasks.session.with_share = _in_turns
    app()
