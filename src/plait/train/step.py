"""One optimizer step in any layout: loss and gradients as sums over the whole global batch, then the update.

Loss = Σ token losses / N with N the valid labels of the global batch, known before the first backward; every reduction
is a sum. `backward` leaves raw gradients (proofs read them there), `update` clips and applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from plait.data import IGNORED, Batch
from plait.models.dropout import step_key
from plait.models.moe import denominators as auxiliary_denominators
from plait.models.where import Where
from plait.parallel import collectives as comm
from plait.parallel.faults import strike
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import Parallel
from plait.parallel.pipeline import Pipeline
from plait.parallel.precision import LossScale
from plait.parallel.stage import Denominators, Micro
from plait.parallel.zero import Parts, local_norm_squared
from plait.placement import Piece
from plait.placement.tokens import context_runs, tokens_in
from plait.schedule import Span
from plait.schedule.of_run import schedules
from plait.spec.errors import TrainingStopped
from plait.spec.run import RunSpec
from plait.train.experts import ExpertLoads, ExpertUse
from plait.train.optimizer import make_optimizer
from plait.train.rates import rate


class Sums(NamedTuple):
    """What every rank knows after a step's backward: mean loss (nats/token), raw gradient norm, valid labels.

    `norm` is that of all losses, whatever scale the gradients still have. `auxiliary` are the other losses, each over
    its own denominator; `experts` says how those of each layer were used.
    """

    step: int
    loss: float
    norm: float
    labels: int
    auxiliary: Mapping[str, float] = MappingProxyType({})
    experts: Mapping[int, ExpertUse] = MappingProxyType({})


class Step:
    """The steps of one rank. `samples` counts those that were taken, and `updates` the optimizer's updates: a step that
    was skipped is none.
    """

    def __init__(self, run: RunSpec, mesh: Mesh, parallel: Parallel) -> None:
        self.run, self.mesh, self.stages = run, mesh, parallel.stages
        self.samples = self.updates = 0
        self.asked = 0  # the signal that asks this rank to stop, or 1 where it has another reason
        self.stopping = False  # whether any rank was asked: known to all since the last sum over the world
        self.spans: list[Span] = []
        self.states, self.domain = parallel.states, mesh.group("dp_cp")
        self.pipeline = Pipeline(parallel.stages, mesh, parallel.states)
        self.tokens = torch.tensor(tokens_in(context_runs(run, mesh.layout, mesh.at.cp)))
        self.fixed = auxiliary_denominators(run.model, run.batch.global_size, run.batch.sequence)
        self.auxiliary = (*self.fixed, *(("z_loss",) if run.model.z_loss else ()))
        self.loads = ExpertLoads(run, parallel.stages, mesh)
        self.schedule, self.evaluation = schedules(run, mesh.layout.dp)
        self.pipeline.connect(self.schedule)
        masters = parallel.states.masters()
        self.masters = [master for _, master in masters]
        self.optimizer = make_optimizer(masters, run.optim)
        self.buffers: Parts = [
            (Piece(parallel.placements[name], 0, value.numel(), sharded=False), value.view(-1))
            for name, value in parallel.buffers.items()
        ]
        self.scale = LossScale(run.precision)

    def backward(self, step: int, batch: Batch) -> Sums:
        """Raw gradients of this rank's rows of the global batch, summed over every group."""
        self.states.begin()
        self.samples += self.run.batch.global_size
        labels = (batch.labels[:, self.tokens] != IGNORED).sum().to(self.mesh.device)
        denominators = Denominators({"loss": labels}, self.domain, self.scale.value, self.fixed)
        self._begin(step, batch, denominators)
        strike(self.mesh.rank, step, "forward")
        self.spans = self.pipeline.run(self.schedule)
        denominators.wait()
        strike(self.mesh.rank, step, "collective")
        self.states.finish()
        self.loads.gather()
        sums, uses = self._over_world(local_norm_squared(self.states.gradients()))
        return Sums(
            step,
            sums["loss"] / max(sums["count"], 1),
            math.sqrt(sums["norm"]) / self.scale.value,
            round(sums["count"]),
            {name: sums[name] / (self.fixed.get(name) or max(sums["count"], 1)) for name in self.auxiliary},
            uses,
        )

    def update(self, sums: Sums) -> float | None:
        """Clip and apply the gradients; the learning rate used, or None where the step is skipped on every rank.

        That is where the batch had no label to learn from, or gradients overflowed fp16. Raises TrainingStopped where
        loss or norm is not finite in another dtype, or the loss scale cannot fall; weights are as before then.
        """
        if not (math.isfinite(sums.loss) and math.isfinite(sums.norm)):
            self._not_finite(sums)
            return None
        if sums.labels == 0:
            return None
        optim = self.run.optim
        clip = optim.clip / sums.norm if optim.clip and sums.norm > optim.clip else 1.0
        self.updates += 1
        lr = rate(self.updates, optim, self.run.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        strike(self.mesh.rank, sums.step, "update")
        self._apply(clip / self.scale.value)
        self.scale.succeeded()
        self.loads.settle()
        return lr

    def _apply(self, factor: float) -> None:
        """The optimizer's update with gradients times `factor`; then every rank has the new weights."""
        gradients = [
            part.to(master.dtype) for (_, part), master in zip(self.states.gradients(), self.masters, strict=True)
        ]
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()  # else these gradients would live on while the next step makes its own
        self.states.publish()

    def _not_finite(self, sums: Sums) -> None:
        if self.scale.dynamic:
            self.scale.overflowed(sums.step)
            return
        found, size = self._first_not_finite(), self.run.batch.global_size
        raise TrainingStopped(
            f"step {sums.step}: loss {sums.loss}, gradient norm {sums.norm}: not finite"
            f"{f'; first {found}' if found else ''}; samples {(sums.step - 1) * size} to {sums.step * size - 1}",
            "the weights are those of the step before; a lower optim.lr or optim.clip often helps",
        )

    def _first_not_finite(self) -> str:
        """What is not finite, and on which rank: the first weight of all ranks, else the first gradient. Collective."""
        for what, parts in (("weight", self.states.weights()), ("gradient of", self.states.gradients())):
            mine = next((f" {p.placement.tensor.name}" for p, part in parts if not torch.isfinite(part).all()), " ")
            told = [name.decode() for name in comm.gather_bytes(mine.encode(), self.mesh.group("world"))]
            rank = next((rank for rank, name in enumerate(told) if name.strip()), None)
            if rank is not None:
                return f"{what}{told[rank]} on rank {rank}"
        return ""

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of token losses (nats) and number of labels over the whole batch; leaves training as it was."""
        self._begin(0, batch, None)
        self.pipeline.run(self.evaluation)
        sums, _ = self._over_world(torch.zeros((), dtype=torch.float64, device=self.mesh.device))
        return sums["loss"], round(sums["count"])

    def _begin(self, step: int, batch: Batch, denominators: Denominators | None) -> None:
        size, device = self.run.batch.micro_size, self.mesh.device
        whole = batch.documents if self.mesh.layout.cp > 1 else None
        batch = batch.columns(self.tokens)
        indices = self.tokens.to(device)
        key = torch.tensor(step_key(self.run.train.seed, step), device=device)
        starts = range(0, len(batch.samples), size)
        rows = [batch.rows(start, start + size).to(device) for start in starts]
        documents = [None if whole is None else whole[start : start + size].to(device) for start in starts]
        micros = [
            Micro(r.tokens, r.labels, Where(r.samples, indices, r.positions, r.documents, key, row_documents))
            for r, row_documents in zip(rows, documents, strict=True)
        ]
        for stage in self.stages.values():
            stage.begin(micros, denominators)

    def _over_world(self, norm_squared: Tensor) -> tuple[dict[str, float], dict[int, ExpertUse]]:
        """norm², loss, count and auxiliary losses of the world, and the use of experts: one reduction, read once."""
        # The tp ranks of a stage hold the same token losses; each routes tokens of its own.
        tp = self.mesh.layout.tp
        alike = {"loss": tp, "count": tp, **{name: 1 if name in self.fixed else tp for name in self.auxiliary}}
        shares = torch.zeros(2 + len(alike), dtype=torch.float64, device=self.mesh.device)
        shares[0], shares[-1] = norm_squared, float(self.asked > 0)
        for stage in self.stages.values():
            for place, (name, ranks) in enumerate(alike.items(), start=1):
                if name in stage.totals:
                    shares[place] += stage.totals[name].double() / ranks
        shares = torch.cat((shares, self.loads.shares().flatten()))
        found = comm.read(comm.sum_in_place(shares, self.mesh.group("world")).wait())
        sums = dict(zip(("norm", *alike, "asked"), found, strict=False))
        self.stopping = sums["asked"] > 0
        rows = zip(*[iter(found[len(sums) :])] * len(ExpertUse._fields), strict=True)
        return sums, {layer: ExpertUse(*row) for layer, row in zip(self.loads.layers, rows, strict=True)}
