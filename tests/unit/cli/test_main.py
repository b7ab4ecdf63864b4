"""The command line: overrides, and errors as sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal.arguments import parse_overrides
from storage.log.run_log import RunLog
from tests.conftest import PROJECT
from tests.unit.cli.builders import printed


def test_overrides_are_toml_values_and_bare_words() -> None:
    parsed = parse_overrides(["steps=5", "train.loss=cispo", "learning_rate=1e-3", "rollout.drop_uniform_groups=true"])
    assert parsed.pop("rollout.drop_uniform_groups") is True
    assert parsed == {"steps": 5, "train.loss": "cispo", "learning_rate": 1e-3}
    with pytest.raises(ValueError, match="key=value"):
        parse_overrides(["steps"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("stepz=4", "did you mean 'steps'"),
        ("train.shedule=linear", "did you mean 'schedule'"),
        ("n_samples=1 rollout.min_usable=1", "n_samples of 2 or more"),
        ("max_staleness=-1", "max_staleness = -1"),
        ("model=/nowhere", "no such folder"),
        ("workflow=examples.nothing:X", "cannot be imported"),
        ("workflow=examples.gsm8k:Gsm8k", "dataset must be set"),
        ("store=/dev/null/store", "cannot be opened (Not a directory); choose another `store`"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(home: Path, overrides: str, sentence: str) -> None:
    assert sentence in printed(f"train {PROJECT}/examples/arithmetic.toml {overrides}", status=2)
    assert not (home / "store" / "runs").exists(), "nothing was created"


def test_a_count_that_cannot_be_is_refused_by_its_option(log: RunLog) -> None:
    for options in ("--num-tasks 0", "--n-samples 0", "--version -1", "--temperature -1"):
        assert "Invalid value" in printed(f"eval run {options}", status=2)
    options = "--reward rollouts.rewards.answers:exact --processes -1"
    assert "Invalid value" in printed(f"rescore run {options}", status=2)


def test_a_data_file_with_a_broken_line_names_the_line(home: Path) -> None:
    data = home / "data.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?"}\n')
    shown = printed(f"train {PROJECT}/examples/gsm8k.toml dataset={data}", status=2)
    assert "line 2" in shown and "'answer' missing" in shown
