"""Planted faults: each is caught, with the rank and the action named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from plait.schedule import Action, Kind, Message, Program, Schedule, check, forward_of, generate, lower
from plait.spec.errors import InvalidSchedule

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def changed(rank: int, change: Callable[[list[Action]], object], schedule: Schedule | None = None) -> Schedule:
    """1F1B of 4 ranks and 4 micro-batches with one rank's lowered program changed."""
    schedule = schedule or lower(generate("1f1b", 4, 4))
    programs = [list(program) for program in schedule.programs]
    change(programs[rank])
    return replace(schedule, programs=tuple(tuple(program) for program in programs))


def hand_written(*programs: Program, micro_batches: int = 1, owner: tuple[int, ...] = (0, 1)) -> Schedule:
    return Schedule("hand-written", micro_batches, owner, programs)


def swap(program: list[Action], one: Action, other: Action) -> None:
    i, j = program.index(one), program.index(other)
    program[i], program[j] = program[j], program[i]


ACTIVATION = Message(1, 2, 0)


@pytest.mark.parametrize(
    ("rank", "change", "named"),
    [
        (2, lambda p: p.remove(Action(BW, 2, 3)), r"rank 2: BW\(stage 2, micro 3\) is missing"),
        (2, lambda p: p.remove(Action(F, 2, 3)), r"rank 2: BW\(stage 2, micro 3\) comes without F\(stage 2, micro 3\)"),
        (1, lambda p: p.append(Action(F, 1, 0)), r"rank 1: F\(stage 1, micro 0\) comes after F .* already done"),
        (0, lambda p: p.append(Action(F, 2, 0)), r"rank 0: F\(stage 2, micro 0\) is not of this rank, .* stage 0"),
        (0, lambda p: p.append(Action(F, 0, 4)), r"rank 0: F\(stage 0, micro 4\) is not one of 4 micro-batches"),
        (3, lambda p: swap(p, Action(F, 3, 1), Action(BW, 3, 1)), r"rank 3: BW\(stage 3, micro 1\) comes without F"),
        (1, lambda p: p.remove(Action.send(ACTIVATION)), r"rank 1: SEND\(stage 1 to 2, micro 0\) is missing"),
        (2, lambda p: p.remove(Action.receive(ACTIVATION)), r"rank 2: F\(stage 2, micro 0\) needs .* no RECV\(stage 2"),
        (1, lambda p: p.insert(0, Action.send(ACTIVATION)), r"rank 1: SEND\(stage 1 to 2, micro 0\) comes before"),
        (1, lambda p: p.append(Action.send(ACTIVATION)), r"rank 1: SEND\(stage 1 to 2, micro 0\) comes .* second time"),
        (2, lambda p: p.insert(0, Action.receive(ACTIVATION)), r"rank 2: RECV\(stage 2 from 1, micro 0\) is posted tw"),
        (2, lambda p: p.append(Action.receive(ACTIVATION)), r"rank 2: RECV\(stage 2 from 1, micro 0\) is posted, but"),
        (2, lambda p: p.append(Action.send(Message(2, 0, 0))), r"rank 2: SEND\(stage 2 to 0.* does not join two neigh"),
        (1, lambda p: p.insert(0, p.pop()), r"rank 1: REDUCE\(stage 1\) has no weight gradient to reduce"),
        (1, lambda p: p.pop(), r"rank 1: REDUCE\(stage 1\) is missing after the stage's last weight gradient"),
        (1, lambda p: p.append(Action(Kind.REDUCE, 1)), r"rank 1: REDUCE\(stage 1\) has no weight gradient to reduce"),
    ],
)
def test_a_planted_fault_is_named_by_rank_and_action(
    rank: int, change: Callable[[list[Action]], object], named: str
) -> None:
    with pytest.raises(InvalidSchedule, match=named):
        check(changed(rank, change))


def test_sends_and_receives_of_a_channel_in_different_orders_are_refused() -> None:
    first, second = (Action.receive(Message(0, 1, micro)) for micro in (0, 1))
    with pytest.raises(
        InvalidSchedule, match=r"rank 0: SEND\(stage 0 to 1, micro 0\) meets RECV\(stage 1 from 0, micro 1"
    ):
        check(changed(1, lambda program: swap(program, first, second)))


