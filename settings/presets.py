"""Conventions of other systems as values of our settings.

In: the `train` table of a run file. Out: the same table, with what its preset means filled in where it is silent.
docs/algorithms.md tells where each value comes from.
"""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["", "trl", "verl", "openrlhf"]

# A list holds one block for each `kind` the system has conventions for; a block without a kind is the first one.
_TRL: dict[str, Any] = {
    "advantage": [
        {"kind": "grpo", "scale": "std", "ddof": 1, "eps": 1e-4, "singleton": "zero"},
        {"kind": "leave_one_out", "scale": "none"},
    ],
    "loss": [
        {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        {"kind": "cispo", "clip_low": None, "clip_high": 4.0},
        {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    ],
    "aggregation": "token_mean",
    "kl": {"estimator": "k3", "place": "loss", "clamp": None, "weighted": True},
}
_VERL: dict[str, Any] = {
    "advantage": [
        {"kind": "grpo", "scale": "std", "ddof": 1, "eps": 1e-6, "singleton": "reward"},
        {"kind": "leave_one_out", "scale": "none"},
        {"kind": "reinforce++", "eps": 1e-8},
        {"kind": "gae", "gamma": 1.0, "lam": 1.0, "whiten": True},
    ],
    "loss": [
        {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        {"kind": "cispo", "clip_low": 0.2, "clip_high": 0.2},
        {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    ],
    "aggregation": "token_mean",
    "kl": {"estimator": "k3", "place": "loss", "clamp": 10.0, "weighted": False},
    "critic": {"clip": 0.5},
}
_OPENRLHF: dict[str, Any] = {
    "advantage": [
        {"kind": "reinforce++", "baseline": False, "eps": 1e-8},
        {"kind": "grpo", "scale": "std", "ddof": 1, "eps": 1e-9, "singleton": "zero"},
        {"kind": "leave_one_out", "scale": "none"},
        {"kind": "gae", "gamma": 1.0, "lam": 1.0, "whiten": True},
    ],
    "loss": [{"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}],
    "aggregation": "token_mean",
    "kl": {"estimator": "k1", "place": "reward", "clamp": 10.0, "weighted": False},
    "critic": {"clip": 0.5},
}
_PRESETS: dict[str, dict[str, Any]] = {"trl": _TRL, "verl": _VERL, "openrlhf": _OPENRLHF}


def with_preset(table: dict[str, Any]) -> dict[str, Any]:
    """`table` with its preset's conventions under what it says itself; `table` stays as it is.

    A block without a `kind` is of the preset's first one; a block of a kind the preset says nothing about keeps our
    defaults. Values that are no tables (settings built in Python) are whole already. A preset that does not exist is
    left to the table's own check.
    """
    preset = table.get("preset")
    conventions = _PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    filled = dict(table)
    for name, convention in conventions.items():
        silent = {} if isinstance(convention, dict | list) else convention
        filled[name] = _filled(table.get(name, silent), convention)
    return filled


def under_preset(table: dict[str, Any], preset: str) -> dict[str, Any]:
    """A whole `table`, in which nothing is silent, with a preset's conventions in place of its own values.

    Kinds stay, and so does what the preset has no convention for.
    """
    changed = {**table, "preset": preset}
    for name, convention in _PRESETS.get(preset, {}).items():
        match table[name], convention:
            case dict() as own, dict():
                changed[name] = {**own, **convention}
            case dict() as own, list():
                changed[name] = {**own, **_of_kind(own["kind"], convention)}
            case _:
                changed[name] = convention
    return changed


def conventions_for(name: str) -> list[dict[str, Any]]:
    """What each preset says about a block that has no kinds, such as `critic`."""
    return [preset[name] for preset in _PRESETS.values() if name in preset]


def _filled(given: Any, convention: Any) -> Any:
    match given, convention:
        case dict(), dict():
            return {**convention, **given}
        case dict(), list():
            return {**_of_kind(given.get("kind", convention[0]["kind"]), convention), **given}
    return given


def _of_kind(kind: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    return next((block for block in blocks if block["kind"] == kind), {})
