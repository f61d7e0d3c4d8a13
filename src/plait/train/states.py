"""What a checkpoint keeps of a training, and how a training takes it up again: weights, moments, counters, scaler.

Every state is a list of pieces in the order of `States.masters()`. Which file a rank reads is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from plait.checkpoint.manifest import WEIGHT, Facts
from plait.checkpoint.save import Parts, versions
from plait.checkpoint.source import Source, refuse_mismatch
from plait.parallel.precision import Dtypes
from plait.placement import Piece
from plait.placement.cuts import Rectangle, area
from plait.spec.run import OptimSpec, RunSpec
from plait.train.step import Step

# Optimizer -> its states of the size of the weights, under torch's names, and whether it counts its updates itself.
MOMENTS: Mapping[str, Callable[[OptimSpec], tuple[str, ...]]] = {
    "adamw": lambda optim: ("exp_avg", "exp_avg_sq"),
    "sgd": lambda optim: ("momentum_buffer",) if optim.momentum else (),
}
COUNTS = ("adamw",)
SCALE = ("value", "good_steps", "patience")  # of LossScale

Read = Callable[[str, Rectangle], Tensor]  # name, rectangle -> values on the CPU


def states_of(step: Step) -> dict[str, Parts]:
    """Each state that this rank updates, by name: master weights and buffers, and the moments once there are any."""
    pieces = [piece for piece, _ in step.states.masters()]
    found: dict[str, Parts] = {WEIGHT: [*zip(pieces, step.masters, strict=True), *step.buffers]}
    if step.updates:
        for name in MOMENTS[step.run.optim.name](step.run.optim):
            found[name] = [
                (p, step.optimizer.state[master][name]) for p, master in zip(pieces, step.masters, strict=True)
            ]
    return found


def facts_of(step: Step, number: int, loss: float | None, data: str) -> Facts:
    """Where the training stands after step `number`."""
    run = step.run
    return Facts(
        step=number,
        updates=step.updates,
        samples=step.samples,
        loss=loss,
        scale={name: getattr(step.scale, name) for name in SCALE},
        run=run.model_dump(mode="json"),
        layout=step.mesh.layout.model_dump(mode="json"),
        data=data,
        dtype=str(Dtypes.of(run.precision).master).removeprefix("torch."),
        versions=versions(),
    )


def take_up(step: Step, source: Source) -> None:
    """Go on where a checkpoint stands, whatever layout wrote it, once the states are published. Not collective."""
    facts, run = source.manifest.facts, step.run
    moments = MOMENTS[run.optim.name](run.optim) if facts.updates else ()
    refuse_mismatch(source.manifest, shapes_of(run), moments)
    take_weights(step, source.read)
    step.optimizer.state.clear()  # of a checkpoint that turned out to be damaged half-way
    pieces = [piece for piece, _ in step.states.masters()]
    for piece, master in zip(pieces, step.masters, strict=True) if facts.updates else ():
        state: dict[str, Tensor] = {name: torch.empty_like(master) for name in moments}
        for name, values in state.items():
            _fill(values, piece, step.mesh.rank, partial(source.read, state=name))
        if run.optim.name in COUNTS:
            state["step"] = torch.tensor(float(facts.updates), device=master.device)
        step.optimizer.state[master] = state
    step.updates, step.samples = facts.updates, facts.samples
    if facts.run["precision"]["compute"] == run.precision.compute:  # another dtype begins with a scale of its own
        for name in SCALE:
            setattr(step.scale, name, type(getattr(step.scale, name))(facts.scale[name]))


@torch.no_grad()
def take_weights(step: Step, read: Read) -> None:
    """The master weights and buffers from `read`. What forward reads has them once the states are published."""
    for piece, target in (*zip((p for p, _ in step.states.masters()), step.masters, strict=True), *step.buffers):
        _fill(target, piece, step.mesh.rank, read)


def shapes_of(run: RunSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model."""
    return {tensor.name: tensor.shape for tensor in run.model.parameters()}


def _fill(target: Tensor, piece: Piece, rank: int, read: Read) -> None:
    """A flat piece, one rectangle after the other: never more than one of them stands in memory twice."""
    at = 0
    for rectangle in piece.rectangles(rank):
        size = area(rectangle)
        target[at : at + size].copy_(read(piece.placement.tensor.name, rectangle).reshape(-1))
        at += size
