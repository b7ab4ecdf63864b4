"""`millrace diff`: two runs, and where they first differ.

In: two logs and the shards of their steps. Out: the settings, code and data that differ, and the first thing, in the
order of cause, that is another one: a claim, a prompt, a draw, a log-probability, a token, a reward, a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.terminal.arguments import JsonOption, StoreOption, open_named, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import number, plain_table
from cli.traj.finding import note_left_out
from settings.places.hints import command
from settings.redaction import one_line

if TYPE_CHECKING:
    from storage.log.entries import Step
    from storage.log.run_log import RunLog

_OWN = {"run", "store", "tracking"}
_COLUMNS = [
    "group_id",
    "attempt",
    "sequence_idx",
    "prompt_len",
    "input_ids",
    "loss_mask",
    "logprobs",
    "reward",
    "sampling",
]


def runs_diff(a: str, b: str, store: StoreOption = "", as_json: JsonOption = False) -> None:
    """Two runs: what differs in what they were given, and the first thing that differs in what they did."""
    logs, left_out = (open_named(a, store), open_named(b, store)), dict[str, str]()
    differences = [*given(*logs), *itertools.islice(done(*logs, left_out), 1)]
    note_left_out(left_out)
    if as_json:
        print_json(differences)
        return
    console, table = open_console(), plain_table("", "what", a, b)
    for each in differences:
        where = [str(each[name]) for name in ("step", "id", "token") if name in each]
        values = [number(v, digits=9) if isinstance(v, float) else str(v) for v in (each["a"], each["b"])]
        table.add_row(*(Text(one_line(text)) for text in (" ".join(where), each["what"], *values)))
    if not any("step" in each for each in differences):
        console.print(f"the {min(len(log.state.steps) for log in logs)} steps that both have are the same, bit for bit")
    if differences:
        console.print(table)
    for each in differences:
        if "id" in each:
            console.print(command("traj", "diff", a, each["id"], each["id"], "--run-b", b), soft_wrap=True)


def given(a: RunLog, b: RunLog) -> list[dict[str, Any]]:
    """Settings, code, tasks and base policies that differ."""
    from settings.block import leaves
    from storage.log.runs import run_config

    configs = [{k: v for k, v in leaves(run_config(log)) if k.split(".")[0] not in _OWN} for log in (a, b)]
    keys = sorted(configs[0].keys() | configs[1].keys())
    pairs: dict[str, list[Any]] = {f"setting {key}": [config.get(key) for config in configs] for key in keys}
    for log in (a, b):
        state = log.state
        tasks = state.task_set()
        code = sorted({f"{each.code_version} {each.reward_sha256[:12]}".strip() for each in state.sessions})
        pairs.setdefault("code", []).append(code)
        pairs.setdefault("data", []).append(tasks.sha256 if tasks else None)
        pairs.setdefault("base policy", []).append(state.policies[0].weights_sha256 if state.policies else None)
    return [{"what": what, "a": left, "b": right} for what, (left, right) in pairs.items() if left != right]


def done(a: RunLog, b: RunLog, left_out: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What differs, step by step; the first is the cause. Of a step with a shard that is gone, which `left_out` gets,
    only what the log has is compared."""
    from storage.shards.shards import DamagedShard

    for step_a, step_b in zip(a.state.steps, b.state.steps, strict=False):
        step = {"step": step_a.claim.step}
        claims = [[group.group_id for group in each.claim.trained] for each in (step_a, step_b)]
        try:
            rows = [_rows(log, each) for log, each in ((a, step_a), (b, step_b))]
        except DamagedShard as error:
            left_out[error.shard_id], rows = error.reason, [{}, {}]
        for key in sorted(rows[0].keys() & rows[1].keys()):
            for change in _row_changes(rows[0][key], rows[1][key]):
                yield {**step, "id": f"{key[0]}/{key[1]}", **change}
        if claims[0] != claims[1]:
            names = ["; ".join(sorted(set(one) - set(other))) for one, other in (claims, claims[::-1])]
            yield {**step, "what": "claim: groups of one alone", "a": names[0], "b": names[1]}
        if rows[0].keys() != rows[1].keys():
            counts = [len(each) for each in rows]
            yield {**step, "what": "training sequences of the claim", "a": counts[0], "b": counts[1]}
        digests = [each.policy.weights_sha256 for each in (step_a, step_b)]
        if digests[0] != digests[1]:
            norms = [each.metrics.get("grad_norm") for each in (step_a, step_b)]
            left, right = norms if norms[0] != norms[1] else digests
            yield {**step, "what": "gradient" if norms[0] != norms[1] else "weights", "a": left, "b": right}


def _rows(log: RunLog, step: Step) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Every training sequence of a step, by group, attempt and number. Raises `DamagedShard`."""
    from storage.shards.shards import read_shard

    groups = {group.group_id for group in step.claim.trained}
    shards = {group.shard_id: None for group in step.claim.trained}
    tables = [read_shard(log, log.state.shards[shard_id], columns=_COLUMNS) for shard_id in shards]
    rows = [row for table in tables for row in table.select(_COLUMNS).to_pylist() if row["group_id"] in groups]
    return {(row["group_id"], row["attempt"], row["sequence_idx"]): row for row in rows}


def _row_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What differs between two training sequences of one place, the cause first."""
    prompts = [row["input_ids"][: row["prompt_len"]] for row in (a, b)]
    if prompts[0] != prompts[1]:
        yield {"what": "prompt", "a": prompts[0], "b": prompts[1]}
    seeds = [row["sampling"]["seed"] for row in (a, b)]
    if seeds[0] != seeds[1]:
        yield {"what": "draw: seed of the sequence", "a": seeds[0], "b": seeds[1]}
    tokens = [list(zip(row["input_ids"], row["logprobs"], strict=True)) for row in (a, b)]
    for index, (one, other) in enumerate(itertools.zip_longest(*tokens, fillvalue=("nothing", 0.0))):
        if one[0] != other[0]:
            sides = [f"{token} (logprob {logprob:.6f})" for token, logprob in (one, other)]
            yield {"token": index, "what": "token", "a": sides[0], "b": sides[1]}
        elif one[1] != other[1]:
            what = f"log-probability of token {one[0]}: {bits_apart(one[1], other[1])} bits"
            yield {"token": index, "what": what, "a": one[1], "b": other[1]}
    if a["reward"] != b["reward"]:
        yield {"what": "reward", "a": a["reward"], "b": b["reward"]}


def bits_apart(a: float, b: float) -> int:
    """How many of the last bits of two float32 are needed to count the numbers between them: 1 for neighbours."""
    import numpy as np

    left, right = (int(value) for value in np.array([a, b], np.float32).view(np.int32))
    return abs(left - right).bit_length()
