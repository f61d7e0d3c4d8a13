"""Tables and short forms of lists: aligned, elided, and reversible by a reader."""

import pytest

from plait.report.table import elide, numbers, table


def test_columns_are_aligned_and_numbers_stand_to_the_right() -> None:
    assert table(["name", ">size"], [["a", "7"], ["longer", "1024"]]) == [
        "name    size",
        "a          7",
        "longer  1024",
    ]


def test_a_long_list_keeps_its_first_items_and_its_last() -> None:
    assert elide(list("abcdef"), 4) == ["a", "b", "…", "f"]
    assert elide(list("abcd"), 4) == list("abcd")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([4, 5, 6, 7], "4-7"),
        ([1, 5, 9], "1-9 by 4"),
        ([0, 1, 4, 5], "0-1, 4-5"),
        ([0, 1, 4, 5, 8, 9, 12, 13, 16, 17], "0-1, 4-5, …, 16-17"),
        ([3, 2, 1], "3, 2, 1"),
    ],
)
def test_ranks_are_written_as_runs_or_strides(values: list[int], text: str) -> None:
    assert numbers(values) == text
