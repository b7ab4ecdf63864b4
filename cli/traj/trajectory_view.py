"""`millrace traj show`: a trajectory as a person reads it, its tokens coloured by what they are to be looked at for.

In: a shard row, the run's tokenizer, a colouring. Out: the conversation, the reward, the turns with their tools, and
the sampled tokens, each with its value where there is room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cli.terminal.formatting import number, one_line, printable, versions_of
from cli.traj.trajectories import outcome_of

MOST_VALUES = 40
"""Sampled tokens that are printed with their values; longer replies are running text, in colour alone."""
_MOST_PARTS = 2  # of a reward that fit into the title
_VERSION_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass(frozen=True, kw_only=True)
class Coloring:
    """How the sampled tokens look, in order; one entry per token of the row, prompt included."""

    name: str
    styles: Sequence[str]
    values: Sequence[str]
    """What stands beside a token, without markup; empty strings where the colour says it all."""
    legend: Text


def show_trajectory(row: Mapping[str, Any], tokenizer: Any, console: Console, coloring: Coloring | None = None) -> None:
    """Print one shard row. `tokenizer` is a `tokenizers.Tokenizer`; without a colouring, logprobs give the colours."""
    coloring = coloring or by_logprob(row)
    pieces = decode(tokenizer, row["input_ids"])
    lines = Table.grid(padding=(0, 2))
    lines.add_column(justify="right", style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    if row["sequence_idx"]:
        lines.add_row("sequence", f"{row['sequence_idx']} of the same attempt, which edited its history")
    for message in row["messages"]:
        style = "bold green" if message["is_completion"] else "cyan"
        lines.add_row(message["role"], Text(printable(message["content"]), style=style))
    parts = ", ".join(f"{escape(name)} {number(value)}" for name, value in row["reward_parts"])
    if len(row["reward_parts"]) > _MOST_PARTS:
        lines.add_row("reward", parts)
        parts = ""
    lines.add_row()
    _add_turns(lines, row, pieces, coloring)
    lines.add_row(coloring.name, coloring.legend)
    title = f"reward [bold]{number(row['reward'])}[/]" + (f" ({parts})" if parts else "")
    title += f"  policy {versions_of(row)}  {row['status']}"
    footer = f"{escape(row['id'])}  {outcome_of(row)}"
    if not row["accepted"]:
        footer += f": {escape(row['reject_reason'])}"
    footer += f"  shard {escape(row['shard_id'])}"
    console.print(Panel(lines, title=title, subtitle=footer, title_align="left", subtitle_align="left"))


def _add_turns(lines: Table, row: Mapping[str, Any], pieces: Sequence[str], coloring: Coloring) -> None:
    """The sampled tokens; where there are several turns, or tools, by turn and with what each of them did."""
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
            ended = f"{turn['finish_reason']}, {turn['sampled_len']} tokens in {turn['generate_seconds']:.2g} s"
            lines.add_row("", Text(ended, style="dim"))
        for call in turn["tool_calls"]:
            shown = Text(f"{one_line(call['name'])}({one_line(call['arguments'])})", style="magenta")
            shown.append(" failed" if call["failed"] else " →", style="bold red" if call["failed"] else "dim")
            shown.append(f" {one_line(call['result'])}", style="red" if call["failed"] else "")
            lines.add_row("tool", shown.append(f"  {call['seconds']:.2g} s", style="dim"))


def decode(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Text of each token. Of a character that several tokens spell, the last one has all of it."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


def by_logprob(row: Mapping[str, Any]) -> Coloring:
    """Green for what the policy was sure of, red for what surprised it; with the version that sampled the token."""
    versions = row["weight_versions"]
    return Coloring(
        name="logprob",
        styles=[_heat(-logprob, low=0.2, high=1.5) for logprob in row["logprobs"]],
        values=[f"{logprob:.2f}@{version}" for logprob, version in zip(row["logprobs"], versions, strict=True)],
        legend=_heat_legend("> −0.2", "> −1.5", "below").append("   beside it @ the policy version", style="dim"),
    )


def by_version(row: Mapping[str, Any]) -> Coloring:
    """A colour per policy version."""
    sampled = sorted({version for version in row["weight_versions"] if version >= 0})
    style_of = {version: _VERSION_STYLES[i % len(_VERSION_STYLES)] for i, version in enumerate(sampled)}
    counts = {version: sum(1 for v in row["weight_versions"] if v == version) for version in sampled}
    legend = Text()
    for version in sampled:
        legend.append("■", style=style_of[version])
        legend.append(f" {version} ({counts[version]} tokens)  ")
    return Coloring(
        name="version",
        styles=[style_of.get(version, "") for version in row["weight_versions"]],
        values=[f"@{version}" for version in row["weight_versions"]] if len(sampled) > 1 else [],
        legend=legend,
    )


def by_advantage(row: Mapping[str, Any], advantage: float, why: str, *, oldest: int = 0) -> Coloring:
    """The attempt's one advantage on every token; none on tokens of versions before `oldest`, which were masked."""
    style = "dim" if advantage == 0 else "green" if advantage > 0 else "red"
    style = f"bold {style}" if abs(advantage) > 1 else style
    masked = sum(1 for version in row["weight_versions"] if 0 <= version < oldest)
    legend = Text(f"{advantage:+.3f}", style=style).append(f"  {why}", style="default")
    if masked:
        legend.append(f"; {masked} tokens were masked as stale (dim)")
    return Coloring(
        name="advantage",
        styles=[style if version >= oldest else "dim" for version in row["weight_versions"]],
        values=[],
        legend=legend,
    )


def by_gap(gaps: Sequence[float], why: str) -> Coloring:
    """Trainer's minus engine's logprob of each token; NaN where nothing was sampled."""
    known = [abs(gap) for gap in gaps if not math.isnan(gap)]
    legend = _heat_legend("< 0.01", "< 0.1", "more")
    legend.append(f"   mean {sum(known) / max(1, len(known)):.2g}, largest {max(known, default=0):.2g}; {why}")
    return Coloring(
        name="gap",
        styles=["" if math.isnan(gap) else _heat(abs(gap), low=0.01, high=0.1) for gap in gaps],
        values=["" if math.isnan(gap) else f"{gap:+.1g}" for gap in gaps],
        legend=legend,
    )


def _visible(piece: str) -> str:
    """A token's text; a line break stays one, and is seen."""
    return printable(piece).replace("\n", "⏎\n")


def _heat(distance: float, *, low: float, high: float) -> str:
    return "green" if distance < low else "yellow" if distance < high else "red"


def _heat_legend(good: str, middle: str, bad: str) -> Text:
    legend = Text()
    for style, text in (("green", good), ("yellow", middle), ("red", bad)):
        legend.append("■", style=style)
        legend.append(f" {text}  ")
    return legend
