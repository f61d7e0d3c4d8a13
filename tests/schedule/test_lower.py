"""Where lowering puts communication, for the named schedules and for any other."""

from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.schedule import (
    COMPUTE,
    Action,
    Costs,
    Kind,
    Message,
    Program,
    Schedule,
    check,
    forward_of,
    generate,
    live,
    lower,
    simulate,
)
from tests.schedule.drawn import drawn_schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Looped, V-shaped and arbitrary placements of 1 to 8 stages, backward whole or split."""
    ranks = draw(st.integers(1, 4))
    down = tuple(range(ranks))
    owner = draw(st.sampled_from([down, down + down, down + down[::-1], ()])) or tuple(
        draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=8))
    )
    return drawn_schedule(draw(st.integers(0, 10**6)), ranks, owner, draw(st.integers(1, 5)), draw(st.booleans()))


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_whatever_order_the_data_allow_lowers_to_a_valid_schedule(schedule: Schedule) -> None:
    lowered = check(lower(schedule))
    compute = tuple(tuple(action for action in program if action.kind in COMPUTE) for program in lowered.programs)
    assert compute == schedule.programs
    messages = sum(schedule.owner[i] != schedule.owner[i + 1] for i in range(schedule.stages - 1)) * 2
    sends = [action for program in lowered.programs for action in program if action.kind is Kind.SEND]
    assert len(sends) == messages * schedule.micro_batches


@given(schedules(), st.floats(0, 3))
@settings(max_examples=50, deadline=None)
def test_in_a_simulation_every_message_leaves_after_its_producer_and_arrives_before_its_consumer(
    schedule: Schedule, link: float
) -> None:
    simulated = simulate(lower(schedule), Costs.equal(schedule.stages, link=link))
    transfers = {span.action.message: span for spans in simulated.network for span in spans}
    for spans in simulated.compute:
        assert all(one.end <= other.start for one, other in pairwise(spans))
        for span in spans:
            assert all(transfers[m].end <= span.start for m in schedule.inputs(span.action) if schedule.crosses(m))
            assert all(transfers[m].start >= span.end for m in schedule.outputs(span.action) if schedule.crosses(m))


def test_a_receive_is_posted_before_the_action_that_precedes_its_consumer() -> None:
    for program in lower(generate("1f1b", 4, 8)).programs:
        for position, action in enumerate(program):
            if action.kind is not Kind.RECV or action.message is None:
                continue
            after = [later for later in program[position:] if later.kind in COMPUTE]
            consumer = Action(Kind.F if action.message.what == "activation" else Kind.BW, action.stage, action.micro)
            first = next(earlier for earlier in program if earlier.kind in COMPUTE)
            assert after.index(consumer) >= 1 or consumer == first


def test_stages_of_one_rank_hand_over_without_sending() -> None:
    program = tuple(Action(kind, stage) for kind, stage in ((Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0)))
    lowered = check(lower(Schedule("one rank", 1, (0, 0), (program,))))
    assert [str(a.kind) for a in lowered.programs[0]] == ["F", "F", "BW", "REDUCE", "BW", "REDUCE"]


def test_a_stage_is_reduced_right_after_its_last_weight_gradient_and_its_send() -> None:
    program = lower(generate("1f1b", 2, 3)).programs[1]
    assert program[-3:] == (Action(Kind.BW, 1, 2), Action.send(Message(1, 0, 2)), Action(Kind.REDUCE, 1))


def test_a_forward_and_a_backward_together_are_lowered_checked_simulated_and_counted() -> None:
    together = Action.together(Action(Kind.F, 0, 1), Action(Kind.BW, 0, 0))
    first = (Action(Kind.F, 0, 0), together, Action(Kind.BW, 0, 1))
    second = (Action(Kind.F, 1, 0), Action(Kind.BW, 1, 0), Action(Kind.F, 1, 1), Action(Kind.BW, 1, 1))
    lowered = check(lower(Schedule("together", 2, (0, 1), (first, second))))
    simulated = simulate(lowered, Costs.equal(2))
    assert [span.end for span in simulated.compute[0]] == [1, 7, 12]
    assert [held.forward for held in live(lowered)] == [2, 1]


def test_live_sets_count_bytes_of_each_stage_and_what_waits_for_its_weight_gradient() -> None:
    order = ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0), (Kind.W, 1), (Kind.W, 0))
    program = tuple(Action(kind, stage) for kind, stage in order)
    schedule = Schedule("split", 1, (0, 0), (program,))
    assert live(schedule) == ((2, 2, 2),)
    assert live(schedule, forward_bytes=(10, 1), weight_bytes=(4, 6)) == ((11, 10, 16),)


def kinds_after(program: Program, index: int) -> list[str]:
    """The actions between a compute action and the next thing that is computed or received."""
    after = takewhile(lambda action: action.kind not in (*COMPUTE, Kind.RECV), program[index + 1 :])
    return [f"{action.kind}{action.stage}" for action in after]


@given(schedules(), st.integers(0, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_zero_stage_says_after_which_actions_gradients_are_reduced_and_weights_dropped(
    schedule: Schedule, zero: int, keep: bool
) -> None:
    """Checked, so the last weight gradient of each stage is reduced at any ZeRO stage."""
    for program in check(lower(schedule, zero, keep)).programs:
        for index, action in enumerate(program):
            if action.kind not in COMPUTE:
                continue
            later = [
                part for following in program[index + 1 :] for part in following.parts if part.stage == action.stage
            ]
            gradients = [part for part in later if part.kind in (Kind.W, Kind.BW)]
            reduces = action.kind in (Kind.W, Kind.BW) and (zero >= 2 or not gradients)
            drops = zero == 3 and (not keep or not later)
            expected = [f"REDUCE{action.stage}"] * reduces + [f"DROP{action.stage}"] * drops
            assert [kind for kind in kinds_after(program, index) if "SEND" not in kind] == expected


@pytest.mark.parametrize(("keep", "drops"), [(False, ["DROP0", "DROP1"]), (True, [])])
def test_a_forward_and_a_backward_together_are_followed_by_the_endings_of_both_stages(
    keep: bool, drops: list[str]
) -> None:
    f, bw = Kind.F, Kind.BW
    together = Action.together(Action(f, 0, 1), Action(bw, 1, 0))
    rest = Action(f, 1, 1), Action(bw, 1, 1), Action(bw, 0, 0), Action(bw, 0, 1)
    lowered = check(lower(Schedule("V", 2, (0, 0), ((Action(f, 0), Action(f, 1), together, *rest),)), 3, keep))
    assert kinds_after(lowered.programs[0], lowered.programs[0].index(together)) == ["REDUCE1", *drops]


def test_an_evaluation_of_sharded_weights_drops_them_and_reduces_nothing() -> None:
    for keep, drops in ((False, 4), (True, 1)):
        for program in check(lower(forward_of(generate("1f1b", 2, 4)), 3, keep)).programs:
            assert [str(action.kind) for action in program].count("DROP") == drops
            assert program[-1].kind is Kind.DROP and Kind.REDUCE not in {action.kind for action in program}


def test_dropping_and_reducing_more_often_costs_nothing_unless_it_is_given_a_cost() -> None:
    plain, sharded = (simulate(lower(generate("1f1b", 4, 6), zero), Costs.equal(4)) for zero in (0, 3))
    assert sharded.compute == plain.compute and sharded.step == plain.step
