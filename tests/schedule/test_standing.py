"""The text that a stopped pipeline shows: every rank, and the action that it stands at."""

from plait.schedule import Action, Kind, generate, lower
from plait.schedule.standing import standing


def test_each_rank_is_shown_at_its_action_between_what_was_and_what_comes() -> None:
    schedule = lower(generate("1f1b", 3, 4))
    at = schedule.programs[0].index(Action(Kind.BW, 0, 1))
    text = standing(schedule, {0: at, 1: len(schedule.programs[1])})
    assert text.splitlines() == [
        f"pp 0: F2 BW0 F3 [BW1] BW2 BW3; action {at + 1} of {len(schedule.programs[0])}",
        f"pp 1: at the end of its {len(schedule.programs[1])} actions",
        "pp 2: no answer: it computes, or is gone",
    ]


def test_stages_are_named_where_a_rank_holds_several() -> None:
    schedule = lower(generate("interleaved", 2, 2))
    send = next(i for i, action in enumerate(schedule.programs[0]) if action.kind is Kind.SEND)
    assert standing(schedule, {0: send}).startswith("pp 0: F0/0 [SEND(stage 0 to 1, micro 0)] F1/0")