def test_ranks_that_wait_for_each_other_are_named_with_where_they_stand() -> None:
    one_then_other = ((Action(F, 0, 0), Action(BW, 0, 0), Action(F, 0, 1), Action(BW, 0, 1)),)
    both_first = ((Action(F, 1, 1), Action(BW, 1, 1), Action(F, 1, 0), Action(BW, 1, 0)),)
    schedule = lower(hand_written(*one_then_other, *both_first, micro_batches=2))
    with pytest.raises(InvalidSchedule) as caught:
        check(schedule)
    assert str(caught.value) == (
        "deadlock: "
        "rank 0 stands at BW(stage 0, micro 0) until rank 1 sends the gradient of micro-batch 0 from stage 1 to 0; "
        "rank 1 stands at F(stage 1, micro 1) until rank 0 sends the activation of micro-batch 1 from stage 0 to 1"
    )


def test_receives_posted_too_late_are_refused_if_sends_may_block() -> None:
    """1F1B of two ranks whose receives stand right before their consumers: each sends before it receives."""

    def late(program: Program) -> Program:
        actions = [action for action in program if action.kind is not Kind.RECV]
        receives = {(a.message.micro, a.message.what): a for a in program if a.message and a.kind is Kind.RECV}
        for kind, what in ((F, "activation"), (BW, "gradient")):
            for (micro, carried), receive in receives.items():
                if carried == what:
                    actions.insert(
                        next(i for i, a in enumerate(actions) if (a.kind, a.micro) == (kind, micro)), receive
                    )
        return tuple(actions)

    schedule = lower(generate("1f1b", 2, 4))
    schedule = replace(schedule, programs=tuple(map(late, schedule.programs)))
    with pytest.raises(InvalidSchedule, match="deadlock if sends block: rank 0 stands at SEND"):
        check(schedule)


def test_a_backward_has_no_place_in_an_evaluation() -> None:
    with pytest.raises(InvalidSchedule, match=r"rank 3: BW\(stage 3, micro 0\) has no place in an evaluation"):
        check(changed(3, lambda p: p.append(Action(BW, 3, 0)), lower(forward_of(generate("gpipe", 4, 4)))))


def test_split_and_joined_passes_are_checked_alike() -> None:
    split = (Action(F, 0, 0), Action(B, 0, 0), Action(W, 0, 0))
    check(lower(hand_written(split, owner=(0,))))
    with pytest.raises(InvalidSchedule, match=r"W\(stage 0, micro 0\) is missing"):
        check(lower(hand_written(split[:2], owner=(0,))))
    with pytest.raises(InvalidSchedule, match=r"W\(stage 0, micro 0\) comes without B\(stage 0, micro 0\)"):
        check(lower(hand_written((split[0], split[2], split[1]), owner=(0,))))
    with pytest.raises(InvalidSchedule, match=r"BW\(stage 0, micro 0\) comes after B .* already done"):
        check(lower(hand_written((*split, Action(BW, 0, 0)), owner=(0,))))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: p.pop(), r"rank 1: DROP\(stage 1\) is missing after the stage's last use"),
        (lambda p: p.insert(0, p.pop()), r"rank 1: DROP\(stage 1\) drops weights that nothing has gathered"),
        (lambda p: p.append(Action(Kind.DROP, 1)), r"rank 1: DROP\(stage 1\) drops weights that nothing has gathered"),
        (lambda p: p.remove(Action(Kind.REDUCE, 1)), None),
        (lambda p: p.pop(-2), r"rank 1: REDUCE\(stage 1\) is missing after the stage's last weight gradient"),
    ],
)
def test_sharded_weights_are_dropped_after_use_and_sharded_gradients_reduced_after_the_last(
    change: Callable[[list[Action]], object], named: str | None
) -> None:
    schedule = changed(1, change, lower(generate("1f1b", 4, 4), zero=3))
    if named is None:  # one reduction less, and the next one takes over what it left
        check(schedule)
    else:
        with pytest.raises(InvalidSchedule, match=named):
            check(schedule)
