"""Values as people read them."""

from __future__ import annotations

from cli.formatting import counted, number, one_line, ranges, shortened, size, versions_of


def test_numbers_are_rounded_and_may_be_missing() -> None:
    assert [number(1.0), number(0.123456), number(None), number(0.123456, digits=2)] == ["1", "0.1235", "none", "0.12"]
    assert number(None, missing="-") == "-"


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5 * 10**12)] == ["0 B", "999 B", "1.0 KB", "1.2 MB", "5.0 TB"]


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]


def test_neighbours_are_a_range() -> None:
    assert ranges([1, 3, 4, 5, 9]) == "1, 3–5, 9" and ranges(range(2)) == "0–1" and ranges([]) == ""
    assert versions_of({"head_version": 3, "tail_version": 5}) == "3–5"
    assert versions_of({"head_version": 5, "tail_version": 5}) == "5"


def test_text_from_a_policy_can_neither_break_a_line_nor_steer_the_terminal() -> None:
    assert one_line("a\nb\x1b[31mc\td") == "a⏎b·[31mc d"
    assert shortened("abcde", 5) == "abcde" and shortened("abcdef", 5) == "abcd…"
