"""What one step has to do, counted at the device's and the links' own best: seconds if every peak were reached.

Counts are sums of terms, so the step's time is a sum of terms over a few efficiencies (`pace.py`), and neither the
counts nor the search need them. A column is one kind of work; forward and backward are counted apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plait.placement.cuts import piece
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import parts_recomputed, stage_kinds
from plait.planner.network import exchange, wires
from plait.planner.shape import Block, Shape, Split
from plait.schedule import GENERATORS, PassSeconds, Size
from plait.spec.flops import flops_per_token
from plait.spec.pipeline import SHAPES, owners

COLUMNS = (
    "gemm",  # products in the compute dtype, at its peak
    "wide",  # products in 16 bits although the compute dtype is narrower, and all of the head's
    "expert",  # products of experts, at the compute dtype's peak
    "attention",  # the two products inside attention, at the 16-bit peak, of the causal half where the kernel skips it
    "traffic",  # element-wise reading and writing, at the memory's bandwidth
    "operands",  # reading and writing of products' operands
    "quantise",  # reading and writing of what is made narrower
    "kernels",  # starts of kernels, a number
    "routing",  # layers of experts passed, a number: choice, permutation, and the counts that the host waits for
    "tp",  # tensor-parallel collectives on their wires
    "tp_start",  # and the waits of their messages
    "cp",
    "ep",
    "pp",  # messages between stages
)
INDEX = {name: column for column, name in enumerate(COLUMNS)}
Counts = np.ndarray  # (len(COLUMNS),)


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


def work(ground: Ground, job: Job) -> Work:
    """All counts of a job."""
    shape = ground.shape
    fullest, ends = position_kinds(shape, owners(job.pp, job.chunks, SHAPES[job.schedule].folded))
    how = _how(shape, job)
    blocks = _blocks(ground, job, how)
    head = _head_counts(ground, how)
    entry = _entry_counts(ground, how)
    stage = _sum(fullest, blocks) + (entry if job.pp == 1 else 0.0)
    last = _sum(ends, blocks) + head + (entry if job.pp == 1 else 0.0)
    total = _sum(shape.count(range(len(shape.layers))), blocks) + head + entry
    if job.pp > 1:
        message = _message(ground, job)
        for counts in (stage, last):
            counts[:, INDEX["pp"]] += job.chunks * message
        total[:, INDEX["pp"]] += job.chunks * message * job.pp
    reduce, gather, start = _data_parallel(ground, job)
    update = _update(shape, job) / ground.cluster.device.bandwidth
    return Work(
        stage, last, total, job.micro_batches, job.pp, job.chunks, reduce, gather, start,
        job.zero == 3, update, job.world, _fill(job.schedule, job.pp, job.micro_batches, job.chunks),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def position_kinds(shape: Shape, place: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks of each kind on the position with the most blocks, and on that of the last stage."""
    each = [stage_kinds(shape, place, at) for at in range(max(place) + 1)]
    return max(each, key=lambda kinds: (sum(kinds), kinds[::-1])), each[place[-1]]


def position_counts(ground: Ground, job: Job) -> np.ndarray:
    """(stages, 2, columns): forward and backward counts of one micro-batch on each stage, chunks one by one."""
    shape, how = ground.shape, _how(ground.shape, job)
    blocks = _blocks(ground, job, how)
    stages = job.pp * job.chunks
    found = np.stack(
        [_sum(shape.count(range(*piece(len(shape.layers), stages, stage))), blocks) for stage in range(stages)]
    )
    found[0] += _entry_counts(ground, how)
    found[-1] += _head_counts(ground, how)
    if job.pp > 1:
        found[:, :, INDEX["pp"]] += _message(ground, job)
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


class How(NamedTuple):
    """All of a job that the counts of one block depend on."""

    tokens: int
    sequence: int
    tp: int
    cp: int
    ep: int
    etp: int
    kv: int
    sequence_parallel: bool
    compute: str
    recomputed: tuple[str, ...]
    tp_stride: int
    cp_stride: int


