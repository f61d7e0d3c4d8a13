"""Ranks that share processors: a schedule takes what its work takes, and longer only where too few ranks have any."""

from __future__ import annotations

import pytest

from plait.schedule import Costs, Schedule, generate, lower, simulate
from plait.schedule.actions import Action, F
from plait.schedule.shared import simulate_shared
from plait.spec.errors import InvalidSchedule
from plait.spec.pipeline import SHAPES

F_S, B_S, W_S = 1.1, 1.3, 0.7
RANKS, MICRO_BATCHES = 4, 12


def made(name: str) -> tuple[Schedule, Costs, float]:
    """A lowered schedule, its costs, and the seconds of all its passes together."""
    schedule = lower(generate(name, RANKS, MICRO_BATCHES, SHAPES[name].chunks))
    work = MICRO_BATCHES * len(schedule.owner) * (F_S + B_S + W_S)
    return schedule, Costs.equal(len(schedule.owner), F_S, B_S, W_S), work


@pytest.mark.parametrize("name", SHAPES)
def test_with_a_processor_for_each_rank_the_schedule_takes_what_it_takes(name: str) -> None:
    schedule, costs, _ = made(name)
    assert simulate_shared(schedule, costs, RANKS) == pytest.approx(simulate(schedule, costs).step)


@pytest.mark.parametrize("name", SHAPES)
def test_on_one_processor_every_schedule_takes_all_work_one_after_the_other(name: str) -> None:
    schedule, costs, work = made(name)
    assert simulate_shared(schedule, costs, 1) == pytest.approx(work)
    assert simulate_shared(schedule, costs, 0.5) == pytest.approx(2 * work)


def test_two_processors_wait_only_while_one_rank_has_work() -> None:
    """GPipe: the first forward of stage 0 and the last of stage 3 have a processor beside them that nobody uses."""
    schedule, costs, work = made("gpipe")
    idle = 2 * F_S + 2 * (B_S + W_S)  # in F: before rank 1 begins, after rank 2 has ended; in BW alike
    assert simulate_shared(schedule, costs, 2) == pytest.approx((work + idle) / 2)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    stuck = Schedule("stuck", 1, (0, 1), ((), (Action(F, 1),)))
    with pytest.raises(InvalidSchedule, match="rank 1 at F"):
        simulate_shared(stuck, Costs.equal(2), 2)
