"""The attempts of a run that a person asks for, and what the commands that show them have in common.

In: a run's log and options. Out: rows as the shards hold them, with the outcome of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.text import Text

from cli.terminal.console import open_console
from settings.errors import WHOLE_NUMBER, InvalidInput, counted
from settings.places.hints import command
from settings.redaction import one_line

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.log.run_state import RunState
    from storage.shards.failed_attempts import FailedAttempt
    from storage.views.queries import Queries

NEWEST = "shard_number DESC, position DESC, attempt, sequence_idx"
"""Order of the newest first."""


def find_trajectories(
    log: RunLog,
    *,
    trajectory_id: str = "",
    worst: bool = False,
    best: bool = False,
    group: str | None = None,
    step: int | None = None,
    include_eval: bool = False,
    where: str = "",
    count: int = 1,
) -> list[dict[str, Any]]:
    """Shard rows of at most `count` attempts, newest first, or lowest or highest reward first; the rest filters.

    A row also has `id`, `outcome`, `step`, `policy_version` and `shard_id`. An attempt that edited its history has
    several rows, one after the other. Every file that is shown was compared with the digest in the log. Prints which
    shards were passed over. Raises `InvalidInput` if nothing matches, and for a wrong id, step or condition.
    """
    from storage.views.queries import open_queries

    if worst and best:
        raise InvalidInput("--worst and --best exclude each other")
    if trajectory_id:
        if worst or best or group is not None or step is not None:
            raise InvalidInput("an id names one trajectory: leave out --worst, --best, --group and --step")
        group, attempt = split_id(trajectory_id)
    filters: dict[str, Any] = {}
    if group is not None:
        filters["group_id = ?"] = group
    if trajectory_id:
        filters["attempt = ?"] = attempt
    if step is not None:
        filters["outcome = 'trained' AND step = ?"] = step
    conditions = [condition(where, include_eval or group is not None), "sequence_idx = 0", *filters]
    order = NEWEST
    if worst or best:
        conditions.append("reward IS NOT NULL")
        order = f"reward {'DESC' if best else 'ASC'}, {NEWEST}"
    shard_ids: list[str] | None = None
    if step is not None:
        check_step(log.state, step)
        shard_ids = [claimed.shard_id for claimed in log.state.steps[step - 1].claim.trained]
    elif group is not None:
        shard_ids = _shards_of_group(log, group)
    elif not (worst or best or where):
        shard_ids = newest_shards(log.state, count, include_eval=include_eval)
    sql = f"""
        SELECT shard_id, group_id, attempt FROM trajectories
        WHERE {" AND ".join(conditions)} ORDER BY {order} LIMIT {count}
    """
    queries, parameters = open_queries(log, shard_ids=shard_ids), list(filters.values())
    rows = _rows_of(log, queries, sql, parameters)
    if shard_ids is not None and not filters and len({(row["shard_id"], row["id"]) for row in rows}) < count:
        queries = open_queries(log)  # some of the newest shards are damaged: look further back
        rows = _rows_of(log, queries, sql, parameters)
    if not rows:
        missing = trajectory_id or (f"group {group}" if group is not None else "such trajectory")
        raise InvalidInput(
            f"run {log.run_id!r} has no {missing}{why_missing(queries.left_out)}; "
            f"`{command('traj', 'ls', log.run_id, store=log.store.uri)}` lists what it has"
        )
    note_left_out(queries.left_out)
    return rows


def find_failure(log: RunLog, trajectory_id: str) -> FailedAttempt | None:
    """The attempt with this id, if it failed."""
    from storage.shards.failed_attempts import read_failures

    group, _ = split_id(trajectory_id)
    failures = read_failures(log, [log.state.shards[shard_id] for shard_id in _shards_of_group(log, group)])
    return next((failure for failure in failures if failure.id == trajectory_id), None)


def condition(where: str, include_eval: bool) -> str:
    """The SQL condition of the options; `where` ends with a line break, so that a comment in it ends there."""
    return f"({where or 'true'}\n)" + ("" if include_eval else " AND is_eval = false")


def note_left_out(left_out: Mapping[str, str]) -> None:
    """Print which shards are not in the result, and why."""
    console = open_console(stderr=True)
    for shard_id, reason in list(left_out.items())[:3]:
        console.print(f"[yellow]left out:[/] shard {escape(shard_id)}: {escape(reason)}", soft_wrap=True)
    if len(left_out) > 3:
        console.print(f"[yellow]left out:[/] {counted(len(left_out) - 3, 'more shard')}")


def load_tokenizer(log: RunLog) -> Any:
    """The run's tokenizer, without loading transformers."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(log.store.get(f"{log.state.policies[0].path}/tokenizer.json").decode())


