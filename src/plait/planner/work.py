"""What one step has to do, counted at the device's and the links' own best: seconds if every peak were reached.

Counts are sums of terms, so the step's time is a sum of terms over a few efficiencies (`pace.py`), and neither the
counts nor the search need them. What one block does is counted in `block.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from plait.planner.block import COLUMNS, INDEX, How, block_counts, entry_counts, head_counts, width_of
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import parts_recomputed
from plait.planner.network import wires
from plait.planner.shape import Place, Shape, Split
from plait.schedule import GENERATORS, PassSeconds, Size
from plait.spec.flops import flops_per_token

ADAM = 4 + 8 + 16 + 2  # bytes that an update reads and writes of an element


class Work(NamedTuple):
    """One step: (forward, backward) counts of a micro-batch on the fullest position and on the last one, and the sum
    over all positions; what is done once per step; and the pipeline's sizes.
    """

    stage: np.ndarray  # (2, columns)
    last: np.ndarray  # (2, columns)
    total: np.ndarray  # (2, columns)
    micro_batches: int
    positions: int
    chunks: int
    reduce: float  # seconds on the wires, once per step (ZeRO 3: per micro-batch)
    gather: float
    start: float  # waits of their messages
    per_micro_batch: bool
    update: float  # seconds of memory traffic of the optimizer
    world: int
    fill: float  # of the other positions' passes that the busiest one waits for: 1 for 1F1B, 1/v interleaved
    sharers: float  # ranks that share a processor


def work(ground: Ground, job: Job) -> Work:
    """All counts of a job."""
    how = _how(ground.shape, job)
    stage, last, total = _positions(ground, how, job.place, job.recompute_layers, job.stride("pp"))
    reduce, gather, start = _data_parallel(ground, _frame(job))
    if job.zero == 2:
        reduce *= job.micro_batches
    return Work(
        stage, last, total, job.micro_batches, job.pp, job.chunks, reduce, gather, start, job.zero == 3,
        _update(ground.shape, job) / ground.cluster.device.bandwidth, job.world,
        _fill(job.schedule, job.pp, job.micro_batches, job.chunks), ground.cluster.sharers(job.world),
    )  # fmt: skip


@lru_cache(maxsize=16384)
def _positions(ground: Ground, how: How, place: Place, first: int, stride: int) -> tuple[np.ndarray, ...]:
    """(forward, backward) counts on the fullest position, on that of the last stage, and on all together.

    `first` blocks of a position are recomputed, neighbours in the pipeline are `stride` ranks apart.
    """
    shape, pp = ground.shape, place.pp
    positions = shape.kinds_of_positions(place)
    fullest = max(positions, key=lambda kinds: (sum(kinds), kinds[::-1]))
    blocks = _blocks(ground, how, len(shape.layers) / pp, first)
    head, entry = head_counts(ground, how), entry_counts(ground, how)
    alone = entry if pp == 1 else 0.0
    stage, last = _sum(fullest, blocks) + alone, _sum(positions[place.owners[-1]], blocks) + head + alone
    total = _sum(shape.count(range(len(shape.layers))), blocks) + head + entry
    if pp > 1:
        message = place.chunks * _message(ground, how, stride)
        stage[:, INDEX["pp"]] += message
        last[:, INDEX["pp"]] += message
        total[:, INDEX["pp"]] += message * pp
    return stage, last, total


def position_counts(ground: Ground, job: Job) -> np.ndarray:
    """(stages, 2, columns): forward and backward counts of one micro-batch on each stage, chunks one by one."""
    shape, how = ground.shape, _how(ground.shape, job)
    blocks = _blocks(ground, how, len(shape.layers) / job.pp, job.recompute_layers)
    found = np.stack([_sum(kinds, blocks) for kinds in shape.kinds_of_stages(job.pp * job.chunks, job.layers)])
    found[0] += entry_counts(ground, how)
    found[-1] += head_counts(ground, how)
    if job.pp > 1:
        found[:, :, INDEX["pp"]] += _message(ground, how, job.stride("pp"))
    return found


def head_share(shape: Shape, sequence: int) -> float:
    """The output projection's share of a step's model FLOPs."""
    head = 2 * shape.spec.hidden * shape.spec.vocab
    return head / flops_per_token(shape.spec, sequence).forward


@lru_cache(maxsize=65536)
def _fill(schedule: str, pp: int, micro_batches: int, chunks: int) -> float:
    """A schedule's idle time over that of 1F1B, by its closed form with F, B and W equally long."""
    if pp == 1:
        return 0.0
    return GENERATORS[schedule].idle(Size(pp, micro_batches, chunks), PassSeconds(1.0, 1.0, 1.0)) / (3 * (pp - 1))


