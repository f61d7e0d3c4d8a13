"""Which pipeline rank owns which stage, by the schedule's name: the one statement that placement and schedules read.

How a schedule orders its work is in `schedule/`; which layers form a stage is in `placement/stages.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from plait.spec.run import ScheduleSpec
from plait.spec.schedule_file import read_file


class Shape(NamedTuple):
    """How many stages a rank holds where the run does not say, whether it may say otherwise, and in which places.

    `split`: some backwards are run as B and W apart. Stages go round the ranks (0 1 2 0 1 2), or where `folded` down
    and up again (0 1 2 2 1 0): a V, whose first and last stage share rank 0.
    """

    chunks: int = 1
    chosen: bool = False
    folded: bool = False
    split: bool = False


SHAPES = {
    "gpipe": Shape(),
    "1f1b": Shape(),
    "interleaved": Shape(chunks=2, chosen=True),
    "zb-h1": Shape(split=True),
    "zb-v": Shape(chunks=2, folded=True, split=True),
    "v-half": Shape(chunks=2, folded=True, split=True),
    "dualpipe-v": Shape(chunks=2, folded=True, split=True),
}


def owners(ranks: int, chunks: int, folded: bool) -> tuple[int, ...]:
    """The rank of each stage."""
    down = tuple(range(ranks))
    return (down + down[::-1]) * (chunks // 2) + down * (chunks % 2) if folded else down * chunks


def chunks_of(schedule: ScheduleSpec) -> int:
    """Stages per rank of a named schedule: what the run says, else what its schedule needs."""
    return schedule.chunks or SHAPES[schedule.name].chunks


def splits_backward(schedule: ScheduleSpec) -> bool:
    """Whether weight gradients are computed apart from input gradients anywhere. Raises UsageError as `read_file`."""
    if schedule.file is None:
        return SHAPES[schedule.name].split
    return any(part.kind == "W" for cells in read_file(schedule.file).ranks for cell in cells for part in cell)


def stage_count(schedule: ScheduleSpec, pp: int) -> int:
    """How many stages a run has. Raises UsageError where a schedule's file does not say it."""
    return pp * chunks_of(schedule) if schedule.file is None else len(read_file(schedule.file).owner)


def stage_owners(schedule: ScheduleSpec, pp: int) -> tuple[int, ...]:
    """The pipeline rank of each stage of a run. Raises UsageError where a schedule's file does not say it."""
    if schedule.file is not None:
        return read_file(schedule.file).owner
    return owners(pp, chunks_of(schedule), SHAPES[schedule.name].folded)
