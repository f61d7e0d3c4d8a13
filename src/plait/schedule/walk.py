"""One order in which all ranks' actions can happen, or the reason why there is none.

The rules of waiting stand here once: the checker asks whether the walk ends, the simulator puts times to its steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from plait.schedule.actions import RECV, SEND, Action, Kind, Message, Schedule
from plait.spec.errors import InvalidSchedule

Event = tuple[Kind, Message]  # SEND: the message is sent; RECV: its receive is posted


def walk(schedule: Schedule, blocking: bool = False) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) of a lowered schedule in an order that respects all programs and messages.

    A compute action waits until its messages from other ranks are sent; posting a receive never waits. A send does
    not wait either, unless `blocking`: then it waits for its receive to be posted, the worst that a backend may do.
    Raises InvalidSchedule that names each waiting rank with its action if not all can happen.
    """
    happened: dict[Kind, set[Message]] = {SEND: set(), RECV: set()}
    waiting: defaultdict[Event, list[int]] = defaultdict(list)  # ranks that stand still until the event
    remaining = [iter(program) for program in schedule.programs]
    current = [next(program, None) for program in remaining]
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        while (action := current[rank]) is not None:
            kind, message = action.kind, action.message
            event = None if kind is RECV else _awaited(schedule, action, happened, blocking)
            if event is not None:
                waiting[event].append(rank)
                break
            if message is not None:
                happened[kind].add(message)
                ready += waiting.pop((kind, message), ())
            yield rank, action
            current[rank] = next(remaining[rank], None)
    if waiting:
        stuck = [_standstill(schedule, rank, current[rank], event) for event in waiting for rank in waiting[event]]
        raise InvalidSchedule(f"deadlock{' if sends block' * blocking}: " + "; ".join(sorted(stuck)))


def _awaited(schedule: Schedule, action: Action, happened: dict[Kind, set[Message]], blocking: bool) -> Event | None:
    """What has to happen before the action can, and has not."""
    if (sent := action.message) is not None:
        return (RECV, sent) if blocking and action.kind is SEND and sent not in happened[RECV] else None
    for message in schedule.inputs(action):
        if message not in happened[SEND] and schedule.crosses(message):
            return (SEND, message)
    return None


def _standstill(schedule: Schedule, rank: int, action: Action | None, event: Event) -> str:
    kind, message = event
    source, target = schedule.channel(message)
    happens = f"rank {source} sends" if kind is SEND else f"rank {target} receives"
    return f"rank {rank} stands at {action} until {happens} the {message}"
