"""When actions happened: `Span`, and `Timeline`, all ranks' spans of one step with the bubble in both of its names.

One type for prediction and measurement: the simulator makes it, training makes it, drawings and reports read it.
Times are seconds on one clock; nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from plait.schedule.actions import COMPUTE, Action, Kind


class Span(NamedTuple):
    """One action's start and end in seconds. A SEND or REDUCE spans the transfer, not the call that starts it."""

    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def row(self) -> dict[str, Any]:
        """For JSON; `from_row` reads it again. What runs along with a forward stands in its `backward`."""
        action = self.action
        row = {"kind": str(action.kind), "stage": action.stage, "micro": action.micro}
        if action.backward is not None:
            row["backward"] = {"stage": action.backward.stage, "micro": action.backward.micro}
        return row | {"start": self.start, "end": self.end}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Span:
        """Raises ValueError, KeyError or TypeError where the row is none."""
        action = Action(Kind(row["kind"]), int(row["stage"]), int(row["micro"]))
        if action.kind is Kind.FB:
            other = row["backward"]
            action = Action.together(action, Action(Kind.BW, int(other["stage"]), int(other["micro"])))
        return cls(action, float(row["start"]), float(row["end"]))


@dataclass(frozen=True)
class Timeline:
    """One step of all pipeline ranks: `compute[rank]` occupies the rank, `network[rank]` runs beside it."""

    compute: tuple[tuple[Span, ...], ...]
    network: tuple[tuple[Span, ...], ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Iterable[Span]]) -> Timeline:
        """From each rank's spans of any kind, as training records them."""
        ranks = [sorted(rank, key=lambda span: span.start) for rank in spans]
        return cls(
            compute=tuple(tuple(s for s in rank if s.action.kind in COMPUTE) for rank in ranks),
            network=tuple(tuple(s for s in rank if s.action.kind not in COMPUTE) for rank in ranks),
        )

    @property
    def ranks(self) -> int:
        return len(self.compute)

    @cached_property
    def start(self) -> float:
        return min((s.start for rank in (*self.compute, *self.network) for s in rank), default=0.0)

    @cached_property
    def step(self) -> float:
        """Seconds from the first start to the last end, of compute and network."""
        return max((s.end for rank in (*self.compute, *self.network) for s in rank), default=self.start) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute, per rank."""
        return tuple(sum(s.seconds for s in rank) for rank in self.compute)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds without compute, per rank."""
        return tuple(self.step - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The bubble as a share of the step: idle / (idle + busy), over all ranks; (p-1)/(m+p-1) for 1F1B."""
        return sum(self.idle) / (self.step * self.ranks) if self.step else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The bubble relative to the ideal time: idle / busy, over all ranks; (p-1)/m for 1F1B."""
        return sum(self.idle) / sum(self.busy) if sum(self.busy) else 0.0
