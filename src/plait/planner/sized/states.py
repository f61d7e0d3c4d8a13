"""The buffers of a rank at work in sizes: weights gathered and dropped, gradients collected, reduced and kept.

As `parallel/row.py` and `parallel/zero.py` do it over NCCL. Weights and gradients that stay are states, which others
count; what comes and goes with them is counted here as buffers, and what a sum arrives in as an activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from plait.placement.place import homes
from plait.planner.seat import Row, Seat
from plait.planner.sized.stage import Outputs
from plait.planner.sized.tape import Grads, Heap, Leaf, Memory, Saved, Sized, Tape

Place = tuple[int, int]  # of a weight: its row, and which member it is


@dataclass
class Work:
    """What is there of a row now."""

    row: Row
    whole: Memory | None = None  # gathered weights
    collected: Memory | None = None  # gradients on their way to be sharded
    filled: set[int] = field(default_factory=set)
    waiting: int = 0
    flushed: int = 0
    reducing: list[Memory] | None = None
    summed: bool = False


class Rows:
    """All rows of a rank. `buffers` is where what comes and goes is counted."""

    def __init__(self, seat: Seat, tape: Tape) -> None:
        self.seat, self.tape, self.buffers = seat, tape, Heap()
        self.work = [Work(row) for row in seat.rows]
        self.next: dict[int, int] = {}
        self.in_flight: deque[Work] = deque()

    def weights(self) -> dict[str, Leaf]:
        """Every parameter of this rank by its path; a tied table by that of its second reader too."""
        found = {}
        for number, row in enumerate(self.seat.rows):
            for index, member in enumerate(row.buffer.members):
                leaf = Leaf(Memory(0, None), sum(member.sizes), self.seat.widths.compute, self, (number, index))
                found[member.home] = leaf
        for home, (first, *_) in homes(self.seat.placements, self.seat.rank).items():
            if first.tensor.also is not None:
                found |= {name: found[home] for name in (first.tensor.name, first.tensor.also)}
        return found

    # --- gradients ---

    def keeps(self, place: Place) -> bool:
        work = self.work[place[0]]
        return not work.row.collects and place[1] not in work.filled

    def add(self, place: Place, gradient: Sized) -> None:
        work = self.work[place[0]]
        self._add(work, place[1])
        stage = work.row.buffer.stages[0]
        if stage in self.next:
            work.waiting -= 1
            self._reduce_complete(stage)

    def _add(self, work: Work, index: int) -> None:
        self._settle(work)
        if work.row.collects and not self._keeps_whole(work) and work.collected is None:
            work.collected = Memory(work.row.buffer.size * self.seat.widths.reduce, self.buffers)
        work.filled.add(index)

    def arm(self, stage: int) -> None:
        self.next[stage] = 0
        for number in self.seat.rows_of(stage):
            self.work[number].waiting = len(self.work[number].row.buffer.members)

    def flush(self, stage: int) -> None:
        for number in self.seat.rows_of(stage):
            self.work[number].waiting = 0
            self.work[number].flushed += 1
        self.next.setdefault(stage, 0)
        self._reduce_complete(stage, flushing=True)
        del self.next[stage]

    def _reduce_complete(self, stage: int, flushing: bool = False) -> None:
        rows = self.seat.rows_of(stage)
        while self.next[stage] < len(rows):
            work = self.work[rows[self.next[stage]]]
            several = len(work.row.buffer.stages) > 1
            if work.waiting > 0 or (several and not flushing):
                return
            self.next[stage] += 1
            if not several or not self._keeps_whole(work) or work.flushed == len(work.row.buffer.stages):
                self._reduce(work)

    def _reduce(self, work: Work) -> None:
        while self.in_flight:
            self._settle(self.in_flight.popleft())
        row, widths, layout = work.row, self.seat.widths, self.seat.layout
        for index, member in enumerate(row.buffer.members):
            if index not in work.filled:
                zeros = self.tape.new(sum(member.sizes), widths.compute)
                self._add(work, index)
                del zeros
        if not row.collects:
            return
        shard, repeat = (layout.size(group) for group in row.groups)
        work.reducing = []
        whole = self._keeps_whole(work)
        if whole and widths.accumulate != widths.reduce:
            moved = not row.zero and repeat > 1
            work.reducing.append(Memory(row.buffer.size * widths.reduce, self.buffers if moved else self.tape.heap))
        if row.zero and shard > 1:
            stays = not whole and not work.summed and widths.accumulate == widths.reduce
            work.reducing.append(Memory(row.buffer.length * widths.reduce, None if stays else self.tape.heap))
        if not whole:
            work.filled.clear()
        if row.zero:
            self.in_flight.append(work)

    def _settle(self, work: Work) -> None:
        if work.reducing is None:
            return
        work.reducing, work.summed = None, True
        if not work.filled:
            work.collected = None

    def finish(self) -> None:
        """After a step's last backward."""
        widths, travelling = self.seat.widths, []
        for work in self.work:
            self._settle(work)
            repeats = self.seat.layout.size(work.row.groups[1]) > 1
            if work.row.zero and repeats and widths.accumulate != widths.reduce:
                travelling.append(Memory(work.row.buffer.length * widths.reduce, self.buffers))
        travelling.clear()
        pieces = self.seat.pieces()
        for name in ("copies", "tp", "tied"):
            if self.seat.layout.size(name) > 1:
                elements = sum(p.stop - p.start for p in pieces if name in p.placement.partial)
                Memory(elements * widths.accumulate, self.buffers)

    @staticmethod
    def _keeps_whole(work: Work) -> bool:
        return work.row.buffer.keeps_whole(work.row.zero)

    # --- weights ---

    def gather(self, numbers: list[int]) -> None:
        for number in numbers:
            work = self.work[number]
            if work.whole is None:
                work.whole = Memory(work.row.buffer.size * self.seat.widths.compute, self.buffers)

    def leave(self, numbers: list[int]) -> None:
        for number in numbers:
            self.work[number].whole = None

    def drop(self, stage: int) -> None:
        self.leave(self.seat.rows_of(stage))


