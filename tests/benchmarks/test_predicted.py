"""What is predicted is held against what was run: every split once, pairs counted, noise and error told."""

from argparse import Namespace
from math import prod

import pytest

from benchmarks.predicted import CORES, SIZE, TINY, Taken, cases, hold, judge, lines, missed, pairs
from plait.spec.cluster import CATALOGUE
from plait.spec.fit import fit


def test_every_split_of_eight_ranks_is_there_and_can_be_trained():
    every = list(cases(SIZE, 8))
    assert len({case[:3] for case in every}) == 10
    assert len(set(every)) == len(every)
    assert {case.zero for case in every} == {0, 1, 2, 3}
    for case in every:
        assert prod(case[:3]) == 8
        assert fit(case.run(SIZE), 8).world == 8


def test_only_pairs_apart_by_more_than_a_tenth_are_asked_for():
    found = pairs([1.0, 1.09, 2.0], [1.0, 0.9, 3.0])
    assert (found.asked, found.in_order) == (2, 2)
    assert pairs([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]).share == pytest.approx(2 / 3)
    assert pairs([1.0, 2.0], [1.0, 1.0]).in_order == 0  # no order is no right one


def test_a_prediction_off_by_one_factor_is_right_once_anchored():
    assert missed([1.0, 2.0, 4.0], [3.0, 6.0, 12.0]) == pytest.approx(0)
    assert missed([1.0, 2.0], [1.0, 1.0]) == pytest.approx((0.5 + 1.0) / 2)


def test_noise_is_what_two_runs_differ_by_without_what_other_programs_had():
    two = list(cases(TINY, 2))[:2]
    other, none = [2.0 * CORES], [0.0]
    runs = [
        [Taken([1.0, 9.0, 1.0], 3 * [0.5], 3 * none), Taken([4.0], [2.0], other)],
        [Taken([1.1], [0.5], none), Taken([2.0], [2.0 * CORES], other)],
    ]
    result = judge(two, [{"products": 1.0}, {"products": 3.0}], runs)
    assert result["noise"] == {"median": pytest.approx(0.05), "worst": pytest.approx(0.1)}
    assert (result["pairs"], result["in_order"], result["share_in_order_by_a_second_run"]) == (1, 1, 1.0)


def test_layouts_of_two_ranks_are_planned_trained_and_told():
    asked = Namespace(
        ranks=2, turns=1, steps=1, warm=0, tiny=True, long=False, cluster=CATALOGUE / "clusters" / "cpu.toml"
    )
    result = hold(asked)
    assert all(case["seconds"] > 0 and case["predicted_s"] > 0 for case in result["cases"])
    assert len(lines(result)) == len(result["cases"]) + 5
