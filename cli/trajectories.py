"""`millrace traj show`: a trajectory as a person reads it, from the shard it is stored in.

In: a run's log. Out: the conversation, the reward and its parts, and each sampled token with logprob and version.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from storage.run_log import RunLog
from storage.shards import DamagedShard, read_shard


def find_trajectories(
    log: RunLog, *, worst: bool, best: bool, group: str | None, step: int | None, include_eval: bool, count: int
) -> list[dict[str, Any]]:
    """Rows in commit order, newest first; `worst` and `best` sort by reward, `group` and `step` filter.

    Raises `ValueError` when nothing matches.
    """
    state = log.state
    wanted = {g.group_id for s in state.steps for g in s.claim.trained if s.claim.step == step}
    rows: list[dict[str, Any]] = []
    for shard in reversed(list(state.shards.values())):
        if shard.is_eval and not include_eval or shard.id in state.quarantined:
            continue
        ids = {g.id for g in shard.groups}
        if (group is not None and group not in ids) or (step is not None and not ids & wanted):
            continue
        try:
            table = read_shard(log, shard)
        except DamagedShard:
            continue  # `millrace train` quarantines it; here the others are worth showing
        found = [dict(row, shard_id=shard.id) for row in table.to_pylist()]
        found = [row for row in found if group is None or row["group_id"] == group]
        rows += [row for row in found if step is None or row["group_id"] in wanted]
        if len(rows) >= count and not (worst or best):
            break
    if not rows:
        raise ValueError(f"run {log.run_id!r} has no such trajectory; `millrace status {log.run_id}` says what it has")
    if worst or best:
        rows = [row for row in rows if row["reward"] is not None]
        rows.sort(key=lambda row: row["reward"], reverse=best)
    return rows[:count]


def show_trajectory(row: dict[str, Any], tokenizer: Any, console: Console) -> None:
    """Print one row. `tokenizer` is a `tokenizers.Tokenizer`."""
    versions = f"{row['head_version']}" + (
        f"–{row['tail_version']}" if row["tail_version"] != row["head_version"] else ""
    )
    parts = ", ".join(f"{name} {_number(value)}" for name, value in row["reward_parts"])
    lines = Text()
    for message in row["messages"]:
        style = "bold green" if message["is_completion"] else "cyan"
        lines.append(f"{message['role']:>9}  ", style="dim")
        lines.append(f"{message['content']}\n", style=style)
    lines.append("\n   tokens  ", style="dim")
    sampled = zip(row["input_ids"], row["loss_mask"], row["logprobs"], row["weight_versions"], strict=True)
    for token, is_sampled, logprob, version in sampled:
        if is_sampled:
            text = tokenizer.id_to_token(token) or f"#{token}"
            lines.append(text, style=_heat(logprob))
            lines.append(f" {logprob:.2f}@{version}  ", style="dim")
    title = f"reward [bold]{_number(row['reward'])}[/] ({parts})  policy {versions}  {row['status']}"
    footer = f"group {row['group_id']} attempt {row['attempt']}  shard {row['shard_id']}"
    if not row["accepted"]:
        footer += f"  rejected: {row['reject_reason']}"
    console.print(Panel(lines, title=title, subtitle=footer, title_align="left", subtitle_align="left"))


def load_tokenizer(log: RunLog) -> Any:
    """The run's tokenizer, without loading transformers."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(log.store.get(f"{log.state.policies[0].path}/tokenizer.json").decode())


def _heat(logprob: float) -> str:
    """Green for what the policy was sure of, red for what surprised it."""
    return "green" if logprob > -0.2 else "yellow" if logprob > -1.5 else "red"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
