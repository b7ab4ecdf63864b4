"""Writes `v1.arrow`, a shard as the first schema wrote it. Run it only to add a file for a new schema version:
`python -m tests.golden.make_v1`. The file that is committed is never made again: it stands for shards on users' disks.
"""

from __future__ import annotations

from pathlib import Path

from storage.records import Message, RolloutGroup, Sampling, Task, ToolCall, Trajectory, Turn
from storage.shards.codec import Provenance
from tests.shard_files import encode_shard

FILE = Path(__file__).parent / "v1.arrow"

_ASKED = Message(role="user", content="37+45=")

TWO_TURNS_WITH_A_TOOL = Trajectory(
    attempt=0,
    turns=[
        Turn(
            context_ids=[2, 8, 12, 4, 9, 10, 15, 3],
            sampled_ids=[12, 7, 1],
            logprobs=[-0.25, -0.5, -0.125],
            weight_versions=[3, 3, 4],
            finish_reason="stop",
            tool_calls=[ToolCall(name="add", arguments='{"a": 37, "b": 45}', result="82", seconds=0.5)],
            generate_seconds=0.75,
        ),
        Turn(
            context_ids=[2, 13, 7, 3],
            sampled_ids=[13, 7],
            logprobs=[-1.0, 0.0],
            weight_versions=[4, 4],
            finish_reason="length",
            generate_seconds=0.25,
        ),
    ],
    messages=[
        _ASKED,
        Message(role="assistant", content="72", is_completion=True),
        Message(role="tool", content="82"),
        Message(role="assistant", content="82", is_completion=True),
    ],
    status="truncated",
    reward=0.5,
    reward_parts={"exact": 1.0, "format": -0.5, "style": None},
    reward_seconds=0.125,
    started_at=1_700_000_000.5,
    finished_at=1_700_000_002.0,
)

FORKED = Trajectory(
    attempt=2,
    turns=[
        Turn(
            context_ids=[2, 8, 3],
            sampled_ids=[5, 1],
            logprobs=[-2.0, -0.0625],
            weight_versions=[4, 4],
            finish_reason="stop",
        ),
        Turn(
            context_ids=[2, 9, 3],
            sampled_ids=[6, 1],
            logprobs=[-3.0, -0.03125],
            weight_versions=[5, 5],
            finish_reason="stop",
            sequence_idx=1,
        ),
    ],
    messages=[_ASKED, Message(role="assistant", content="0", is_completion=True)],
    status="ok",
    reward=0.0,
)

FAILED = Trajectory(attempt=1, turns=[], messages=[_ASKED], status="env_error", reward=None, error="KeyError: 'x'")

GROUPS = [
    RolloutGroup(
        id="2.37+45",
        task=Task(id="37+45", prompt="37+45=", answer="82"),
        position=205,
        epoch=2,
        expected=3,
        trajectories=[TWO_TURNS_WITH_A_TOOL, FAILED, FORKED],
        queued_at=1_700_000_000.0,
    ),
    RolloutGroup(
        id="2.1+1.retry1",
        task=Task(id="1+1", prompt="01+01=", answer="2"),
        position=206,
        epoch=2,
        expected=1,
        trajectories=[
            Trajectory(
                attempt=0,
                turns=[
                    Turn(
                        context_ids=[],
                        sampled_ids=[151_643],
                        logprobs=[-10.5],
                        weight_versions=[5],
                        finish_reason="stop",
                    )
                ],
                messages=[Message(role="assistant", content="grün 🙂", is_completion=True)],
                status="max_turns",
                reward=-1.5,
            )
        ],
        accepted=False,
        reject_reason="1 usable of 1, 2 needed",
    ),
]


def make() -> bytes:
    """The shard's bytes."""
    provenance = Provenance(
        run_id="golden",
        shard_id="000003-rollout-0-0a1b2c3d",
        producer="rollout-0",
        tokenizer_sha256="11" * 32,
        chat_template_sha256="22" * 32,
        config_sha256="33" * 32,
        code_version="0.1.0",
    )
    return encode_shard(GROUPS, provenance=provenance, sampling=Sampling(temperature=0.5, max_tokens=16, seed=7))


if __name__ == "__main__":
    FILE.write_bytes(make())
