"""`parallelize(model, mesh, run)`: a model of one device, on meta, becomes this rank's stages.

Read top to bottom: this is the only place where shapes change, and the order in which the axes are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor, nn

from plait.models.decoder import Decoder, PassThrough
from plait.models.init import draw
from plait.parallel.context import Context, split_context
from plait.parallel.expert import Spread, spread_experts
from plait.parallel.late import Late, split_backward
from plait.parallel.mesh import Mesh
from plait.parallel.precision import DTYPES, Dtypes
from plait.parallel.recompute import recompute
from plait.parallel.stage import DecoderStage, Signature
from plait.parallel.tensor import Sharding, split_tensors
from plait.parallel.weights import Weights, fill_buffers, materialise
from plait.parallel.zero import States, gather_by_unit
from plait.placement import Placement, StageMap, place, stages_of
from plait.placement.cuts import Rectangle
from plait.placement.place import homes
from plait.spec.pipeline import splits_backward
from plait.spec.run import SHARD_UNITS, RunSpec


@dataclass(frozen=True)
class Parallel:
    """What a rank runs: its stages by number, its weights and gradients, where every tensor of the model is, and what
    it keeps without training it, by name."""

    stages: Mapping[int, DecoderStage]
    states: States
    placements: Mapping[str, Placement]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def parallelize(model: Decoder, mesh: Mesh, run: RunSpec, weights: Weights | None = None) -> Parallel:
    """This rank's part of `model`, which is on meta and used up. `weights` gives first values, by default by seed."""
    weights = weights or (lambda tensor, rectangle: draw(tensor, run.model, run.train.seed, rectangle))
    stages = stages_of(run, mesh.layout)
    placements = place(run.model, mesh.layout, run.zero, stages)
    parts = {index: _cut(model, stages, index) for index in stages.owned_by(mesh.at.pp)}

    dtypes = Dtypes.of(run.precision)
    states = States(placements, mesh, run.zero, dtypes, SHARD_UNITS[run.optim.name])
    materialise(parts, states.rows, mesh.rank, weights)
    buffers = fill_buffers(parts, placements, mesh, weights, dtypes.master)

    late = Late(states.deliver) if splits_backward(run.schedule) else None
    split = mesh.layout.sequence_parallel
    context, spread = Context.of(mesh, run), Spread.of(mesh, run)
    known = Sharding(mesh.group("tp"), split, run.model.head_dim, _rectangles(placements, mesh))
    for part in parts.values():
        split_tensors(part, known)
        spread_experts(part, spread)
        split_context(part, context, run.model.heads // mesh.layout.tp, mesh.device)
        if late is not None:
            split_backward(part, late)
        recompute(part, run.recompute)
    gather_by_unit(parts, states)
    boundary = _boundary(run, mesh)
    mine = {i: DecoderStage(i, part, i == 0, i == stages.last, boundary, late) for i, part in parts.items()}
    return Parallel(mine, states, placements, buffers)


def _cut(model: Decoder, stages: StageMap, index: int) -> Decoder:
    """The blocks of one stage, with the ends that belong to it."""
    part = copy(model)
    part._modules = dict(model._modules)  # the copy shares its modules, not its list of them
    part.blocks = nn.ModuleDict({str(layer): part.blocks[str(layer)] for layer in stages.layers[index]})
    if index > 0:
        part.embedding = PassThrough("embedding")
    if index < stages.last:
        part.head = PassThrough("head")
    return part


def _boundary(run: RunSpec, mesh: Mesh) -> Signature:
    """What travels between two stages: one tensor (B, T, d) of T tokens, those over tp and cp taken apart."""
    parts = mesh.layout.cp * (mesh.layout.tp if mesh.layout.sequence_parallel else 1)
    return (((run.batch.micro_size, run.batch.sequence // parts, run.model.hidden), DTYPES[run.precision.compute]),)


def _rectangles(placements: Mapping[str, Placement], mesh: Mesh) -> dict[str, tuple[Rectangle, ...]]:
    """A module parameter's path (both paths of a tied tensor) -> this rank's rectangles of what it stacks."""
    found: dict[str, tuple[Rectangle, ...]] = {}
    for home, stacked in homes(placements, mesh.rank).items():
        rectangles = tuple(p.rectangle(mesh.rank) for p in stacked)
        found |= {path: rectangles for path in (home, stacked[0].tensor.also) if path is not None}
    return found
