"""Who holds what: the rank map, the groups, the layers and parameters of each stage, and how each role is cut.

Everything is read from the layout and the placement records; nothing here computes a cut or a group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.placement import Placement, StageMap, place, stages_of
from plait.placement.cuts import area
from plait.placement.tokens import imbalance, ring_chunks, ring_pairs, ring_runs
from plait.report.table import elide, numbers, table
from plait.spec.layout import GROUPS, Layout
from plait.spec.run import RunSpec
from plait.spec.units import format_count

EXPERT_GROUPS = ("edp", "ep", "etp")
SHOWN_CHUNK = 16  # tokens of a chunk in which pairs are counted: the shares hardly depend on it
ROWS, COLUMNS, SHOWN_GROUPS = 10, 8, 4  # more replicas, stages or groups than this are elided in the text


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage: its owner's pp coordinate, its blocks, and the elements that a rank of it holds for it."""

    stage: int
    pp: int
    layers: tuple[int, ...]
    embedding: bool
    head: bool
    parameters_smallest: int
    parameters_largest: int


@dataclass(frozen=True)
class RoleRow:
    """All tensors of one role, which are cut alike: `dim` over group `over` into `parts`, or whole; and perhaps a
    `second` dim, group and number of parts."""

    role: str
    tensors: tuple[str, ...]  # "*" stands for every block
    count: int
    dim: int | None
    over: str | None
    parts: int
    gradient_sum_over: tuple[str, ...]  # groups of more than one rank
    copies: int
    second: tuple[int, str, int] | None = None


