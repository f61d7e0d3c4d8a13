"""The formulas beside each generator against the simulation of the list that it generates."""

import pytest

from plait.schedule import (
    GENERATORS,
    Costs,
    PassSeconds,
    Size,
    Timeline,
    check,
    forward_of,
    generate,
    live,
    lower,
    simulate,
)

TRAINING = ("gpipe", "1f1b")
ONE_AND_TWO = PassSeconds(f=1.0, b=1.0, w=1.0)  # F = 1, B = 2 as B and W of 1 each


def timeline(name: str, ranks: int, micro_batches: int, seconds: PassSeconds = ONE_AND_TWO) -> Timeline:
    return simulate(check(lower(generate(name, ranks, micro_batches))), Costs.equal(ranks, *seconds))


@pytest.mark.parametrize("name", [*TRAINING, "forward"])
@pytest.mark.parametrize("seconds", [ONE_AND_TWO, PassSeconds(2.0, 3.0, 0.5)])
def test_the_closed_forms_equal_the_simulation_of_the_emitted_list(name: str, seconds: PassSeconds) -> None:
    if name == "forward":
        seconds = seconds._replace(b=0.0, w=0.0)
    for ranks in range(1, 9):
        for micro_batches in range(1, 17):
            size, row = Size(ranks, micro_batches), GENERATORS[name]
            lowered = check(lower(generate(name, *size)))
            simulated = simulate(lowered, Costs.equal(ranks, *seconds))
            assert simulated.idle == pytest.approx([row.idle(size, seconds)] * ranks, abs=1e-9)
            assert simulated.bubble == pytest.approx(row.bubble(size, seconds), abs=1e-12)
            assert simulated.bubble_over_ideal == pytest.approx(row.bubble_over_ideal(size, seconds), abs=1e-12)
            assert [held.forward for held in live(lowered)] == [row.peak_live(size, rank) for rank in range(ranks)]


@pytest.mark.parametrize(("micro_batches", "utilisation"), [(1, 0.125), (8, 0.533), (32, 0.821)])
def test_gpipe_with_8_stages_is_busy_m_of_m_plus_7_steps(micro_batches: int, utilisation: float) -> None:
    assert 1 - timeline("gpipe", 8, micro_batches).bubble == pytest.approx(utilisation, abs=5e-4)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize(("micro_batches", "bubble"), [(1, 0.75), (4, 0.429), (8, 0.273), (16, 0.158), (32, 0.086)])
def test_the_bubble_of_4_stages_shrinks_with_micro_batches(name: str, micro_batches: int, bubble: float) -> None:
    assert timeline(name, 4, micro_batches).bubble == pytest.approx(bubble, abs=5e-4)


def test_a_naive_pipeline_of_4_stages_is_busy_a_quarter_of_the_time() -> None:
    assert 1 - timeline("gpipe", 4, 1).bubble == 0.25


def test_the_two_names_of_the_bubble_differ_at_8_stages_and_64_micro_batches() -> None:
    simulated = timeline("1f1b", 8, 64)
    assert simulated.bubble == pytest.approx(7 / 71)
    assert simulated.bubble_over_ideal == pytest.approx(7 / 64)


@pytest.mark.parametrize(
    ("micro_batches", "share", "over_ideal"), [(8, 0.2727, 0.375), (4, 0.4286, 0.75), (1, 0.75, 3.0)]
)
def test_1f1b_with_4_stages_idles_9_units_per_rank(micro_batches: int, share: float, over_ideal: float) -> None:
    simulated = timeline("1f1b", 4, micro_batches)
    assert simulated.idle == (9.0,) * 4
    assert simulated.bubble == pytest.approx(share, abs=5e-5)
    assert simulated.bubble_over_ideal == pytest.approx(over_ideal)


def test_the_forward_of_gpipe_takes_7_steps_and_stage_k_waits_k_minus_1_before_and_4_minus_k_after() -> None:
    simulated = simulate(lower(forward_of(generate("gpipe", 4, 4))), Costs.equal(4))
    assert simulated.step == 7
    assert [spans[0].start for spans in simulated.compute] == [0, 1, 2, 3]
    assert [simulated.step - spans[-1].end for spans in simulated.compute] == [3, 2, 1, 0]


def test_1f1b_holds_4_3_2_1_micro_batches_where_gpipe_holds_8() -> None:
    assert [held.forward for held in live(generate("1f1b", 4, 8))] == [4, 3, 2, 1]
    assert [held.forward for held in live(generate("gpipe", 4, 8))] == [8, 8, 8, 8]


def test_unequal_stages_make_the_bubble_larger_than_the_formula() -> None:
    costs = Costs(f=(1.0, 2.0, 1.0, 1.0), b=(1.0, 2.0, 1.0, 1.0), w=(1.0, 2.0, 1.0, 1.0))
    simulated = simulate(lower(generate("1f1b", 4, 8)), costs)
    assert simulated.bubble > GENERATORS["1f1b"].bubble(Size(4, 8), ONE_AND_TWO)
