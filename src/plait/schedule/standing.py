"""Where each rank stands in a schedule, as text: what a pipeline that came to a stop has to say."""

from __future__ import annotations

from collections.abc import Mapping

from plait.schedule.actions import Action, Program, Schedule
from plait.schedule.draw import label

AROUND = 3  # compute actions shown before and after


def standing(schedule: Schedule, positions: Mapping[int, int | None]) -> str:
    """One line per rank: the action that it stands at in brackets, some of its compute before and after.

    `positions[rank]` is an index of the rank's program; None, or a rank left out, has given no answer.
    """
    lines = []
    for rank, program in enumerate(schedule.programs):
        at = positions.get(rank)
        if at is None:
            lines.append(f"pp {rank}: no answer: it computes, or is gone")
        elif at >= len(program):
            lines.append(f"pp {rank}: at the end of its {len(program)} actions")
        else:
            lines.append(f"pp {rank}: {_line(schedule, rank, program, at)}; action {at + 1} of {len(program)}")
    return "\n".join(lines)


def _line(schedule: Schedule, rank: int, program: Program, at: int) -> str:
    several = len(schedule.held_by(rank)) > 1

    def named(actions: Program) -> list[str]:
        return [label(action, several) for action in actions if action.parts]

    before, after = named(program[:at])[-AROUND:], named(program[at + 1 :])[:AROUND]
    return " ".join([*before, f"[{_here(program[at], several)}]", *after])


def _here(action: Action, several: bool) -> str:
    return label(action, several) if action.parts else str(action)
