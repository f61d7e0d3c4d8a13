"""What the generators emit, and what they refuse."""

import pytest

from plait.schedule import GENERATORS, check, forward_of, generate, lower
from plait.spec.errors import UsageError


def test_one_rank_is_gradient_accumulation() -> None:
    (program,) = lower(generate("1f1b", 1, 3)).programs
    assert [f"{action.kind}{action.micro}" for action in program] == ["F0", "BW0", "F1", "BW1", "F2", "BW2", "REDUCE0"]


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
def test_no_number_of_micro_batches_hangs(name: str, ranks: int, micro_batches: int) -> None:
    check(lower(generate(name, ranks, micro_batches)))


def test_gradients_are_summed_in_one_order_under_every_schedule() -> None:
    for name in GENERATORS:
        schedule = generate(name, 4, 6)
        for program in schedule.programs:
            for stage in schedule.held_by(schedule.programs.index(program)):
                parts = [part for action in program for part in action.parts if part.stage == stage]
                assert [part.micro for part in parts if part.kind in ("W", "BW")] == list(range(6))


def test_the_forward_of_a_schedule_keeps_its_placement_and_needs_no_backward() -> None:
    evaluation = check(lower(forward_of(generate("1f1b", 4, 5))))
    assert evaluation.owner == (0, 1, 2, 3)
    assert {str(action.kind) for program in evaluation.programs for action in program} == {"F", "SEND", "RECV"}


def test_what_a_generator_cannot_make_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule '1fb1'[^$]*did you mean '1f1b'"):
        generate("1fb1", 4, 8)
    with pytest.raises(UsageError, match="micro-batches = 0, needs at least 1"):
        generate("gpipe", 4, 0)
    with pytest.raises(UsageError, match=r"chunks = 2, but 1f1b holds 1"):
        generate("1f1b", 4, 8, chunks=2)
