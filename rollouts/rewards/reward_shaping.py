"""Turns a score into the reward that is trained on: weights, scale, clipping, and a penalty for length.

In: the named parts of one attempt, and the run file's `[reward]`. Out: its reward, and the part `overlong`.

    training    reward = clip((Σ weight · part + bias) · scale) + overlong
    evaluation  reward = Σ weight · part: the weights define a good reply, the rest only shapes the gradient

Parts stay raw. An attempt without a reward gets none, whatever its parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rollouts.reward_values import as_number
from settings.errors import InvalidInput
from settings.reward import RewardSettings
from storage.records import Trajectory

OVERLONG = "overlong"
"""Name of the length penalty among the reward parts."""


def weighted_sum(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Σ weight · part over the parts that apply, with weight 1 by default; None if no part applies.

    >>> weighted_sum({"correct": 1.0, "format": 0.5, "style": None}, {"format": 0.2})
    1.1
    """
    weighted = [weights.get(name, 1.0) * part for name, part in parts.items() if part is not None]
    return sum(weighted) if weighted else None


def overlong(length: int, *, max_length: int, zone: int) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476 equation 13, from 0 to −1. Lengths are in tokens.

    0 up to `max_length` − `zone`, from there a straight line to −1 at `max_length`, and −1 beyond.

    >>> overlong(768, max_length=1024, zone=256), overlong(896, max_length=1024, zone=256)
    (0.0, -0.5)
    """
    return max(-1.0, min(0.0, (max_length - zone - length) / zone))


def shaped(trajectory: Trajectory, settings: RewardSettings, *, max_tokens: int, is_eval: bool) -> Trajectory:
    """The attempt with the reward that is trained on. Its longest reply counts as its length.

    Raises `InvalidInput` if the workflow has a part `overlong` and the run file's length penalty is on.
    """
    reward, parts = trajectory.reward, trajectory.reward_parts
    if reward is not None and settings.weights and parts:
        reward = weighted_sum(parts, settings.weights)
    if reward is None or is_eval:
        return dataclasses.replace(trajectory, reward=as_number(reward))
    reward = (reward + settings.bias) * settings.scale
    if settings.clip is not None:
        reward = max(-settings.clip, min(settings.clip, reward))
    if settings.overlong_tokens and settings.overlong_penalty:
        if OVERLONG in parts:
            raise InvalidInput(
                f"the workflow has a reward part {OVERLONG!r}, which is the name of the run file's length penalty; "
                "rename it, or set reward.overlong_tokens = 0"
            )
        longest = max((len(turn.sampled_ids) for turn in trajectory.turns), default=0)
        penalty = settings.overlong_penalty * overlong(longest, max_length=max_tokens, zone=settings.overlong_tokens)
        reward, parts = reward + penalty, {**parts, OVERLONG: penalty}
    return dataclasses.replace(trajectory, reward=as_number(reward), reward_parts=parts)


def check_weights(unseen: set[str], trajectories: Sequence[Trajectory]) -> set[str]:
    """The weighted parts that no attempt has had so far, after one more group.

    Raises `InvalidInput` if there are any although the group has rewards: a misspelt weight would have no effect.
    """
    rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    if not unseen or not rewarded:
        return unseen
    names = sorted({name for trajectory in rewarded for name in trajectory.reward_parts})
    if missing := sorted(unseen - set(names)):
        raise InvalidInput(
            f"reward.weights names {', '.join(missing)}, but the reward parts are {', '.join(names) or 'none at all'}. "
            "Correct the name; a part that does not always apply must be returned as None if it does not"
        )
    return set()
