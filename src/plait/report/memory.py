"""Where the memory goes: bytes of model states on a rank of each stage, by kind, and the same under every ZeRO stage.

All bytes come from the placement records and, for activations, from one micro-batch of each stage run in sizes. Buffers
of collectives and what the framework takes for itself are not counted, and the picture says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.placement import stages_of
from plait.placement.bytes import SHARDED_FROM, SIZES, element_bytes
from plait.planner.seat import Seat
from plait.planner.sized.kept import kept, peak_of
from plait.report.table import numbers, table
from plait.schedule.actions import Schedule
from plait.schedule.live import live
from plait.schedule.of_run import schedules
from plait.spec.layout import Layout
from plait.spec.pipeline import splits_backward
from plait.spec.run import RunSpec
from plait.spec.units import format_bytes

NOT_COUNTED = ("communication buffers", "the allocator's and torch's own")
MODES = ("none", "selective", "full")  # of recompute, that are shown side by side


@dataclass(frozen=True)
class RankBytes:
    """One rank of a (pp, tp) place: bytes by kind, ZeRO's padding included, and its share in them.

    No rank of the place holds more than this one, the first; `padding` is that of the last shard, which has the most.
    """

    rank: int
    pp: int
    tp: int
    kinds: Mapping[str, int]
    padding: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class PeakActivations:
    """Of a rank of one pp coordinate: what a micro-batch `keeps` (of it `logits` for the loss), the most that all
    micro-batches in flight keep beside the step's tokens and labels, and the most that there ever is."""

    pp: int
    keeps: int
    logits: int
    in_flight: int
    peak: int


@dataclass(frozen=True)
class MemoryPicture:
    """`zero[n]` has one entry per (pp, tp) place under ZeRO stage n; `ranks` ranks hold the same as each entry's."""

    stage: int  # of the run
    shards: int
    ranks: int
    layers: tuple[tuple[int, ...], ...]  # of each pp coordinate
    element_bytes: Mapping[str, int]
    zero: tuple[tuple[RankBytes, ...], ...]
    activations: tuple[PeakActivations, ...]  # by pp coordinate
    recompute: Mapping[str, tuple[PeakActivations, ...]]  # the same under other modes
    what: str
    micro_batch: str

    def largest(self, stage: int, pp: int | None = None) -> RankBytes:
        """The first rank with the most bytes under a ZeRO stage, of all or of one pp coordinate."""
        return max((r for r in self.zero[stage] if pp in (None, r.pp)), key=lambda r: r.total)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        largest = self.largest(self.stage)
        return {
            "zero_stage": self.stage,
            "shards": self.shards,
            "ranks_per_place": self.ranks,
            "bytes_per_element": dict(self.element_bytes),
            "largest": {"rank": largest.rank, "bytes": largest.total},
            "zero": [
                {"stage": stage, "ranks": [{**asdict(rank), "total": rank.total} for rank in ranks]}
                for stage, ranks in enumerate(self.zero)
            ],
            "activations": [asdict(rank) for rank in self.activations],
            "recompute": {mode: [asdict(rank) for rank in ranks] for mode, ranks in self.recompute.items()},
            "not_counted": list(NOT_COUNTED),
        }

    def text(self, width: int) -> str:
        """Bytes by kind and stage, the ZeRO stages side by side, and what is missing."""
        largest = self.largest(self.stage)
        parts = [
            [f"model states of one rank, ZeRO {self.stage}; {self.what}", *_kinds_table(self)],
            [f"largest: rank {largest.rank} (pp {largest.pp}, tp {largest.tp}), {format_bytes(largest.total)}"],
            _zero_table(self) if self.shards > 1 else ["ZeRO saves nothing here: dp·cp 1 leaves nobody to share with"],
            _activations_table(self),
            ["not counted: " + ", ".join(NOT_COUNTED)],
        ]
        return "\n\n".join("\n".join(lines) for lines in parts)


def picture_memory(run: RunSpec, layout: Layout) -> MemoryPicture:
    """The picture of a run that fits its layout."""
    stages, schedule = stages_of(run, layout), schedules(run, layout.dp)[0]
    each = element_bytes(run)
    zero = [
        _places(run.model_copy(update={"zero": run.zero.model_copy(update={"stage": stage})}), layout)
        for stage in range(1 + max(SHARDED_FROM.values()))
    ]
    return MemoryPicture(
        stage=run.zero.stage,
        shards=layout.size("shard"),
        ranks=layout.dp * layout.cp,
        layers=tuple(tuple(n for s in stages.owned_by(pp) for n in stages.layers[s]) for pp in range(layout.pp)),
        element_bytes=each,
        zero=tuple(zero),
        activations=peak_activations(run, layout, schedule),
        recompute={mode: peak_activations(_with_mode(run, mode), layout, schedule) for mode in MODES},
        micro_batch=f"{run.batch.micro_size} × {run.batch.sequence} tokens",
        what=f"{run.precision.compute}, {run.optim.name}",
    )


