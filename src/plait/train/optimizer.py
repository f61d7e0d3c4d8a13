"""The optimizer of this rank's master weights: torch's own, in two groups (matrices decay, norms and biases do not)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # any optimizer's first step imports it, seconds: once here, not in each forked rank

from plait.parallel.zero import Parts
from plait.spec.run import OptimSpec


def _adamw(groups: list[dict[str, Any]], optim: OptimSpec) -> torch.optim.Optimizer:
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)


def _sgd(groups: list[dict[str, Any]], optim: OptimSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=True)


OPTIMIZERS: Mapping[str, Callable[[list[dict[str, Any]], OptimSpec], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def make_optimizer(masters: Parts, optim: OptimSpec) -> torch.optim.Optimizer:
    """torch's optimizer of that name over the pieces that this rank updates."""
    groups = [
        {
            "params": [master for piece, master in masters if piece.placement.decays is decays],
            "weight_decay": optim.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    # A rank may hold no shard of a small model: then it has an optimizer of nothing.
    return OPTIMIZERS[optim.name]([group for group in groups if group["params"]] or groups[:1], optim)
