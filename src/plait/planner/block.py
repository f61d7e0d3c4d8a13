"""What one block (and the head, and the entry) has to do for one micro-batch, at the device's and the links' own best.

Seconds if every peak were reached, one column for each kind of work, forward and backward apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from plait.planner.ground import Ground
from plait.planner.kernels import stretch
from plait.planner.network import Wires, exchange, wires
from plait.planner.shape import Block, Shape, Split

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
    "host",  # operations that the host starts, a number
    "tp",  # tensor-parallel collectives on their wires
    "tp_start",  # and the waits of their messages
    "cp",
    "ep",
    "pp",  # messages between stages
)
INDEX = {name: column for column, name in enumerate(COLUMNS)}
Counts = np.ndarray  # (len(COLUMNS),)


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


@lru_cache(maxsize=4096)
def block_counts(ground: Ground, block: Block, how: How) -> np.ndarray:
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
    started = OPERATIONS + EXPERT_OPERATIONS * block.has_experts
    started += LATENT_OPERATIONS * (ground.shape.spec.latent is not None)
    for counts in (forward, backward):
        counts[INDEX["routing"]] += block.has_experts
        counts[INDEX["host"]] += started
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
    width, narrow = 2.0 if how.compute in ("float8", "float4") else width_of(how.compute), how.compute[5:] in ("8", "4")
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
        seconds = 2 * tokens * out * inner / peak
        column = INDEX["expert"] if matrix.expert else INDEX["wide" if matrix.role == "router" else "gemm"]
        each, units = tokens / experts, device.units
        forward[column] += seconds * stretch(each, out, inner, units, experts)
        backward[column] += seconds * stretch(each, inner, out, units, experts)
        backward[column] += seconds * stretch(out, inner, each, units, experts)
        moved = (tokens * (out + inner) + experts * out * inner) * width
        forward[INDEX["operands"]] += moved / device.bandwidth
        backward[INDEX["operands"]] += (2 * moved + 6 * experts * out * inner) / device.bandwidth
        if narrow and matrix.role != "router":
            made = tokens * inner + experts * out * inner
            forward[INDEX["quantise"]] += 4 * made / device.bandwidth
            backward[INDEX["quantise"]] += 4 * tokens * out / device.bandwidth


OPERATIONS = 25  # that a host starts for a pass through a block,
EXPERT_OPERATIONS = 60  # more for a layer of experts: scores, choice, counts, permutation, exchange, products, weights,
LATENT_OPERATIONS = 60  # and more for latent attention: down, norm and up of both latents, rotated parts cut and joined
HEAD_TILE = 32  # channels of a head


def tiled(size: float, tile: int) -> float:
    """A dim as a kernel computes it, padded to whole tiles."""
    return -(-size // tile) * tile


def width_of(compute: str) -> float:
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
    spec, width = shape.spec, width_of(how.compute)
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
    spec, width = ground.shape.spec, width_of(how.compute)
    if how.tp > 1:
        group = wires(ground, how.tp, how.tp_stride)
        passing, starting = _tensor_collectives(group, how.tokens * spec.hidden * width, how.sequence_parallel)
        for counts, seconds, start in zip((forward, backward), passing, starting, strict=True):
            counts[INDEX["tp"]] += seconds
            counts[INDEX["tp_start"]] += start
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


def _tensor_collectives(group: Wires, size: float, split: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """(forward, backward) seconds on the wires, and of starts: a sum after each of two row products and one before
    each of two columns; where tokens are split, half of it each before and after, and inputs once more in backward.
    """
    if not split:
        once, start = 2 * group.reduce(size), 2 * group.start("all_reduce")
        return (once, once), (start, start)
    once = 2 * group.gather(size) + 2 * group.scatter(size)
    start = 2 * group.start("all_gather") + 2 * group.start("reduce_scatter")
    return (once, once + 2 * group.gather(size)), (start, start + 2 * group.start("all_gather"))


@lru_cache(maxsize=4096)
def head_counts(ground: Ground, how: How) -> np.ndarray:
    """The output projection in 16 bits, and the loss over the vocabulary in float32."""
    spec, device, stack = ground.shape.spec, ground.cluster.device, ground.stack
    wide = how.compute if how.compute in ("float32", "float64", "float16") else "bfloat16"
    found = np.zeros((2, len(COLUMNS)))
    out, inner, units = spec.vocab / how.tp, float(spec.hidden), device.units
    seconds = 2 * how.tokens * out * inner / device.peak(wide)
    found[0, INDEX["wide"]] = seconds * stretch(how.tokens, out, inner, units)
    found[1, INDEX["wide"]] = seconds * (
        stretch(how.tokens, inner, out, units) + stretch(out, inner, how.tokens, units)
    )
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
        found[:, INDEX["tp_start"]] = 3 * group.start(), group.start()
    return found


@lru_cache(maxsize=4096)
def entry_counts(ground: Ground, how: How) -> np.ndarray:
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
