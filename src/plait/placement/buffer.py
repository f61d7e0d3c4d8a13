"""Buffers: which parameters of a rank lie side by side in one flat row, and which part of the row each shard owns.

A buffer is what one collective moves: gradients are summed and weights gathered buffer by buffer (Rajbhandari et al.
2020). Whatever asks where a shard's elements belong in the global tensors asks here. A number, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from plait.placement.cuts import Rectangle, area
from plait.placement.place import Placement, Placements, homes

BUCKET_ELEMENTS = 2**20  # below ZeRO 3 a buffer closes once it holds this many: enough to hide the latency of a call

# (domain of a gradient, ZeRO or not) -> (group of different shards, group that repeats each of them)
SHARDING: Mapping[tuple[str, bool], tuple[str, str]] = {
    ("dp_cp", False): ("self", "dp_cp"),
    ("dp_cp", True): ("shard", "replicate"),
    ("edp", False): ("self", "edp"),
    ("edp", True): ("edp", "self"),
}


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a rank's flat rectangle of a tensor. `sharded`: other ranks hold the rest."""

    placement: Placement
    start: int
    stop: int
    sharded: bool

    @property
    def copies(self) -> int:
        """Ranks of the world that hold the same elements."""
        layout, shard_group = self.placement.layout, SHARDING[self.placement.domain, True][0]
        return self.placement.copies // (layout.size(shard_group) if self.sharded else 1)

    def first_copy(self, rank: int) -> bool:
        """Whether `rank` is the one that speaks for all copies."""
        return self.placement.first_copy(rank, self.sharded)

    def rectangles(self, rank: int) -> Iterator[Rectangle]:
        """The rectangles of the global tensor whose elements, one after the other, are the piece."""
        return _rectangles(self.placement.rectangle(rank), self.start, self.stop)


