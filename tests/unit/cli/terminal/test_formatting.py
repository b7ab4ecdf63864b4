"""Values as people read them."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from cli.operate.rounds import LEGEND, rounds_table
from cli.terminal.console import open_console
from cli.terminal.formatting import ago, held_out, number, plain_table, shortened, versions_of
from settings.errors import all_of, counted, ranges, size
from settings.redaction import one_line
from tests.builders import a_log, a_step
from tests.unit.cli.builders import an_evaluation


def test_numbers_sizes_and_ranges_are_for_people() -> None:
    assert [number(1.0), number(0.123456), number(None), number(0.123456, digits=2)] == ["1", "0.1235", "none", "0.12"]
    assert number(None, missing="-") == "-"
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5 * 10**12)] == ["0 B", "999 B", "1.0 KB", "1.2 MB", "5.0 TB"]
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [all_of(n, "shard") for n in (1, 2000)] == ["the only shard", "all 2,000 shards"]
    assert ranges([1, 3, 4, 5, 9]) == "1, 3–5, 9" and ranges(range(2)) == "0–1" and ranges([]) == ""
    assert versions_of({"head_version": 3, "tail_version": 5}) == "3–5"
    assert versions_of({"head_version": 5, "tail_version": 5}) == "5"


def test_text_from_a_policy_can_neither_break_a_line_nor_steer_the_terminal() -> None:
    assert one_line("a\nb\x1b[31mc\td") == "a⏎b·[31mc d"
    assert shortened("abcde", 5) == "abcde" and shortened("abcdef", 5) == "abcd…"


def test_an_evaluation_is_a_score_with_its_error_and_what_failed() -> None:
    one = an_evaluation(3, 0.49, num_tasks=200, n_samples=1, pass_at={"1": 0.49}, standard_error=0.0353, seconds=4.81)
    assert held_out(one) == ("held-out 0.490 ± 0.035", "on 200 tasks, 4.8 s")
    chances = {"1": 0.48, "2": 0.6, "4": 0.75}
    several = replace(one, n_samples=4, num_failed=3, failures={"env_error": 1, "timeout": 2}, pass_at=chances)
    assert held_out(several) == (
        "held-out avg@4 0.490 ± 0.035",
        "on 200 tasks × 4 attempts, pass@1 0.480, pass@2 0.600, pass@4 0.750, 3 failed (env_error 1, timeout 2), 4.8 s",
    )
    voted = replace(several, num_failed=0, pass_all={"1": 0.48, "4": 0.25}, maj_at={"1": 0.48, "4": 0.5})
    assert held_out(voted)[1].endswith("pass@4 0.750, pass^4 0.250, maj@4 0.500, 4.8 s")
    older = replace(one, n_samples=0, num_failed=2, pass_at={}, standard_error=None)
    assert held_out(older) == ("held-out 0.490", "on 200 tasks, 2 failed, 4.8 s")
    failed = replace(several, num_tasks=2, n_samples=2, num_failed=4, failures={"env_error": 4})
    assert held_out(failed) == ("evaluation failed:", "all 4 attempts did (env_error 4)")
    assert held_out(replace(failed, num_tasks=1, n_samples=1, num_failed=1))[1].startswith("the only attempt did (")


def test_outside_of_a_terminal_nothing_is_folded_cut_or_padded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = plain_table("name", "value")
    table.add_row("n" * 300, "short")
    table.add_row("x", "v" * 300)
    console = open_console()
    console.print(table)
    console.print("word " * 60 + "end")
    header, first, second, text = capsys.readouterr().out.splitlines()
    assert header == "name" + " " * 298 + "value" and first == "n" * 300 + "  short"
    assert second.endswith("v" * 300) and text == "word " * 60 + "end"


def test_a_round_is_a_row_of_at_most_80_columns_under_its_name() -> None:
    metrics = {"reward": 0.5, "staleness_mean": 1.0, "staleness_max": 2.0, "tokens_per_second": 123456.0}
    metrics |= {"round_seconds": 1000.0, "generate_seconds": 1000.0}
    log = a_log()
    step = a_step(log.state)
    step = replace(step, claim=replace(step.claim, step=2000, base_version=1999), metrics=metrics)
    for width in (80, 200):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(rounds_table([step], [an_evaluation(5, 0.25), an_evaluation(9, 0.75)], wanted=2000))
        console.print(rounds_table([step], [], wanted=2000, header=False))
        header, row, later = console.export_text().splitlines()
        assert row.split() == [
            "2000/2000",
            "0.500",
            "0.750",
            "1.0",
            "max",
            "2",
            "123456",
            "1000.0s",
            "100",
            "0",
            "0",
            "0",
            "0",
            "0",
        ]
        assert len(header.rstrip()) <= 80 and len(LEGEND) <= 80
        ends = [[m.end() for m in re.finditer(r"\S+( max \d)?", line)] for line in (header, row, later)]
        assert ends[0] == ends[1] == ends[2], "each number ends under its name"


def test_a_time_that_a_clock_ahead_of_this_one_wrote_says_so() -> None:
    assert [ago(seconds) for seconds in (7200, 61, 3, -3)] == ["2 h ago", "1 min ago", "3 s ago", "0 s ago"]
    assert ago(-5 * 3600) == "5 h ahead of this clock"
