"""The page of models is made of the results beside it, and no row claims what was not run."""

import json

import pytest

from benchmarks.models import MOST_GAP, page
from tests.conftest import PROJECT
from trainers.model.kinds import replay_refusal


def test_the_page_is_that_of_the_results_and_says_their_versions() -> None:
    rows = json.loads((PROJECT / "docs/models.json").read_text())
    assert (PROJECT / "docs/models.md").read_text() == page(rows)
    assert all({"transformers", "vllm", "day"} <= row.keys() for row in rows.values())


@pytest.mark.parametrize(
    ("column", "most", "fewest"),
    [("packed", 1e-5, 60), ("ranks", 1e-4, 20), ("served", MOST_GAP, 60), ("slot", MOST_GAP, 8)],
)
def test_every_row_is_exact_or_says_why_not(column: str, most: float, fewest: int) -> None:
    rows = json.loads((PROJECT / "docs/models.json").read_text())
    proven = {name: row[column] for name, row in rows.items() if not row.get(column, "no").startswith("no")}
    assert len(proven) >= fewest
    assert all(float(gap) <= most for gaps in proven.values() for gap in gaps.split(", "))


def test_models_whose_routers_replay_are_those_that_a_start_lets_pass() -> None:
    rows = json.loads((PROJECT / "docs/models.json").read_text())
    tried = {name: row["replay"] for name, row in rows.items() if row.get("replay", "no experts") != "no experts"}
    refused = {name for name in tried if replay_refusal({"model_type": name, "num_experts": 4})}
    assert refused == {name for name, said in tried.items() if said.startswith("no")} and len(tried) > 30