@dataclass(frozen=True)
class Member:
    """A module parameter in a buffer: its path, the tensors that it stacks with their sizes, and where it begins."""

    home: str
    placements: tuple[Placement, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + sum(self.sizes)


@dataclass(frozen=True)
class Buffer:
    """`shards` parts of `length` elements each; what no member fills is padding and holds zeros.

    `units` are the parts of the decoder ("embedding", "blocks.3", "head") whose forward reads it; `stages` those of
    this rank whose backward completes its gradient.
    """

    members: tuple[Member, ...]
    units: tuple[str, ...]
    stages: tuple[int, ...]
    domain: str
    shards: int
    length: int

    @property
    def size(self) -> int:
        return self.shards * self.length

    @property
    def padding(self) -> int:
        return self.size - sum(sum(member.sizes) for member in self.members)

    def gathers(self, zero: int) -> bool:
        """Whether a ZeRO stage shards its weights, so that they are gathered to be read."""
        return zero == 3 and self.shards > 1

    def republishes(self, zero: int) -> bool:
        """Whether a ZeRO stage leaves each rank with new weights of its shard alone, after the update."""
        return zero in (1, 2) and self.shards > 1

    @staticmethod
    def keeps_whole(zero: int) -> bool:
        """Whether gradients stay whole until a step's last backward under a ZeRO stage."""
        return zero < 2

    def pieces(self, shard: int | None) -> list[tuple[Piece, int]]:
        """What a shard owns (None: all of the buffer), each with its offset in the buffer."""
        low, high = (0, self.size) if shard is None else (shard * self.length, (shard + 1) * self.length)
        found = []
        for member in self.members:
            begins = accumulate(member.sizes, initial=member.start)
            for placement, size, begin in zip(member.placements, member.sizes, begins, strict=False):
                start, stop = max(low, begin), min(high, begin + size)
                if start < stop:
                    found.append((Piece(placement, start - begin, stop - begin, shard is not None), start))
        return found


def buffers(placements: Placements, rank: int, unit: str = "element") -> tuple[Buffer, ...]:
    """The buffers of a rank, in the order in which backward completes them; a tied table's is its own and the last.

    A buffer never mixes parameters of different stages, of different gradient domains, or such as tp ranks hold alike
    with such as they cut: copies must stay equal to the last bit, and the order in which a ring adds an element up
    depends on the size of the whole. Under ZeRO 3 it also never mixes parts of the decoder that are gathered apart.
    `unit` is what a shard's border may not cut: an "element", or a whole "matrix".
    """
    opened: dict[tuple[object, ...], list[tuple[str, tuple[Placement, ...]]]] = {}
    found: list[tuple[tuple[object, ...], list[tuple[str, tuple[Placement, ...]]]]] = []
    for home, stacked in reversed(homes(placements, rank).items()):
        key = _key(stacked, rank)
        by_part = stacked[0].zero_stage == 3
        if key not in opened or (not by_part and sum(_size(p, rank) for _, p in opened[key]) >= BUCKET_ELEMENTS):
            opened[key] = []
            found.append((key, opened[key]))
        opened[key].append((home, stacked))
    found.sort(key=lambda entry: entry[1][0][1][0].tensor.also is not None)
    return tuple(_buffer(members, rank, unit) for _, members in found)


def _key(stacked: tuple[Placement, ...], rank: int) -> tuple[object, ...]:
    first = stacked[0]
    alike = first.layout.tp > 1 and any(p.copied_over_tp for p in stacked)
    part = _unit(first) if first.zero_stage == 3 else None
    return first.stages_on(rank), first.domain, alike, first.tensor.also, part


def _unit(placement: Placement) -> str:
    layer = placement.tensor.layer
    return placement.tensor.part if layer is None else f"blocks.{layer}"


def _units(placement: Placement) -> tuple[str, ...]:
    return ("embedding", "head") if placement.tensor.also else (_unit(placement),)


def _size(stacked: Sequence[Placement], rank: int) -> int:
    return sum(area(p.rectangle(rank)) for p in stacked)


def _buffer(members: list[tuple[str, tuple[Placement, ...]]], rank: int, unit: str) -> Buffer:
    first = members[0][1][0]
    shards = first.layout.size(SHARDING[first.domain, first.zero_stage > 0][0])
    starts, length = _LAYOUTS[unit]([_size(stacked, rank) for _, stacked in members], shards)
    return Buffer(
        members=tuple(
            Member(home, stacked, tuple(area(p.rectangle(rank)) for p in stacked), start)
            for (home, stacked), start in zip(members, starts, strict=True)
        ),
        units=tuple(dict.fromkeys(name for _, stacked in members for name in _units(stacked[0]))),
        stages=first.stages_on(rank),
        domain=first.domain,
        shards=shards,
        length=length,
    )


def _by_element(sizes: Sequence[int], shards: int) -> tuple[list[int], int]:
    """Members without a gap; a border may fall anywhere."""
    return list(accumulate(sizes, initial=0))[:-1], -(-sum(sizes) // shards)


def _by_matrix(sizes: Sequence[int], shards: int) -> tuple[list[int], int]:
    """The shortest length with which no border cuts a member, when shards take members in order."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _shard_of_each(sizes, middle)[-1] < shards else (middle + 1, high)
    found = _shard_of_each(sizes, low)
    starts: list[int] = []
    for index, shard in enumerate(found):
        follows = index > 0 and found[index - 1] == shard
        starts.append(starts[-1] + sizes[index - 1] if follows else shard * low)
    return starts, low


def _shard_of_each(sizes: Sequence[int], length: int) -> list[int]:
    shard, used, found = 0, 0, []
    for size in sizes:
        shard, used = (shard, used + size) if used + size <= length else (shard + 1, size)
        found.append(shard)
    return found


_LAYOUTS: Mapping[str, Callable[[Sequence[int], int], tuple[list[int], int]]] = {
    "element": _by_element,
    "matrix": _by_matrix,
}


def _rectangles(whole: Rectangle, start: int, stop: int) -> Iterator[Rectangle]:
    """Flat elements start to stop of a rectangle: the end of a row, whole rows, the beginning of a row; row by row."""
    if start >= stop:
        return
    (low, _), inner = whole[0], area(whole[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        row = low + last
        yield from (
            ((row, row + 1), *rest) for rest in _rectangles(whole[1:], start - last * inner, stop - last * inner)
        )
        return
    if start % inner:
        row = low + first - 1
        yield from (((row, row + 1), *rest) for rest in _rectangles(whole[1:], start % inner, inner))
    if first < last:
        yield ((low + first, low + last), *whole[1:])
    if stop % inner:
        row = low + last
        yield from (((row, row + 1), *rest) for rest in _rectangles(whole[1:], 0, stop % inner))
