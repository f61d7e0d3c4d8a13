"""What is said about times: the interval is the one of order statistics, and nothing flatters plait."""

import pytest

from benchmarks.contest import Turns, data_parallel
from benchmarks.table import interval, table
from benchmarks.verdict import judge, ratio
from benchmarks.work import TINY


@pytest.mark.parametrize(
    ("rounds", "low", "high", "coverage"), [(7, 1, 7, 0.984), (9, 2, 8, 0.961), (15, 4, 12, 0.965)]
)
def test_the_interval_is_the_widest_pair_of_order_statistics_that_is_needed(rounds, low, high, coverage):
    found = ratio([(float(i), 1.0) for i in range(rounds, 0, -1)])
    assert (found.low, found.median, found.high) == (low, (rounds + 1) / 2, high)
    assert found.coverage == pytest.approx(coverage, abs=1e-3)


def test_a_peer_at_or_below_the_floor_counts_against_plait():
    found = ratio([(1.0, 0.0), (1.0, -1.0), (1.0, 2.0)])
    assert (found.low, found.median, found.high) == (0.5, None, None)
    assert interval({"median": None, "low": 0.5, "high": None}) == "∞ (0.50 … ∞)"


def test_the_lower_of_two_floors_counts():
    seconds = {"plait": [1.2] * 7, "peer": [1.4] * 7, "floor": [1.1] * 7, "floor_plain": [1.0] * 7}
    result = judge(data_parallel(2), Turns(seconds, seconds, {"plait": 1e-6}), TINY, steps=2)
    assert result["floor"] == "floor_plain"
    assert result["above_floor"]["median"] == pytest.approx(0.5)
    assert result["throughput"]["median"] == pytest.approx(1.4 / 1.2)
    assert "| data parallel | 2 | DistributedDataParallel | 1200 | 1400 | 1000 | 1.17" in table([result])
