"""The page of models is made of the results beside it, and no row claims what was not run."""

import json

from benchmarks.models import page
from tests.conftest import PROJECT


def test_the_page_is_that_of_the_results_and_every_row_is_exact_or_says_why_not() -> None:
    rows = json.loads((PROJECT / "docs/models.json").read_text())
    assert (PROJECT / "docs/models.md").read_text() == page(rows)
    exact = [row for row in rows.values() if not row["packed"].startswith("no")]
    assert len(exact) >= 60 and all(float(gap) < 1e-5 for row in exact for gap in row["packed"].split(", "))
    assert all({"transformers", "vllm", "day"} <= row.keys() for row in rows.values())
