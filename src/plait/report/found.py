"""A schedule that is searched for a run: with what times, under which limit, and how it stands against named ones.

The stages stand where the run's own schedule places them, so a V is asked for with a schedule that is one. Times are
the FLOP of each stage, in forwards of a mean one, or those that a run measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from plait.placement.stages import StageMap, stage_flops, stages_of
from plait.planner.seat import Seat
from plait.planner.sized.kept import kept
from plait.report.measured import read_spans
from plait.report.schedule import SchedulePicture, sizes
from plait.schedule import Costs, Kind, Span, check, lower
from plait.schedule.of_run import to_csv
from plait.schedule.search import Memory, Task, named, search, seconds
from plait.spec.errors import UsageError
from plait.spec.layout import Layout
from plait.spec.run import RunSpec, ScheduleSpec
from plait.spec.units import format_bytes


class Asked(NamedTuple):
    """`measured`: the directory of a run whose spans say how long passes take. `link`: the time of a message, in the
    unit of the passes. `limit`: what a rank may hold, as a share of the most that a rank holds under 1F1B."""

    measured: Path | None = None
    link: float = 0.0
    limit: float = 1.0


@dataclass(frozen=True)
class FoundPicture(SchedulePicture):
    """The picture of what was found. `best` is the shortest named schedule within the limit, and its time."""

    best: tuple[str, float] | None = None
    limit_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = None if self.best is None else {"name": self.best[0], "step": self.best[1]}
        return super().as_dict() | {"best_named": best, "limit_bytes": self.limit_bytes, "unit": self.unit}

    def text(self, width: int) -> str:
        """The drawing, and how much longer the named ones take."""
        return f"{super().text(width)}\n{self._against}"

    @property
    def _against(self) -> str:
        if self.best is None:
            return "no named schedule of these stages keeps the limit"
        name, taken = self.best
        longer = taken / self.timeline.step - 1
        return (
            f"the shortest named schedule within the limit, {name}, takes {taken:.4g} {self.unit}: {longer:.1%} longer"
        )

    def csv(self) -> str:
        """The schedule as a file for `schedule.file`."""
        return f"# found for {self.sizes}; {self.planned}\n{to_csv(self.schedule)}"


def picture_found(run: RunSpec, layout: Layout, asked: Asked) -> FoundPicture:
    """Search a schedule for a run that fits its layout. Raises UsageError where not one micro-batch fits."""
    stages = stages_of(run, layout)
    memory = _memory(run, layout, stages, asked.limit)
    micro_batches = run.batch.micro_batches(layout.dp)
    costs, where = _costs(run, stages, asked)
    task = Task(stages.owner, micro_batches, costs, memory)
    try:
        found = replace(search(task).schedule, name="found")
    except UsageError as error:
        raise UsageError(
            f"--limit {asked.limit:g}: {error.message}", f"--limit {_least(run, layout, memory)}"
        ) from error
    best = min(
        ((s.name, seconds(s, costs)) for s in named(stages.owner, micro_batches) if memory.allows(s)),
        key=lambda one: one[1],
        default=None,
    )
    unit = "units" if asked.measured is None else "s"
    within = f"at most {format_bytes(memory.limit[0])} of activations on a rank, {asked.limit:g} of 1F1B's most"
    return FoundPicture.of(
        check(lower(found, run.zero.stage, run.zero.keep)), costs, sizes(run, layout, found),
        planned=f"searched with {where}, messages of {asked.link:g} {unit}; {within}",
        costs={"F": costs.f, "B": costs.b, "W": costs.w, "transfer": asked.link},
        unit=unit, best=best, limit_bytes=memory.limit[0],
    )  # fmt: skip


def _most(run: RunSpec, layout: Layout) -> int:
    """Bytes of activations on the rank that holds most of them under 1F1B."""
    plain = run.model_copy(update={"schedule": ScheduleSpec(name="1f1b")})
    micro_batches = run.batch.micro_batches(layout.dp)
    line = [kept(Seat(plain, layout, layout.rank(pp=pp)), pp, splits=False).between for pp in range(layout.pp)]
    return max(held * min(layout.pp - pp, micro_batches) for pp, held in enumerate(line))


def _least(run: RunSpec, layout: Layout, memory: Memory) -> float:
    """The limit, rounded up to a hundredth, under which a rank can hold a micro-batch of each of its stages."""
    held = [0] * layout.pp
    for stage, pp in enumerate(stages_of(run, layout).owner):
        held[pp] += memory.forward[stage] + memory.weight[stage]
    return ceil(100 * max(held) / _most(run, layout)) / 100


def _memory(run: RunSpec, layout: Layout, stages: StageMap, share: float) -> Memory:
    """Bytes of each stage, and the same limit for each rank."""
    most = _most(run, layout)
    own = [kept(Seat(run, layout, layout.rank(pp=pp)), stage, splits=True) for stage, pp in enumerate(stages.owner)]
    return Memory(tuple(one.between for one in own), tuple(one.late for one in own), (int(share * most),) * layout.pp)


def _costs(run: RunSpec, stages: StageMap, asked: Asked) -> tuple[Costs, str]:
    """Times of every stage, and in words where they are from."""
    links = (asked.link,) * stages.last
    if asked.measured is not None:
        times = measured_costs(read_spans(asked.measured / "spans.jsonl"), stages.last + 1, str(asked.measured))
        return replace(times, link=links), f"the times that {asked.measured} measured"
    flops = stage_flops(run, stages)
    each = tuple(one * len(flops) / sum(flops) for one in flops)
    return Costs(each, each, each, link=links), "F, B and W by each stage's FLOP"


def measured_costs(spans: Iterable[Iterable[Span]], stages: int, name: str) -> Costs:
    """Each stage's median seconds; a backward that ran whole is halved, one that ran with a forward is left out."""
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in (span for rank in spans for span in rank):
        taken[span.action.kind, span.action.stage].append(span.seconds)
    found: Mapping[tuple[Kind, int], float] = {at: median(times) for at, times in taken.items()}

    def times(kind: Kind) -> tuple[float, ...]:
        return tuple(found.get((kind, s), found.get((Kind.BW, s), 0.0) / 2) for s in range(stages))

    forward = tuple(found.get((Kind.F, stage), 0.0) for stage in range(stages))
    costs = Costs(forward, times(Kind.B), times(Kind.W))
    ran = 1 + max(stage for _, stage in taken)
    told = [stage for stage in range(stages) if costs.f[stage] and costs.b[stage] and costs.w[stage]]
    if len(told) != stages or ran != stages:
        raise UsageError(
            f"{name} measured {len(told)} of its {ran} stages, this run has {stages}",
            "measure a run of the same stages, with a schedule that runs F, B and W (or BW) one by one",
        )
    return costs
