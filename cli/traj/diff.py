"""`millrace traj diff`: two attempts side by side, and where they part.

In: two shard rows, each with its run's tokenizer. Out: what differs, the first token that does, and by how much the
logprobs differ before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import StoreOption, open_named
from cli.terminal.console import open_console
from cli.terminal.formatting import number, plain_table, versions_of
from cli.traj.finding import decode, find_trajectories, load_tokenizer, outcome_of, tool_call
from settings.errors import counted
from settings.redaction import one_line, printable

MOST_ROWS = 24
"""Tokens whose logprobs are listed; of more, the ones that differ most."""


def diff(
    run: str,
    a: Annotated[str, typer.Argument(metavar="ID_A", help="Take both from `traj ls`.")],
    b: Annotated[str, typer.Argument(metavar="ID_B")],
    run_b: Annotated[str, typer.Option(help="The run of ID_B, if it is another one.")] = "",
    store: StoreOption = "",
) -> None:
    """Two trajectories side by side: rewards, where their tokens part, and logprobs up to there."""
    logs = [open_named(run, store)]
    logs.append(open_named(run_b, store) if run_b else logs[0])
    tokenizers = [load_tokenizer(log) for log in logs]
    sides = []
    for log, name, tokenizer in zip(logs, (a, b), tokenizers, strict=True):
        row = find_trajectories(log, trajectory_id=name)[0]
        title = f"{log.run_id}: {name}" if run_b else name
        sides.append(Side(name=title, row=row, pieces=decode(tokenizer, row["input_ids"])))
    left, right = sides
    _print(left, right, open_console(), by_text=tokenizers[0].to_str() != tokenizers[1].to_str())


class Side(NamedTuple):
    """One of the two."""

    name: str
    """The attempt's id, with its run if there are two."""
    row: Mapping[str, Any]
    pieces: Sequence[str]
    """Text of each token."""


class Parting(NamedTuple):
    """Where two token sequences part."""

    same_prompt: bool
    """True when the tokens before the first sampled one are the same."""
    parted_at: int
    """Index of the first token that differs, or that only one side has; the shorter length if none differs."""
    shared: list[int]
    """Indices of the tokens before it that both sides sampled."""


def compare(a: Side, b: Side, *, by_text: bool = False) -> Parting:
    """Compare by token id, or by the tokens' text if there are two tokenizers."""
    left, right = (side.pieces if by_text else side.row["input_ids"] for side in (a, b))
    pairs = list(zip(left, right, strict=False))
    parted_at = next((index for index, (x, y) in enumerate(pairs) if x != y), len(pairs))
    prompt_len = a.row["prompt_len"]
    masks = zip(a.row["loss_mask"][:parted_at], b.row["loss_mask"][:parted_at], strict=True)
    return Parting(
        same_prompt=prompt_len == b.row["prompt_len"] and parted_at >= prompt_len,
        parted_at=parted_at,
        shared=[index for index, (x, y) in enumerate(masks) if x and y],
    )


def _print(a: Side, b: Side, console: Console, *, by_text: bool) -> None:
    parting = compare(a, b, by_text=by_text)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column(Text(a.name), ratio=1, overflow="fold")
    table.add_column(Text(b.name), ratio=1, overflow="fold")
    parts = list(dict.fromkeys(name for side in (a, b) for name, _ in side.row["reward_parts"]))
    others = _facts(b, parts)
    for name, left in _facts(a, parts).items():
        style = "" if left == others[name] else "yellow"
        table.add_row(Text(name), Text(left, style=style), Text(others[name], style=style))
    table.add_row()
    table.add_row("said", _messages(a, other=b), _messages(b, other=a))
    if any(len(side.row["turns"]) > 1 or side.row["turns"][0]["tool_calls"] for side in (a, b)):
        table.add_row("tools", *(_tools(side) for side in (a, b)))
    table.add_row()
    table.add_row("tokens", *(_tokens(side, parting.parted_at if parting.same_prompt else 0) for side in (a, b)))
    console.print(table)
    console.print()
    for line in _verdict(a, b, parting, by_text=by_text):
        console.print(line)
    if parting.same_prompt and parting.shared:
        console.print()
        console.print(_logprobs(a, b, parting))


