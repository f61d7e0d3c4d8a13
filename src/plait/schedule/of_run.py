"""The schedules of a run: what training executes, `show` draws and the planner costs is the list made here.

It reads the run's sizes and nothing else; the generators know no run, and no other file makes a schedule from one.
"""

from __future__ import annotations

from plait.schedule.actions import Schedule
from plait.schedule.check import check
from plait.schedule.generators import forward_of, generate
from plait.schedule.lower import lower
from plait.spec.run import RunSpec


def schedules(run: RunSpec, dp: int) -> tuple[Schedule, Schedule]:
    """The lowered and checked schedules of training and of evaluation, for a run that fits `dp` replicas."""
    micro_batches = run.batch.global_size // (dp * run.batch.micro_size)
    plain = generate(run.schedule.name, run.layout.pp, micro_batches, run.schedule.chunks)
    zero, keep = run.zero.stage, run.zero.keep
    return check(lower(plain, zero, keep)), check(lower(forward_of(plain), zero, keep))
