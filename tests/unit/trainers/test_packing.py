"""Packs hold every row once, keep their budget, and their sequences do not see each other."""

from hypothesis import given
from hypothesis import strategies as st

from trainers.packing import block_causal_mask, pack_rows, position_ids

_LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def test_longest_first_into_the_first_pack_with_room() -> None:
    assert pack_rows([5, 3, 2], budget=5) == [[0], [1, 2]]
    assert pack_rows([2, 6, 4, 4], budget=8) == [[0, 1], [2, 3]]
    assert pack_rows([], budget=8) == []


@given(_LENGTHS, st.integers(1, 64))
def test_every_row_is_in_exactly_one_pack(lengths: list[int], budget: int) -> None:
    packs = pack_rows(lengths, budget=budget)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))


@given(_LENGTHS, st.integers(1, 64))
def test_no_pack_is_over_budget_but_a_single_row_that_is(lengths: list[int], budget: int) -> None:
    for pack in pack_rows(lengths, budget=budget):
        assert len(pack) == 1 or sum(lengths[row] for row in pack) <= budget


@given(_LENGTHS, st.integers(40, 64))
def test_at_most_one_pack_is_less_than_half_full(lengths: list[int], budget: int) -> None:
    loads = [sum(lengths[row] for row in pack) for pack in pack_rows(lengths, budget=budget)]
    assert sum(load * 2 < budget for load in loads) <= 1


@given(_LENGTHS, st.integers(1, 64))
def test_the_same_lengths_give_the_same_packs(lengths: list[int], budget: int) -> None:
    assert pack_rows(lengths, budget=budget) == pack_rows(list(lengths), budget=budget)


def test_positions_start_anew_in_every_sequence() -> None:
    assert position_ids([3, 1, 2]).tolist() == [0, 1, 2, 0, 0, 1]


def test_a_mask_by_hand() -> None:
    assert block_causal_mask([2, 1]).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_a_token_sees_its_own_sequence_up_to_itself_and_nothing_else(lengths: list[int]) -> None:
    sequence = [index for index, length in enumerate(lengths) for _ in range(length)]
    expected = [[k <= q and sequence[k] == sequence[q] for k in range(len(sequence))] for q in range(len(sequence))]
    assert block_causal_mask(lengths)[0, 0].tolist() == expected
