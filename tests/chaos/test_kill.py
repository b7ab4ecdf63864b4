"""kill -9 of the whole process group, Ctrl-C and SIGTERM in turn, and the run goes on as if nothing had happened; in a
fixed schedule with other workers, too."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from storage.log.claims import follows_until
from tests.chaos.outcomes import check_trained_once, sampled_by, state_of, weights_of
from tests.conftest import SCRIPTED, Home

KILLS = 40 if os.environ.get("MILLRACE_CHAOS_FAULTS") else 3  # each of `_STOPS`; `make chaos` kills more often
STEPS = 4 * KILLS  # more than so many lives last
_STOPS = (None, signal.SIGINT, signal.SIGTERM)
"""`millrace stop` sends the second; of those that go to one process."""


_FIXED = ["max_staleness=1", "rollout.schedule=fixed", "rollout.drop_uniform_groups=true", "n_samples=2"]
"""Half of the groups are rejected, so that which ones are asked at all depends on what others came to."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "schedule", [pytest.param([], id="synchronous", marks=pytest.mark.slow), pytest.param(_FIXED, id="fixed")]
)
def test_kills_and_stops_lose_nothing_and_change_nothing(home: Home, base_model: Path, schedule: list[str]) -> None:
    arguments = ["train", str(SCRIPTED), f"model={base_model}", f"steps={STEPS}", "evaluation.every=0", *schedule]
    arguments.append("reward.timeout=300")  # on a busy machine its process may take long to start
    done = home.run(*arguments, "run=undisturbed")
    assert done.stdout.count("run=undisturbed") == 1, "the next run's name stands for this one's"
    arguments += ["run=killed", *(["rollout.max_concurrent=3"] if schedule else [])]
    draw = random.Random(7)
    committed: set[str] = set()
    for number in range(KILLS):
        process = home.start(*arguments)
        entries = state_of(home, "killed").entries + draw.randint(1, 5)
        home.wait(process, lambda entries=entries: state_of(home, "killed").entries >= entries)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 0.3))  # the random moment itself
        if stop := _STOPS[number % len(_STOPS)]:
            process.send_signal(stop)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=60) == (130 if stop else -signal.SIGKILL)
        state = state_of(home, "killed")
        assert committed <= state.groups.keys(), "a committed group was lost"
        committed = set(state.groups)
    home.run(*arguments, *(["rollout.num_workers=2"] if schedule else []))
    killed, undisturbed = state_of(home, "killed"), state_of(home, "undisturbed")
    if schedule:
        assert {shard.producer for shard in undisturbed.shards.values()} == {"rollout-0"}
        assert {shard.producer for shard in killed.shards.values()} == {"rollout-0", "rollout-1"}
        newest = [max(head for _, _, head, _ in groups) for groups in sampled_by(killed)]
        assert newest == [0, *range(STEPS - 1)]
    else:  # what a filter rejects is replaced by prompts behind it
        check_trained_once(killed, steps=STEPS, committed=committed)
    assert len(set(weights_of(undisturbed))) == STEPS, "equal weights would compare equal whatever happened"
    assert weights_of(killed) == weights_of(undisturbed)
    assert sampled_by(killed) == sampled_by(undisturbed)
    assert follows_until(killed) == follows_until(undisturbed) == (STEPS, "")


@pytest.mark.slow
def test_a_stopped_run_leaves_no_process_and_goes_on_as_if_nothing_had_happened(home: Home, base_model: Path) -> None:
    arguments = ["train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0"]
    home.run(*arguments, "run=whole", "steps=8")
    process = home.start(*arguments, "run=stopped", "steps=4000")
    home.wait(process, lambda: state_of(home, "stopped").step >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    stopped = home.run("stop", "stopped")
    assert process.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(children, timeout=180)
    assert not alive, f"`millrace stop` left {alive}"
    step = state_of(home, "stopped").step
    assert f"run stopped has stopped at step {step}" in stopped.stdout
    assert home.run("stop", "stopped", check=False).returncode == 2
    home.run(*arguments, "run=stopped", f"steps={step + 2}")
    state = state_of(home, "stopped")
    check_trained_once(state, steps=step + 2)
    assert weights_of(state)[:8] == weights_of(state_of(home, "whole"))[: len(weights_of(state))]
