"""The shards of one worker, with their provenance and the time they took.

groups, wall-clock seconds ─▶ shares of generating and of rewarding ─▶ `storage.shards.shards.commit_shard`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.production.failures import Failures
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.records import RolloutGroup, Sampling
from storage.shards.codec import Provenance
from storage.shards.failed_attempts import failed_attempts
from storage.shards.shards import commit_shard


@dataclass(frozen=True, kw_only=True)
class ShardWriter:
    log: RunLog
    producer: str
    tokens: ChatTokens
    config_sha256: str
    code_version: str
    failures: Failures = field(default_factory=Failures)

    def write(
        self,
        shard_id: str,
        groups: Sequence[RolloutGroup],
        *,
        sampling: Sampling,
        wall_seconds: float,
        is_eval: bool = False,
    ) -> Shard:
        """Commit the groups as one shard, which took `wall_seconds` to produce (`storage.shards.shards`)."""
        self.failures.add(failed_attempts(groups))
        provenance = Provenance(
            run_id=self.log.run_id,
            shard_id=shard_id,
            producer=self.producer,
            tokenizer_sha256=self.tokens.tokenizer_sha256,
            chat_template_sha256=self.tokens.chat_template_sha256,
            config_sha256=self.config_sha256,
            code_version=self.code_version,
        )
        seconds = _phases(groups, wall_seconds)
        return commit_shard(
            self.log, groups, provenance=provenance, sampling=sampling, is_eval=is_eval, seconds=seconds
        )


def _phases(groups: Sequence[RolloutGroup], wall_seconds: float) -> dict[str, float]:
    """The wall-clock in proportion to the attempts' own seconds, which overlap."""
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    rewarding = sum(trajectory.reward_seconds for trajectory in attempts)
    generating = sum(turn.generate_seconds for trajectory in attempts for turn in trajectory.turns)
    share = rewarding / (rewarding + generating) if attempts and rewarding + generating else 0.0
    return {"generate": wall_seconds * (1 - share), "reward": wall_seconds * share}
