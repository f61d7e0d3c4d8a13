"""One rank of a run that plait itself trains, as values: where it stands, its stages, its buffers, its program.

The plan of other programs is an estimate (`memory.py`, `work.py`); of this one much is exact, since placement and
schedule are the ones that training executes. What a rank sends is in `traffic.py`; its model states are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from plait.placement import Buffer, Piece, buffers, place, stages_of
from plait.placement.buffer import SHARDING
from plait.placement.bytes import SIZES, element_bytes
from plait.placement.place import Placements
from plait.placement.stages import StageMap
from plait.planner.steady import LONG, numbers_per_token
from plait.schedule.actions import DROP, REDUCE, Action, Program, Schedule, W
from plait.schedule.of_run import schedules
from plait.spec.layout import Coordinates, Layout
from plait.spec.run import SHARD_UNITS, RunSpec


@dataclass(frozen=True)
class Widths:
    """Bytes of a number: of weights and activations, of what is never narrower than float32, and of gradients as they
    are added up and as they travel. `apart`: whether adding up needs a dtype of its own."""

    compute: int
    wide: int
    accumulate: int
    reduce: int
    apart: bool

    @classmethod
    def of(cls, run: RunSpec) -> Widths:
        precision = run.precision
        compute = SIZES[precision.compute]
        wide = max(compute, SIZES["float32"])
        accumulate, reduce = (
            wide if name == "float32" else SIZES[name] for name in (precision.grad_accumulate, precision.grad_reduce)
        )
        full = precision.compute if compute > SIZES["float32"] else "float32"
        meant = full if precision.grad_accumulate == "float32" else precision.grad_accumulate
        return cls(compute, wide, accumulate, reduce, meant != precision.compute)


@dataclass(frozen=True)
class Row:
    """A buffer and what training does with it."""

    buffer: Buffer
    zero: int
    groups: tuple[str, str]  # of different shards, and of those that repeat each
    collects: bool  # gradients have a flat tensor of their own


@lru_cache(maxsize=8)
def _of_all_ranks(run: RunSpec, layout: Layout) -> tuple[StageMap, Placements]:
    stages = stages_of(run, layout)
    return stages, place(run.model, layout, run.zero, stages)


@dataclass(frozen=True)
class Seat:
    """A rank of a run that fits its layout."""

    run: RunSpec
    layout: Layout
    rank: int

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @cached_property
    def widths(self) -> Widths:
        return Widths.of(self.run)

    @cached_property
    def stages(self) -> StageMap:
        return _of_all_ranks(self.run, self.layout)[0]

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.stages.owned_by(self.at.pp)

    @cached_property
    def placements(self) -> Placements:
        return _of_all_ranks(self.run, self.layout)[1]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        found = []
        for buffer in buffers(self.placements, self.rank, SHARD_UNITS[self.run.optim.name]):
            groups = SHARDING[buffer.domain, self.run.zero.stage > 0]
            collects = any(self.layout.size(group) > 1 for group in groups) or self.widths.apart
            found.append(Row(buffer, self.run.zero.stage, groups, collects))
        return tuple(found)

    @cached_property
    def schedule(self) -> Schedule:
        return schedules(self.run, self.layout.dp)[0]

    @property
    def program(self) -> Program:
        return self.schedule.programs[self.at.pp]

    @property
    def micro_batches(self) -> int:
        return self.run.batch.micro_batches(self.layout.dp)

    @property
    def tokens(self) -> int:
        """Of one micro-batch on this rank, where all tp ranks have the same."""
        return self.run.batch.micro_size * self.run.batch.sequence // self.layout.cp

    @property
    def batch(self) -> int:
        """Bytes of a step's tokens, labels and places on this rank."""
        places = 0 if self.run.data.mask_documents else self.tokens // self.run.batch.micro_size
        return LONG * (numbers_per_token(self.run) * self.micro_batches * self.tokens + places)

    @property
    def between(self) -> int:
        """Of one micro-batch on this rank, between matrices."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    def rows_of(self, stage: int) -> list[int]:
        """The rows that a stage reads, by number."""
        return [number for number, row in enumerate(self.rows) if stage in row.buffer.stages]

    def pieces(self) -> list[Piece]:
        """What this rank keeps of each tensor's gradient."""
        shards = [getattr(self.at, row.groups[0]) if row.zero else None for row in self.rows]
        return [found for row, n in zip(self.rows, shards, strict=True) for found, _ in row.buffer.pieces(n)]

    def states(self) -> dict[str, int]:
        """Bytes of this rank's model states by kind after a step, to the byte: padding where buffers have it."""
        widths, rows = self.widths, self.rows
        own = sum(row.buffer.length if row.buffer.gathers(row.zero) else row.buffer.size for row in rows)
        updated = sum(p.stop - p.start for p in self.pieces())
        return {
            "weights": own * widths.compute,
            "gradients": sum(self._gradients(row) for row in rows),
            "master": sum(row.buffer.length for row in rows) * widths.wide if widths.compute < widths.wide else 0,
            "moments": updated * element_bytes(self.run)["moments"],
        }

    def _gradients(self, row: Row) -> int:
        if not row.collects:  # they stay where backward puts them
            return sum(sum(member.sizes) for member in row.buffer.members) * self.widths.compute
        return (row.buffer.size if row.buffer.keeps_whole(row.zero) else row.buffer.length) * self.widths.accumulate

    def times(self) -> tuple[list[int], list[int]]:
        """How often each row is gathered, and how often its gradient is reduced, in one step."""
        gathered, reduced = [0] * len(self.rows), [0] * len(self.rows)
        whole: set[int] = set()
        for action in self.program:
            for stage in _touched(action):
                read = self.rows_of(stage)
                for number in set(read) - whole:
                    gathered[number] += 1
                whole |= set(read) if self.run.zero.keep else {n for n in read if len(self.rows[n].buffer.units) > 1}
            if action.kind is DROP:
                whole -= set(self.rows_of(action.stage))
            if action.kind is REDUCE:
                for number in self.rows_of(action.stage):
                    reduced[number] += 1
        once = [1 if row.buffer.keeps_whole(row.zero) else times for row, times in zip(self.rows, reduced, strict=True)]
        return [times * row.buffer.gathers(row.zero) for row, times in zip(self.rows, gathered, strict=True)], once


def _touched(action: Action) -> Iterator[int]:
    """The stages of whose weights an action reads any: a weight's gradient needs no weight."""
    return (part.stage for part in action.parts if part.kind is not W)
