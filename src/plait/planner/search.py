"""Every legal way to lay a model over a machine, pruned by bounds, and what is left ranked honestly.

A layout that cannot fit, or whose arithmetic alone is slower than a layout that is known, is dropped with its reason
and the nearest miss. The answer is a plateau: layouts within the noise of the best are not ranked by time but by the
memory that they leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd

import numpy as np

from plait.planner.constants import calibration, rates
from plait.planner.estimate import Estimate, closed_form, estimate
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import peaks, stage_bytes
from plait.planner.pace import TERMS
from plait.planner.pipeline import simulated_passes
from plait.schedule import GENERATORS, PassSeconds, Size
from plait.spec.errors import UsageError
from plait.spec.flops import flops_per_token
from plait.spec.layout import AXES
from plait.spec.nearest import divisors, nearest_multiples
from plait.spec.pipeline import SHAPES

NOISE = 0.05  # what one layout's prediction is off against another's of the same model and machine
EXACT = 6  # of the best, simulated
MOST_PASSES = 8_000  # of stages in all of these simulations
SLOWER = {
    False: 1.5,
    True: 3.0,
}  # with experts or not: a layout whose arithmetic and bubble alone take so much longer than
# the best known by them is not estimated; as soon as the best one estimated takes longer still, all are looked at again
SLOW = "longer by FLOPs and idle time alone than the best known layout would take in all"
UNEVEN = 1.25  # blocks of the fullest stage over the mean, beyond which stages are too unequal
MICROS = (1, 2, 4, 8, 16)
MODES = ("none", "selective", "full")
ZERO_BUBBLE = ("zb-h1", "zb-v", "v-half", "dualpipe-v")
EQUAL = PassSeconds(1.0, 1.0, 1.0)
LEAST_CONTEXT = 1024  # tokens of a sequence on one context rank
CHUNK = 4096  # jobs estimated at once


@dataclass(frozen=True)
class Want:
    """What is asked for: devices, a batch in sequences, their length, and what may be split and how."""

    world: int
    batch: int
    sequence: int
    compute: str = "bfloat16"
    most_micro: int = 16


@dataclass
class Rejected:
    """Layouts that one reason dropped: how many, and the one that came nearest to passing."""

    reason: str
    count: int = 0
    miss: float = float("inf")
    nearest: str = ""

    def add(self, miss: float, job: Job, count: int = 1) -> None:
        self.count += count
        if miss < self.miss:
            self.miss, self.nearest = miss, describe(job)


@dataclass
class Found:
    """The answer. `plans`: the plateau by headroom, then the rest by time; `losers`: the best of each other kind."""

    plans: list[Estimate]
    within_noise: int
    examined: int
    estimated: int
    seconds: float
    rejected: list[Rejected]
    losers: list[tuple[str, float, str]] = field(default_factory=list)


def describe(job: Job) -> str:
    """A layout in one line."""
    parts = [f"tp {job.tp}", f"pp {job.pp}", f"dp {job.dp}"]
    parts += [f"{name} {value}" for name, value in (("cp", job.cp), ("ep", job.ep), ("etp", job.etp)) if value > 1]
    parts += [f"micro {job.micro}", f"zero {job.zero}", f"recompute {job.recompute}"]
    parts += [f"{job.schedule} × {job.chunks}"] if job.chunks > 1 else [job.schedule] if job.pp > 1 else []
    parts += [f"order {' '.join(job.order)}"] if job.order != AXES else []
    return ", ".join(parts) + (", sequence parallel" if job.sequence_parallel else "")


def search(ground: Ground, want: Want, top: int = 10) -> Found:
    """The plateau of the best layouts. Raises UsageError with the tightest bound where nothing is legal or fits."""
    begun = time.perf_counter()
    sieve, jobs, steps = _sift(ground, want)
    order = np.argsort(steps, kind="stable")
    best = _simulated(ground, [jobs[at] for at in order[: max(EXACT, top)]])
    limit = best[0].step * (1 + NOISE)
    within = int((steps <= steps[order[0]] * (1 + NOISE)).sum())
    plateau = sorted((one for one in best if one.step <= limit), key=lambda one: -one.memory.headroom)
    rest = [one for one in best if one.step > limit]
    losers = _losers(ground, jobs, steps, best[0])
    seconds = time.perf_counter() - begun
    return Found(
        [*plateau, *rest][:top], within, sieve.examined, len(jobs), seconds, sorted(
            sieve.reasons.values(), key=lambda one: -one.count
        ), losers,
    )  # fmt: skip


def _sift(ground: Ground, want: Want) -> tuple[Sieve, list[Job], np.ndarray]:
    """Jobs that could be best, and their seconds. A bound drops nothing that the best found would not beat."""
    margin = SLOWER[ground.shape.spec.moe is not None]
    while True:
        sieve = Sieve(ground, want, margin)
        jobs = list(sieve.survivors())
        if not jobs:
            raise _nothing(ground, want, sieve.reasons)
        chunks = (jobs[at : at + CHUNK] for at in range(0, len(jobs), CHUNK))
        steps = np.concatenate([closed_form(ground, chunk).sum(-1) for chunk in chunks])
        if steps.min() <= margin * sieve.least:
            return sieve, jobs, steps
        margin = 1.01 * float(steps.min()) / sieve.least


def _simulated(ground: Ground, jobs: list[Job]) -> list[Estimate]:
    """Estimates by time; the first ones with their schedules simulated, as long as that takes no time to speak of."""
    found, passes = [], 0
    for rank, job in enumerate(jobs):
        passes += simulated_passes(job)
        found.append(estimate(ground, job, exact=rank < EXACT and passes <= MOST_PASSES))
    return sorted(found, key=lambda one: one.step)


class Sieve:
    """Walks all layouts and lets those through that are legal, fit, and are not hopeless."""

    def __init__(self, ground: Ground, want: Want, margin: float) -> None:
        self.ground, self.want, self.margin = ground, want, margin
        self.reasons: dict[str, Rejected] = {}
        self.examined = 0
        self.least = float("inf")  # seconds of the best layout by its bound, so far
        stack = ground.stack
        self.orders = tuple(tuple(order.split()) for order in stack.orders)
        self.modes = MODES if stack.attention == "unfused" else ("none", "full")
        made = rates(ground, Job(compute=want.compute), calibration().constants)
        flops = flops_per_token(ground.shape.spec, want.sequence).training * want.batch * want.sequence
        peak = ground.cluster.device.peak(want.compute)
        self.arithmetic = flops / want.world / (peak * max(float(made.gemm), float(made.wide)))

    def reject(self, reason: str, miss: float, job: Job, count: int = 1) -> None:
        self.examined += count
        self.reasons.setdefault(reason, Rejected(reason)).add(miss, job, count)

    def survivors(self) -> Iterator[Job]:
        """Jobs to estimate."""
        for split in self.splits():
            yield from self.batches(split)

    # --- degrees ---

    def splits(self) -> Iterator[Job]:
        """Degrees of every axis that multiply to the world and that the model's sizes allow."""
        want, parallel = self.want, self.ground.stack.sequence_parallel
        for tp, pp, cp in self._degrees():
            dp = want.world // (tp * pp * cp)
            job = Job(tp, pp, dp, cp, batch=want.batch, sequence=want.sequence, compute=want.compute)
            job = job._replace(sequence_parallel=tp > 1 and parallel)
            if want.batch % dp:
                self.reject(f"dp does not divide the batch of {want.batch}", dp / want.batch, job)
                continue
            for ep, etp in self._experts(job):
                for order in self.orders if pp > 1 else self.orders[:1]:
                    yield job._replace(ep=ep, etp=etp, order=order)

    def _degrees(self) -> Iterator[tuple[int, int, int]]:
        """(tp, pp, cp) of which each is legal by itself; tensor groups reach at most twice as far as a node."""
        world, sequence = self.want.world, self.want.sequence
        tensor = (n for n in divisors(world) if n <= 2 * self.ground.cluster.domain and self._tp_legal(n))
        for tp in tensor:
            for pp in (n for n in divisors(world // tp) if self._pp_legal(tp, n)):
                context = (n for n in divisors(world // (tp * pp)) if sequence // n >= LEAST_CONTEXT or n == 1)
                yield from ((tp, pp, cp) for cp in context if cp == 1 or sequence % (2 * cp) == 0)

    def _tp_legal(self, tp: int) -> bool:
        spec, stack = self.ground.shape.spec, self.ground.stack
        if tp > 1 and "tp" in stack.refuses:
            self.reject(f"{stack.name} has no tensor parallelism", tp, Job(tp=tp))
            return False
        common = gcd(tp, spec.kv_heads)
        if spec.heads % tp or common not in (tp, spec.kv_heads) or min(spec.ffn, spec.vocab) < tp:
            self.reject("tp does not divide the heads", tp, Job(tp=tp))
            return False
        return True

    def _pp_legal(self, tp: int, pp: int) -> bool:
        layers, stack = len(self.ground.shape.layers), self.ground.stack
        if pp > 1 and "pp" in stack.refuses:
            self.reject(f"{stack.name} has no pipeline", pp, Job(tp=tp, pp=pp))
            return False
        if pp > layers:
            self.reject(f"more stages than the {layers} blocks", pp / layers, Job(tp=tp, pp=pp))
            return False
        if -(-layers // pp) / (layers / pp) > UNEVEN:
            self.reject("stages too unequal", -(-layers // pp) / (layers / pp), Job(tp=tp, pp=pp))
            return False
        return True

    def _experts(self, job: Job) -> Iterator[tuple[int, int]]:
        """(ep, etp) of a split; a model without experts has neither."""
        moe = self.ground.shape.spec.moe
        if moe is None:
            yield 1, 1
            return
        stage = job.tp * job.dp * job.cp
        for etp in {1, job.tp}:
            for ep in divisors(gcd(moe.count, stage // etp)):
                yield ep, etp

    # --- batch, schedule, ZeRO, recompute ---

    def batches(self, split: Job) -> Iterator[Job]:
        """Micro-batches, schedules, ZeRO stages and recompute modes of a split that fit."""
        each = split.batch // split.dp
        micros = [n for n in MICROS if n <= self.want.most_micro and each % n == 0]
        for zero in self._stages_of_zero(split):
            job = split._replace(zero=zero)
            states = stage_bytes(self.ground, job._replace(recompute="full", micro=1), 0)
            limit = self.ground.cluster.device.memory
            if states.total - states.reserve > limit:
                tried = len(micros) * len(self.modes)
                self.reject("does not fit at micro-batch 1 under full recompute", states.total / limit, job, tried)
                continue
            too_large: dict[tuple[str, int], float] = {}  # schedules of which no larger micro-batch fits either
            for micro in micros:
                for schedule, chunks in self._schedules(job, each // micro):
                    asked = job._replace(micro=micro, chunks=chunks, schedule=schedule)
                    yield from self._recomputed(asked, too_large)

    def _stages_of_zero(self, split: Job) -> Sequence[int]:
        if split.dp * split.cp == 1:
            return (0,)
        return (0, 1, 3) if split.pp == 1 else (0, 1)

    def _schedules(self, job: Job, micro_batches: int) -> Iterator[tuple[str, int]]:
        """(name, stages per device); interleaving needs whole rounds of pp micro-batches and equal stages."""
        yield "1f1b", 1
        layers, known = len(self.ground.shape.layers), self.ground.stack.schedules
        if job.pp == 1:
            return
        yield from ((name, SHAPES[name].chunks) for name in known if name in ZERO_BUBBLE and 2 * job.pp <= layers)
        if "interleaved" in known and micro_batches % job.pp == 0 and layers % job.pp == 0:
            each = layers // job.pp
            yield from (("interleaved", n) for n in divisors(each) if n > 1 and each // n <= 8)

    def _recomputed(self, job: Job, too_large: dict[tuple[str, int], float]) -> Iterator[Job]:
        """The job under each recompute mode that fits, the least first; more recompute than needed is never faster."""
        if miss := too_large.get((job.schedule, job.chunks), 0.0):
            self.reject(f"does not fit under recompute {self.modes[-1]}", miss, job, len(self.modes))
            return
        bubble = _bubble(job.schedule, Size(job.pp, job.micro_batches, job.chunks))
        limit = self.ground.cluster.device.memory
        needed = self._peaks(job)
        for mode, peak in zip(self.modes, needed, strict=True):
            asked = job._replace(recompute=mode)
            bound = self.arithmetic * (1 + bubble) * (4 / 3 if mode == "full" else 1.0)
            if bound > self.margin * self.least:
                self.reject(SLOW, bound / self.least, asked)
            elif peak > limit:
                self.reject(f"does not fit under recompute {mode}", peak / limit, asked)
            else:
                self.least = min(self.least, bound)
                self.examined += 1
                yield asked
                break
        if needed[-1] > limit:
            too_large[job.schedule, job.chunks] = needed[-1] / limit

    def _peaks(self, job: Job) -> list[float]:
        """Bytes under each recompute mode on the fullest of three positions: the first two hold most micro-batches, the
        last holds the logits. Where all blocks are alike the second holds no more than the first.
        """
        alike = len(self.ground.shape.kinds) == 1
        at = {0, job.pp - 1} if alike else {0, min(1, job.pp - 1), job.pp - 1}
        each = [peaks(self.ground, job, pp, self.modes) for pp in at]
        return [max(of_mode) for of_mode in zip(*each, strict=True)]


@lru_cache(maxsize=65536)
def _bubble(schedule: str, size: Size) -> float:
    """A schedule's idle time over its work, with F, B and W equally long."""
    return GENERATORS[schedule].idle(size, EQUAL) / (3 * size.micro_batches)


def _nothing(ground: Ground, want: Want, reasons: dict[str, Rejected]) -> UsageError:
    """Why no layout is left: the reason that came nearest, and the way out."""
    fits = [one for name, one in reasons.items() if name.startswith("does not fit")]
    limit = ground.cluster.device.memory
    if fits:
        least = min(fits, key=lambda one: one.miss)
        need = least.miss * limit
        return UsageError(
            f"no layout of {want.world} {ground.cluster.device.name} holds this model: the nearest "
            f"({least.nearest}) needs {need / 2**30:.1f} GiB a device, there are {limit / 2**30:.1f}",
            f"use about {max(2, int(least.miss + 1))} times as many devices, or larger ones",
        )
    told = "; ".join(f"{one.reason} ({one.count})" for one in reasons.values())
    batch = nearest_multiples(want.world, want.batch)
    return UsageError(f"no layout of {want.world} devices is legal: {told}", f"try batch {batch}")


# --- why others lose ------------------------------------------------------------------------------------------------

KINDS: tuple[tuple[str, Callable[[Job, Ground], bool]], ...] = (
    ("tensor groups across nodes", lambda job, ground: job.tp > ground.cluster.domain),
    ("tensor parallel", lambda job, ground: 1 < job.tp <= ground.cluster.domain),
    ("no tensor parallel", lambda job, ground: job.tp == 1),
    ("a pipeline", lambda job, ground: job.pp > 1),
    ("no pipeline", lambda job, ground: job.pp == 1),
    ("context parallel", lambda job, ground: job.cp > 1),
    ("weights sharded (ZeRO 3)", lambda job, ground: job.zero == 3),
    ("nothing sharded (ZeRO 0)", lambda job, ground: job.zero == 0),
    ("full recompute", lambda job, ground: job.recompute == "full"),
    ("experts not spread", lambda job, ground: ground.shape.spec.moe is not None and job.ep == 1),
)


def _losers(ground: Ground, jobs: list[Job], steps: np.ndarray, best: Estimate) -> list[tuple[str, float, str]]:
    """(kind, how much slower its best layout is, the term that grows most) of each kind that the best is not of."""
    found = []
    for kind, member in KINDS:
        if member(best.job, ground):
            continue
        of_kind = [at for at, job in enumerate(jobs) if member(job, ground)]
        if not of_kind:
            continue
        leader = min(of_kind, key=lambda at: steps[at])
        terms = closed_form(ground, [jobs[leader]])[0]
        ours = np.array([best.terms[name] for name in TERMS])
        grown = int(np.argmax(terms - ours))
        because = f"{TERMS[grown]} takes {terms[grown]:.3g} s, there {ours[grown]:.3g} s ({describe(jobs[leader])})"
        found.append((kind, float(steps[leader] / best.step - 1), because))
    return sorted(found, key=lambda one: one[1])
