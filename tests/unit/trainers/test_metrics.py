"""Every metric that a step reports is in docs/metrics.md, with what it means."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.trainers.builders import random_rows, row_of, samples_of, take_step, trainer_of
from trainers.data.operations import Operations

_DOCUMENT = Path(__file__).parents[3] / "docs/metrics.md"


def _documented() -> re.Pattern[str]:
    """Matches every name in the tables' first column; `<part>` stands for anything, `…_1` for any number."""
    rows = [line.split(" | ")[0] for line in _DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    patterns = [re.sub(r"<\w+>", r".+", re.escape(name).replace("\\<", "<").replace("\\>", ">")) for name in names]
    return re.compile("|".join([*patterns, r"staleness_share_\d+"]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": {"kind": "clip", "dual_clip": 3.0}, "decoupled": {}, "num_minibatches": 2, "entropy_bonus": 0.01},
        {"loss": {"kind": "cispo"}, "decoupled": {"proximal": "loglinear"}},
        {"loss": {"kind": "gspo"}, "aggregation": "sequence_mean"},
        {"loss": {"kind": "dppo"}, "reject": [{"high": 2.0}]},
        {"loss": {"kind": "sapo"}, "top_entropy_fraction": 0.5},
        {"loss": {"kind": "sft", "min_reward": 0.0}},
        {"advantage": {"kind": "gae"}},
        {"kl": {"coefficient": 0.1, "weighted": True}, "reference": {"kind": "base"}, "ema": 0.9},
    ],
    ids=str,
)
def test_every_metric_of_a_step_is_documented(tiny_folder: Path, settings: dict[str, Any]) -> None:
    metrics = take_step(trainer_of(tiny_folder, **settings), samples_of(random_rows(tiny_folder)))
    documented = _documented()
    assert metrics and [name for name in metrics if not documented.fullmatch(name)] == []
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("settings", "passes"), [({}, 3), ({"lora": {"rank": 2}}, 2), ({"decoupled": {}}, 4)], ids=str)
def test_the_operations_of_a_step_are_those_of_what_is_computed(
    tiny_folder: Path, settings: dict[str, Any], passes: int
) -> None:
    """Two attempts of 5 tokens at a prompt of 8, and one of 3 at another of 4, whose last tokens predict nothing."""
    first = {"prompt": [2] * 8, "group": 0}
    second = {"prompt": [1] * 4, "group": 1}
    changes: list[dict[str, Any]] = [{**first, "reward": 1.0}, first, {**second, "reward": 1.0}, second]
    replies = [[3, 4, 5, 6, 7], [8] * 5, [9] * 3, [5]]
    trainer, found = trainer_of(tiny_folder, **settings), []
    for version in (0, 1):
        rows = [
            row_of(reply, version=version, attempt=number, **changes[number]) for number, reply in enumerate(replies)
        ]
        found.append(take_step(trainer, samples_of(rows), step=version + 1)["train_flops"])
    computed = 8 + 4 + 4 + 4 + 2
    pairs = sum(range(1, 13)) + sum(range(9, 13)) + sum(range(1, 7))
    operations = Operations.of(trainer.model.causal_lm)
    once = operations.forward(computed=computed, predicted=5 + 5 + 3 + 1, pairs=pairs)
    assert found == [passes * once] * 2
