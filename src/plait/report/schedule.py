"""The pipeline's timeline: the actions that will run, simulated with unit costs, and the most that each rank holds.

The schedule is the one that training executes; nothing here generates or orders an action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from plait.report.page import Panel, page
from plait.report.table import elide
from plait.schedule import Costs, Schedule, Span, Timeline, draw, live, simulate
from plait.schedule.of_run import schedules
from plait.schedule.trace import trace
from plait.spec.layout import Layout
from plait.spec.run import RunSpec

FORWARD, BACKWARD = 1.0, 2.0  # units of the planned timeline; transfers are free
PLANNED = f"planned with F {FORWARD:g}, BW {BACKWARD:g} units, transfers free"
PLANNED_COSTS: Mapping[str, Any] = {"F": FORWARD, "BW": BACKWARD, "transfer": 0.0}
SHOWN_RANKS = 16


@dataclass(frozen=True)
class SchedulePicture:
    """A training step of the pipeline; `sizes` says how large it is, `planned` and `costs` with which times."""

    schedule: Schedule
    timeline: Timeline
    peak_live: tuple[int, ...]  # stage inputs that each pipeline rank holds from F to its backward at its peak
    peak_late: tuple[int, ...]  # the same from B to W
    sizes: str
    planned: str = PLANNED
    costs: Mapping[str, Any] = field(default_factory=lambda: PLANNED_COSTS)
    unit: str = "units"

    @classmethod
    def of(cls, schedule: Schedule, times: Costs, sizes: str, **said: Any) -> Self:
        """Of a lowered schedule whose passes take these times."""
        held = live(schedule)
        peaks, late = tuple(rank.forward for rank in held), tuple(rank.weight for rank in held)
        return cls(schedule, simulate(schedule, times), peaks, late, sizes, **said)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in units of the costs."""
        return {
            "name": self.schedule.name,
            "micro_batches": self.schedule.micro_batches,
            "stage_owner": list(self.schedule.owner),
            "costs": dict(self.costs),
            **timeline_dict(self.timeline),
            "peak_live": list(self.peak_live),
            "peak_late": list(self.peak_late),
        }

    @property
    def title(self) -> str:
        """What is pictured, in one line."""
        return f"{self.schedule.name}: {self.sizes}"

    def text(self, width: int) -> str:
        """One line per pipeline rank, the bubble, and the peaks."""
        what = "stage inputs" if self.schedule.stages > self.schedule.ranks else "micro-batches"
        lines = [f"peak live {what}, from F to its backward, by rank: {_row(self.peak_live)}"]
        if any(self.peak_late):
            lines.append(f"peak live {what}, from B to W, by rank: {_row(self.peak_late)}")
        return "\n".join([self.title, self.planned, draw(self.timeline, width, self.unit), *lines])

    def panel(self) -> Panel:
        """The planned timeline for a page."""
        return Panel(self.planned, self.timeline, self.unit)

    def html(self) -> str:
        """A self-contained page."""
        return page(self.title, (self.panel(),))

    def trace(self) -> dict[str, Any]:
        """For Perfetto: a unit is drawn as a millisecond."""
        return trace({"planned": self.timeline}, microseconds=1e6 if self.unit == "s" else 1e3)


def picture_schedule(run: RunSpec, layout: Layout) -> SchedulePicture:
    """The picture of a run that fits its layout."""
    schedule, _ = schedules(run, layout.dp)
    half = BACKWARD / 2  # B and W, wherever a schedule splits them
    return SchedulePicture.of(schedule, Costs.equal(schedule.stages, FORWARD, half, half), sizes(run, layout, schedule))


def _row(peaks: tuple[int, ...]) -> str:
    return " ".join(elide([str(peak) for peak in peaks], SHOWN_RANKS))


def sizes(run: RunSpec, layout: Layout, schedule: Schedule) -> str:
    """How large a pipeline is, in words."""
    alike = f" (each line stands for {layout.ranks_per_stage} ranks alike)" if layout.ranks_per_stage > 1 else ""
    micro_batches = f"{schedule.micro_batches} micro-batch{'es' * (schedule.micro_batches > 1)}"
    pipeline = f"{schedule.ranks} pipeline rank{'s' * (schedule.ranks > 1)}{alike}"
    return f"{pipeline}, {micro_batches} of {run.batch.micro_size} × {run.batch.sequence} tokens"


def timeline_dict(timeline: Timeline) -> dict[str, Any]:
    """A timeline for JSON: its length, the bubble by both of its names, and each rank's compute."""
    return {
        "step": timeline.step,
        "bubble": timeline.bubble,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "ranks": [_spans(spans, timeline.start) for spans in timeline.compute],
    }


def _spans(spans: Iterable[Span], origin: float) -> list[dict[str, Any]]:
    return [
        {"action": str(s.action), "kind": s.action.kind, "stage": s.action.stage, "micro": s.action.micro}
        | {"start": s.start - origin, "end": s.end - origin}
        for s in spans
    ]
