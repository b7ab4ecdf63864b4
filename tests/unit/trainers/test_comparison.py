"""Equal batches have equal digests and others have not; updates are compared by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from storage.log.entries import Claim
from tests.unit.trainers.builders import random_rows, samples_of
from trainers.replay import compare_updates
from trainers.run_trainer import batch_sha256


def test_the_digest_of_a_batch_tells_any_other_claim_or_value(tiny_folder: Path) -> None:
    first, second = (
        Claim(step=step, base_version=step - 1, trained=[], stale=[], filtered=[], failed=[]) for step in (1, 2)
    )
    samples = samples_of(random_rows(tiny_folder))
    digest = batch_sha256(first, samples)
    assert digest == batch_sha256(first, dataclasses.replace(samples)) != batch_sha256(second, samples)
    others = [
        dataclasses.replace(samples, **{name: _another(getattr(samples, name))})
        for name in (field.name for field in dataclasses.fields(samples))
    ]
    assert len({digest, *(batch_sha256(first, other) for other in others)}) == 1 + len(others)


def _another(value: Any) -> Any:
    match value:
        case np.ndarray():
            return np.append(value, value[:1] if len(value) else np.zeros(1, value.dtype))
        case dict():
            return {**value, "new": np.zeros(1)}
        case bool() | None:
            return not value
        case int():
            return value + 1
        case _:
            return [*value, "new"]


def test_the_comparison_of_updates_by_hand(tmp_path: Path) -> None:
    def folder(name: str, a: list[float], b: list[float]) -> Path:
        (tmp_path / name).mkdir()
        save_file({"a": torch.tensor([a]), "b": torch.tensor(b)}, str(tmp_path / name / "model.safetensors"))
        return tmp_path / name

    start = folder("start", [1, 1], [1])
    recorded = folder("recorded", [4, 5], [1])  # moved by (3, 4, 0)
    new = folder("new", [1, 5], [4])  # moved by (0, 4, 3)
    distance, cosine = compare_updates(new, recorded, start=start)
    assert distance == pytest.approx(math.sqrt(18) / 5) and cosine == pytest.approx(16 / 25)
    assert compare_updates(recorded, recorded, start=start) == (0.0, pytest.approx(1.0))
    assert compare_updates(new, start, start=start) == (None, None)
