"""Values as people read them."""

from __future__ import annotations

from dataclasses import replace

from cli.terminal.formatting import held_out, number, one_line, ranges, shortened, size, versions_of
from settings.errors import counted
from tests.unit.cli.builders import an_evaluation


def test_numbers_sizes_and_ranges_are_for_people() -> None:
    assert [number(1.0), number(0.123456), number(None), number(0.123456, digits=2)] == ["1", "0.1235", "none", "0.12"]
    assert number(None, missing="-") == "-"
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5 * 10**12)] == ["0 B", "999 B", "1.0 KB", "1.2 MB", "5.0 TB"]
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
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
    older = replace(one, n_samples=0, num_failed=2, pass_at={}, standard_error=None)
    assert held_out(older) == ("held-out 0.490", "on 200 tasks, 2 failed, 4.8 s")
    failed = replace(several, num_tasks=2, n_samples=2, num_failed=4, failures={"env_error": 4})
    assert held_out(failed) == ("evaluation failed:", "all 4 attempts did (env_error 4)")
