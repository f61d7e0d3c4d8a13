"""One rank of a run, for tests that look inside: its mesh, tensors and steps over B8; and a model of one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.data import Batch, Samples, batch, rows_of
from plait.models.decoder import Decoder
from plait.models.init import draw
from plait.models.where import Where
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import Parallel, parallelize
from plait.parallel.precision import Dtypes
from plait.parallel.stage import DecoderStage
from plait.parallel.weights import gather_whole, materialise, pieces_held
from plait.parallel.zero import Parts, States
from plait.placement import Placement
from plait.placement.cuts import Rectangle
from plait.spec.fit import fit
from plait.spec.model import TensorSpec
from plait.spec.run import RunSpec
from plait.train.step import Step, Sums
from tests.fixtures import B8, MASK


@dataclass
class Rank:
    """What a test on ranks needs of its own rank. Norm weights and biases are random, as in every proof."""

    run: RunSpec
    mesh: Mesh
    parallel: Parallel
    step: Step

    @classmethod
    def of(cls, run: RunSpec, randomise: bool = True) -> Rank:
        mesh = Mesh(fit(run))
        seed = run.train.seed
        weights = lambda t, r: draw(t, run.model, seed, r, randomise)  # noqa: E731
        parallel = parallelize(Decoder(run.model), mesh, run, weights)
        return cls(run, mesh, parallel, Step(run, mesh, parallel))

    def batch(self, number: int = 1, keep: tuple[int, ...] = MASK) -> Batch:
        """This rank's rows of B8, of step `number` (from 1)."""
        samples = Samples(B8(self.run.model.vocab, keep), self.run.train.seed, shuffle=False)
        rows = rows_of(self.run.batch.global_size, self.mesh.at.dp, self.mesh.layout.dp)
        return batch(samples, number - 1, self.run.batch.global_size, rows)

    def backward(self, number: int = 1, keep: tuple[int, ...] = MASK) -> Sums:
        return self.step.backward(number, self.batch(number, keep))

    def weights(self) -> Parts:
        return self.parallel.states.weights()

    def gradients(self) -> dict[str, Tensor]:
        """Whole raw gradients on rank 0; raises where copies differ in a single bit."""
        owned = pieces_held(self.parallel.placements, self.run.zero.stage > 0)
        return gather_whole(self.step.states.gradients(), owned, self.mesh)

    def gather(self, parts: Parts) -> dict[str, Tensor]:
        """Whole tensors on rank 0 from what forward reads; raises where copies differ in a single bit."""
        return gather_whole(parts, pieces_held(self.parallel.placements, self.run.zero.stage == 3), self.mesh)


class OneNumber(nn.Module):
    """A whole network with a single weight w: a token's loss is w times its number, so its gradient is the number."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, tokens: Tensor, where: Where, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        valid = labels >= 0
        return tokens, {"loss": (self.w * tokens * valid).sum(), "count": valid.sum()}


def one_number(run: RunSpec, w: float = 1.0, tokens: int = 5) -> tuple[Step, nn.Parameter]:
    """The steps of that network on this rank of a data-parallel run, on rows of so many tokens."""
    run = run.model_copy(update={"batch": run.batch.model_copy(update={"sequence": tokens})})
    mesh, module = Mesh(fit(run)), OneNumber(w)
    states, placements = hold(mesh, module, run)
    stage = DecoderStage(0, module, first=True, last=True)  # type: ignore[arg-type]
    return Step(run, mesh, Parallel({0: stage}, states, placements)), module.w


def hold(
    mesh: Mesh, module: nn.Module, run: RunSpec, cut: tuple[str, ...] = (), tied: bool = False
) -> tuple[States, dict[str, Placement]]:
    """The states of a module that is a stage, with the values that it has; of `cut` each tp rank holds other rows.

    `tied`: the first and the last stage hold it.
    """
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    tp = mesh.layout.tp
    stages, partial = ((0, mesh.layout.pp - 1), ("dp_cp", "tied")) if tied else ((0,), ("dp_cp",))

    def placed(name: str, value: Tensor) -> Placement:
        rows, dim = (value.shape[0] * tp, 0) if name in cut else (value.shape[0], None)
        tensor = TensorSpec(name, (rows, *value.shape[1:]), "norm", None, "head", name, "elsewhere" if tied else None)
        return Placement(tensor, mesh.layout, stages, stages, dim, "tp", partial, run.zero.stage)

    def value_of(tensor: TensorSpec, rectangle: Rectangle) -> Tensor:
        first, _ = placements[tensor.name].rectangle(mesh.rank)[0]
        start, stop = rectangle[0]
        return values[tensor.name][start - first : stop - first]

    placements = {name: placed(name, value) for name, value in values.items()}
    states = States(placements, mesh, run.zero, Dtypes.of(run.precision))
    materialise({mesh.at.pp: module}, states.rows, mesh.rank, value_of)
    return states, placements


def gradients_of(states: States) -> dict[str, Tensor]:
    """What this rank keeps of each gradient, by name, flat."""
    return {piece.placement.tensor.name: part for piece, part in states.gradients()}


def rows_of_numbers(*rows: list[int], first: int = 0) -> Batch:
    """Rows of numbers as tokens; a number below 0 is a token without a label."""
    tokens = torch.tensor(rows)
    labels = torch.where(tokens < 0, -100, 0)
    return Batch(tokens.clamp(min=0), labels, torch.arange(first, first + len(rows)), torch.arange(len(rows[0])), None)
