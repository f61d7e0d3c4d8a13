"""One rank of a run, for tests that look inside: its mesh, tensors and steps over B8; and a model of one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.data import Batch, Samples, batch, rows_of
from plait.models.decoder import Decoder
from plait.models.init import draw
from plait.models.where import Where
from plait.parallel.gradients import Gradients
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import Parallel, parallelize
from plait.parallel.stage import DecoderStage
from plait.parallel.weights import Held, gather_whole
from plait.placement import Placement
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

    def weights(self) -> list[tuple[Placement, Tensor]]:
        return [part for held in self.parallel.held for part in held.parts(held.parameter.detach())]

    def gather(self, parts: list[tuple[Placement, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors on rank 0; raises where copies differ in a single bit."""
        return gather_whole(parts, self.parallel.placements, self.mesh)


class OneNumber(nn.Module):
    """A whole network with a single weight w: a token's loss is w times its number, so its gradient is the number."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, tokens: Tensor, where: Where, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        valid = labels >= 0
        return tokens, {"loss": (self.w * tokens * valid).sum(), "count": valid.sum()}


def one_number(run: RunSpec, w: float = 1.0) -> tuple[Step, nn.Parameter]:
    """The steps of that network on this rank of a data-parallel run."""
    mesh, module = Mesh(fit(run)), OneNumber(w)
    held = hold(mesh, module.w)
    stage = DecoderStage(0, module, first=True, last=True)  # type: ignore[arg-type]
    parallel = Parallel({0: stage}, [held], {"w": held.placements[0]})
    return Step(run, mesh, parallel), module.w


def hold(mesh: Mesh, parameter: nn.Parameter, name: str = "w", dim: int | None = None) -> Held:
    """A parameter of stage 0, cut over tp along `dim`."""
    tp = mesh.layout.tp
    shape = tuple(size * tp if i == dim else size for i, size in enumerate(parameter.shape))
    spec = TensorSpec(name, shape, "norm", None, "head", name)
    placement = Placement(spec, mesh.layout, (0,), (0,), dim, "tp", ("dp_cp",))
    return Held(0, parameter, (placement,), (parameter.shape[0],))


def gradients_of(mesh: Mesh, *held: Held) -> Gradients:
    """The gradient buffers of some parameters."""
    return Gradients(list(held), {h.placements[0].tensor.name: h.placements[0] for h in held}, mesh)


def rows_of_numbers(*rows: list[int], first: int = 0) -> Batch:
    """Rows of numbers as tokens; a number below 0 is a token without a label."""
    tokens = torch.tensor(rows)
    labels = torch.where(tokens < 0, -100, 0)
    return Batch(tokens.clamp(min=0), labels, torch.arange(first, first + len(rows)), torch.arange(len(rows[0])), None)
