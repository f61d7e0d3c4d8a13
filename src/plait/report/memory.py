"""Where the memory goes: bytes of model states on a rank of each stage, by kind, and the same under every ZeRO stage.

All bytes come from the placement records. Activations, communication buffers, and what the framework takes for itself
are not counted yet, and the picture says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.placement import Placement, buffers, place, stages_of
from plait.placement.bytes import SHARDED_FROM, element_bytes, state_bytes
from plait.report.table import numbers, table
from plait.spec.layout import Layout
from plait.spec.run import SHARD_UNITS, RunSpec
from plait.spec.units import format_bytes

NOT_COUNTED = ("activations", "communication buffers", "the allocator's and torch's own")


@dataclass(frozen=True)
class RankBytes:
    """One rank of a (pp, tp) place: bytes by kind, ZeRO's padding included, and its share in them.

    All ranks of the place hold as much; `padding` is that of the last shard, which has the most.
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
class MemoryPicture:
    """`zero[n]` has one entry per (pp, tp) place under ZeRO stage n; `ranks` ranks hold the same as each entry's."""

    stage: int  # of the run
    shards: int
    ranks: int
    layers: tuple[tuple[int, ...], ...]  # of each pp coordinate
    element_bytes: Mapping[str, int]
    zero: tuple[tuple[RankBytes, ...], ...]
    what: str

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
            "not_counted": list(NOT_COUNTED),
        }

    def text(self, width: int) -> str:
        """Bytes by kind and stage, the ZeRO stages side by side, and what is missing."""
        largest = self.largest(self.stage)
        parts = [
            [f"model states of one rank, ZeRO {self.stage}; {self.what}", *_kinds_table(self)],
            [f"largest: rank {largest.rank} (pp {largest.pp}, tp {largest.tp}), {format_bytes(largest.total)}"],
            _zero_table(self) if self.shards > 1 else ["ZeRO saves nothing here: dp·cp 1 leaves nobody to share with"],
            ["not counted yet: " + ", ".join(NOT_COUNTED)],
        ]
        return "\n\n".join("\n".join(lines) for lines in parts)


def picture_memory(run: RunSpec, layout: Layout) -> MemoryPicture:
    """The picture of a run that fits its layout."""
    stages = stages_of(run, layout)
    each = element_bytes(run)
    zero = []
    for stage in range(1 + max(SHARDED_FROM.values())):
        spec = run.zero.model_copy(update={"stage": stage})
        zero.append(_places(place(run.model, layout, spec, stages), run, layout))
    return MemoryPicture(
        stage=run.zero.stage,
        shards=layout.size("shard"),
        ranks=layout.dp * layout.cp,
        layers=tuple(tuple(n for s in stages.owned_by(pp) for n in stages.layers[s]) for pp in range(layout.pp)),
        element_bytes=each,
        zero=tuple(zero),
        what=f"{run.precision.compute}, {run.optim.name}",
    )


def _places(placements: Mapping[str, Placement], run: RunSpec, layout: Layout) -> tuple[RankBytes, ...]:
    found = []
    for pp in range(layout.pp):
        held = {name: placement for name, placement in placements.items() if pp in placement.holders}
        for tp in range(layout.tp):
            rank = layout.rank(pp=pp, tp=tp)
            last = layout.rank(pp=pp, tp=tp, dp=layout.dp - 1, cp=layout.cp - 1)
            found.append(RankBytes(rank, pp, tp, state_bytes(held, run, rank), _padding(held, run, last)))
    return tuple(found)


def _padding(held: Mapping[str, Placement], run: RunSpec, rank: int) -> int:
    """Bytes in a rank's slices that hold nothing."""
    stage = next(iter(held.values())).zero_stage
    sharded = sum(each for kind, each in element_bytes(run).items() if stage >= SHARDED_FROM[kind])
    return sharded * sum(b.padding for b in buffers(held, rank, SHARD_UNITS[run.optim.name])) if sharded else 0


def _kinds_table(picture: MemoryPicture) -> list[str]:
    kinds = [kind for kind, each in picture.element_bytes.items() if each]
    rows = []
    for pp, layers in enumerate(picture.layers):
        most = picture.largest(picture.stage, pp)
        sizes = [format_bytes(most.kinds[kind]) for kind in kinds]
        rows.append([str(pp), numbers(layers), *sizes, format_bytes(most.total), str(most.rank)])
    heads = [f">{kind} ({picture.element_bytes[kind]} B)" for kind in kinds]
    return table([">pp", "layers", *heads, ">total", ">its largest rank"], rows)


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
