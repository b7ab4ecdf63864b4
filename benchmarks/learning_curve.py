"""The learning curve of a run, drawn from its log.

In: a run id and the name of a PNG. Out: the picture, and beside it the same numbers as JSON.

    .venv/bin/python -m benchmarks.learning_curve arithmetic docs/arithmetic.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cli.operate.status import run_status
from settings.places.state_folder import store_uri
from storage.log.entries import Evaluation, Step
from storage.log.run_log import RunLog
from storage.log.runs import open_run, run_config
from storage.log.scores import own_scores
from storage.objects.opening import open_store

TOOL_CALLS = "tool_calls_per_attempt"


def curve(log: RunLog) -> dict[str, Any]:
    """Reward and tool calls per step and held-out score per version, with seconds since the run's first entry."""
    start = log.entries[0].written_at
    steps = [(e, e.body) for e in log.entries if isinstance(e.body, Step) and "reward" in e.body.metrics]
    own = own_scores(log, run_config(log))
    scores = [(entry, entry.body) for entry in log.entries if isinstance(entry.body, Evaluation) and entry.body in own]
    return {
        "status": {key: value for key, value in run_status(log).items() if key not in ("store", "policy")},
        "reward": [[body.claim.step, body.metrics["reward"], entry.written_at - start] for entry, body in steps],
        "held_out": [[body.version, body.score, entry.written_at - start] for entry, body in scores],
        TOOL_CALLS: [
            [body.claim.step, body.metrics[TOOL_CALLS], entry.written_at - start]
            for entry, body in steps
            if TOOL_CALLS in body.metrics
        ],
    }


def draw(numbers: dict[str, Any], picture: Path) -> None:
    """Training reward and held-out accuracy over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=110)
    steps, rewards, _ = zip(*numbers["reward"], strict=True)
    versions, scores, _ = zip(*sorted(numbers["held_out"]), strict=True)
    axes.plot(steps, rewards, color="#8aa9c9", linewidth=1.5, label="mean reward of the rollouts (sampled)")
    axes.plot(versions, scores, color="#c0392b", marker="o", linewidth=2, label="held-out accuracy")
    most_calls = 1.0
    if numbers[TOOL_CALLS]:
        called, calls, _ = zip(*numbers[TOOL_CALLS], strict=True)
        axes.plot(called, calls, color="#5d9b5d", linestyle="--", linewidth=1.5, label="tool calls per attempt")
        most_calls = max(1.0, *calls)
    for version, score in ((versions[0], scores[0]), (versions[-1], scores[-1])):
        axes.annotate(f"{score:.3f}", (version, score), textcoords="offset points", xytext=(0, 8), ha="center")
    status = numbers["status"]
    minutes, gib = status["wall_seconds"] / 60, status["peak_memory_bytes"] / 2**30
    axes.set_title(f"{status['run']}: {status['step']} steps in {minutes:.1f} min, at most {gib:.1f} GiB")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1.05 * most_calls)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Read the arguments, draw, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--store", default="")
    arguments = parser.parse_args()
    numbers = curve(open_run(open_store(store_uri(arguments.store)), arguments.run))
    draw(numbers, arguments.picture)
    arguments.picture.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
