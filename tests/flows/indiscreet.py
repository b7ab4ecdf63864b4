"""A workflow whose code says the secrets of its environment wherever a workflow's code can say something."""

from __future__ import annotations

import json
import logging
import os
import sys
import urllib.parse
import warnings

from rollouts.chat.chat import Chat
from rollouts.rewards.scoring import score
from rollouts.workflow import Score
from storage.records import Task
from tests.flows.guesses import Guesses, parity
from trainers.objective.losses import LossInputs, LossOutput, clip_loss

PLANTED = "TEST_PLANTED"
"""Environment variable: the names of those with secrets."""
CRASHES = "TEST_CRASHES"
"""Environment variable: with a value, training ends."""


_calls: list[int] = []


def everything() -> str:
    """The secrets of this process's environment, as they stand and as libraries quote them."""
    secrets = [os.environ[name] for name in json.loads(os.environ[PLANTED])]
    quoted = [urllib.parse.quote(secret, safe="") for secret in secrets]
    return " , ".join([*secrets, *quoted, *map(repr, secrets)])


class Indiscreet(Guesses):
    async def run(self, task: Task, chat: Chat) -> Score:
        logging.getLogger("millrace.test").warning("of %s", everything())
        if "ray" in sys.modules:  # when the run is checked before its start, its terminal is the user's own
            print(everything())
            print(everything(), file=sys.stderr)
            warnings.warn(everything(), stacklevel=1)
        reply = await chat.ask(task.prompt)
        if chat.request_id.endswith("/1"):
            raise ConnectionError(f"refused: {everything()}")
        return await score(parity, reply, task.answer)


def loss(inputs: LossInputs) -> LossOutput:
    _calls.append(1)
    if os.environ.get(CRASHES) and "ray" in sys.modules and len(_calls) > 1:  # not when it is tried before the start
        raise RuntimeError(f"no server answers: {everything()}")
    return clip_loss(inputs, clip_low=0.2, clip_high=0.2)
