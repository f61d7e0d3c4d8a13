"""plait's side of every benchmark: the public pieces that `plait train` runs, and nothing added."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.work import Size
from plait.data import rows_of
from plait.models.decoder import Decoder
from plait.parallel.launch import World
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.parallel.weights import gather_whole, pieces_held
from plait.spec.fit import fit
from plait.spec.run import RunSpec
from plait.train.step import Step, Sums


class Plait:
    """A run's optimizer step on this rank."""

    def __init__(self, size: Size, run: RunSpec, world: World) -> None:
        self.mesh = Mesh(fit(run, world.size), world.device)
        self.parallel = parallelize(Decoder(run.model), self.mesh, run)
        self.step = Step(run, self.mesh, self.parallel)
        rows = rows_of(size.rows, self.mesh.at.dp, self.mesh.layout.dp)
        self.batch = size.batch(rows.start, rows.stop)
        self.sums: Sums | None = None

    def backward(self) -> None:
        self.sums = self.step.backward(1, self.batch)

    def update(self) -> None:
        assert self.sums is not None, "backward comes first"
        self.step.update(self.sums)

    def gradients(self) -> dict[str, Tensor]:
        owned = pieces_held(self.parallel.placements, sharded=self.step.run.zero.stage > 0)
        found = gather_whole(self.step.states.gradients(), owned, self.mesh)
        return {name: gradient.clone() for name, gradient in found.items()}


def plait(**asked: object) -> Callable[[Size, World], Plait]:
    """plait on the layout and schedule asked for, as a row of the table of contests."""
    return lambda size, world: Plait(size, size.run(**asked), world)  # type: ignore[arg-type]
