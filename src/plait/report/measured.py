"""What a run's directory tells of its pipeline: the plan of its `run.toml` above the spans of its last step.

It reads the two files and draws them; it judges neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.report.page import Panel, page
from plait.report.schedule import SchedulePicture, picture_schedule, timeline_dict
from plait.report.table import numbers
from plait.schedule import Span, Timeline, draw
from plait.schedule.trace import trace
from plait.spec.errors import UsageError
from plait.spec.fit import fit
from plait.spec.load import RUN_FILE, load


@dataclass(frozen=True)
class RunPicture:
    """Planned and measured timelines of one pipeline: that of the world's rank 0."""

    planned: SchedulePicture
    measured: Timeline
    ranks: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; measured times in seconds."""
        measured = {"world_ranks": list(self.ranks), **timeline_dict(self.measured)}
        return {"planned": self.planned.as_dict(), "measured": measured}

    def html(self) -> str:
        """A self-contained page: the plan above the measurement."""
        planned, measured = self.planned.panel(), Panel(f"measured: {self._ranks}", self.measured, "s")
        return page(self.planned.title, (planned, measured))

    def trace(self) -> dict[str, Any]:
        """For Perfetto: measured seconds, and above them the plan with a unit as long as it came to be."""
        unit = self.measured.step / self.planned.timeline.step if self.planned.timeline.step else 1.0
        both = trace({"planned": self.planned.timeline}, unit * 1e6), trace({"measured": self.measured})
        ranks = self.planned.timeline.ranks
        later = [event | {"pid": event["pid"] + ranks} for event in both[1]["traceEvents"]]
        return both[0] | {"traceEvents": [*both[0]["traceEvents"], *later]}

    @property
    def _ranks(self) -> str:
        return f"rank{'s' * (len(self.ranks) > 1)} {numbers(self.ranks)} of the world"

    def text(self, width: int) -> str:
        """The plan, and below it the measurement."""
        heading = f"measured in the last step: {self._ranks}"
        return "\n".join([self.planned.text(width), "", heading, draw(self.measured, width, "s")])


def picture_run(folder: Path) -> RunPicture:
    """Plan and measurement of a run's directory. Raises UsageError where a file is missing or cannot be understood."""
    spans = read_spans(folder / "spans.jsonl")
    run = load(folder / RUN_FILE)
    layout = fit(run, len(spans))
    ranks = layout.group("pp", 0)
    return RunPicture(picture_schedule(run, layout), Timeline.of(spans[rank] for rank in ranks), ranks)


def read_spans(path: Path) -> list[list[Span]]:
    """Each rank's spans, in seconds of a clock that the ranks of one machine share."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", "a run writes it when it ends") from error
    by_rank: dict[int, list[Span]] = {}
    for number, line in enumerate(lines, 1):
        rank, span = _read_span(line, f"{path}:{number}")
        by_rank.setdefault(rank, []).append(span)
    if not by_rank or sorted(by_rank) != list(range(len(by_rank))):
        raise UsageError(f"{path}: spans of ranks {sorted(by_rank)}, needs every rank from 0", "train the run again")
    return [by_rank[rank] for rank in range(len(by_rank))]


def _read_span(line: str, where: str) -> tuple[int, Span]:
    try:
        row = json.loads(line)
        return int(row["rank"]), Span.from_row(row)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}: not a span: {error!r}", "each line has rank, kind, stage, micro, start, end"
        ) from None