def _facts(side: Side, parts: Sequence[str]) -> dict[str, str]:
    """What there is to say of one side, by name; `parts` names the rewards of either."""
    row, rewards = side.row, dict(side.row["reward_parts"])
    sampled = [value for value, is_sampled in zip(row["logprobs"], row["loss_mask"], strict=True) if is_sampled]
    return {
        "reward": number(row["reward"]),
        **{f"· {one_line(name)}": number(rewards[name]) if name in rewards else "-" for name in parts},
        "status": row["status"],
        "policy": versions_of(row),
        "outcome": outcome_of(row),
        "turns": str(len(row["turns"])),
        "tokens": f"{len(sampled)} sampled after {row['prompt_len']}",
        "logprob": f"{sum(sampled) / max(1, len(sampled)):.3f} mean over these",
    }


def _messages(side: Side, *, other: Side) -> Text:
    """The conversation; what the other side's has in the same place is dim."""
    text = Text()
    for index, message in enumerate(side.row["messages"]):
        is_common = message in other.row["messages"][index : index + 1]
        style = "dim" if is_common else "green" if message["is_completion"] else "cyan"
        text.append(f"{message['role']}: ", style="dim").append(f"{printable(message['content'])}\n", style=style)
    text.rstrip()
    return text


def _tools(side: Side) -> Text:
    text = Text()
    for index, turn in enumerate(side.row["turns"]):
        for call in turn["tool_calls"]:
            text.append(f"{index + 1} ", style="dim").append(tool_call(call)).append("\n")
    text.rstrip()
    return text or Text("none", style="dim")


def _tokens(side: Side, parted_at: int) -> Text:
    """The sampled text: dim while it is common, the first token that differs marked."""
    text = Text()
    for index, (piece, is_sampled) in enumerate(zip(side.pieces, side.row["loss_mask"], strict=True)):
        if is_sampled:
            style = "dim" if index < parted_at else "bold reverse yellow" if index == parted_at else "green"
            text.append(printable(piece).replace("\n", "⏎\n"), style=style)
        elif text and not text.plain.endswith(" … "):
            text.append(" … ", style="dim")
    return text


def _verdict(a: Side, b: Side, parting: Parting, *, by_text: bool) -> list[Text]:
    """Sentences: whether the prompts are the same, and where the replies part."""
    lines = [Text("the two runs have different tokenizers: tokens are compared by their text")] if by_text else []
    if not parting.same_prompt:
        return [*lines, Text("different prompts: their tokens are not compared")]
    lengths = [len(side.pieces) for side in (a, b)]
    if parting.parted_at == lengths[0] == lengths[1]:
        return [*lines, Text(f"the same {len(parting.shared)} sampled tokens")]
    sentence = Text("they part at the first sampled token: ")
    if parting.shared:
        sentence = Text(f"the first {len(parting.shared)} sampled tokens are the same; then ")
    first, second = (_token(side, parting.parted_at) for side in (a, b))
    return [*lines, sentence.append(first).append(" against ").append(second)]


def _token(side: Side, index: int) -> Text:
    if index >= len(side.pieces):
        return Text("nothing more")
    fact = f"{side.row['logprobs'][index]:.2f}" if side.row["loss_mask"][index] else "not sampled"
    return Text(repr(side.pieces[index]), style="bold yellow").append(f" ({fact})", style="not bold default")


def _logprobs(a: Side, b: Side, parting: Parting) -> Table:
    """Logprobs of the common sampled tokens, in order."""
    changes = {index: b.row["logprobs"][index] - a.row["logprobs"][index] for index in parting.shared}
    shown = sorted(sorted(changes, key=lambda index: -abs(changes[index]))[:MOST_ROWS])
    title = "logprob of the same token"
    if len(shown) < len(changes):
        title += f": the {MOST_ROWS} of {len(changes)} that differ most"
    mean = sum(map(abs, changes.values())) / len(changes)
    names = ("at", "token", "policy", "A", "policy", "B", "B − A")
    table = plain_table(*names, right=set(names) - {"token"}, title=title, title_justify="left", title_style="dim")
    over = counted(len(changes), "token")
    table.caption, table.caption_justify = f"mean |difference| {mean:.2g} over {over}", "left"
    for index in shown:
        style = "green" if changes[index] > 0.1 else "red" if changes[index] < -0.1 else "dim"
        pairs = [(str(side["weight_versions"][index]), f"{side['logprobs'][index]:.3f}") for side in (a.row, b.row)]
        token = Text(repr(a.pieces[index])[1:-1])
        table.add_row(str(index), token, *pairs[0], *pairs[1], Text(f"{changes[index]:+.3f}", style=style))
    return table
