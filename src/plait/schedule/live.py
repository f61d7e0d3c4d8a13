"""What a rank holds between passes: micro-batches, or bytes, from F to B and from B to W, at their peaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plait.schedule.actions import B, F, Program, Schedule, W
from plait.schedule.bulk import uncollected


class Live(NamedTuple):
    """One rank's peaks: what waits for its B, what waits for its W, and the most of both at one time."""

    forward: int
    weight: int
    total: int


@uncollected()
def live(
    schedule: Schedule, forward_bytes: Sequence[int] | None = None, weight_bytes: Sequence[int] | None = None
) -> tuple[Live, ...]:
    """Each rank's live sets, in micro-batches of a stage, or in bytes where bytes per stage are given.

    F adds to the first set, B moves from the first to the second, W and BW take away at their ends. FB adds before
    it takes away. An evaluation holds nothing.
    """
    if not schedule.trains:
        return (Live(0, 0, 0),) * schedule.ranks
    one = [1] * schedule.stages
    return tuple(_peaks(program, forward_bytes or one, weight_bytes or one) for program in schedule.programs)


def _peaks(program: Program, forward_bytes: Sequence[int], weight_bytes: Sequence[int]) -> Live:
    forward = weight = 0
    peaks = Live(0, 0, 0)
    for part in (part for action in program for part in action.parts):
        if part.kind is F:
            forward += forward_bytes[part.stage]
        elif part.kind is W:
            weight -= weight_bytes[part.stage]
        else:
            forward -= forward_bytes[part.stage]
            weight += weight_bytes[part.stage] if part.kind is B else 0
        peaks = Live(max(peaks.forward, forward), max(peaks.weight, weight), max(peaks.total, forward + weight))
    return peaks
