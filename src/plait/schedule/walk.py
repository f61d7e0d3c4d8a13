"""One order in which all ranks' actions can happen, or the reason why there is none.

The rules of waiting stand here once: the checker asks whether the walk ends, the simulator puts times to its steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence, Set

from plait.schedule.actions import RECV, SEND, Action, Kind, Message, Schedule
from plait.spec.errors import InvalidSchedule

Event = tuple[Kind, Message]  # SEND: the message is sent; RECV: its receive is posted
Step = tuple[int, Action, Sequence[Message]]  # rank, action, and the messages that it takes in


def walk(schedule: Schedule, blocking: bool = False) -> Iterator[Step]:
    """Yield every action of a lowered schedule in an order that respects all programs and messages.

    A compute action waits until its messages from other ranks are sent; posting a receive never waits. A send does
    not wait either, unless `blocking`: then it waits for its receive to be posted, the worst that a backend may do.
    Raises InvalidSchedule that names each waiting rank with its action if not all can happen.
    """
    happened: dict[Kind, set[Message]] = {SEND: set(), RECV: set()}
    sent, posted = happened[SEND], happened[RECV]
    waiting: defaultdict[Event, list[int]] = defaultdict(list)  # ranks that stand still until the event
    reached = [0] * schedule.ranks
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        program = schedule.programs[rank]
        for at in range(reached[rank], len(program)):
            action = program[at]
            kind, message = action.kind, action.message
            taken = schedule.inputs(action) if message is None else ()
            event = None if sent.issuperset(taken) else _unsent(schedule, taken, sent)
            if blocking and message is not None and kind is SEND and message not in posted:
                event = RECV, message
            if event is not None:
                waiting[event].append(rank)
                reached[rank] = at
                break
            if message is not None and (blocking or kind is SEND):
                happened[kind].add(message)
                ready += waiting.pop((kind, message), ())
            yield rank, action, taken
    if waiting:
        stuck = [_standstill(schedule, rank, reached[rank], event) for event in waiting for rank in waiting[event]]
        raise InvalidSchedule(f"deadlock{' if sends block' * blocking}: " + "; ".join(sorted(stuck)))


def _unsent(schedule: Schedule, taken: Sequence[Message], sent: Set[Message]) -> Event | None:
    """The first message from another rank that is not there."""
    for message in taken:
        if message not in sent and schedule.crosses(message):
            return SEND, message
    return None


def _standstill(schedule: Schedule, rank: int, at: int, event: Event) -> str:
    kind, message = event
    source, target = schedule.channel(message)
    happens = f"rank {source} sends" if kind is SEND else f"rank {target} receives"
    return f"rank {rank} stands at {schedule.programs[rank][at]} until {happens} the {message}"