def _blocks(ground: Ground, how: How, each: float, first: int) -> list[np.ndarray]:
    """Counts of each kind of block; where only the first of a position's `each` are recomputed, the mean of both."""
    again = [block_counts(ground, block, how) for block in ground.shape.kinds]
    if "block" not in how.recomputed or not 0 <= first < each:
        return again
    share = first / each
    kept = [block_counts(ground, block, how._replace(recomputed=())) for block in ground.shape.kinds]
    return [share * some + (1 - share) * other for some, other in zip(again, kept, strict=True)]


def _how(shape: Shape, job: Job) -> How:
    return How(
        job.tokens, job.sequence, job.tp, job.cp, job.ep, job.etp, job.split(shape).kv, job.sequence_parallel,
        job.compute, parts_recomputed(job.recompute), job.stride("tp"), job.stride("cp"),
    )  # fmt: skip


def _sum(kinds: tuple[int, ...], blocks: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((2, len(COLUMNS)))
    for count, block in zip(kinds, blocks, strict=True):
        found += count * block
    return found


def _message(ground: Ground, how: How, stride: int) -> np.ndarray:
    """Seconds of one activation (and of its gradient) between neighbouring stages, cut over tp where both sides hold
    it so or can gather it.
    """
    cluster, stack = ground.cluster, ground.stack
    link, timed = cluster.link(2, stride), cluster.timed("send", 2)
    bandwidth, start = (link.bandwidth, link.latency) if timed is None else (timed.bandwidth, timed.start)
    whole = width_of(how.compute) * how.tokens * ground.shape.spec.hidden / bandwidth
    cut = np.array([how.tp if stack.scatter_messages else 1, how.tp if stack.scatter_gradients else 1])
    return whole / cut + start


def _frame(job: Job) -> Job:
    """A job without what data parallelism does not depend on: the key of a cache."""
    return job._replace(
        micro=1, batch=1, sequence=1, sequence_parallel=False, recompute="none", recompute_layers=-1, chunks=1,
        schedule="1f1b", layers=(),
    )  # fmt: skip


@lru_cache(maxsize=65536)
def _data_parallel(ground: Ground, job: Job) -> tuple[float, float, float]:
    """Seconds on the wires of reducing gradients and of gathering weights; of a step, or of a micro-batch in ZeRO 3."""
    shape, stack = ground.shape, ground.stack
    dense, experts = _elements(shape, job.split(shape), job.pp)
    parts = (
        (dense, job.dp * job.cp, min(job.shards, job.dp * job.cp)),
        (experts, job.expert_copies, job.expert_copies),
    )
    reduce = gather = start = 0.0
    for elements, ranks, shards in parts:
        if ranks == 1 or not elements:
            continue
        stride = min(job.stride("dp"), job.stride("cp") if job.cp > 1 else job.world)
        inside = wires(ground, shards, stride)
        size, calls = elements * stack.reduce_bytes, _calls(ground, job, elements)
        reduce += inside.reduce(size) if job.zero == 0 else inside.scatter(size)
        reduce += calls * inside.start("reduce_scatter" if job.zero else "all_reduce")
        if ranks > shards:
            reduce += wires(ground, ranks // shards, stride * shards).reduce(size / shards)
        if job.zero:
            gather += inside.gather(elements * max(stack.gather_bytes, width_of(job.compute)))
            gather += calls * inside.start("all_gather")
        start += 0 if calls else 2 * inside.start() * (len(shape.layers) / job.pp if job.zero == 3 else 1)
    return reduce, gather, start


def _calls(ground: Ground, job: Job, elements: float) -> float:
    """Collectives, one for each buffer, whose starts cost time: none where they run beside the backward pass."""
    if not ground.cluster.device.moves_itself:
        return 0.0
    units = len(ground.shape.layers) / job.pp + (2 if job.pp == 1 else 1)
    together = max(1, ceil(ground.stack.bucket / (elements / units))) if job.zero < 3 else 1
    return max(1.0, units / together) if ground.stack.bucket or job.zero == 3 else 1.0


@lru_cache(maxsize=16384)
def _elements(shape: Shape, split: Split, pp: int) -> tuple[float, float]:
    """(dense, expert) elements on a rank of the fullest position, ends included in the mean."""
    dense = experts = 0.0
    for block, count in zip(shape.kinds, shape.count(range(len(shape.layers))), strict=True):
        own = block.elements(split)
        dense += count * own[0] / pp
        experts += count * own[1] / pp
    outside = shape.embedding_elements(split) + shape.head_elements(split, with_embedding=True)
    return dense + outside / (1 if pp == 1 else 2), experts


def _update(shape: Shape, job: Job) -> float:
    """Bytes that Adam reads and writes for one rank's slice: gradient, master, moments; and the weight it writes."""
    dense, experts = _elements(shape, job.split(shape), job.pp)
    if job.zero:
        dense, experts = dense / job.shards, experts / min(job.expert_copies, job.shards)
    return ADAM * (dense + experts)
