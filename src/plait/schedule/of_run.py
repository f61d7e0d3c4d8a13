"""The schedules of a run: what training executes, `show` draws and the planner costs is the list made here.

It reads the run's sizes and nothing else; the generators know no run, and no other file makes a schedule from one.
"""

from __future__ import annotations

from plait.schedule.actions import Action, Kind, Schedule
from plait.schedule.check import check
from plait.schedule.generators import forward_of, generate
from plait.schedule.lower import lower
from plait.spec.errors import InvalidSchedule, UsageError
from plait.spec.pipeline import chunks_of
from plait.spec.run import RunSpec
from plait.spec.schedule_file import ScheduleFile, read_file


def schedules(run: RunSpec, dp: int) -> tuple[Schedule, Schedule]:
    """The lowered and checked schedules of training and of evaluation, for a run that fits `dp` replicas."""
    zero, keep = run.zero.stage, run.zero.keep
    if run.schedule.file is not None:
        plain = from_file(read_file(run.schedule.file))
    else:
        micro_batches = run.batch.micro_batches(dp)
        plain = generate(run.schedule.name, run.layout.pp, micro_batches, chunks_of(run.schedule))
    return check(lower(plain, zero, keep)), check(lower(forward_of(plain), zero, keep))


def from_file(file: ScheduleFile) -> Schedule:
    """The compute-only schedule of a file. Raises UsageError that names file and line where it is no valid one."""
    programs = tuple(
        tuple(_action(*(Action(Kind(part.kind), part.stage, part.micro) for part in cell)) for cell in cells)
        for cells in file.ranks
    )
    schedule = Schedule(file.path, file.micro_batches, file.owner, programs)
    try:
        check(lower(schedule))
    except InvalidSchedule as fault:
        where = file.path if fault.rank is None else f"{file.path}:{file.lines[fault.rank]}"
        raise UsageError(
            f"{where}: {fault.message}",
            fault.hint
            or "each stage runs every micro-batch once: F, then "
            "BW, or B and later W; a forward after that of the stage before, a backward after that of the stage after",
        ) from fault
    return schedule


def _action(first: Action, backward: Action | None = None) -> Action:
    return first if backward is None else Action.together(first, backward)


def to_csv(schedule: Schedule) -> str:
    """The text of a schedule's file: `from_file` of it is the same schedule under another name."""
    lines = (
        ",".join("+".join(f"{p.kind}{p.micro}/{p.stage}" for p in action.parts) for action in program if action.parts)
        for program in schedule.programs
    )
    return "".join(line + "\n" for line in lines)
