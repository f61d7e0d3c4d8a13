"""Bytes on one device, stage by stage and line by line: what a rank of each pipeline position holds at its peak.

Model states follow from the table of cuts and the ZeRO stage; activations from what each block keeps for its backward
pass (Korthikanti et al. 2022, section 4, term by term), times the micro-batches that the schedule really holds.
Lines sum to the total; what a stack reserves without using it is a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.shape import Block, Shape, Split
from plait.planner.stack import Stack
from plait.schedule import GENERATORS, Size

LINES = (
    "weights", "gradients", "master", "moments", "gathered", "activations", "recomputed", "logits", "workspace",
    "communication", "context", "reserve",
)  # fmt: skip

# Recompute mode -> the parts of a block that are not kept.
RECOMPUTED: Mapping[str, tuple[str, ...]] = {"none": (), "selective": ("attention",), "full": ("block",)}


class StageBytes(NamedTuple):
    """One pipeline position: bytes by line, in the order of LINES."""

    weights: float
    gradients: float
    master: float
    moments: float
    gathered: float
    activations: float
    recomputed: float
    logits: float
    workspace: float
    communication: float
    context: float
    reserve: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def allocated(self) -> float:
        """What the allocator has handed out at the peak: all but the context and what is reserved unused."""
        return sum(self) - self.context - self.reserve


@dataclass(frozen=True)
class Memory:
    """All pipeline positions against a device's limit, bytes."""

    stages: tuple[StageBytes, ...]
    limit: float

    @property
    def worst(self) -> int:
        """The first position with the most bytes."""
        return max(range(len(self.stages)), key=lambda pp: self.stages[pp].total)

    @property
    def headroom(self) -> float:
        return self.limit - self.stages[self.worst].total

    @property
    def verdict(self) -> str:
        """fits; tight: only where nothing is lost between allocated blocks; or no."""
        worst = self.stages[self.worst]
        return "fits" if worst.total <= self.limit else "tight" if worst.total - worst.reserve <= self.limit else "no"


def parts_recomputed(mode: str) -> tuple[str, ...]:
    """What a recompute mode does not keep; a list is written with plus signs."""
    return RECOMPUTED.get(mode, tuple(mode.split("+")))


def memory(ground: Ground, job: Job) -> Memory:
    """The peak of every pipeline position of one replica."""
    return Memory(tuple(stage_bytes(ground, job, pp) for pp in range(job.pp)), ground.cluster.device.memory)


def live_stages(job: Job, pp: int) -> float:
    """Inputs of whole positions (all its chunks) that a rank holds at once: a chunk counts as its share."""
    return _live_stages(job.schedule, Size(job.pp, job.micro_batches, job.chunks), pp)


class _Flight(NamedTuple):
    """Micro-batches of a position that are live, and that wait for W after their B, with the bytes per token of what
    waits: each linear's input and output gradient."""

    live: float
    late: float
    waiting: float

    def bytes(self, kept: float) -> float:
        """Per token of all micro-batches that are held, where each keeps `kept` from F to B, and from B to W that or
        what waits, if it is more."""
        return self.live * kept + self.late * max(0.0, self.waiting - kept)


def _flight(ground: Ground, job: Job, pp: int) -> _Flight:
    size = Size(job.pp, job.micro_batches, job.chunks)
    late = GENERATORS[job.schedule].peak_late(size, pp) / size.chunks
    waiting = _waiting(ground, _frame(job), job.sequence_parallel, pp) if late else 0.0
    return _Flight(live_stages(job, pp), late, waiting)


@lru_cache(maxsize=65536)
def _waiting(ground: Ground, frame: Job, sequence_parallel: bool, pp: int) -> float:
    """Of the blocks of a position, and on the last of the projection onto the vocabulary."""
    shape, grain = ground.shape, _Grain.of(frame)._replace(sequence_parallel=sequence_parallel)
    kinds = shape.kinds_of_positions(frame.place)[pp]
    waiting = sum(count * _late_bytes(shape, block, grain) for block, count in zip(shape.kinds, kinds, strict=True))
    if pp == frame.place.owners[-1]:
        waiting += grain.width * (_entry(shape, grain) + shape.spec.vocab / frame.tp)
    return waiting


# Role of a matrix whose gradient may wait for W -> whether tp cuts its output. "row" is cut along its input instead.
LATE: Mapping[str, bool] = {"q": True, "kv": True, "column": True, "row": False, "latent": False}


def _late_bytes(shape: Shape, block: Block, grain: _Grain) -> float:
    """Output gradients per token of a block's linears, and inputs, of which linears side by side share one."""
    late = [matrix for matrix in block.matrices if matrix.role in LATE and not matrix.expert]
    outputs = sum(matrix.out / (grain.tp if LATE[matrix.role] else 1) for matrix in late)
    own = sum(matrix.inner for matrix in late if matrix.role == "row") / grain.tp
    shared = sum({matrix.inner for matrix in late if matrix.role != "row"} - {shape.spec.hidden})
    norms = 1 + any(matrix.role == "column" for matrix in late)  # before attention, and before an MLP that is here
    return grain.width * (outputs + own + shared + norms * _entry(shape, grain))


