"""`millrace traj show`: a trajectory as a person reads it, its tokens coloured by what they are to be looked at for.

In: a shard row, the run's tokenizer, a colouring. Out: the conversation, the reward, the turns with their tools, and
the sampled tokens, each with its value if there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import EvalOption, StoreOption, WhereOption, open_named
from cli.terminal.console import open_console
from cli.terminal.formatting import facts_table, number, versions_of
from cli.traj.finding import decode, find_failure, find_trajectories, load_tokenizer, outcome_of, tool_call
from settings.errors import counted
from settings.redaction import printable

if TYPE_CHECKING:
    from cli.traj.coloring import Coloring

MOST_VALUES = 40
"""Sampled tokens that are printed with their values; longer replies are running text, in colour alone."""
_MOST_PARTS = 2  # of a reward that fit into the title


def show(
    run: str,
    trajectory: Annotated[str, typer.Argument(metavar="[ID]", help="Take one from `traj ls`; else the newest.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    group: Annotated[str | None, typer.Option(help="Only this group id.")] = None,
    step: Annotated[int | None, typer.Option(help="Only what this step trained on.")] = None,
    where: WhereOption = "",
    include_eval: EvalOption = False,
    color: Annotated[str, typer.Option(help="logprob, advantage, version, or gap: trainer minus engine.")] = "logprob",
    count: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 1,
    store: StoreOption = "",
) -> None:
    """Print decoded trajectories with reward, logprobs and the policy version of every token.

    Of an attempt that failed, print the error and the places in your code that it came from.
    """
    from cli.traj.coloring import Colorist
    from infra.environment import cache_folder

    log, console = open_named(run, store), open_console()
    if trajectory and (failure := find_failure(log, trajectory)):
        error = Text(failure.error, style="red")
        title = Text(f"{failure.id}  {failure.status}, no reward")
        console.print(Panel(error, title=title, title_align="left", expand=console.is_terminal))
        return
    colorist, tokenizer = Colorist(log, color, cache=cache_folder()), load_tokenizer(log)
    rows = find_trajectories(
        log,
        trajectory_id=trajectory,
        worst=worst,
        best=best,
        group=group,
        step=step,
        where=where,
        include_eval=include_eval,
        count=count,
    )
    for row in rows:
        _print(row, decode(tokenizer, row["input_ids"]), colorist.color(row), console)


def _print(row: Mapping[str, Any], pieces: Sequence[str], coloring: Coloring, console: Console) -> None:
    """Print one shard row; `pieces` is the text of each token."""
    lines = facts_table()
    if row["sequence_idx"]:
        lines.add_row("sequence", f"{row['sequence_idx']} of the same attempt, which edited its history")
    for message in row["messages"]:
        style = "bold green" if message["is_completion"] else "cyan"
        lines.add_row(Text(message["role"]), Text(message["content"], style=style))
    parts = ", ".join(f"{escape(name)} {number(value)}" for name, value in row["reward_parts"])
    if len(row["reward_parts"]) > _MOST_PARTS:
        lines.add_row("reward", parts)
        parts = ""
    lines.add_row()
    _add_turns(lines, row, pieces, coloring)
    beside = "   beside it @ the policy version" if coloring.name == "logprob" else ""
    lines.add_row(coloring.name, coloring.legend.copy().append(beside, style="dim"))
    title = f"reward [bold]{number(row['reward'])}[/]" + (f" ({parts})" if parts else "")
    title += f"  policy {versions_of(row)}  {escape(row['status'])}"
    footer = f"{escape(row['id'])}  {escape(outcome_of(row))}"
    if not row["accepted"]:
        footer += f": {escape(row['reject_reason'])}"
    footer += f"  shard {escape(row['shard_id'])}"
    aligned: Any = {"title_align": "left", "subtitle_align": "left", "expand": console.is_terminal}
    aligned |= {"title": Text.from_markup(title, emoji=False), "subtitle": Text.from_markup(footer, emoji=False)}
    console.print(Panel(lines, **aligned))


def _add_turns(lines: Table, row: Mapping[str, Any], pieces: Sequence[str], coloring: Coloring) -> None:
    """The sampled tokens; several turns, or turns with tools, one by one and with what each of them did."""
    turns = row["turns"]
    is_plain = len(turns) == 1 and not turns[0]["tool_calls"]
    with_values = sum(row["loss_mask"]) <= MOST_VALUES and any(coloring.values)
    start = 0
    for index, turn in enumerate(turns):
        first = start + turn["context_len"]
        start = first + turn["sampled_len"]
        text = Text()
        for token in range(first, start):
            text.append(_visible(pieces[token]), style=coloring.styles[token])
            if with_values:
                text.append(f" {coloring.values[token]}  ", style="dim")
        lines.add_row("tokens" if is_plain else f"turn {index + 1}", text)
        if not is_plain:
            ended = (
                f"{turn['finish_reason']}, {counted(turn['sampled_len'], 'token')} in {turn['generate_seconds']:.2g} s"
            )
            lines.add_row("", Text(ended, style="dim"))
        for call in turn["tool_calls"]:
            lines.add_row("tool", tool_call(call).append(f"  {call['seconds']:.2g} s", style="dim"))


def _visible(piece: str) -> str:
    """A token's text; a line break stays one, and is seen."""
    return printable(piece).replace("\n", "⏎\n")