@dataclass
class Unit:
    """A part of a stage whose weights are gathered together."""

    rows: Rows
    reads: list[int]
    before: Unit | None = None
    after: Unit | None = None

    def enter(self, ahead: Unit | None) -> None:
        self.rows.gather([*self.reads, *(ahead.reads if ahead is not None else ())])

    def leave(self) -> None:
        seat = self.rows.seat
        self.rows.leave([n for n in self.reads if len(seat.rows[n].buffer.units) == 1 and not seat.run.zero.keep])


def units_of(rows: Rows, stage: int) -> dict[str, Unit]:
    """The parts of a stage that read weights which have to be gathered, by path."""
    seat = rows.seat
    found: dict[str, Unit] = {}
    first, last = ["embedding"] * (stage == 0), ["head"] * (stage == seat.stages.last)
    for path in (*first, *(f"blocks.{layer}" for layer in seat.stages.layers[stage]), *last):
        reads = [
            n for n in seat.rows_of(stage)
            if path in seat.rows[n].buffer.units and seat.rows[n].buffer.gathers(seat.run.zero.stage)
        ]  # fmt: skip
        if reads:
            unit = Unit(rows, reads, before=next(reversed(found.values()), None))
            if unit.before is not None:
                unit.before.after = unit
            found[path] = unit
    return found


def gathered(t: Tape, unit: Unit | None, compute: Callable[..., Outputs], *inputs: Sized) -> Outputs:
    """A part of a stage, whose weights are there while it works."""
    if unit is None:
        return compute(*inputs)
    unit.enter(unit.after)
    y, terms = compute(*(_watched(t, x, unit.leave) for x in inputs))
    unit.leave()
    return _ahead(t, unit, y, terms)


def _watched(t: Tape, x: Sized, then: Callable[[], None]) -> Sized:
    out = x.detach()

    def backward(_: Saved, grads: Grads) -> Grads:
        then()
        return grads

    t.record((x,), (out,), (), backward)
    return out


def _ahead(t: Tape, unit: Unit, y: Sized, terms: dict[str, Sized]) -> Outputs:
    given = [y, *terms.values()]
    outs = [x.detach() for x in given]

    def backward(_: Saved, grads: Grads) -> Grads:
        unit.enter(unit.before)
        return grads

    t.record(given, outs, (), backward)
    return outs[0], dict(zip(terms, outs[1:], strict=True))
