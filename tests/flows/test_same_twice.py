"""A run and the same run with other workers: the same policies, trained on the same groups, of the same samplers."""

from __future__ import annotations

from pathlib import Path

from storage.log.claims import follows_until
from tests.chaos.outcomes import sampled_by, state_of, weights_of
from tests.conftest import SCRIPTED, Home


def test_in_a_fixed_schedule_workers_and_concurrency_change_nothing(home: Home, base_model: Path) -> None:
    """Half of the groups are rejected, so that which ones are asked at all depends on what others came to."""
    patient = "reward.timeout=300"  # on a busy machine its process may take long to start
    fixed = [patient, "max_staleness=1", "rollout.schedule=fixed", "rollout.drop_uniform_groups=true", "n_samples=2"]
    arguments = ["train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0", *fixed]
    home.run(*arguments, "run=one")
    home.run(*arguments, "run=two", "rollout.num_workers=2", "rollout.max_concurrent=3")
    one, two = (state_of(home, run) for run in ("one", "two"))
    producers = [{shard.producer for shard in state.shards.values()} for state in (one, two)]
    assert producers == [{"rollout-0"}, {"rollout-0", "rollout-1"}]
    assert len(set(weights_of(one))) == 6 and weights_of(two) == weights_of(one)
    assert sampled_by(two) == sampled_by(one)
    assert [max(head for _, _, head, _ in groups) for groups in sampled_by(one)] == [0, 0, 1, 2, 3, 4]
    assert follows_until(one) == follows_until(two) == (6, "")
    assert home.status("two")["reproducible"] == "all 6 of 6 steps, where log-probabilities have the same bits"
