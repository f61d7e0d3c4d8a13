"""`place(model, layout, zero)`: the placement record of every tensor.

Gradient reduction, norm, clipping, initialisation, decay groups, checkpoints, proof and the memory table read these
records; nothing else computes a cut. No torch, no process group: a rank is a number here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from plait.placement.cuts import CUTS, Rectangle, piece
from plait.placement.stages import StageMap, stage_map
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec, TensorSpec
from plait.spec.run import ZeroSpec


@dataclass(frozen=True)
class Placement:
    """Where one tensor is.

    `stages` hold it; `dim` is cut over group `over` (None: whole), and a `second` dim over another; its gradient is a
    partial sum over each group of `partial`, in the order in which they are reduced; `copies` ranks of the world hold
    an identical rectangle.
    """

    tensor: TensorSpec
    layout: Layout
    stages: tuple[int, ...]
    owners: tuple[int, ...]  # the pp coordinate of each
    dim: int | None
    over: str
    partial: tuple[str, ...]
    zero_stage: int = 0
    second: tuple[int, str] | None = None

    @property
    def cuts(self) -> tuple[tuple[int, str], ...]:
        """(dim, group) of each cut."""
        first = () if self.dim is None else ((self.dim, self.over),)
        return first if self.second is None else (*first, self.second)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The pp coordinates that hold it."""
        return tuple(dict.fromkeys(self.owners))

    @property
    def domain(self) -> str:
        """The group of all ranks whose tokens meet these weights; ZeRO shards over it, or over a part of it."""
        return self.partial[0]

    @property
    def copied_over_tp(self) -> bool:
        """Whether several tp ranks hold the same rectangle, and sum its gradient in groups of their own."""
        return self.domain == "dp_cp" and self.layout.tp > (1 if self.dim is None else self.layout.size(self.over))

    @cached_property
    def copies(self) -> int:
        pieces = prod(self.layout.size(group) for _, group in self.cuts)
        return len(self.holders) * self.layout.ranks_per_stage // pieces

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, not for norms and biases."""
        return len(self.tensor.shape) > 1

    def held_by(self, rank: int) -> bool:
        return self.layout.coordinates(rank).pp in self.holders

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of `rank` that hold it."""
        pp = self.layout.coordinates(rank).pp
        return tuple(stage for stage, owner in zip(self.stages, self.owners, strict=True) if owner == pp)

    def rectangle(self, rank: int) -> Rectangle:
        """What `rank` holds of the global tensor; a rank of another stage holds nothing and asking is a bug."""
        assert self.held_by(rank), f"rank {rank} does not hold {self.tensor.name}"
        whole: list[tuple[int, int]] = [(0, size) for size in self.tensor.shape]
        at = self.layout.coordinates(rank)
        for dim, group in self.cuts:
            whole[dim] = piece(self.tensor.shape[dim], self.layout.size(group), int(getattr(at, group)))
        return tuple(whole)

    def shape(self, rank: int) -> tuple[int, ...]:
        """The local shape."""
        return tuple(stop - start for start, stop in self.rectangle(rank))

    def first_copy(self, rank: int, sharded: bool = False) -> bool:
        """Whether `rank` is the one of its identical copies that speaks for all (a file's writer, a sum's term).

        `sharded`: each rank speaks for its shard of the rectangle only.
        """
        at = self.layout.coordinates(rank)
        if self.domain == "edp":  # cut over all other ranks of the stage
            return at.pp == self.holders[0] and (sharded or at.edp == 0)
        along_tp = at.tp if self.dim is None else at.copy if self.over == "kv" else 0
        along_domain = at.replicate if sharded else at.dp + at.cp
        return (at.pp, along_domain, along_tp) == (self.holders[0], 0, 0)


Placements = Mapping[str, Placement]


def place(model: ModelSpec, layout: Layout, zero: ZeroSpec, stages: StageMap | None = None) -> dict[str, Placement]:
    """One record per tensor of `model.parameters()`, by global name, in that order."""
    assert layout.kv == gcd(layout.tp, model.kv_heads), f"kv {layout.kv} is not that of {model.kv_heads} kv heads"
    stages = stages or stage_map(model, layout)
    return {t.name: _placement(t, layout, zero, stages) for t in model.parameters()}


def _placement(tensor: TensorSpec, layout: Layout, zero: ZeroSpec, stages: StageMap) -> Placement:
    cut = CUTS[tensor.role]
    held = stages.holding(tensor)
    owners = tuple(stages.owner[stage] for stage in held)
    partial = (cut.domain, *cut.partial)
    if layout.sequence_parallel:
        partial += cut.partial_split
    if len(set(owners)) > 1:
        partial += ("tied",)
    return Placement(tensor, layout, held, owners, cut.dim, cut.over, partial, zero.stage, cut.second)


def homes(placements: Placements, rank: int) -> dict[str, tuple[Placement, ...]]:
    """Module parameter -> the tensors that it holds on this rank, stacked along dim 0 in this order."""
    found: dict[str, tuple[Placement, ...]] = {}
    for placement in placements.values():
        if placement.tensor.kind == "weight" and placement.held_by(rank):
            home = placement.tensor.home
            found[home] = (*found.get(home, ()), placement)
    return found
