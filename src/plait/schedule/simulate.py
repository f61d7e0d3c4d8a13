"""The time that a lowered schedule takes, given the seconds of its passes and transfers: an event simulation.

A rank runs its program in order and one compute action at a time. A transfer starts when its send is started, its
receive is posted and the channel is free; it delays nobody but its consumer. Reductions of one rank follow each other
beside its compute. Nothing here knows where the seconds come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from plait.schedule.actions import BW, DROP, REDUCE, SEND, Action, B, F, Kind, Message, Schedule, W
from plait.schedule.bulk import uncollected
from plait.schedule.span import Span, Timeline
from plait.schedule.walk import walk


@dataclass(frozen=True)
class Costs:
    """Seconds per stage of each kind, and per boundary (between stage i and i+1) of each message, either direction.

    `bw` is b + w where it is not given; FB takes as long as its two parts. Empty `reduce` and `link` cost nothing.
    """

    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    bw: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    link: tuple[float, ...] = ()

    @classmethod
    def equal(cls, stages: int, f: float = 1.0, b: float = 1.0, w: float = 1.0, link: float = 0.0) -> Costs:
        """The same for every stage and boundary."""
        return cls(f=(f,) * stages, b=(b,) * stages, w=(w,) * stages, link=(link,) * (stages - 1))

    def by_kind(self) -> Mapping[Kind, tuple[float, ...]]:
        """Seconds of each single pass, by stage."""
        whole = self.bw or tuple(b + w for b, w in zip(self.b, self.w, strict=True))
        return {F: self.f, B: self.b, W: self.w, BW: whole}

    def transfer(self, message: Message) -> float:
        """Seconds of one message on its link."""
        return self.link[min(message.source, message.target)] if self.link else 0.0


@uncollected()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The spans of every rank of a lowered, checked schedule; the clock starts at 0.

    Raises InvalidSchedule where the ranks wait for each other.
    """
    seconds = costs.by_kind()
    clock = [0.0] * schedule.ranks
    network_clock = [0.0] * schedule.ranks  # when the rank's last reduction ends
    compute: list[list[Span]] = [[] for _ in clock]
    network: list[list[Span]] = [[] for _ in clock]
    links = _Links(schedule, costs)
    arrival = links.arrival
    for rank, action, taken in walk(schedule):
        if action.message is not None:
            links.meet(action, action.message, clock[rank])
        elif action.kind is REDUCE:
            start = max(clock[rank], network_clock[rank])
            network_clock[rank] = start + (costs.reduce[action.stage] if costs.reduce else 0.0)
            network[rank].append(Span(action, start, network_clock[rank]))
        elif action.kind is not DROP:
            start = clock[rank]
            for message in taken:
                start = max(start, arrival.get(message, 0.0))
            end = start
            for part in (action,) if action.backward is None else action.parts:
                end += seconds[part.kind][part.stage]
            clock[rank] = end
            compute[rank].append(Span(action, start, end))
    for (source, _), spans in links.spans.items():
        network[source] += spans
    return Timeline(
        tuple(map(tuple, compute)), tuple(tuple(sorted(spans, key=lambda span: span.start)) for spans in network)
    )


class _Links:
    """Transfers under way: when each message arrives (none from the rank itself), and the sender's span, by channel."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.half: dict[Message, tuple[Action, float]] = {}  # sent or posted, and the other side not yet there
        self.arrival: dict[Message, float] = {}
        self.spans: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        joints = [
            Message(stage, other, 0)
            for stage in range(schedule.stages)
            for other in (stage - 1, stage + 1)
            if 0 <= other < schedule.stages
        ]
        # By source and target stage: the transfers of their channel so far, and the seconds of one between them.
        self.lanes = {(m.source, m.target): (self.spans[schedule.channel(m)], costs.transfer(m)) for m in joints}

    def meet(self, action: Action, message: Message, now: float) -> None:
        """One side of the message is there; when the second comes, the transfer can be timed."""
        other = self.half.pop(message, None)
        if other is None:
            self.half[message] = action, now
            return
        first, since = other
        earlier, seconds = self.lanes[message[:2]]
        start = max(since, now, earlier[-1].end) if earlier else max(since, now)
        self.arrival[message] = end = start + seconds
        earlier.append(Span(first if first.kind is SEND else action, start, end))