def _blocks(ground: Ground, job: Job, how: How) -> list[np.ndarray]:
    """Counts of each kind of block; where only some blocks of a position are recomputed, the mean of both."""
    again = [_block_counts(ground, block, how) for block in ground.shape.kinds]
    each = len(ground.shape.layers) / job.pp
    if "block" not in how.recomputed or not 0 <= job.recompute_layers < each:
        return again
    share = job.recompute_layers / each
    kept = [_block_counts(ground, block, how._replace(recomputed=())) for block in ground.shape.kinds]
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


@lru_cache(maxsize=4096)
def _block_counts(ground: Ground, block: Block, how: How) -> np.ndarray:
    """(forward, backward) counts of one block and micro-batch on one rank."""
    forward, backward = np.zeros(len(COLUMNS)), np.zeros(len(COLUMNS))
    stack = ground.stack
    _products(forward, backward, ground, block, how)
    inside = _attention(ground, how)
    forward += inside
    backward += inside * (2.0 if stack.attention == "unfused" else 2.5)
    added = sum(block.elements(Split(how.tp, how.kv, how.ep, how.etp))) * stack.accumulate_bytes
    backward[INDEX["traffic"]] += added / ground.cluster.device.bandwidth
    passing = _traffic(ground, block, how) / ground.cluster.device.bandwidth
    forward[INDEX["traffic"]] += passing
    backward[INDEX["traffic"]] += 2 * passing
    kernels = 12 if stack.fused_norm else 24
    forward[INDEX["kernels"]] += kernels
    backward[INDEX["kernels"]] += 2 * kernels
    forward[INDEX["routing"]] += block.has_experts
    backward[INDEX["routing"]] += block.has_experts
    _collectives(forward, backward, ground, block, how)
    if "block" in how.recomputed:
        backward += forward
    elif "attention" in how.recomputed and stack.attention == "unfused":
        backward += inside
    return np.stack([forward, backward])


def _products(forward: np.ndarray, backward: np.ndarray, ground: Ground, block: Block, how: How) -> None:
    """Products with weights: forward one, backward two, in the compute dtype."""
    device = ground.cluster.device
    peak = device.peak(how.compute)
    width, narrow = 2.0 if how.compute in ("float8", "float4") else _width(how.compute), how.compute[5:] in ("8", "4")
    moe = ground.shape.spec.moe
    for matrix in block.matrices:
        tokens, experts = float(how.tokens), 1.0
        out, inner = float(matrix.out), float(matrix.inner)
        if matrix.expert:
            assert moe is not None
            tokens = how.tokens * moe.top_k / how.tp * how.etp  # tokens are split over tp before they travel
            experts = max(1.0, moe.count / how.ep)
            out, inner = (out / how.etp, inner) if matrix.role == "expert_column" else (out, inner / how.etp)
        elif matrix.role in ("row",):
            inner /= how.tp
        elif matrix.role == "kv":
            out /= how.kv
        elif matrix.role in ("q", "column"):
            out /= how.tp
        elif how.sequence_parallel:
            tokens /= how.tp
        seconds = 2 * tokens * tiled(out) * tiled(inner) / peak
        column = INDEX["expert"] if matrix.expert else INDEX["wide" if matrix.role == "router" else "gemm"]
        forward[column] += seconds
        backward[column] += 2 * seconds
        moved = (tokens * (out + inner) + experts * out * inner) * width
        forward[INDEX["operands"]] += moved / device.bandwidth
        backward[INDEX["operands"]] += (2 * moved + 6 * experts * out * inner) / device.bandwidth
        if narrow and matrix.role != "router":
            made = tokens * inner + experts * out * inner
            forward[INDEX["quantise"]] += 4 * made / device.bandwidth
            backward[INDEX["quantise"]] += 4 * tokens * out / device.bandwidth


TILE = 64  # rows or columns that a product's kernel computes at once, at the least
HEAD_TILE = 32  # channels of a head


