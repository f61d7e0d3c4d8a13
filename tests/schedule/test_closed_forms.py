"""The formulas beside each generator against the simulation of the list that it generates."""

from itertools import product

import pytest

from plait.schedule import (
    GENERATORS,
    Costs,
    PassSeconds,
    Schedule,
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
SECONDS = [
    PassSeconds(2.0, 2.0, 2.0),
    PassSeconds(2.0, 3.0, 0.5),
    PassSeconds(1.0, 2.0, 4.0),
    PassSeconds(3.0, 3.0, 1.0),
]
RANKS, MICRO_BATCHES, CHUNKS = range(1, 9), range(1, 17), {"interleaved": (1, 2, 3, 4)}
ONE_AND_TWO = PassSeconds(f=1.0, b=1.0, w=1.0)  # F = 1, B = 2 as B and W of 1 each


def timeline(name: str, ranks: int, micro_batches: int, seconds: PassSeconds = ONE_AND_TWO) -> Timeline:
    return simulate(check(lower(generate(name, ranks, micro_batches))), Costs.equal(ranks, *seconds))


def costs_of(schedule: Schedule, seconds: PassSeconds) -> Costs:
    """A rank's seconds in equal parts for each of its stages."""
    chunks = schedule.stages // schedule.ranks
    return Costs.equal(schedule.stages, *(time / chunks for time in seconds))


def assert_closed_forms_equal_the_simulation(name: str, size: Size) -> None:
    lowered, row = check(lower(generate(name, *size))), GENERATORS[name]
    assert [held.total for held in live(lowered)] == [row.peak_live(size, rank) for rank in range(size.ranks)]
    late = [row.peak_late(size, rank) for rank in range(size.ranks)]
    assert all(held.weight <= most for held, most in zip(live(lowered), late, strict=True))
    assert name != "zb-h1" or [held.weight for held in live(lowered)] == late
    for seconds in SECONDS:
        if not lowered.trains:
            seconds = seconds._replace(b=0.0, w=0.0)
        if row.holds(size, seconds):
            simulated = simulate(lowered, costs_of(lowered, seconds))
            assert simulated.idle == pytest.approx([row.idle(size, seconds)] * size.ranks, abs=1e-9)
            assert simulated.bubble == pytest.approx(row.bubble(size, seconds), abs=1e-12)
            assert simulated.bubble_over_ideal == pytest.approx(row.bubble_over_ideal(size, seconds), abs=1e-12)


def chunks_of(name: str) -> tuple[int, ...]:
    return CHUNKS.get(name, (2 if name in ("zb-v", "v-half", "dualpipe-v") else 1,))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 5), (3, 1), (3, 7), (4, 3), (4, 8), (5, 13)])
def test_the_closed_forms_equal_the_simulation_of_the_emitted_list(name: str, ranks: int, micro_batches: int) -> None:
    for chunks in chunks_of(name):
        assert_closed_forms_equal_the_simulation(name, Size(ranks, micro_batches, chunks))


@pytest.mark.proof
@pytest.mark.parametrize("name", GENERATORS)
def test_the_closed_forms_equal_the_simulation_for_every_size(name: str) -> None:
    for size in product(RANKS, MICRO_BATCHES, chunks_of(name)):
        assert_closed_forms_equal_the_simulation(name, Size(*size))


@pytest.mark.parametrize("name", ["zb-v", "v-half", "dualpipe-v"])
def test_the_closed_forms_of_the_v_family_are_tried_with_equal_passes_and_enough_micro_batches(name: str) -> None:
    row = GENERATORS[name]
    assert row.holds(Size(4, 8, 2), SECONDS[0]) and not row.holds(Size(4, 7, 2), SECONDS[0])


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


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks", "share", "over_ideal"), [(4, 8, 2, 0.1579, 0.1875), (8, 32, 4, 0.0519, 0.0547)]
)
def test_w10_b92_the_bubble_of_interleaved_stages_is_smaller_by_their_number(
    ranks: int, micro_batches: int, chunks: int, share: float, over_ideal: float
) -> None:
    schedule = check(lower(generate("interleaved", ranks, micro_batches, chunks)))
    simulated = simulate(schedule, Costs.equal(schedule.stages))
    assert simulated.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    assert simulated.bubble == pytest.approx(share, abs=5e-5)
    assert simulated.bubble_over_ideal == pytest.approx(over_ideal, abs=5e-5)


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_b92_zb_h1_idles_3_units_per_rank_where_1f1b_idles_9_and_holds_no_more(micro_batches: int) -> None:
    schedule = check(lower(generate("zb-h1", 4, micro_batches)))
    assert simulate(schedule, Costs.equal(4)).idle == (3.0,) * 4
    assert max(held.total for held in live(schedule)) == max(h.total for h in live(generate("1f1b", 4, micro_batches)))


# --- what the papers of the V family publish --------------------------------------------------------------------------


def longest_rank(timeline: Timeline) -> float:
    """Seconds from first to last action of the rank where that is most: what the papers call a schedule's cost."""
    return max(spans[-1].end - spans[0].start for spans in timeline.compute)


def published_bubble(name: str, ranks: int, micro_batches: int) -> float:
    """1 - m (F + B + W) / longest rank, with F = B = W."""
    schedule = check(lower(generate(name, ranks, micro_batches)))
    return 1 - 6 * micro_batches / longest_rank(simulate(schedule, Costs.equal(schedule.stages)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_zb_v_has_the_published_bubble_of_zero_with_the_memory_of_1f1b(ranks: int, rounds: int) -> None:
    """Qi et al. 2023 (arXiv 2401.10241), ZB-V: bubble 0, activations p micro-batches, which are 2p stage inputs."""
    assert published_bubble("zb-v", ranks, rounds * ranks) == 0
    assert {held.total for held in live(generate("zb-v", ranks, rounds * ranks))} == {2 * ranks}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_v_half_has_at_most_the_published_bubble_and_memory(ranks: int, rounds: int) -> None:
    """Qi et al. 2024 (arXiv 2405.15362), their table for F = B = W: bubble p / 2m, (p + 2) // 2 micro-batches."""
    assert published_bubble("v-half", ranks, rounds * ranks) <= ranks / (2 * rounds * ranks)
    assert {held.total for held in live(generate("v-half", ranks, rounds * ranks))} == {2 * ((ranks + 2) // 2)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_dualpipe_v_has_the_published_bubble_and_memory(ranks: int) -> None:
    """DeepSeek-AI's DualPipe README: with PP = 2p stages (PP/2 - 1)(F&B + B - 3W), and PP + 1 activations."""
    schedule = check(lower(generate("dualpipe-v", ranks, 10 * ranks)))
    f, b, w = 1.0, 2.0, 1.0  # of one stage; b is the whole backward, as in their table
    assert simulate(schedule, Costs.equal(2 * ranks)).idle == ((ranks - 1) * ((f + b) + b - 3 * w),) * ranks
    assert {held.total for held in live(schedule)} == {2 * ranks + 1}


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-half", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_schedule_is_shorter_than_the_fill_and_the_work_of_the_last_rank(name: str, ranks: int) -> None:
    """The lower bound beside the published points: the last rank begins p - 1 forwards late. ZB-V and ZB-H1 meet it."""
    schedule = check(lower(generate(name, ranks, 2 * ranks)))
    idle = simulate(schedule, Costs.equal(schedule.stages)).idle[0]
    assert idle == ranks - 1 if name in ("zb-h1", "zb-v") else idle >= ranks - 1


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
