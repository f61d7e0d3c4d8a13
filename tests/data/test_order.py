"""The order of an epoch."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.data.order import mix, shuffled


@given(st.integers(1, 400), st.integers(0, 2**31), st.integers(0, 50))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(p, size, seed, epoch) for p in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1023, 1024, 1025, 9973])
def test_larger_epochs_are_permutations_too(size: int) -> None:
    assert len({shuffled(p, size, 1, 0) for p in range(size)}) == size


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(shuffled(p, 50, seed, epoch) for p in range(50)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_a_trillion_samples_are_shuffled_without_a_table() -> None:
    size = 10**12 + 39
    found = [shuffled(p, size, 3, 2) for p in range(1000)]
    assert len(set(found)) == 1000 and all(0 <= f < size for f in found)
    assert sum(f < size / 2 for f in found) == pytest.approx(500, abs=80)  # five standard deviations


@pytest.mark.parametrize("size", [3, 5, 8])
def test_each_window_comes_equally_often_at_each_place(size: int) -> None:
    seeds = 2000
    seen = Counter((p, shuffled(p, size, seed, 0)) for seed in range(seeds) for p in range(size))
    expected = seeds / size
    chi_squared = sum((seen[p, i] - expected) ** 2 / expected for p in range(size) for i in range(size))
    freedom = (size - 1) ** 2
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_neighbours() -> None:
    order = [shuffled(p, 1000, 7, 0) for p in range(1000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 15  # 2 are expected


def test_the_order_never_changes_between_versions() -> None:
    assert [shuffled(p, 10, 1, 0) for p in range(10)] == [3, 5, 4, 9, 8, 1, 6, 7, 2, 0]
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of SplitMix64 from state 0
