"""A job: one model on one split with one batch, in the few numbers that memory and time depend on.

It is what a run file says without data, optimizer and seeds, and also what a published row says. Cheap to make by the
ten thousand, so it is a plain tuple that validates nothing: `fit` has done that for a run, the search makes legal ones.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from plait.placement.stages import stages_of
from plait.planner.shape import Place, Shape, Split
from plait.spec.layout import AXES, Layout
from plait.spec.pipeline import SHAPES, chunks_of
from plait.spec.run import RunSpec

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "float4": 0.5}


class Job(NamedTuple):
    """Degrees, schedule, batch and habits of one training run. `compute` is the dtype of the products."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    micro: int = 1
    batch: int = 1  # sequences per step
    sequence: int = 1
    zero: int = 0
    shard: int = 0  # ranks that share a tensor under ZeRO; 0: all
    keep: bool = False
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_layers: int = -1  # the first blocks of each stage; -1: all
    compute: str = "bfloat16"
    order: tuple[str, ...] = AXES
    layers: tuple[int, ...] = ()  # blocks of each stage; none: as even as can be

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Passes of one pipeline in a step."""
        return max(1, self.batch // (self.dp * self.micro))

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one context rank."""
        return self.micro * self.sequence // self.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards what is not an expert."""
        return self.shard or self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return max(1, self.tp * self.dp * self.cp // (self.ep * self.etp))

    @property
    def width(self) -> float:
        """Bytes of a saved activation: 16 bits under 8-bit products too."""
        return max(2, WIDTHS[self.compute])

    @property
    def place(self) -> Place:
        """How its stages lie on the pipeline's positions."""
        return Place(self.pp, self.chunks, SHAPES[self.schedule].folded, self.layers)

    def split(self, shape: Shape) -> Split:
        return Split(self.tp, gcd(self.tp, shape.spec.kv_heads), self.ep, self.etp)

    def stride(self, axis: str) -> int:
        """How many ranks apart the neighbours along an axis are."""
        after = self.order[self.order.index(axis) + 1 :]
        stride = 1
        for other in after:
            stride *= int(getattr(self, other))
        return stride


def job_of(run: RunSpec, layout: Layout) -> Job:
    """The job that a run on a layout is."""
    recompute = run.recompute
    return Job(
        layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.etp,
        chunks=chunks_of(run.schedule), schedule=run.schedule.name,
        micro=run.batch.micro_size, batch=run.batch.global_size, sequence=run.batch.sequence,
        zero=run.zero.stage, shard=layout.shard, keep=run.zero.keep,
        sequence_parallel=layout.sequence_parallel,
        recompute="+".join(recompute.parts) or str(recompute.mode),
        recompute_layers=-1 if run.recompute.layers == "all" else run.recompute.layers,
        compute=run.precision.compute, order=layout.order,
        layers=() if run.schedule.layers == "even" else tuple(len(stage) for stage in stages_of(run, layout).layers),
    )  # fmt: skip
