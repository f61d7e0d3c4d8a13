"""The draw of `plait verify --random`: pure, legal, and wide enough to mean something."""

from __future__ import annotations

import pytest

from plait.proof.draw import FEATURES, MOST_RANKS, coverage, draw_run
from plait.spec.fit import fit


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_every_feature_is_in_a_tenth_of_the_draws_and_three_axes_in_three_tenths(seed: int) -> None:
    shares = coverage([draw_run(seed, number) for number in range(200)])
    assert list(shares) == list(FEATURES)
    assert {name: share for name, share in shares.items() if share < 0.10} == {}
    assert shares["three axes > 1"] >= 0.30


def test_a_draw_depends_on_its_seed_and_number_only() -> None:
    forwards = [draw_run(3, number) for number in range(20)]
    backwards = [draw_run(3, number) for number in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert len({repr(run) for run in forwards + [draw_run(4, number) for number in range(20)]}) == 40


def test_every_draw_is_legal_and_some_fill_the_machine() -> None:
    worlds = [fit(draw_run(5, number)).world for number in range(100)]
    assert max(worlds) == MOST_RANKS
