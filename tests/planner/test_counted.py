"""The plan of a run that plait trains is what a count of its own step finds: every call, every byte of the states, and
the bytes at the peak."""

from __future__ import annotations

import pytest

from plait.planner.seat import Seat
from plait.planner.sized.step import peak
from plait.planner.traffic import collectives
from plait.proof.count import count
from plait.proof.draw import draw_run
from plait.spec.fit import fit
from plait.spec.run import PrecisionSpec, RunSpec

SEED = 631
RUNS = 120
PRECISIONS = (
    PrecisionSpec(), PrecisionSpec(compute="bfloat16"), PrecisionSpec(compute="bfloat16", grad_accumulate="bfloat16"),
)  # fmt: skip


def drawn(number: int) -> RunSpec:
    """Run `number`: all axes, schedules, ZeRO stages, recompute modes, families and kinds of experts take part."""
    run = draw_run(SEED, number)
    return run.model_copy(update={"precision": PRECISIONS[number % len(PRECISIONS)]})


@pytest.mark.quick(2)
@pytest.mark.parametrize("number", range(RUNS))
def test_planned_collectives_and_states_are_those_that_are_counted_and_memory_is_within_three_percent(
    number: int,
) -> None:
    """First and last rank. Experts are routed evenly on both sides: what travels to them is nobody's to know before."""
    run = drawn(number)
    layout = fit(run)
    ranks = list(dict.fromkeys((0, layout.world - 1)))
    for counted in count(run, layout.world, ranks):
        seat = Seat(run, layout, counted.rank)
        assert collectives(seat) == counted.collectives
        assert seat.states() == counted.states
        planned = sum(seat.states().values()) + sum(peak(seat))
        found = sum(counted.states.values()) + counted.activations + counted.buffers
        assert planned == pytest.approx(found, rel=0.03), (peak(seat), counted)