@dataclass(frozen=True)
class LayoutPicture:
    """`replicas[dp][pp]` are the ranks that run one stage of one replica; `groups` has every kind of 2 ranks or more.

    Kinds with the very same groups stand in one entry, "tp = kv". `notes` says what a reader would stumble over.
    """

    axes: Mapping[str, int]
    sequence_parallel: bool
    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    stages: tuple[StageRow, ...]
    roles: tuple[RoleRow, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        world = sum(len(ranks) for replica in self.replicas for ranks in replica)
        return {"world": world, **asdict(self), "order": list(self.axes)}

    def text(self, width: int) -> str:
        """Five short tables."""
        world = sum(len(ranks) for replica in self.replicas for ranks in replica)
        axes = " × ".join(f"{axis} {size}" for axis, size in self.axes.items())
        suffix = ", sequence parallel" if self.sequence_parallel else ""
        parts = [
            [f"{world} rank{'s' * (world > 1)} = {axes} (slowest first){suffix}"],
            ["ranks of each replica and stage", *_rank_map(self)],
            ["groups of 2 ranks or more", *_group_table(self.groups)],
            ["stages", *_stage_table(self.stages)],
            ["how each role is cut", *_role_table(self.roles)],
            list(self.notes),
        ]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def picture_layout(run: RunSpec, layout: Layout) -> LayoutPicture:
    """The picture of a run that fits its layout."""
    stages = stages_of(run, layout)
    placements = tuple(place(run.model, layout, run.zero, stages).values())
    stage_rows = _stage_rows(placements, layout, stages)
    return LayoutPicture(
        axes={axis: int(getattr(layout, axis)) for axis in layout.order},
        sequence_parallel=layout.sequence_parallel,
        replicas=_replicas(layout),
        groups=_groups(layout, run.model.tied),
        stages=stage_rows,
        roles=_role_rows(placements, layout),
        notes=(*_uneven_notes(stage_rows), *_copy_notes(placements, layout), *_context_notes(run, layout)),
    )


def _replicas(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    cells: list[list[list[int]]] = [[[] for _ in range(layout.pp)] for _ in range(layout.dp)]
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        cells[at.dp][at.pp].append(rank)
    return tuple(tuple(map(tuple, replica)) for replica in cells)


def _groups(layout: Layout, tied: bool) -> dict[str, tuple[tuple[int, ...], ...]]:
    left_out = {*(() if layout.ep * layout.etp > 1 else EXPERT_GROUPS), *(() if tied else ("tied",))}
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name in GROUPS:
        if name not in left_out and layout.size(name) > 1:
            names.setdefault(layout.groups(name), []).append(name)
    return {" = ".join(same): groups for groups, same in names.items()}


def _stage_rows(placements: Sequence[Placement], layout: Layout, stages: StageMap) -> tuple[StageRow, ...]:
    rows = []
    for stage, owner in enumerate(stages.owner):
        held = [placement for placement in placements if stage in placement.stages]
        ranks = [layout.rank(pp=owner, tp=tp) for tp in range(layout.tp)]  # dp and cp only repeat them
        sizes = [sum(area(placement.rectangle(rank)) for placement in held) for rank in ranks]
        rows.append(
            StageRow(
                stage,
                owner,
                tuple(stages.layers[stage]),
                embedding=stage == 0,
                head=stage == stages.last,
                parameters_smallest=min(sizes),
                parameters_largest=max(sizes),
            )
        )
    return tuple(rows)


def _role_rows(placements: Sequence[Placement], layout: Layout) -> tuple[RoleRow, ...]:
    by_role: dict[str, list[Placement]] = {}
    for placement in placements:
        by_role.setdefault(placement.tensor.role, []).append(placement)
    return tuple(_role_row(role, same, layout) for role, same in by_role.items())


def _role_row(role: str, same: Sequence[Placement], layout: Layout) -> RoleRow:
    first = same[0]
    whole = first.dim is None
    names = (re.sub(r"^blocks\.\d+\.", "blocks.*.", placement.tensor.name) for placement in same)
    return RoleRow(
        role,
        tensors=tuple(dict.fromkeys(names)),
        count=len(same),
        dim=first.dim,
        over=None if whole else first.over,
        parts=1 if whole else layout.size(first.over),
        gradient_sum_over=tuple(group for group in first.partial if layout.size(group) > 1),
        copies=first.copies,
        second=None if first.second is None else (*first.second, layout.size(first.second[1])),
    )


def _uneven_notes(stages: Sequence[StageRow]) -> list[str]:
    lengths = [len(row.layers) for row in stages]
    if len(set(lengths)) == 1:
        return []
    return [f"uneven stages: {sum(lengths)} layers on {len(lengths)} stages, {min(lengths)} or {max(lengths)} each"]


def _copy_notes(placements: Sequence[Placement], layout: Layout) -> list[str]:
    notes = []
    if (copies := layout.size("copies")) > 1:
        notes.append(f"kv heads: {layout.kv} pieces over tp {layout.tp}, each on {copies} ranks of a tp group")
    for placement in placements:
        if placement.tensor.also:
            where = " and ".join(map(str, placement.stages))
            name, also = placement.tensor.name, placement.tensor.also
            notes.append(f"tied: {name} = {also}, held by stage{'s' * (len(placement.stages) > 1)} {where}")
    return notes


def _context_notes(run: RunSpec, layout: Layout) -> list[str]:
    """How even the work of a ring is, in the order that was asked for and in the other."""
    ring = layout.size("ring")
    if ring == 1:
        return []
    loads = {}
    for order in ("zigzag", "contiguous"):
        asked = run.model_copy(update={"layout": run.layout.model_copy(update={"context_order": order})})
        chunks = ring_chunks(asked)
        length = min(run.batch.sequence, chunks * ring * SHOWN_CHUNK)
        pairs = ring_pairs(ring_runs(length // (chunks * ring) * chunks * ring, ring, chunks))
        totals = [sum(step[rank] for step in pairs) for rank in range(ring)]
        loads[order] = imbalance(pairs), imbalance([totals])
    figures = "; ".join(
        f"{order} {worst:.2f} × the mean in the worst step, {whole:.2f} in all"
        for order, (worst, whole) in loads.items()
    )
    order, how = run.layout.context_order, run.layout.context
    return [
        f"context: ring {ring} × ulysses {layout.ulysses}, {order} order, keys by {how}",
        f"query-key pairs of the most loaded rank: {figures}",
    ]


def _rank_map(picture: LayoutPicture) -> list[str]:
    held: dict[int, list[str]] = {}
    for row in picture.stages:
        held.setdefault(row.pp, []).append(str(row.stage))
    head = ["", *elide([f"stage {', '.join(held[pp])}" for pp in sorted(held)], COLUMNS)]
    rows = [
        [f"replica {dp}", *elide([numbers(ranks) for ranks in replica], COLUMNS)]
        for dp, replica in enumerate(picture.replicas)
    ]
    if len(rows) > ROWS:
        rows = [*rows[: ROWS - 2], ["…"] * len(head), rows[-1]]
    return table(head, rows)


def _group_table(groups: Mapping[str, tuple[tuple[int, ...], ...]]) -> list[str]:
    if not groups:
        return ["none: every axis is 1"]
    rows = [
        [name, str(len(same)), str(len(same[0])), "  |  ".join(elide([numbers(g) for g in same], SHOWN_GROUPS))]
        for name, same in groups.items()
    ]
    return table(["kind", ">groups", ">ranks each", "ranks"], rows)


def _stage_table(stages: Sequence[StageRow]) -> list[str]:
    rows = [
        [str(row.stage), str(row.pp), numbers(row.layers), str(len(row.layers)), _ends(row), _parameters(row)]
        for row in stages
    ]
    return table([">stage", ">pp", "layers", ">count", "and", ">parameters per rank"], rows)


def _ends(row: StageRow) -> str:
    return ", ".join(name for name, there in (("embedding", row.embedding), ("head", row.head)) if there)


def _parameters(row: StageRow) -> str:
    smallest, largest = format_count(row.parameters_smallest), format_count(row.parameters_largest)
    return largest if smallest == largest else f"{smallest} to {largest}"


def _role_table(roles: Sequence[RoleRow]) -> list[str]:
    rows = [
        [
            row.role,
            ", ".join(_short_names(row.tensors)),
            _cut(row),
            " + ".join(row.gradient_sum_over) or "-",
            str(row.copies),
        ]
        for row in roles
    ]
    return table(["role", "tensors", "cut", "gradient is a sum over", ">copies"], rows)


def _cut(row: RoleRow) -> str:
    cuts = [] if row.dim is None else [(row.dim, row.over, row.parts)]
    cuts += [] if row.second is None else [row.second]
    return ", ".join(f"dim {dim} over {over} {parts}" for dim, over, parts in cuts) or "whole"


def _short_names(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.removeprefix("blocks.*.").rpartition(".")[0] for name in names))
