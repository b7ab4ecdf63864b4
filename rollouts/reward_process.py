"""The child side of `scoring.py`: read a JSON line, call the function, write a JSON line, until stdin ends.

Run as `python -m rollouts.reward_process`. It dies with its parent, because its stdin then ends.
"""

from __future__ import annotations

import json
import os
import sys

from rollouts.loading import load_object


def main() -> None:
    """Serve requests until stdin closes."""
    # The protocol keeps the real stdout; whatever a reward prints goes to stderr instead of into an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": load_object(request["function"])(*request["arguments"])}
            text = json.dumps(answer)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it becomes status reward_error
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text + "\n")


if __name__ == "__main__":
    main()