def _entry(shape: Shape, grain: _Grain) -> float:
    """Elements per token between blocks."""
    return shape.spec.hidden / (grain.tp if grain.sequence_parallel else 1)


@lru_cache(maxsize=65536)
def _live_stages(schedule: str, size: Size, pp: int) -> float:
    return GENERATORS[schedule].peak_live(size, pp) / size.chunks


def stage_bytes(ground: Ground, job: Job, pp: int) -> StageBytes:
    """The peak of one pipeline position, by line."""
    stack, tokens = ground.stack, job.tokens
    fixed = _fixed(ground, _frame(job), pp)
    kept, working = _activations(ground, _Grain.of(job), fixed.kinds)
    lines = (
        *fixed.states,
        fixed.gathered,
        _flight(ground, job, pp).bytes(kept) * tokens,
        working * tokens,
        fixed.logits * tokens,
        fixed.workspace + fixed.flowing * tokens,
        _communication(ground.shape, job),
    )
    return StageBytes(*lines, context=stack.context, reserve=stack.fragments * sum(lines))


def peaks(ground: Ground, job: Job, pp: int, modes: Sequence[str]) -> list[float]:
    """`stage_bytes(...).total` under each recompute mode, as the search needs it by the ten thousand."""
    stack, tokens = ground.stack, job.tokens
    fixed, grain = _fixed(ground, _frame(job), pp), _Grain.of(job)
    moving = (fixed.logits + fixed.flowing) * tokens + _communication(ground.shape, job)
    always = sum(fixed.states) + fixed.gathered + fixed.workspace + moving
    flight, found = _flight(ground, job, pp), []
    for mode in modes:
        kept, working = _activations(ground, grain._replace(recompute=mode), fixed.kinds)
        found.append((always + (flight.bytes(kept) + working) * tokens) * (1 + stack.fragments) + stack.context)
    return found


class _Fixed(NamedTuple):
    """What a position holds whatever the batch, bytes; of logits and of a gradient on its way, bytes per token."""

    kinds: tuple[int, ...]
    states: tuple[float, float, float, float]
    gathered: float
    workspace: float
    flowing: float
    logits: float


def _frame(job: Job) -> Job:
    """A job without what `_fixed` does not depend on: the key of its cache."""
    return job._replace(
        micro=1, batch=1, sequence=1, sequence_parallel=False, recompute="none", recompute_layers=-1, order=()
    )


@lru_cache(maxsize=65536)
def _fixed(ground: Ground, job: Job, pp: int) -> _Fixed:
    shape, stack, split = ground.shape, ground.stack, job.split(ground.shape)
    kinds, owners = shape.kinds_of_positions(job.place)[pp], job.place.owners
    first, last = pp == owners[0], pp == owners[-1]
    return _Fixed(
        kinds,
        states(job, stack, _elements(shape, split, kinds, first, last)),
        _gathered(ground, job, split),
        *_workspace(shape, job, stack),
        stack.logit_bytes * shape.spec.vocab / job.tp if last else 0.0,
    )


def _elements(shape: Shape, split: Split, kinds: tuple[int, ...], first: bool, last: bool) -> tuple[int, int]:
    """(dense, expert) elements of one rank of a position."""
    dense = experts = 0
    for block, count in zip(shape.kinds, kinds, strict=True):
        own = block.elements(split)
        dense += count * own[0]
        experts += count * own[1]
    dense += shape.embedding_elements(split) if first else 0
    dense += shape.head_elements(split, with_embedding=first) if last else 0
    return dense, experts


