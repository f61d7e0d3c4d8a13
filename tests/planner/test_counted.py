"""The plan of a run that plait trains is what a count of its own step finds: every call, every byte of the states, and
the bytes at the peak."""

from __future__ import annotations

from typing import Literal

import pytest

from plait.planner.seat import Seat
from plait.planner.sized.step import peak
from plait.planner.traffic import collectives
from plait.proof.count import count
from plait.proof.draw import draw_run
from plait.spec.fit import fit
from plait.spec.load import load
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
    assert_planned_is_counted(drawn(number), within=0.03)


# Where one tensor more or less stands beside a peak for long.
NAMED: dict[str, str] = {
    "a tied table whose gradients meet": """batch.global_size=4 model.layers=1 model.tied=true model.vocab=32000
        recompute.loss_chunk=8""",
    "the same, gathered": """batch.global_size=8 model.layers=2 layout.dp=4 model.tied=true model.vocab=8192
        zero.stage=3""",
    "one head a rank in a ring": """layout.tp=4 layout.cp=2 layout.sequence_parallel=true model.kv_heads=4
        model.layers=2 batch.global_size=4 batch.sequence=512 model.max_sequence=512 recompute.mode=selective""",
    "what waits for W": """layout.pp=2 schedule.name=v-half recompute.mode=full recompute.layers=1 batch.global_size=4
        optim.name=sgd""",
    "keys gathered before W": """layout.pp=2 layout.cp=2 layout.context=gather schedule.name=dualpipe-v
        model.kv_heads=4 batch.global_size=4 batch.sequence=256 model.max_sequence=512""",
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMED)
def test_the_planned_peak_is_the_counted_one_but_for_numbers_of_tokens(name: str) -> None:
    assert_planned_is_counted(load(None, ["batch.micro_size=2", *NAMED[name].split()]), within=1e-3)


@pytest.mark.parametrize("context", ["ring", "gather"])
def test_attention_over_context_ranks_is_recomputed_once(context: Literal["ring", "gather"]) -> None:
    words = "layout.cp=2 recompute.mode=full model.layers=1 batch.global_size=2 batch.micro_size=2 batch.sequence=32"
    assert_planned_is_counted(load(None, [*words.split(), f"layout.context={context}"]), within=1e-2)


def assert_planned_is_counted(run: RunSpec, within: float) -> None:
    layout = fit(run)
    ranks = list(dict.fromkeys((0, layout.world - 1)))
    for counted in count(run, layout.world, ranks):
        seat = Seat(run, layout, counted.rank)
        assert collectives(seat) == counted.collectives
        assert seat.states() == counted.states
        planned = sum(seat.states().values()) + sum(peak(seat))
        found = sum(counted.states.values()) + counted.activations + counted.buffers
        assert planned == pytest.approx(found, rel=within), (peak(seat), counted)