def peak_activations(run: RunSpec, layout: Layout, schedule: Schedule) -> tuple[PeakActivations, ...]:
    """By pp coordinate, of the run's schedule."""
    splits = splits_backward(run.schedule)
    seats = [Seat(run, layout, layout.rank(pp=pp)) for pp in range(layout.pp)]
    of = {stage: kept(seat, stage, splits) for seat in seats for stage in seat.mine}
    stages = [of[stage] for stage in sorted(of)]
    flight = live(schedule, [stage.between for stage in stages], [stage.late for stage in stages])
    found = []
    for seat, most in zip(seats, flight, strict=True):
        keeps = sum(of[stage].between for stage in seat.mine)
        logits = logits_bytes(run, layout) if seat.stages.last in seat.mine else 0
        peak = peak_of(seat, schedule, of)
        found.append(PeakActivations(seat.at.pp, keeps, logits, seat.batch + most.total, peak))
    return tuple(found)


def logits_bytes(run: RunSpec, layout: Layout) -> int:
    """What one micro-batch keeps of its logits on a rank with the head: log-probabilities, and for a z-loss logits too;
    of a loss in chunks those of one chunk at a time.
    """
    tokens = run.batch.micro_size * run.batch.sequence // layout.cp
    at_once = min(run.recompute.loss_chunk or tokens, tokens)
    wide = max(SIZES[run.precision.compute], SIZES["float32"])
    apart = layout.tp == 1 and run.model.z_loss > 0
    return at_once * -(-run.model.vocab // layout.tp) * wide * (1 + apart)


def _with_mode(run: RunSpec, mode: str) -> RunSpec:
    return run.model_copy(update={"recompute": run.recompute.model_copy(update={"mode": mode})})


def _places(run: RunSpec, layout: Layout) -> tuple[RankBytes, ...]:
    found = []
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            seat = Seat(run, layout, layout.rank(pp=pp, tp=tp))
            last = Seat(run, layout, layout.rank(pp=pp, tp=tp, dp=layout.dp - 1, cp=layout.cp - 1))
            found.append(RankBytes(seat.rank, pp, tp, seat.states(), _padding(last)))
    return tuple(found)


def _padding(seat: Seat) -> int:
    """Bytes in a rank's slices that hold nothing."""
    stage = seat.run.zero.stage
    sharded = sum(each for kind, each in element_bytes(seat.run).items() if stage >= SHARDED_FROM[kind])
    return sharded * sum(row.buffer.padding for row in seat.rows) if sharded else 0


def _kinds_table(picture: MemoryPicture) -> list[str]:
    kinds = [kind for kind, each in picture.element_bytes.items() if each]
    rows = []
    for pp, layers in enumerate(picture.layers):
        most = picture.largest(picture.stage, pp)
        sizes = [format_bytes(most.kinds[kind]) for kind in kinds]
        rows.append([str(pp), numbers(layers), *sizes, format_bytes(most.total), str(most.rank)])
    heads = [f">{kind} ({picture.element_bytes[kind]} B)" for kind in kinds]
    return table([">pp", "layers", *heads, ">total", ">its largest rank"], rows)


def _activations_table(picture: MemoryPicture) -> list[str]:
    rows = []
    for mine in picture.activations:
        others = [format_bytes(picture.recompute[mode][mine.pp].peak) for mode in MODES]
        states = picture.largest(picture.stage, mine.pp).total
        sizes = (mine.keeps, mine.logits, mine.in_flight, mine.peak, states + mine.peak)
        rows.append([str(mine.pp), *map(format_bytes, sizes), *others])
    heads = ["keeps", "of it logits", "in flight", "peak", "with states"]
    title = f"activations of one rank; a micro-batch is {picture.micro_batch}; peaks under recompute on the right"
    return [title, *table([">pp", *(f">{head}" for head in heads), *(f">{mode}" for mode in MODES)], rows)]


def _zero_table(picture: MemoryPicture) -> list[str]:
    stages = range(len(picture.zero))
    rows = [
        [f"pp {pp}", *(format_bytes(picture.largest(stage, pp).total) for stage in stages)]
        for pp in range(len(picture.layers))
    ]
    most = [max(rank.padding for rank in ranks) for ranks in picture.zero]
    rows.append(["of it padding, at most", *map(format_bytes, most)])
    sharded = ", ".join(
        f"{kind} from {stage} on" for kind, stage in SHARDED_FROM.items() if picture.element_bytes[kind]
    )
    title = f"the same under every ZeRO stage over {picture.shards} ranks: {sharded}"
    return [title, *table(["largest rank of", *(f">ZeRO {stage}" for stage in stages)], rows)]
