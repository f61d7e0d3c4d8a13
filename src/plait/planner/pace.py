"""From counts to seconds: one formula over a few efficiencies, the same for one plan and for a table of a thousand.

Every argument may be a number or an array over jobs. A term is a count at the machine's best divided by the part of it
that programs reach; what overlaps is subtracted where the stack overlaps it. The terms returned sum to the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from plait.planner.block import INDEX

Numbers = Any  # a float, or an array of one per job


class Rates(NamedTuple):
    """Parts of peaks that are reached, and what is left visible of what could overlap."""

    gemm: Numbers  # of the compute dtype's peak
    wide: Numbers  # of the 16-bit peak
    expert: Numbers  # relative to gemm
    attention: Numbers  # of the 16-bit peak
    memory: Numbers  # of the memory's bandwidth
    update: Numbers  # the same, by the optimizer
    operands: Numbers  # visible part of reading and writing operands
    quantise: Numbers  # cost of narrowing relative to its traffic
    kernel: Numbers  # seconds of one kernel's start
    routing: Numbers  # seconds of one layer of experts beside its products and exchanges
    host: Numbers  # seconds in which the host starts one operation
    fast: Numbers  # of the links inside a domain
    network: Numbers  # of the links between nodes
    tp: Numbers  # visible part of tensor-parallel collectives
    ep: Numbers
    pp: Numbers
    dp: Numbers  # whether reductions run beside the backward pass: 1 or 0
    leak: Numbers  # part of overlapped traffic that costs time all the same
    jitter: Numbers  # of the step, for each doubling of the ranks beyond one node
    step: Numbers  # seconds of a step that nothing explains


class Counted(NamedTuple):
    """`Work` of one job, or of many: arrays with the jobs along the first axis, columns along the last."""

    stage: np.ndarray
    last: np.ndarray
    total: np.ndarray
    micro_batches: Numbers
    positions: Numbers
    chunks: Numbers
    reduce: Numbers
    gather: Numbers
    start: Numbers
    per_micro_batch: Numbers
    update: Numbers
    world: Numbers
    fill: Numbers
    sharers: Numbers


TERMS = (
    "products", "experts", "attention", "memory", "kernels", "tensor", "context", "expert exchange", "stages", "bubble",
    "data", "update", "jitter",
)  # fmt: skip

SHARP = 6  # how sharply the slower one of device and host decides


def passes(counts: np.ndarray, rates: Rates) -> np.ndarray:
    """Seconds of a pass by kind of work, (..., 2, 9): forward and backward, the first nine of TERMS."""
    at = {name: counts[..., column] for name, column in INDEX.items()}
    r = Rates(*(np.asarray(value)[..., None] for value in rates))
    attention = at["attention"] / r.attention
    found = np.stack(
        [
            at["gemm"] / r.gemm + at["wide"] / r.wide + r.operands * at["operands"] / r.memory,
            at["expert"] / (r.gemm * r.expert),
            attention,
            (at["traffic"] + r.quantise * at["quantise"]) / r.memory,
            at["kernels"] * r.kernel + at["routing"] * r.routing,
            r.tp * (at["tp"] / r.fast + at["tp_start"]),
            np.maximum(0.0, at["cp"] / r.fast - attention) + r.leak * np.minimum(at["cp"] / r.fast, attention),
            r.ep * at["ep"] / r.network,
            r.pp * at["pp"] / r.network,
        ],
        axis=-1,
    )
    found[..., TERMS.index("kernels")] += waits(found.sum(-1), at["host"] * r.host)
    return found


def waits(device: np.ndarray, host: np.ndarray) -> np.ndarray:
    """Seconds that a device which computes faster than its host starts work waits for the host.

    The slower of the two decides; where they are alike, now one and now the other is behind.
    """
    share = host / np.maximum(device, 1e-12)
    return np.asarray(device * ((1 + share**SHARP) ** (1 / SHARP) - 1))


def seconds(work: Counted, rates: Rates) -> np.ndarray:
    """Seconds of a step by term, (..., len(TERMS)); their sum is the step."""
    stage, last, total = (passes(counts, rates) for counts in (work.stage, work.last, work.total))
    on_last = last.sum((-1, -2)) > stage.sum((-1, -2))
    busiest = np.where(on_last[..., None, None], last, stage)
    micro_batches = np.asarray(work.micro_batches)
    busy = micro_batches[..., None] * busiest.sum(-2)
    bubble = (total.sum((-1, -2)) - busiest.sum((-1, -2))) * work.fill
    forward, backward = busiest.sum(-1)[..., 0], busiest.sum(-1)[..., 1]
    sharers = np.asarray(work.sharers)
    data = sharers * data_parallel(work, rates, forward, backward)
    update = sharers * (work.update / rates.update + rates.step)
    busy, bubble = share(busy, bubble, (sharers * micro_batches / work.positions)[..., None] * total.sum(-2), sharers)
    known = busy.sum(-1) + bubble + data + update
    jitter = known * rates.jitter * np.log2(np.maximum(1.0, np.asarray(work.world) / 8))
    return np.concatenate([busy, np.stack([bubble, data, update, jitter], axis=-1)], axis=-1)


def share(busy: np.ndarray, bubble: np.ndarray, work: np.ndarray, sharers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Busy seconds by term, and idle ones, of ranks of which `sharers` share a processor.

    `work` is what all positions' passes take of all processors: who waits lends its own, so that work decides, unless
    even with a processor for each rank the pipeline takes longer.
    """
    decides = (sharers > 1) & (work.sum(-1) > busy.sum(-1) + bubble)
    return np.where(decides[..., None], work, busy), np.where(decides, 0.0, bubble)


def data_parallel(work: Counted, rates: Rates, forward: Numbers, backward: Numbers) -> Numbers:
    """Seconds of reductions and gathers that nothing hides, and the part of the hidden ones that costs all the same."""
    reduce = work.reduce / rates.network + work.start / 2
    gather = work.gather / rates.network + work.start / 2
    per_micro = np.asarray(work.per_micro_batch)
    times = np.where(per_micro, work.micro_batches, 1)
    behind_forward, behind_backward = gather, reduce + np.where(per_micro, gather, 0.0)
    # The chunks of an interleaved position finish one after the other, pp micro-batches apart.
    last = np.where(per_micro, 1, np.maximum(1, (1 - 1 / np.asarray(work.chunks)) * work.positions))
    last = np.minimum(last, work.micro_batches)
    found = 0.0
    for wire, compute in ((behind_forward, forward), (behind_backward, backward)):
        hidden = np.minimum(wire, last * compute) * rates.dp
        found = found + wire - hidden + rates.leak * hidden
    return times * found