def decode(tokenizer: Any, token_ids: Sequence[int], *, unfinished: str = "") -> list[str]:
    """Text of each token. Of a character that several tokens spell, the last one has all of it."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or unfinished for token in token_ids]


def split_id(trajectory_id: str) -> tuple[str, int]:
    """Group and attempt of a trajectory id, `GROUP/ATTEMPT`. Raises `ValueError` for anything else."""
    group, _, attempt = trajectory_id.rpartition("/")
    if not group or not re.fullmatch(WHOLE_NUMBER, attempt):
        ids = command("traj", "ls", "RUN")
        raise InvalidInput(f"{trajectory_id!r} is no trajectory id: write GROUP/ATTEMPT; `{ids}` lists them")
    return group, int(attempt)


def outcome_of(row: Mapping[str, Any]) -> str:
    """`trained 12`, by which step; `eval` for held-out ones."""
    return f"{row['outcome']}" + (f" {row['step']}" if row["step"] is not None else "")


def _rows_of(log: RunLog, queries: Queries, sql: str, parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Whole rows of what `sql` finds, in its order. Only of their shards is every column unpacked."""
    from storage.views.queries import open_queries

    keys = [(r["shard_id"], r["group_id"], r["attempt"]) for r in queries.select(sql, parameters).to_pylist()]
    table = open_queries(log, shard_ids=dict.fromkeys(shard_id for shard_id, _, _ in keys)).select(
        """
        SELECT r.*, r.group_id || '/' || r.attempt AS id, g.outcome, g.step, g.policy_version
        FROM shard_rows r LEFT JOIN groups g ON g.shard_id = r.shard_id AND g.id = r.group_id
        WHERE r.group_id IN (SELECT unnest(?::VARCHAR[])) ORDER BY r.sequence_idx
        """,
        [[group_id for _, group_id, _ in keys]],
    )
    rows: dict[tuple[str, str, int], list[dict[str, Any]]] = {key: [] for key in keys}
    for row in table.to_pylist():
        if (key := (row["shard_id"], row["group_id"], row["attempt"])) in rows:
            rows[key].append(row)
    return [row for sequences in rows.values() for row in sequences]


def tool_call(call: Mapping[str, Any]) -> Text:
    """What was called and what came back, in one line."""
    text, failed = Text(), call["failed"]
    text.append(f"{one_line(call['name'])}({one_line(call['arguments'])})", style="magenta")
    text.append(" failed" if failed else " →", style="bold red" if failed else "dim")
    return text.append(f" {one_line(call['result'])}", style="red" if failed else "")


def newest_shards(state: RunState, count: int, *, include_eval: bool) -> list[str]:
    """So many of the newest shards that can be read that they hold more than `count` attempts."""
    shard_ids, num_attempts = [], 0
    for shard_id, shard in reversed(list(state.shards.items())):
        if shard_id in state.quarantined or shard_id in state.retired_shards or (shard.is_eval and not include_eval):
            continue
        shard_ids.append(shard_id)
        num_attempts += sum(group.usable for group in shard.groups)
        if num_attempts > count:
            break
    return shard_ids


def check_step(state: RunState, step: int) -> None:
    """Raises `InvalidInput` for a step that the run has not done."""
    if not 1 <= step <= state.step:
        raise InvalidInput(f"--step {step}: the run has {f'steps 1 to {state.step}' if state.step else 'no step yet'}")


def _shards_of_group(log: RunLog, group: str) -> list[str]:
    if group in log.state.shard_of:
        return [log.state.shard_of[group]]
    held_out = [shard for shard in log.state.shards.values() if shard.is_eval]
    shard_ids = [shard.id for shard in held_out if any(summary.id == group for summary in shard.groups)]
    if not shard_ids:
        listing = command("traj", "ls", log.run_id, store=log.store.uri)
        raise InvalidInput(f"run {log.run_id!r} has no group {group!r}; `{listing}` lists its ids")
    return shard_ids


def why_missing(left_out: Mapping[str, str]) -> str:
    """Reasons for shards that were left out."""
    reasons = [f"shard {shard_id} is left out: {reason}" for shard_id, reason in left_out.items()]
    return f" ({'; '.join(reasons[:3])})" if reasons else ""
