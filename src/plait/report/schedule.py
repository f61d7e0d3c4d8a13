"""The pipeline's timeline: the actions that will run, simulated with unit costs, and the most that each rank holds.

The schedule is the one that training executes; nothing here generates or orders an action.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plait.report.table import elide
from plait.schedule import Costs, Schedule, Span, Timeline, draw, live, simulate
from plait.schedule.of_run import schedules
from plait.spec.layout import Layout
from plait.spec.run import RunSpec

FORWARD, BACKWARD = 1.0, 2.0  # units of the planned timeline; transfers are free
SHOWN_RANKS = 16


@dataclass(frozen=True)
class SchedulePicture:
    """A training step of the pipeline; `sizes` says how large it is."""

    schedule: Schedule
    timeline: Timeline
    peak_live: tuple[int, ...]  # micro-batches that each pipeline rank holds from F to BW at its peak
    sizes: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in units of the costs."""
        return {
            "name": self.schedule.name,
            "micro_batches": self.schedule.micro_batches,
            "stage_owner": list(self.schedule.owner),
            "costs": {"F": FORWARD, "BW": BACKWARD, "transfer": 0.0},
            **timeline_dict(self.timeline),
            "peak_live": list(self.peak_live),
        }

    def text(self, width: int) -> str:
        """One line per pipeline rank, the bubble, and the peaks."""
        peaks = " ".join(elide([str(peak) for peak in self.peak_live], SHOWN_RANKS))
        return "\n".join(
            [
                f"{self.schedule.name}: {self.sizes}",
                f"planned with F {FORWARD:g}, BW {BACKWARD:g} units, transfers free",
                draw(self.timeline, width, "units"),
                f"peak live micro-batches, from F to its backward, by rank: {peaks}",
            ]
        )


def picture_schedule(run: RunSpec, layout: Layout) -> SchedulePicture:
    """The picture of a run that fits its layout."""
    schedule, _ = schedules(run, layout.dp)
    half = BACKWARD / 2  # B and W, wherever a schedule splits them
    timeline = simulate(schedule, Costs.equal(schedule.stages, FORWARD, half, half))
    peaks = tuple(rank.forward for rank in live(schedule))
    return SchedulePicture(schedule, timeline, peaks, _sizes(run, layout, schedule))


def _sizes(run: RunSpec, layout: Layout, schedule: Schedule) -> str:
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
