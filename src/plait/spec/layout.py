"""Who stands where: ranks, coordinates and groups of a job, as arithmetic on a frozen value.

A layout knows every group that any mechanism will ask for, in the dense view (pp, dp, cp, tp), in the expert view
(the same ranks of a stage as edp x ep x etp), the factors of an axis (tp = kv x copies, cp = ring x ulysses,
dp·cp = replicate x shard) and the subset that shares a tied tensor. It makes no process group and knows no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from pydantic import Field

from plait.spec.base import Spec

AXES = ("pp", "dp", "cp", "tp")

# Group -> the coordinates that its ranks have in common; along all others they differ.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "pp": ("dp", "cp", "tp"),
    "dp": ("pp", "cp", "tp"),
    "cp": ("pp", "dp", "tp"),
    "tp": ("pp", "dp", "cp"),
    "kv": ("pp", "dp", "cp", "copy"),  # different key/value heads
    "copies": ("pp", "dp", "cp", "kv"),  # the same key/value heads, where tp > kv heads
    "ring": ("pp", "dp", "tp", "ulysses"),
    "ulysses": ("pp", "dp", "tp", "ring"),
    "dp_cp": ("pp", "tp"),  # all ranks whose tokens meet the same weights
    "shard": ("pp", "tp", "replicate"),  # ZeRO's shards
    "replicate": ("pp", "tp", "shard"),
    "edp": ("pp", "ep", "etp"),
    "ep": ("pp", "edp", "etp"),
    "etp": ("pp", "edp", "ep"),
    "tied": ("dp", "cp", "tp"),  # of these only the first and the last stage
    "stage": ("pp",),
    "world": (),
}

# Group -> the axis under which its traffic is reported.
AXIS_OF: Mapping[str, str] = {
    **{name: name for name in ("pp", "dp", "cp", "tp", "ep", "tied", "world")},
    "kv": "tp", "copies": "tp", "ring": "cp", "ulysses": "cp", "dp_cp": "dp", "shard": "dp", "replicate": "dp",
    "edp": "dp", "etp": "tp", "stage": "world",
}  # fmt: skip


class Coordinates(NamedTuple):
    """Where one rank stands, in every view at once."""

    pp: int
    dp: int
    cp: int
    tp: int
    kv: int
    copy: int
    ring: int
    ulysses: int
    replicate: int
    shard: int
    edp: int
    ep: int
    etp: int


class Layout(Spec):
    """The degrees of every axis and the order in which ranks walk through them. world = pp·dp·cp·tp.

    `kv` of the tp ranks hold different key/value heads, the rest are copies; `ulysses` of the cp ranks exchange heads,
    the rest form rings; `shard` of the dp·cp ranks hold different ZeRO shards, the rest replicate. `order` is slowest
    first: the last axis has adjacent ranks.
    """

    pp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)
    kv: int = Field(1, ge=1)
    ulysses: int = Field(1, ge=1)
    shard: int = Field(1, ge=1)
    sequence_parallel: bool = False
    order: tuple[str, ...] = AXES

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def ranks_per_stage(self) -> int:
        return self.dp * self.cp * self.tp

    def size(self, group: str) -> int:
        """The number of ranks in each group of that name."""
        return {
            "kv": self.kv,
            "copies": self.tp // self.kv,
            "ring": self.cp // self.ulysses,
            "ulysses": self.ulysses,
            "dp_cp": self.dp * self.cp,
            "shard": self.shard,
            "replicate": self.dp * self.cp // self.shard,
            "edp": self.ranks_per_stage // (self.ep * self.etp),
            "tied": min(self.pp, 2),
            "stage": self.ranks_per_stage,
            "world": self.world,
        }.get(group) or int(getattr(self, group))

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank in every view."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} of a world of {self.world}")
        return _all_coordinates(self)[rank]

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank that stands at these dense coordinates."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.order:
            rank = rank * int(getattr(self, axis)) + at[axis]
        return rank

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups of that name, each with its ranks in the order of the varying coordinate."""
        return _groups(self, name)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The group of that name in which `rank` stands; of `tied`, the first and last stage of its pipeline."""
        return _groups_by_rank(self, name)[rank]


def _digits(number: int, radices: list[int]) -> list[int]:
    """Mixed-radix digits, slowest first."""
    digits = []
    for radix in reversed(radices):
        number, digit = divmod(number, radix)
        digits.append(digit)
    return digits[::-1]


def _coordinates(layout: Layout, rank: int) -> Coordinates:
    sizes = [int(getattr(layout, axis)) for axis in layout.order]
    at = dict(zip(layout.order, _digits(rank, sizes), strict=True))

    def flat(*axes: str) -> int:
        """The index within these axes, flattened in the order in which they stand in `order`."""
        index = 0
        for axis in layout.order:
            if axis in axes:
                index = index * int(getattr(layout, axis)) + at[axis]
        return index

    copies = layout.tp // layout.kv
    replicate, shard = divmod(flat("dp", "cp"), layout.shard)
    edp, ep, etp = _digits(flat("dp", "cp", "tp"), [layout.ranks_per_stage, layout.ep, layout.etp])
    return Coordinates(
        **at,
        kv=at["tp"] // copies,
        copy=at["tp"] % copies,
        ring=at["cp"] // layout.ulysses,
        ulysses=at["cp"] % layout.ulysses,
        replicate=replicate,
        shard=shard,
        edp=edp,
        ep=ep,
        etp=etp,
    )


@lru_cache(maxsize=16)
def _all_coordinates(layout: Layout) -> tuple[Coordinates, ...]:
    assert prod(int(getattr(layout, axis)) for axis in layout.order) == layout.world
    return tuple(_coordinates(layout, rank) for rank in range(layout.world))


@lru_cache(maxsize=128)
def _groups(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    common = GROUPS[name]
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, at in enumerate(_all_coordinates(layout)):
        members[tuple(getattr(at, c) for c in common)].append(rank)
    # Pipelines run in the order of their stages, whatever the rank order; the others in the order of ranks, which is
    # the order of their own coordinate since a coordinate grows with the rank when all others stay.
    groups = tuple(tuple(ranks) for ranks in members.values())
    return tuple(tuple(dict.fromkeys((g[0], g[-1]))) for g in groups) if name == "tied" else groups


@lru_cache(maxsize=128)
def _groups_by_rank(layout: Layout, name: str) -> Mapping[int, tuple[int, ...]]:
    if name == "tied":
        pipelines = _groups_by_rank(layout, "pp")
        return {rank: tuple(dict.fromkeys((g[0], g[-1]))) for rank, g in pipelines.items()}
    return {rank: group for group in _groups(layout, name) for rank in group}