def states(job: Job, stack: Stack, elements: tuple[int, int]) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, master copy and moments of (dense, expert) elements on one rank."""
    sizes = (
        job.width,
        max(stack.grad_bytes, min(job.width, 4)),
        4.0 if job.width < 4 else 0.0,
        2 * max(4.0, job.width),
    )
    copies = stack.fp8_copies if job.compute in ("float8", "float4") else 0.0
    from_stage = (3, 2, 1, 1)
    found = []
    for size, since in zip(sizes, from_stage, strict=True):
        dense, experts = elements
        if job.zero >= since:
            dense, experts = -(-dense // job.shards), -(-experts // min(job.expert_copies, job.shards))
        found.append(size * (dense + experts))
    found[0] += copies * sum(elements) * (job.zero < 3)
    found[0] *= not (stack.weight_is_master and job.zero == 3 and job.width < 4)
    return found[0], found[1], found[2], found[3]


def _gathered(ground: Ground, job: Job, split: Split) -> float:
    """ZeRO 3: the weights of the block at work and of the next one, and the gradient of one before it is sharded."""
    if job.zero < 3 or job.shards == 1:
        return 0.0
    shape, stack = ground.shape, ground.stack
    largest = max(sum(block.elements(split)) for block in shape.kinds)
    outside = max(shape.embedding_elements(split), shape.head_elements(split, with_embedding=False))
    blocks = len(shape.layers) / job.pp if job.keep else 2
    return max(blocks * largest, outside + largest) * job.width + max(largest, outside) * stack.reduce_bytes


class _Grain(NamedTuple):
    """All of a job that the bytes per token of its activations depend on."""

    width: float
    tp: int
    sequence_parallel: bool
    sequence: int
    recompute: str
    recompute_layers: int

    @classmethod
    def of(cls, job: Job) -> _Grain:
        return cls(job.width, job.tp, job.sequence_parallel, job.sequence, job.recompute, job.recompute_layers)


@lru_cache(maxsize=65536)
def _activations(ground: Ground, grain: _Grain, kinds: tuple[int, ...]) -> tuple[float, float]:
    """Bytes per token that a micro-batch keeps in all blocks of a position, and that a recomputed block works on."""
    shape, parts = ground.shape, parts_recomputed(grain.recompute)
    whole = "block" in parts
    how = _Saved(*grain[:4], ground.stack.attention, () if whole else parts)
    kept = working = 0.0
    remaining = sum(kinds) if grain.recompute_layers < 0 else min(sum(kinds), grain.recompute_layers)
    for block, count in zip(shape.kinds, kinds, strict=True):
        if not count:
            continue
        full = _bytes_per_token(shape, block, how)
        short = min(count, remaining) if whole else 0
        remaining -= short
        entry = grain.width * shape.spec.hidden / (grain.tp if grain.sequence_parallel else 1)
        kept += (count - short) * full + short * entry
        if short:
            working = max(working, full - entry)
    return kept, working


def block_bytes(ground: Ground, block: Block, job: Job, dropped: tuple[str, ...]) -> float:
    """What one block keeps of one micro-batch for its backward pass, bytes on one rank."""
    how = _Saved(*_Grain.of(job)[:4], ground.stack.attention, dropped)
    return job.tokens * _bytes_per_token(ground.shape, block, how)


class _Saved(NamedTuple):
    """All that the bytes per token of a block depend on: the key of a small cache."""

    width: float
    tp: int
    sequence_parallel: bool
    sequence: int
    attention: str
    dropped: tuple[str, ...]


@lru_cache(maxsize=4096)
def _bytes_per_token(shape: Shape, block: Block, how: _Saved) -> float:
    spec, width, tp = shape.spec, how.width, how.tp
    whole = tp if how.sequence_parallel else 1  # what is cut where tokens between products are
    hidden = spec.hidden
    norms = 0 if "norm" in how.dropped else 2
    total = (2 + norms) * hidden * width / whole  # what enters both norms, and what leaves them
    total += 2 * hidden / whole if spec.dropout else 0  # masks of a byte
    latents = sum(m.out for m in block.matrices if m.role == "latent")
    total += 2 * latents * width
    keys = spec.heads if spec.latent else spec.kv_heads
    heads = spec.heads * (spec.head_dim + spec.value_dim) + keys * (spec.head_dim + spec.value_dim)
    total += heads * width / tp
    if how.attention == "unfused" and "attention" not in how.dropped:
        total += spec.heads * how.sequence * (2 * width + (1 if spec.attention_dropout else 0)) / tp
    elif how.attention != "unfused":
        total += 4 * spec.heads / tp
    inner = 3 if shape.gated else 2
    inner -= 1 if "activation" in how.dropped else 0
    total += inner * width * sum(m.out for m in block.matrices if m.role == "column") / (2 if shape.gated else 1) / tp
    if block.has_experts and spec.moe is not None:
        total += _expert_bytes(shape, how, inner) / whole
    return total


def _expert_bytes(shape: Shape, how: _Saved, inner: int) -> float:
    """Tokens as they arrive at experts, the experts' inner sizes, and what they send back."""
    moe = shape.spec.moe
    assert moe is not None
    arrived = 2 * shape.spec.hidden * how.width
    return moe.top_k * (arrived + inner * moe.ffn * how.width) + 4 * moe.count


def _workspace(shape: Shape, job: Job, stack: Stack) -> tuple[float, float]:
    """The largest weight gradient of a block before it is added up; per token, that of an MLP's first product."""
    spec = shape.spec
    gated = 2 if shape.gated else 1
    inner = max((m.out for block in shape.kinds for m in block.matrices if m.role == "column"), default=spec.ffn)
    return stack.wgrad_bytes * gated * inner * spec.hidden / job.tp, job.width * gated * inner / job.tp


def _communication(shape: Shape, job: Job) -> float:
    """Gathered inputs of sequence parallelism, messages between stages, keys and values of other context ranks."""
    spec = shape.spec
    message = job.width * job.tokens * spec.hidden
    gathered = message if job.sequence_parallel and job.tp > 1 else 0.0
    between = 2 * message / (job.tp if job.sequence_parallel else 1) if job.pp > 1 else 0.0
    others = 2 * job.width * job.tokens * spec.kv_heads * spec.head_dim * 2 / job.tp if job.cp > 1 else 0.0
    return gathered + between + others
