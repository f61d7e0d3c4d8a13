"""What all parts of a stage in sizes need: the rank, the tape, weights by path, and which parts are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from plait.planner.seat import Seat
from plait.planner.sized.again import Results, part
from plait.planner.sized.collectives import Parts
from plait.planner.sized.tape import Leaf, Sized, Tape


@dataclass
class Late:
    """What linears leave for W, while somebody keeps it: weight, input, output gradient, whether the input is split."""

    kept: list[tuple[Leaf, Sized, Sized, bool]] | None = None


Outputs = tuple[Sized, dict[str, Sized]]  # activations, and loss terms by name
Tables = tuple[Sized, ...]  # cosines and sines of the tokens here; none where positions are not rotary


@dataclass(frozen=True)
class Stage:
    """A stage of a rank."""

    seat: Seat
    tape: Tape
    weights: Mapping[str, Leaf]
    late: Late | None
    fused_norm: bool
    recomputed: tuple[str, ...] = ()  # parts of the block at work that are computed again
    results: Results | None = field(default=None)

    @cached_property
    def spread(self) -> Parts:
        """The tp ranks, over tokens."""
        return Parts(self.seat.layout.tp, self.rows)

    @property
    def rows(self) -> int:
        return self.seat.run.batch.micro_size

    @property
    def split(self) -> bool:
        return self.seat.layout.sequence_parallel and self.seat.layout.tp > 1

    @property
    def tp(self) -> int:
        return self.seat.layout.tp

    @property
    def width(self) -> int:
        return self.seat.widths.compute

    @property
    def wide(self) -> int:
        return self.seat.widths.wide

    def part(self, name: str, compute: Callable[..., Sized], *inputs: Sized) -> Sized:
        """A part of a block, computed again in backward where the run says so."""
        if name not in self.recomputed or self.results is None:
            return compute(*inputs)
        return part(self.tape, self.results, compute, *inputs)
