"""Conventions of other systems as values of our settings.

In: the `train` table of a run file. Out: the same table, with what its preset means filled in where it is silent.
docs/algorithms.md tells where each value comes from.
"""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["", "trl", "verl", "openrlhf"]

_GRPO = {"kind": "grpo", "scale": "std", "ddof": 1}
_RLOO = {"kind": "leave_one_out", "scale": "none"}
_REINFORCE = {"kind": "reinforce++", "eps": 1e-8}
_GAE = {"kind": "gae", "gamma": 1.0, "lam": 1.0, "whiten": True}
_CLIP = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
_SAPO = {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}

_PRESETS: dict[str, dict[str, Any]] = {
    "trl": {
        "advantage": [{**_GRPO, "eps": 1e-4, "singleton": "zero"}, _RLOO],
        "loss": [_CLIP, {"kind": "cispo", "clip_low": None, "clip_high": 4.0}, _SAPO],
        "aggregation": "token_mean",
        "kl": {"estimator": "k3", "place": "loss", "clamp": None, "weighted": True},
    },
    "verl": {
        "advantage": [{**_GRPO, "eps": 1e-6, "singleton": "reward"}, _RLOO, _REINFORCE, _GAE],
        "loss": [{**_CLIP, "dual_clip": 3.0}, {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.2}, _SAPO],
        "aggregation": "token_mean",
        "kl": [
            {"estimator": "k3", "place": "loss", "clamp": 10.0, "weighted": False},
            {"place": "loss", "clamp": None, "weighted": False},
            {"estimator": "k1", "place": "reward", "clamp": None, "weighted": False},
            {"estimator": "k3", "clamp": 10.0, "weighted": False},
            {"clamp": None, "weighted": False},
        ],
        "critic": {"clip": 0.5},
    },
    "openrlhf": {
        "advantage": [{**_REINFORCE, "baseline": False}, {**_GRPO, "eps": 1e-9, "singleton": "zero"}, _RLOO, _GAE],
        "loss": [_CLIP],
        "aggregation": "token_mean",
        "kl": {"estimator": "k1", "place": "reward", "clamp": 10.0, "weighted": False},
        "critic": {"clip": 0.5},
    },
}
"""A list holds a block for each `kind`, or estimator and place of the KL, that the system has conventions for."""
_CHOICES = ("kind", "estimator", "place")


def with_preset(table: dict[str, Any]) -> dict[str, Any]:
    """`table` with its preset's conventions under what it says itself; `table` stays as it is.

    A block without a `kind` is of the preset's first one; other kinds keep our defaults. Values that are no tables
    (settings built in Python) are whole already. The table itself checks that the preset exists.
    """
    preset = table.get("preset")
    filled = dict(table)
    for name, convention in _PRESETS.get(preset, {}).items() if isinstance(preset, str) else ():
        given = table.get(name, convention if isinstance(convention, str) else {})
        is_block = isinstance(given, dict) and not isinstance(convention, str)
        filled[name] = {**_block(convention, given), **given} if is_block else given
    return filled


def under_preset(table: dict[str, Any], preset: str) -> dict[str, Any]:
    """A whole `table` with a preset's conventions in place of its own values; kinds stay."""
    changed = {**table, "preset": preset}
    for name, convention in _PRESETS.get(preset, {}).items():
        own = table[name]
        kind = {"kind": own["kind"]} if isinstance(own, dict) and "kind" in own else {}
        changed[name] = {**own, **_block(convention, kind)} if isinstance(own, dict) else convention
    return changed


def conventions_for(name: str) -> list[dict[str, Any]]:
    """What each preset says about a block that has no kinds, such as `critic`."""
    return [preset[name] for preset in _PRESETS.values() if name in preset]


def _block(convention: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a convention says about a block; of several the first that `given` does not contradict."""
    if isinstance(convention, dict):
        return convention
    for block in convention:
        if all(given.get(key, block[key]) == block[key] for key in _CHOICES if key in block):
            return {**block}
    return {}
