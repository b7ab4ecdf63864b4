"""Log entries survive JSON exactly, written with the same bytes by every version; newer and older writers are read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.log.entries import ENTRY_KINDS, LATER, Alias, Entry, Pause, Shard, Step
from storage.log.history import decode_entry, encode_entry, from_json, to_json
from tests.builders import MemoryStore, a_log, a_shard, a_step, a_summary


@pytest.mark.parametrize("kind", ENTRY_KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_entry_is_written_as_python_writes_json_and_read_again(kind: type):
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body=st.from_type(kind))
    def survives(body: Entry) -> None:
        fields = {"number": 7, "kind": next(k for k, v in ENTRY_KINDS.items() if v is kind), "written_at": 1e-05}
        document = encode_entry(body, number=7, written_at=1e-05)
        written = _written(body)
        assert document == json.dumps({**fields, "body": written}, separators=(",", ":")).encode()
        entry = decode_entry(document, number=7)
        assert dataclasses.asdict(entry) | {"body": repr(entry.body)} == {**fields, "body": repr(body)}  # NaN ≠ NaN

    survives()


def _written(record: Any) -> dict[str, Any]:
    """What is in the document: all but what came later and is empty, in a step's claim too."""
    later = {each.name for each in dataclasses.fields(record) if each.metadata == LATER}
    values = dataclasses.asdict(record).items()  # a temperature of 0 is not empty
    written = {name: value for name, value in values if value or name not in later or type(value) is float}
    return {**written, "claim": _written(record.claim)} if isinstance(record, Step) else written


@pytest.mark.parametrize("reason", ["é", '\x7f/\\"\n', "half a pair: \ud800", "🙂"])
def test_any_text_is_read_again(reason: str):
    document = encode_entry(Pause(reason=reason), number=0, written_at=1.0)
    assert document.isascii() and decode_entry(document, number=0).body == Pause(reason=reason)


def test_numbers_of_any_kind_are_read_again():
    values = {"loss": float("nan"), "gap": float("inf"), "rate": 1e-05, "tokens": 3, "mean": np.float64(0.1)}
    step = dataclasses.replace(a_step(a_log().state, trained=[]), metrics=values)
    document = encode_entry(step, number=2, written_at=1.0)
    assert b'"metrics":{"loss":NaN,"gap":Infinity,"rate":1e-05,"tokens":3,"mean":0.1}' in document
    assert repr(decode_entry(document, number=2).body.metrics) == repr({**values, "tokens": 3.0, "mean": 0.1})  # type: ignore[union-attr]


def test_what_could_not_be_read_back_is_not_written():
    log = a_log(store := MemoryStore())
    num_files = len(store.files)
    with pytest.raises(ValueError, match="version"):
        log.append(Alias(name="rollout", version="newest", checksum=""))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no place in JSON"):
        log.append(dataclasses.replace(a_step(log.state, trained=[]), metrics={"loss": np.float32(1)}))
    assert len(store.files) == num_files and log.refresh().entries == 2


def test_a_key_of_a_newer_writer_is_ignored_at_every_depth():
    value = to_json(a_shard("s0", [a_summary(0)]))
    value["colour"] = "blue"
    value["groups"][0]["shape"] = {"corners": 3}
    assert from_json(Shard, value) == a_shard("s0", [a_summary(0)])


def test_a_missing_key_is_an_error_unless_it_has_a_default():
    assert from_json(Alias, {"name": "rollout", "version": 3, "checksum": "sum"}).cache_cleared is False
    with pytest.raises(ValueError, match="checksum"):
        from_json(Alias, {"name": "rollout", "version": 3})
