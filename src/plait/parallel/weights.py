"""The tensors that this rank holds in memory, and whole tensors put together again from all ranks.

A module parameter may stack several named tensors; each has its own rectangle of its own global tensor. Everything
that treats tensors by name (reduction, norm, decay, proof, checkpoints) goes through `Held.parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.parallel import collectives as comm
from plait.parallel.mesh import Mesh
from plait.placement import Placement
from plait.placement.cuts import Rectangle, area
from plait.placement.place import Placements, homes
from plait.spec.errors import CopiesDiffer
from plait.spec.model import TensorSpec

Weights = Callable[[TensorSpec, Rectangle], Tensor]  # what a rectangle of a global tensor starts as


@dataclass(frozen=True, eq=False)
class Held:
    """A module parameter of this rank: its stage, and the tensors that it stacks along dim 0."""

    stage: int
    parameter: nn.Parameter
    placements: tuple[Placement, ...]
    rows: tuple[int, ...]

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad

    def parts(self, tensor: Tensor) -> list[tuple[Placement, Tensor]]:
        """Any tensor of the parameter's shape (weight, gradient, moment), part by part."""
        return list(zip(self.placements, tensor.split(self.rows), strict=True))


def materialise(
    stage: nn.Module, index: int, placements: Placements, mesh: Mesh, weights: Weights, dtype: torch.dtype
) -> list[Held]:
    """Give a stage's meta parameters this rank's rectangles, drawn or read by `weights`."""
    held = []
    paths = {path for path, _ in stage.named_parameters(remove_duplicate=False)}
    for home, stacked in homes(placements, mesh.rank).items():
        here = [path for path in (home, stacked[0].tensor.also) if path in paths]
        if here:
            parts = [weights(p.tensor, p.rectangle(mesh.rank)) for p in stacked]
            parameter = nn.Parameter(torch.cat(parts).to(mesh.device, dtype))
            for path in here:
                parent, _, name = str(path).rpartition(".")
                setattr(stage.get_submodule(parent), name, parameter)
            rows = tuple(p.shape(mesh.rank)[0] for p in stacked)
            held.append(Held(index, parameter, stacked, rows))
    left = [path for path, parameter in stage.named_parameters() if parameter.is_meta]
    assert not left, f"no placement fills {left}"
    return held


def gather_whole(
    parts: Iterable[tuple[Placement, Tensor]], placements: Placements, mesh: Mesh, all_copies: bool = True
) -> dict[str, Tensor]:
    """Every global tensor, on rank 0 (the others get none), from each rank's parts. For models that fit on one rank.

    With `all_copies` (proofs) every rank sends what it holds: raises CopiesDiffer where two that should be identical
    are not. Without, only the first of each.
    """
    local = {p.tensor.name: part.detach().flatten() for p, part in parts}
    held = [
        [p for p in placements.values() if p.held_by(rank) and (all_copies or p.first_copy(rank))]
        for rank in range(mesh.layout.world)
    ]
    sizes = [[area(p.rectangle(rank)) for p in mine] for rank, mine in enumerate(held)]
    nothing = next(iter(local.values()))[:0]
    mine = torch.cat([nothing, *(local[p.tensor.name] for p in held[mesh.rank])])
    flats = comm.gather_to_first(mine, [sum(s) for s in sizes], mesh.group("world"))

    pieces: dict[str, dict[int, Tensor]] = {name: {} for name in placements}
    for rank, flat in enumerate(flats):
        for placement, part in zip(held[rank], flat.split(sizes[rank]), strict=True):
            pieces[placement.tensor.name][rank] = part.view(placement.shape(rank))
    return {name: _assemble(placements[name], found) for name, found in pieces.items() if found}


def _assemble(placement: Placement, pieces: Mapping[int, Tensor]) -> Tensor:
    first = next(iter(pieces.values()))
    whole = first.new_empty(placement.tensor.shape)
    seen: dict[Rectangle, tuple[int, Tensor]] = {}
    for rank, piece in pieces.items():
        rectangle = placement.rectangle(rank)
        if rectangle in seen:
            other, same = seen[rectangle]
            if not torch.allclose(same, piece, rtol=0, atol=0, equal_nan=True):
                gap = (same - piece).abs().max().item()
                raise CopiesDiffer(f"{placement.tensor.name}: copies on ranks {other} and {rank} differ by {gap:.3g}")
        else:
            seen[rectangle] = rank, piece
            whole[tuple(slice(*edge) for edge in rectangle)] = piece
    return whole
