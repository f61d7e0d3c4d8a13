"""How often the experts of a run are chosen: summed over a stage once a step, told in three numbers a layer, and handed
to the routers when the step has been an update. Nothing here routes a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.models.moe import Router
from plait.parallel import collectives as comm
from plait.parallel.mesh import Mesh
from plait.parallel.stage import DecoderStage
from plait.spec.run import RunSpec


class ExpertUse(NamedTuple):
    """One layer in one step: choices of the most chosen expert over the mean, the share of choices that capacity
    refused, and the mean entropy of a token's scores in nats."""

    imbalance: float
    dropped: float
    entropy: float


@dataclass(frozen=True)
class LayerLoad:
    """Sums over the whole batch: choices of each expert (E,), refused ones (E,), and the entropy of scores ()."""

    load: Tensor
    drops: Tensor
    entropy: Tensor


class ExpertLoads:
    """The routers of this rank's stages, and what a step counted of them."""

    def __init__(self, run: RunSpec, stages: Mapping[int, DecoderStage], mesh: Mesh) -> None:
        self.run, self.stages, self.mesh = run, stages, mesh
        self.layers = [layer for layer in range(run.model.layers) if run.model.has_experts(layer)]
        self.group = mesh.group("stage") if self.layers else None
        modules = [module for stage in stages.values() for module in stage.module.modules()]
        self.routers = {module.layer: module for module in modules if isinstance(module, Router)}
        self.counted: dict[int, LayerLoad] = {}

    def gather(self) -> None:
        """Sum what the micro-batches of all ranks of each stage counted."""
        if self.group is None:
            return
        totals = {name: value for stage in self.stages.values() for name, value in stage.totals.items()}
        count = self._experts
        parts = []
        for layer in self.routers:
            load = totals[f"load.{layer}"].double()
            drops = totals.get(f"drops.{layer}", torch.zeros_like(load)).double()
            parts += [load, drops, totals[f"entropy.{layer}"].double().view(1)]
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self.mesh.device)
        summed = comm.sum_in_place(flat, self.group).wait() if parts else flat
        each = summed.view(len(self.routers), 2 * count + 1)
        self.counted = {
            layer: LayerLoad(row[:count], row[count : 2 * count], row[-1])
            for layer, row in zip(self.routers, each, strict=True)
        }

    def shares(self) -> Tensor:
        """(layers, 3): this rank's share of every layer's `ExpertUse`: the sum over the world is all of them."""
        found = torch.zeros(len(self.layers), 3, dtype=torch.float64, device=self.mesh.device)
        for layer, counted in self.counted.items():
            chosen = counted.load.sum().clamp(min=1)
            tokens = chosen / self._top_k
            use = (counted.load.max() * self._experts / chosen, counted.drops.sum() / chosen, counted.entropy / tokens)
            found[self.layers.index(layer)] = torch.stack(use) / self.mesh.layout.ranks_per_stage
        return found

    def settle(self) -> None:
        """The step has been an update: routers learn their load."""
        for layer, counted in self.counted.items():
            self.routers[layer].settle(counted.load)

    @property
    def _experts(self) -> int:
        return self.run.model.moe.count if self.run.model.moe is not None else 0

    @property
    def _top_k(self) -> int:
        return self.run.model.moe.top_k if self.run.model.moe is not None else 1