def tiled(size: float, tile: int = TILE) -> float:
    """A dim as a kernel computes it, padded to whole tiles."""
    return -(-size // tile) * tile


def _width(compute: str) -> float:
    return {"float64": 8.0, "float32": 4.0}.get(compute, 2.0)


def attended(shape: Shape, sequence: int) -> float:
    """Keys that a query of a row of `sequence` tokens sees on average, its causal half."""
    window = min(shape.spec.window or sequence, sequence)
    return window * (1 - window / (2 * sequence))


def _attention(ground: Ground, how: How) -> np.ndarray:
    """Forward counts of scores and sums of values."""
    shape, stack, device = ground.shape, ground.stack, ground.cluster.device
    spec = shape.spec
    found = np.zeros(len(COLUMNS))
    wide = how.compute if how.compute in ("float32", "float64", "float16") else "bfloat16"
    keys = attended(shape, how.sequence) if stack.attention != "unfused" else float(how.sequence)
    pairs = how.tokens * keys * spec.heads / how.tp
    channels = tiled(spec.head_dim, HEAD_TILE) + tiled(spec.value_dim, HEAD_TILE)
    found[INDEX["attention"]] = 2 * pairs * channels / device.peak(wide)
    if stack.attention == "unfused":  # scores are written, masked and normalised, perhaps dropped, and read
        found[INDEX["traffic"]] = 6 * 2 * pairs / device.bandwidth
    return found


def _traffic(ground: Ground, block: Block, how: How) -> float:
    """Bytes that element-wise operations of one block read and write in a forward pass."""
    shape, stack = ground.shape, ground.stack
    spec, width = shape.spec, _width(how.compute)
    whole = how.tp if how.sequence_parallel else 1
    passes = 1.0 if stack.fused_norm else 2.0
    hidden = passes * (4 + 6) * spec.hidden / whole  # two norms; two residual additions
    rotary = 2 * (spec.heads + spec.kv_heads) * spec.head_dim / how.tp
    inner = sum(m.out for m in block.matrices if m.role == "column") / how.tp
    activation = passes * inner * (1.5 if shape.gated else 2)
    experts = 0.0
    if block.has_experts and spec.moe is not None:
        moe = spec.moe
        gated = 2 if shape.gated else 1
        experts = moe.top_k / how.tp * (passes * moe.ffn * (gated + 1) + stack.expert_passes * spec.hidden)
    return how.tokens * width * (hidden + rotary + activation + experts)


def _collectives(forward: np.ndarray, backward: np.ndarray, ground: Ground, block: Block, how: How) -> None:
    """What a block's tensor, context and expert axes send."""
    spec, width = ground.shape.spec, _width(how.compute)
    if how.tp > 1:
        group = wires(ground, how.tp, how.tp_stride)
        each = group.gather(how.tokens * spec.hidden * width)
        forward[INDEX["tp"]] += 4 * each
        backward[INDEX["tp"]] += (6 if how.sequence_parallel else 4) * each
        forward[INDEX["tp_start"]] += (4 if how.sequence_parallel else 2) * group.start
        backward[INDEX["tp_start"]] += (6 if how.sequence_parallel else 2) * group.start
    if how.cp > 1:
        group = wires(ground, how.cp, how.cp_stride)
        keys = spec.kv_heads * (spec.head_dim + spec.value_dim) / how.kv if spec.latent is None else (
            spec.heads * (spec.head_dim + spec.value_dim) / how.tp
        )  # fmt: skip
        each = (how.cp - 1) * how.tokens * keys * width / group.bandwidth
        forward[INDEX["cp"]] += each
        backward[INDEX["cp"]] += 2 * each
    if block.has_experts and how.ep > 1:
        assert spec.moe is not None
        size = how.tokens / how.tp * spec.moe.top_k * spec.hidden * width
        each = exchange(ground, how.ep, how.etp, size, spec.moe.top_k)
        forward[INDEX["ep"]] += 2 * each
        backward[INDEX["ep"]] += 2 * each


@lru_cache(maxsize=4096)
def _head_counts(ground: Ground, how: How) -> np.ndarray:
    """The output projection in 16 bits, and the loss over the vocabulary in float32."""
    spec, device, stack = ground.shape.spec, ground.cluster.device, ground.stack
    wide = how.compute if how.compute in ("float32", "float64", "float16") else "bfloat16"
    found = np.zeros((2, len(COLUMNS)))
    seconds = 2 * how.tokens * tiled(spec.hidden) * tiled(spec.vocab / how.tp) / device.peak(wide)
    found[:, INDEX["wide"]] = seconds, 2 * seconds
    moved = (
        (how.tokens * (spec.hidden + spec.vocab / how.tp) + spec.hidden * spec.vocab / how.tp) * 2 / device.bandwidth
    )
    found[:, INDEX["operands"]] = moved, 2 * moved
    loss = how.tokens * spec.vocab / how.tp / device.bandwidth
    found[:, INDEX["traffic"]] = (8 if stack.fused_norm else 16) * loss, 8 * loss
    found[:, INDEX["kernels"]] = 8, 16
    if how.tp > 1:
        group = wires(ground, how.tp, how.tp_stride)
        found[:, INDEX["tp"]] = group.gather(2 * how.tokens * spec.hidden)
        found[:, INDEX["tp_start"]] = 3 * group.start, group.start
    return found


@lru_cache(maxsize=4096)
def _entry_counts(ground: Ground, how: How) -> np.ndarray:
    """The look-up of embeddings and the sum of their gradients."""
    found = np.zeros((2, len(COLUMNS)))
    spec = ground.shape.spec
    moved = how.tokens * spec.hidden * 2 * 2 / ground.cluster.device.bandwidth
    found[:, INDEX["traffic"]] = moved, 2 * moved
    found[:, INDEX["kernels"]] = 3, 6
    if how.tp > 1:
        group = wires(ground, how.tp, how.tp_stride)
        found[:, INDEX["tp"]] = group.gather(2 * how.tokens * spec.hidden)
    return found


def _message(ground: Ground, job: Job) -> float:
    """Seconds of one activation between neighbouring stages, cut over tp as both sides hold it or can gather it."""
    link = ground.cluster.link(2, job.stride("pp"))
    parts = job.tp if ground.stack.scatter_messages else 1
    return job.width * job.tokens * ground.shape.spec.hidden / parts / link.bandwidth + link.latency


def _data_parallel(ground: Ground, job: Job) -> tuple[float, float, float]:
    """Seconds on the wires of reducing gradients and of gathering weights; of a step, or of a micro-batch in ZeRO 3."""
    shape, stack = ground.shape, ground.stack
    dense, experts = stage_elements(shape, job)
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
        size = elements * stack.reduce_bytes
        reduce += inside.reduce(size) if job.zero == 0 else inside.gather(size)
        if ranks > shards:
            reduce += wires(ground, ranks // shards, stride * shards).reduce(size / shards)
        if job.zero:
            gather += inside.gather(elements * stack.gather_bytes)
        start += 2 * inside.start * (len(shape.layers) / job.pp if job.zero == 3 else 1)
    if job.zero == 2:
        reduce *= job.micro_batches
    return reduce, gather, start


def stage_elements(shape: Shape, job: Job) -> tuple[float, float]:
    """(dense, expert) elements on a rank of the fullest position, ends included in the mean."""
    split = job.split(shape)
    dense = experts = 0.0
    for block, count in zip(shape.kinds, shape.count(range(len(shape.layers))), strict=True):
        own = block.elements(split)
        dense += count * own[0] / job.pp
        experts += count * own[1] / job.pp
    outside = shape.embedding_elements(split) + shape.head_elements(split, with_embedding=True)
    return dense + outside / (1 if job.pp == 1 else 2), experts


def _update(shape: Shape, job: Job) -> float:
    """Bytes that Adam reads and writes for one rank's slice: gradient, master, moments; and the weight it writes."""
    dense, experts = stage_elements(shape, job)
    if job.zero:
        dense, experts = dense / job.shards, experts / min(job.expert_copies, job.shards)
    return (4 + 8 + 16 + 2) * (dense + experts)
