"""What a run's log must show after a fault."""

from __future__ import annotations

from collections.abc import Collection

from storage.log.entries import claimed_groups
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.object_store import LocalStore
from tests.conftest import Home


def state_of(home: Home, run: str) -> RunState:
    """The fold of the log as it stands; `refresh` checks the conservation law."""
    return RunLog(LocalStore(home.path / "store"), run).refresh()


def check_trained_once(
    state: RunState, *, steps: int, batch_size: int = 4, committed: Collection[str] = frozenset()
) -> None:
    """A run that has ended trained every prompt of its steps once, and has all groups `committed` before."""
    assert state.step == steps and state.positions == set(range(batch_size * steps)), "a prompt was skipped"
    prompts = [state.groups[group.group_id].prompt_id for step in state.steps for group in step.claim.trained]
    assert len(prompts) == len(set(prompts)) == batch_size * steps, "a prompt was trained twice"
    assert set(committed) <= state.groups.keys(), "a committed group was lost"
    assert not state.leased


def sampled_by(state: RunState) -> list[list[tuple[str, str, int, int]]]:
    """Per step: outcome, id, oldest and newest policy of each of its groups."""
    taken = [claimed_groups(step) for step in state.steps]
    groups = [[(outcome, state.groups[each.group_id]) for outcome, each in of_step] for of_step in taken]
    return [[(outcome, g.id, g.head_version, g.tail_version) for outcome, g in of_step] for of_step in groups]


def weights_of(state: RunState) -> list[str]:
    """The digest of the weights after each step."""
    return [step.policy.weights_sha256 for step in state.steps]
