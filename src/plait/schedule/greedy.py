"""List scheduling: at each time every rank runs, of what it can run, what a policy prefers. A schedule comes of it.

It builds V-Half, and the candidates among which the search of `search.py` chooses. Nothing here knows a named schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from plait.schedule.actions import Action, B, F, Kind, Message, Schedule, W
from plait.schedule.simulate import Costs


class Limits(NamedTuple):
    """What a rank may hold: `forward[s]` from F to B and `weight[s]` from B to W count against `rank[r]`.

    `caps[s]`: most micro-batches of a stage from F to W; what keeps a first stage from taking all the room.
    """

    forward: tuple[int, ...]
    weight: tuple[int, ...]
    rank: tuple[int, ...]
    caps: tuple[int, ...]


class Policy(NamedTuple):
    """Which of several possible actions goes first: by kind, then F of the rank's latest stage, then by micro-batch.

    `patience` is the look-ahead: a W waits if an F or B will be there before that share of the W's time is over.
    """

    kinds: tuple[Kind, Kind, Kind] = (F, B, W)
    oldest: bool = True  # F and B by micro-batch, then by stage; else by stage first
    patience: float = 0.0


def _preference(policy: Policy, order: int, stage: int, micro: int) -> tuple[int, int, int]:
    return (order, micro, -stage) if policy.oldest else (order, -stage, micro)


class Choice(NamedTuple):
    """An action that a rank could run, from when, and how much the policy wants it (least first)."""

    preference: tuple[int, int, int]
    ready: float
    kind: Kind
    stage: int


class Found(NamedTuple):
    """A compute-only schedule, and the seconds of its step."""

    schedule: Schedule
    seconds: float


def list_schedule(
    owner: tuple[int, ...], micro_batches: int, costs: Costs, limits: Limits, policies: tuple[Policy, ...]
) -> Found | None:
    """What comes of one policy per rank, or None where the limits let it come to a stop.

    Its seconds are those of the simulation as long as no transfer waits for another one.
    """
    state = _State(owner, micro_batches, costs, limits, policies)
    events = [(0.0, rank) for rank in range(max(owner) + 1)]  # when a rank is to look again; it may look in vain
    left = 3 * len(owner) * micro_batches
    while left:
        if not events:
            return None
        now, rank = heappop(events)
        if now < state.clock[rank]:
            continue
        choice, later = state.choose(rank, now)
        if choice is not None:
            left -= 1
            for event in state.run(rank, choice, now):
                heappush(events, event)
        elif later is not None:
            heappush(events, (later, rank))
    schedule = Schedule("greedy", micro_batches, owner, tuple(map(tuple, state.programs)))
    return Found(schedule, max(state.clock))


@dataclass
class _State:
    """Where every rank and stage stands. Each stage takes its micro-batches in order, for each kind."""

    owner: tuple[int, ...]
    micro_batches: int
    costs: Costs
    limits: Limits
    policies: tuple[Policy, ...]
    programs: list[list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        ranks, stages = max(self.owner) + 1, len(self.owner)
        self.programs = [[] for _ in range(ranks)]
        self.held = [[s for s in range(stages) if self.owner[s] == rank] for rank in range(ranks)]
        self.clock, self.live = [0.0] * ranks, [0] * ranks
        self.done = {kind: [0] * stages for kind in (F, B, W)}
        # When the input of each next micro-batch is there; the first stage has all of its own from the start.
        self.ready: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(stages)] for kind in (F, B, W)}
        self.ready[F][0] = [0.0] * self.micro_batches
        self.seconds = {F: self.costs.f, B: self.costs.b, W: self.costs.w}
        self.order = [
            [(kind, order, self.done[kind], self.ready[kind]) for order, kind in enumerate(policy.kinds)]
            for policy in self.policies
        ]

    def choose(self, rank: int, now: float) -> tuple[Choice | None, float | None]:
        """The action to start now, or None and when to look again (None: when something else happens)."""
        best: Choice | None = None
        later: float | None = None
        policy = self.policies[rank]
        for kind, order, done, ready in self.order[rank]:
            for stage in self.held[rank]:
                micro = done[stage]
                if micro == len(ready[stage]) or (kind is not W and not self._fits(kind, stage, rank)):
                    continue
                if (at := ready[stage][micro]) > now:
                    later = at if later is None else min(later, at)
                    continue
                choice = Choice(_preference(policy, order, stage, micro), at, kind, stage)
                best = choice if best is None else min(best, choice)
            if best is not None and (best.kind is not W or not policy.patience):
                break  # the other kinds are wanted less, and nobody waits for them
        if best is not None and best.kind is W and later is not None and policy.patience:
            return (None if later < now + policy.patience * self.costs.w[best.stage] else best), later
        return best, later

    def _fits(self, kind: Kind, stage: int, rank: int) -> bool:
        """Whether the rank has room for what the action leaves behind."""
        if kind is F:
            if self.done[F][stage] - self.done[W][stage] >= self.limits.caps[stage]:
                return False
            more = self.limits.forward[stage]
        else:
            more = self.limits.weight[stage] - self.limits.forward[stage]
        return more <= 0 or self.live[rank] + more <= self.limits.rank[rank]

    def run(self, rank: int, choice: Choice, now: float) -> list[tuple[float, int]]:
        """Start the action; the events that follow from it."""
        kind, stage = choice.kind, choice.stage
        micro, end = self.done[kind][stage], now + self.seconds[kind][stage]
        self.done[kind][stage] += 1
        self.clock[rank] = end
        self.programs[rank].append(Action(kind, stage, micro))
        forward, weight = self.limits.forward[stage], self.limits.weight[stage]
        self.live[rank] += forward if kind is F else weight - forward if kind is B else -weight
        events = [(end, rank)]
        if kind is B:
            self.ready[W][stage].append(end)
        if kind is F and stage == len(self.owner) - 1:
            self.ready[B][stage].append(end)
        other = stage + (1 if kind is F else -1)
        if kind is not W and 0 <= other < len(self.owner):
            arrives = end
            if (there := self.owner[other]) != rank:
                arrives += self.costs.transfer(Message(stage, other, micro))
                events.append((max(arrives, self.clock[there]), there))
            self.ready[kind][other].append(arrives)
        return events
