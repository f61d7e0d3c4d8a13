"""Seconds of a pipeline's step by simulating its own list of actions with unequal stages.

A step of hundreds of micro-batches repeats itself: a few rounds are simulated, and each further micro-batch costs what
the busiest position takes for one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from plait.planner.job import Job
from plait.schedule import Costs, Schedule, generate, lower, simulate
from plait.schedule.shared import simulate_shared

ROUNDS = 2  # of pp micro-batches that are simulated before the steady state is continued
MOST = 6000  # passes beyond which one round must do


def _few(job: Job) -> int:
    """Micro-batches that are simulated."""
    rounds = ROUNDS if 2 * ROUNDS * job.pp**2 * job.chunks <= MOST else 1
    return min(job.micro_batches, rounds * job.pp + job.micro_batches % job.pp)


def simulated_passes(job: Job) -> int:
    """How many passes of stages `simulated` walks through."""
    return 0 if job.pp == 1 else 2 * _few(job) * job.pp * job.chunks


@lru_cache(maxsize=16)
def _actions(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    return lower(generate(name, ranks, micro_batches, chunks))


def simulated(job: Job, stages: np.ndarray, sharers: float = 1.0) -> float:
    """Seconds from the first action to the last, given seconds (stages, 2) of each stage's forward and backward pass.

    Stages are numbered along the pipeline, chunks included. `sharers` ranks share a processor.
    """
    few = _few(job)
    schedule = _actions(job.schedule, job.pp, few, job.chunks)
    forward = tuple(stages[:, 0].tolist())
    backward = tuple(stages[:, 1].tolist())
    half = tuple(seconds / 2 for seconds in backward)
    costs = Costs(f=forward, b=half, w=half, bw=backward)
    further = max(
        sum(forward[stage] + backward[stage] for stage in schedule.held_by(rank)) for rank in range(schedule.ranks)
    )
    if sharers > 1:
        processors = job.pp / sharers  # of one pipeline
        step = simulate_shared(schedule, costs, processors)
        further = max(further, float(stages.sum()) / processors)
    else:
        step = simulate(schedule, costs).step
    return float(step + (job.micro_batches - few) * further)
