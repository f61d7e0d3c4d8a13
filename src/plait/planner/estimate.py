"""One job on one machine, estimated: step time with its interval and breakdown, memory by stage, and what was assumed.

The closed form of `pace.py` serves the search; here the pipeline is the simulation of the very list of actions that the
runtime would execute, stage by unequal stage, and the closed form gives way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

import numpy as np

from plait.planner.constants import Calibration, calibration, rates
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import LINES, Memory, memory, parts_recomputed
from plait.planner.pace import TERMS, Counted, Rates, passes, seconds
from plait.planner.pipeline import simulated
from plait.planner.work import Work, head_share, position_counts, work
from plait.spec.flops import flops_per_token

LEAST_ROOM = 0.02  # half a width below which an interval never falls: the same run, run again
OPEN = 0.08  # what one assumption about how a stack runs is worth, in the logarithm


@dataclass(frozen=True)
class Anchor:
    """A measured step of the same machine and stack: of this job, or of another one that was planned alike."""

    measured: float
    planned: float
    same_model: bool = True


@dataclass(frozen=True)
class Estimate:
    """Seconds by term (they sum to the step), the interval that holds four in five, and memory."""

    ground: Ground
    job: Job
    terms: dict[str, float]
    interval: tuple[float, float]
    memory: Memory
    assumed: tuple[str, ...]
    before_anchor: tuple[float, float] | None = None

    @property
    def step(self) -> float:
        return sum(self.terms.values())

    @cached_property
    def useful(self) -> float:
        """Model FLOPs of a step on one device: no recompute (MFU's numerator)."""
        flops = flops_per_token(self.ground.shape.spec, self.job.sequence).training
        return flops * self.job.batch * self.job.sequence / self.job.world

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the device could do in the compute dtype."""
        return self.useful / self.step / self.ground.cluster.device.peak(self.job.compute)

    @property
    def hfu(self) -> float:
        """The same with what is computed again counted: a third of the blocks' FLOPs under full recompute."""
        again = 1 / 3 if "block" in parts_recomputed(self.job.recompute) else 0.0
        return self.mfu * (1 + again * (1 - head_share(self.ground.shape, self.job.sequence)))

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.job.batch * self.job.sequence / self.step / self.job.world

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the run stands beside it."""
        job = self.job
        return {
            "layout": {
                "tp": job.tp, "pp": job.pp, "dp": job.dp, "cp": job.cp, "ep": job.ep, "etp": job.etp,
                "sequence_parallel": job.sequence_parallel, "order": list(job.order), "schedule": job.schedule,
                "chunks": job.chunks, "micro_size": job.micro, "micro_batches": job.micro_batches, "zero": job.zero,
                "shard": job.shards, "recompute": job.recompute, "compute": job.compute,
            },
            "step_time_s": self.step,
            "interval_s": list(self.interval),
            **({"interval_before_anchor_s": list(self.before_anchor)} if self.before_anchor else {}),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "memory_bytes": {
                "limit": self.memory.limit,
                "worst_stage": self.memory.worst,
                "headroom": self.memory.headroom,
                "verdict": self.memory.verdict,
                "by_stage": [
                    {"total": stage.total, **dict(zip(LINES, stage, strict=True))} for stage in self.memory.stages
                ],
            },
            "breakdown_s": self.terms,
            "assumed": list(self.assumed),
        }  # fmt: skip


def counted(works: list[Work]) -> Counted:
    """The counts of many jobs as arrays, jobs along the first axis."""
    return Counted(*(np.array(column) for column in zip(*works, strict=True)))


def closed_form(ground: Ground, jobs: list[Job], known: Calibration | None = None) -> np.ndarray:
    """Seconds by term of many jobs of one ground and dtype, (jobs, len(TERMS)), the pipeline by its closed form."""
    constants = (known or calibration()).constants
    alike: dict[tuple[bool, ...], Rates] = {}  # what the rates of jobs of one ground and dtype depend on
    each = []
    for job in jobs:
        key = job.sequence_parallel, job.world <= ground.cluster.domain
        if key not in alike:
            alike[key] = rates(ground, job, constants)
        each.append(alike[key])
    return seconds(counted([work(ground, job) for job in jobs]), Rates(*(np.array(c) for c in zip(*each, strict=True))))


def estimate(
    ground: Ground, job: Job, assumed: tuple[str, ...] = (), anchor: Anchor | None = None, exact: bool = True
) -> Estimate:
    """Everything about one job. `exact` simulates its schedule; an anchor scales the time and narrows the interval."""
    known = calibration()
    spread = room(ground, job, known, assumed)
    terms = dict(zip(TERMS, closed_form(ground, [job], known)[0].tolist(), strict=True))
    if exact and job.pp > 1:
        terms = _with_pipeline(ground, job, known, terms)
    before = None
    if anchor is not None:
        scale = anchor.measured / anchor.planned
        step = sum(terms.values())
        before = (step * exp(-spread), step * exp(spread))
        terms = {name: value * scale for name, value in terms.items()}
        spread = anchored_room(ground, known, anchor)
    step = sum(terms.values())
    interval = (step * exp(-spread), step * exp(spread))
    return Estimate(ground, job, terms, interval, memory(ground, job), assumed, before)


def room(ground: Ground, job: Job, known: Calibration, assumed: tuple[str, ...]) -> float:
    """Half the width of the interval, in the logarithm: what held-out runs missed by, and what is only assumed."""
    kind = "experts" if ground.shape.spec.moe is not None else "dense"
    open_ends = sum(any(word in line for word in ("interleaved", "micro-batch", "recompute")) for line in assumed)
    return max(LEAST_ROOM, known.spreads[kind] + OPEN * open_ends)


def anchored_room(ground: Ground, known: Calibration, anchor: Anchor) -> float:
    """The same where one step of the machine and stack was measured."""
    kind = "experts" if ground.shape.spec.moe is not None else "dense"
    of = "same model" if anchor.same_model else "another model"
    return max(LEAST_ROOM, known.spreads[f"{kind}, anchored by {of}"])


def _with_pipeline(ground: Ground, job: Job, known: Calibration, terms: dict[str, float]) -> dict[str, float]:
    """The bubble as the simulated schedule has it, with jitter in proportion."""
    made = rates(ground, job, known.constants)
    each = passes(position_counts(ground, job), made).sum(-1)  # (stages, 2): forward, backward
    step = simulated(job, each, ground.cluster.sharers(job.world))
    busy = sum(terms[name] for name in TERMS[: TERMS.index("bubble")])
    changed = {**terms, "bubble": step - busy}
    known_part = sum(value for name, value in changed.items() if name != "jitter")
    before = sum(value for name, value in terms.items() if name != "jitter")
    return {**changed, "jitter": terms["jitter"] * known_part / before}
