"""The simulator's times where they can be worked out by hand, and its speed."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from plait.schedule import Action, Costs, Kind, Message, Span, Timeline, check, forward_of, generate, lower, simulate
from plait.spec.pipeline import SHAPES


def test_a_link_delays_the_consumer_and_nobody_else() -> None:
    simulated = simulate(
        lower(forward_of(generate("gpipe", 2, 3))), Costs(f=(2.0, 1.0), b=(0.0,) * 2, w=(0.0,) * 2, link=(0.5,))
    )
    assert [(span.start, span.end) for span in simulated.compute[0]] == [(0, 2), (2, 4), (4, 6)]
    assert [(span.start, span.end) for span in simulated.compute[1]] == [(2.5, 3.5), (4.5, 5.5), (6.5, 7.5)]


def test_messages_of_one_channel_follow_each_other_on_a_slow_link() -> None:
    simulated = simulate(
        lower(forward_of(generate("gpipe", 2, 3))), Costs(f=(1.0, 1.0), b=(0.0,) * 2, w=(0.0,) * 2, link=(3.0,))
    )
    assert [(span.start, span.end) for span in simulated.network[0]] == [(1, 4), (4, 7), (7, 10)]
    assert simulated.step == 11


def test_a_transfer_waits_for_its_receive_to_be_posted() -> None:
    """Rank 1 posts the receive of micro-batch 2 only when it starts with micro-batch 1, long after it was sent."""
    costs = Costs(f=(1.0, 10.0), b=(0.0,) * 2, w=(0.0,) * 2, link=(0.5,))
    forward, sends = (
        lower(forward_of(generate("gpipe", 2, 3))),
        [Action.send(Message(0, 1, micro)) for micro in range(3)],
    )
    receive = Action.receive(sends[2].message)
    late = [action for action in forward.programs[1] if action != receive]
    late.insert(late.index(Action(Kind.F, 1, 1)), receive)
    simulated = simulate(replace(forward, programs=(forward.programs[0], tuple(late))), costs)
    assert [span.start for span in simulated.network[0]] == [1, 2, 11.5]
    assert [span.start for span in simulated.compute[1]] == [1.5, 11.5, 21.5]


def test_reductions_run_beside_compute_and_end_the_step() -> None:
    costs = Costs(f=(1.0,) * 2, b=(1.0,) * 2, w=(1.0,) * 2, reduce=(5.0, 5.0))
    simulated = simulate(lower(generate("1f1b", 2, 1)), costs)
    reductions = [[s for s in spans if s.action.kind is Kind.REDUCE] for spans in simulated.network]
    assert [[(s.start, s.end) for s in spans] for spans in reductions] == [[(6, 11)], [(4, 9)]]
    assert simulated.step == 11


def test_a_joint_backward_may_cost_other_than_the_sum_of_its_halves() -> None:
    costs = Costs(f=(1.0,), b=(1.0,), w=(1.0,), bw=(1.5,))
    assert simulate(lower(generate("1f1b", 1, 4)), costs).step == 10


def test_measured_spans_make_the_same_timeline_as_simulated_ones() -> None:
    simulated = simulate(lower(generate("1f1b", 3, 4)), Costs.equal(3, link=0.25))
    mixed = [(*network, *compute) for network, compute in zip(simulated.network, simulated.compute, strict=True)]
    assert Timeline.of(mixed) == simulated


def test_times_count_from_the_first_start() -> None:
    spans = [[Span(Action(Kind.F, 0), 100.0, 101.0)], [Span(Action(Kind.F, 1), 101.0, 104.0)]]
    timeline = Timeline.of(spans)
    assert (timeline.step, timeline.busy, timeline.idle) == (4.0, (1.0, 3.0), (3.0, 1.0))
    assert (timeline.bubble, timeline.bubble_over_ideal) == (0.5, 1.0)


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        *(pytest.param(name, marks=pytest.mark.proof) for name in SHAPES if name != "1f1b"),
    ],
)
def test_64_stages_and_512_micro_batches_take_a_second_each_to_generate_check_and_simulate(name: str) -> None:
    """The limit is twice the second: a core that is shared with others does half as much in its time."""
    ranks, times = 64 // SHAPES[name].chunks, []
    for _ in range(2):
        clock = [time.process_time()]
        plain = generate(name, ranks, 512)
        clock.append(time.process_time())
        schedule = lower(plain)
        clock.append(time.process_time())
        check(schedule)
        clock.append(time.process_time())
        simulate(schedule, Costs.equal(64))
        clock.append(time.process_time())
        times.append([after - before for before, after in pairwise(clock)])
        if max(times[-1]) <= 1:
            break
    best = [min(took) for took in zip(*times, strict=True)]
    print("{}: generated {:.2f} s, lowered {:.2f}, checked {:.2f}, simulated {:.2f}".format(name, *best))
    assert max(best) <= 2
