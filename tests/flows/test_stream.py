"""Gradients of the first groups while the last one is sampled, with the whole command."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.outcomes import state_of
from tests.conftest import SCRIPTED, Home

STEPS, BATCH = 3, 8


def test_a_run_trains_on_the_first_groups_while_the_last_one_is_sampled(home: Home, base_model: Path) -> None:
    """One group of each batch takes two seconds longer."""
    given = ["workflow=tests.flows.guesses:OneIsSlow", f"steps={STEPS}", f"batch_size={BATCH}", "evaluation.every=0"]
    home.run("train", str(SCRIPTED), f"model={base_model}", *given, "train.stream=true", "run=streamed")
    state = state_of(home, "streamed")
    parts = [step.claim.parts for step in state.steps]
    assert any(len(sizes) > 1 for sizes in parts), "the trainer has begun while the slow group was sampled"
    assert all(sum(sizes) in (0, BATCH) for sizes in parts)
    streamed = [step.metrics.get("streamed_fraction", 0.0) for step in state.steps]
    assert max(streamed) >= 0.5
