"""Entries as older versions wrote them."""

from __future__ import annotations

from storage.log.entries import Alias, from_json, to_json


def test_an_alias_from_before_updates_were_recorded_is_read():
    old = from_json(Alias, {"name": "rollout", "version": 3, "checksum": "sum"})
    assert old == Alias(name="rollout", version=3, checksum="sum")
    assert (old.update_mode, old.cache_cleared, old.paused_seconds) == ("", False, 0.0)


def test_an_alias_says_how_the_engine_took_the_policy_over():
    alias = Alias(
        name="rollout", version=3, checksum="sum", update_mode="abort", cache_cleared=True, paused_seconds=0.25
    )
    assert from_json(Alias, to_json(alias)) == alias
