"""The time that a schedule takes where its ranks share fewer processors than they are: a rank that waits lends its own.

A bubble then costs time only while fewer ranks have work than there are processors. Messages are part of the passes
here: it is a processor that moves them.
"""

from __future__ import annotations

from plait.schedule.actions import Action, Message, Schedule
from plait.schedule.bulk import uncollected
from plait.schedule.simulate import Costs
from plait.spec.errors import InvalidSchedule


@uncollected()
def simulate_shared(schedule: Schedule, costs: Costs, processors: float) -> float:
    """Seconds from the first action to the last, passes taking what `costs` says on a processor of one's own.

    Of n ranks at work each goes at the pace min(1, processors / n). Raises InvalidSchedule where the ranks wait for
    each other.
    """
    seconds = costs.by_kind()
    programs = [[action for action in program if action.parts] for program in schedule.programs]
    waiting: dict[int, Action] = {rank: program[0] for rank, program in enumerate(programs) if program}
    reached = [0] * schedule.ranks
    given: set[Message] = set()
    left: dict[int, float] = {}  # of the pass that each rank is at work on
    clock = 0.0
    while waiting:
        for rank, action in waiting.items():
            if rank not in left and given.issuperset(schedule.inputs(action)):
                left[rank] = sum(seconds[part.kind][part.stage] for part in action.parts)
        if not left:
            raise InvalidSchedule(f"deadlock: {', '.join(f'rank {r} at {a}' for r, a in waiting.items())}")
        soonest = min(left.values())
        clock += soonest / min(1.0, processors / len(left))
        left = {rank: rest - soonest for rank, rest in left.items()}
        for rank in [rank for rank, rest in left.items() if rest <= 0.0]:
            del left[rank]
            given.update(schedule.outputs(waiting.pop(rank)))
            reached[rank] += 1
            if reached[rank] < len(programs[rank]):
                waiting[rank] = programs[rank][reached[rank]]
    return clock
