"""`millrace replay` refuses what cannot work in one sentence, and prints what came out so that a person sees it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.run.replay import print_replay, span_of
from settings.run_file import default_values
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE
from tests.unit.cli.builders import a_run_of_one_step, assert_refused


def test_what_cannot_work_is_one_sentence_before_anything_starts(store: LocalStore, home: Path) -> None:
    config = {**default_values(), "workflow": "examples.arithmetic:Arithmetic"}
    a_run_of_one_step(store, config, run_id="stepped")
    create_run(store, "empty", config).append(BASE)
    refused = {
        "stepped": "say which steps: --step 7, or --from 1 --to 10",
        "stepped --step 1 --to 1": "say which steps",
        "stepped --step 2": "no step 2; it has steps 1 to 1",
        "stepped --from 2": "no steps 2 to 1",
        "empty --step 1": "no steps yet",
        "absent --step 1": "runs there: empty, stepped",
        "stepped --step 1 --loss ppo": "there are 'clip', 'gspo', 'cispo'",
        "stepped --step 1 --advantage rank": "there are 'grpo', 'leave_one_out'",
        "stepped --step 1 --lr 0": "learning_rate = 0",
        "stepped --step 1 n_samples=4": "a replay can change learning_rate",
        "stepped --step 1 train.loss.clip_hi=4": "did you mean 'train.loss.clip_high'",
        "stepped --step 1 train.loss.clip_high": "key=value",
        "stepped --step 1 --rewards mine": "no rewards 'mine'",
        "stepped --step 1 --save .": "exists already",
    }
    assert_refused("replay {}", refused)
    assert not (home / "logs").exists(), "no worker was started"


def test_a_span_is_a_step_or_two_ends_of_which_one_may_be_open() -> None:
    assert span_of(step=7, first=None, last=None) == (7, 7)
    assert span_of(step=None, first=3, last=None) == (3, None)
    assert span_of(step=None, first=None, last=5) == (1, 5)
    assert span_of(step=None, first=3, last=5) == (3, 5)


SAME = {
    "step": 3, "identical": True, "recorded_sha256": "a" * 64, "replayed_sha256": "a" * 64, "distance": 0.0,
    "recorded": {"loss": 0.125, "grad_norm": 2.0}, "replayed": {"loss": 0.125, "grad_norm": 2.0}, "cosine": 1.0,
    "recorded_arithmetic": "2, torch 2.13", "replayed_arithmetic": "2, torch 2.14", "tolerance": 0.05,
}  # fmt: skip
"""A step that came out as recorded."""


def _shown(**fields: Any) -> str:
    """How one unchanged step is printed that came out as recorded; `fields` replace what the flow returns for it."""
    found = {"run": "run", "plan": {"resumed_from": 0, "first": 3, "last": 3}, "changes": {}, "rewards": ""}
    found |= {"start_identical": True, "steps": [SAME], "recorded_code": "c0de", "code": "c0de+changes"}
    output = io.StringIO()
    found |= {"unchanged": True, "identical": True, "agrees": False}
    print_replay({**found, **fields}, Console(file=output, width=200))
    return output.getvalue()


def test_an_unchanged_step_says_whether_it_came_out_as_recorded_and_what_may_differ() -> None:
    text = _shown()
    assert "steps 3 to 3, from the base policy; nothing changed" in text
    assert "bit for bit" in text and "0.125" in text
    other = {**SAME, "identical": False, "replayed_sha256": "b" * 64, "distance": 0.5, "cosine": 0.9}
    text = _shown(steps=[other], identical=False, start_identical=False)
    assert "the weights differ" in text and "c0de+changes" in text and "bit for bit" not in text
    assert "steps before 3 gave other weights" in text
    text = _shown(steps=[other], identical=False, agrees=True)
    assert "agree within 0.05 of their update" in text and "recorded with 2, torch 2.13, replayed with 2, torch" in text


def test_a_change_shows_old_and_new_side_by_side() -> None:
    first = {**SAME, "identical": False, "replayed": {"loss": 0.25, "grad_norm": 2.0}, "distance": 0.5, "cosine": None}
    text = _shown(
        plan={"resumed_from": 2, "first": 3, "last": 4},
        steps=[first, {**first, "step": 4}],
        changes={"train.loss": "clip → cispo"},
        rewards="mine",
        unchanged=False,
        identical=False,
    )
    assert "from the state saved at step 2; changed: train.loss clip → cispo, rewards mine" in text
    row = next(line for line in text.splitlines() if line.startswith("4"))
    assert row.split()[:8] == ["4", "other", "0.5", "-", "0.125", "→", "0.25", "2"]
    assert "distance: " in text
