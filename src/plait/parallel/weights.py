"""The weights that this rank starts with, and whole tensors put together again from what all ranks hold.

A module parameter may stack several named tensors; each has its own rectangle of its own global tensor, and ZeRO may
leave a rank only a piece of that. Everything that treats tensors by name (proof, samples, checkpoints) sees pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from plait.parallel import collectives as comm
from plait.parallel.mesh import Mesh
from plait.parallel.row import Row
from plait.placement import Piece, Placement, buffers
from plait.placement.buffer import SHARDING
from plait.placement.cuts import Rectangle, area
from plait.placement.place import Placements
from plait.spec.errors import CopiesDiffer
from plait.spec.model import TensorSpec

Weights = Callable[[TensorSpec, Rectangle], Tensor]  # what a rectangle of a global tensor starts as
Owned = Callable[[int], list[Piece]]  # what a rank holds


@torch.no_grad()
def materialise(stages: Mapping[int, nn.Module], rows: Iterable[Row], rank: int, weights: Weights) -> None:
    """Give the stages' meta parameters memory, and values drawn or read by `weights`: no more than the rank keeps."""
    for row in rows:
        row.shape_parameters([_shape(member.placements, rank) for member in row.buffer.members])
        for parameter, member in zip(row.parameters, row.buffer.members, strict=True):
            for stage in row.buffer.stages:
                _attach(stages[stage], (member.home, member.placements[0].tensor.also), parameter)
        _fill(row, rank, weights)
    left = [path for stage in stages.values() for path, parameter in stage.named_parameters() if parameter.is_meta]
    assert not left, f"no placement fills {left}"


def _shape(stacked: tuple[Placement, ...], rank: int) -> tuple[int, ...]:
    shapes = [placement.shape(rank) for placement in stacked]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _attach(stage: nn.Module, paths: Iterable[str | None], parameter: nn.Parameter) -> None:
    there = {path for path, _ in stage.named_parameters(remove_duplicate=False)}
    for path in paths:
        if path is not None and path in there:
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, parameter)


def _fill(row: Row, rank: int, weights: Weights) -> None:
    targets = row.weights() if row.master is row.own else [*row.weights(), *row.masters()]
    for piece, target in targets:
        parts = [weights(piece.placement.tensor, rectangle).flatten() for rectangle in piece.rectangles(rank)]
        target.copy_(torch.cat(parts))


def pieces_held(placements: Placements, sharded: bool, unit: str = "element") -> Owned:
    """What each rank holds, in the order of its buffers: its shards, or whole rectangles."""

    def held(rank: int) -> list[Piece]:
        at = next(iter(placements.values())).layout.coordinates(rank)
        return [
            piece
            for buffer in buffers(placements, rank, unit)
            for piece, _ in buffer.pieces(getattr(at, SHARDING[buffer.domain, True][0]) if sharded else None)
        ]

    return held


def gather_whole(
    parts: Iterable[tuple[Piece, Tensor]], owned: Owned, mesh: Mesh, all_copies: bool = True
) -> dict[str, Tensor]:
    """Every global tensor, on rank 0 (the others get none), from each rank's parts. For models that fit on one rank.

    With `all_copies` (proofs) every rank sends what it holds: raises CopiesDiffer where two that should be identical
    are not. Without, only the first of each.
    """
    local = {(piece.placement.tensor.name, piece.start): part.detach().flatten() for piece, part in parts}
    held = [
        [piece for piece in owned(rank) if all_copies or piece.first_copy(rank)] for rank in range(mesh.layout.world)
    ]
    sizes = [[piece.stop - piece.start for piece in mine] for mine in held]
    nothing = next(iter(local.values()), torch.zeros(0, dtype=torch.float64, device=mesh.device))[:0]
    mine = torch.cat([nothing, *(local[piece.placement.tensor.name, piece.start] for piece in held[mesh.rank])])
    flats = comm.gather_to_first(mine, [sum(s) for s in sizes], mesh.group("world"))

    found: dict[str, list[tuple[int, Piece, Tensor]]] = {}
    for rank, flat in enumerate(flats):
        for piece, part in zip(held[rank], flat.split(sizes[rank]), strict=True):
            found.setdefault(piece.placement.tensor.name, []).append((rank, piece, part))
    return {name: _assemble(pieces) for name, pieces in found.items()}


def fill_buffers(
    stages: Mapping[int, nn.Module], placements: Placements, mesh: Mesh, weights: Weights, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Give the stages' meta buffers memory and the values of `weights`; all by name. Every rank holds them whole."""
    found = {}
    for placement in placements.values():
        for index in placement.stages_on(mesh.rank) if placement.tensor.kind == "buffer" else ():
            value = weights(placement.tensor, placement.rectangle(mesh.rank)).to(mesh.device, dtype)
            parent, _, name = placement.tensor.home.rpartition(".")
            setattr(stages[index].get_submodule(parent), name, value)
            found[placement.tensor.name] = value
    return found


def gather_buffers(buffers: Mapping[str, Tensor], placements: Placements, mesh: Mesh) -> dict[str, Tensor]:
    """Every buffer in float64, on rank 0. Raises CopiesDiffer where two ranks do not hold the same."""

    def owned(rank: int) -> list[Piece]:
        return [
            Piece(p, 0, p.tensor.size, sharded=False)
            for p in placements.values()
            if p.tensor.kind == "buffer" and p.held_by(rank)
        ]

    parts = [(piece, buffers[piece.placement.tensor.name].double()) for piece in owned(mesh.rank)]
    return gather_whole(parts, owned, mesh)


def _assemble(pieces: list[tuple[int, Piece, Tensor]]) -> Tensor:
    _, first, part = pieces[0]
    whole = part.new_empty(first.placement.tensor.shape)
    seen: dict[tuple[Rectangle, int], tuple[int, Tensor]] = {}
    filled = 0
    for rank, piece, part in pieces:
        key = piece.placement.rectangle(rank), piece.start
        if key in seen:
            _same(piece.placement.tensor.name, seen[key], (rank, part))
            continue
        seen[key] = rank, part
        rectangles = list(piece.rectangles(rank))
        for rectangle, values in zip(rectangles, part.split([area(r) for r in rectangles]), strict=True):
            target = whole[tuple(slice(*edge) for edge in rectangle)]
            target.copy_(values.view(target.shape))
        filled += part.numel()
    assert filled == whole.numel(), f"{filled} of {whole.numel()} elements of {first.placement.tensor.name} are held"
    return whole


def _same(name: str, one: tuple[int, Tensor], other: tuple[int, Tensor]) -> None:
    if not torch.allclose(one[1], other[1], rtol=0, atol=0, equal_nan=True):
        gap = (one[1] - other[1]).abs().max().item()
        raise CopiesDiffer(f"{name}: copies on ranks {one[0]} and {other[0]} differ by {gap:.3g}")
