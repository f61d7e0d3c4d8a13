"""The work that every side of a benchmark is given: one model, one batch, one optimizer, the same first weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.data import Batch
from plait.models.decoder import Decoder
from plait.models.init import initialise
from plait.models.where import Where
from plait.spec.model import ModelSpec
from plait.spec.run import BatchSpec, LayoutSpec, OptimSpec, RunSpec, ScheduleSpec, TrainSpec, ZeroSpec

# Clipping is off on all sides. plait still computes the global gradient norm and sums loss and label count over the
# world in each step, as it always does; the peers are spared both.
OPTIM = OptimSpec(lr=1e-4, schedule="constant", clip=0.0)


class Side(Protocol):
    """One of those that meet in a benchmark, on one rank."""

    def backward(self) -> None:
        """The raw gradients of the global batch, summed over all ranks."""

    def update(self) -> None:
        """The optimizer's part of the step."""

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients by plait's names, on rank 0; all ranks call it."""


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of the global batch (`rows` x `sequence` tokens)."""

    hidden: int = 256
    layers: int = 8
    heads: int = 8
    ffn: int = 688
    vocab: int = 4096
    rows: int = 8
    sequence: int = 256
    head_dim: int = 32

    @property
    def model(self) -> ModelSpec:
        """A Llama: RMSNorm, rotary positions, SwiGLU, untied head, as many kv heads as heads."""
        return ModelSpec(
            vocab=self.vocab, hidden=self.hidden, layers=self.layers, heads=self.heads, ffn=self.ffn,
            max_sequence=self.sequence, kv_heads=self.heads, head_dim=self.head_dim,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self) | {"parameters": self.model.parameter_count()}

    def run(self, micro_batches: int = 1, schedule: str = "1f1b", zero: int = 0, **layout: Any) -> RunSpec:
        """The run on a layout, each data-parallel rank's rows in so many micro-batches."""
        micro_size = self.rows // (layout.get("dp", 1) * micro_batches)
        return RunSpec(
            model=self.model,
            layout=LayoutSpec(**layout),
            schedule=ScheduleSpec(name=schedule),
            batch=BatchSpec(global_size=self.rows, micro_size=micro_size, sequence=self.sequence),
            zero=ZeroSpec(stage=zero),
            optim=OPTIM,
            train=TrainSpec(steps=10**6),
        )

    def batch(self, start: int = 0, stop: int | None = None) -> Batch:
        """Rows [start, stop) of the one global batch of all steps; every label counts."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.vocab, (self.rows, self.sequence + 1), generator=generator)
        whole = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(self.rows), torch.arange(self.sequence), None)
        return whole.rows(start, self.rows if stop is None else stop)


TINY = Size(hidden=64, layers=4, heads=4, ffn=96, vocab=96, rows=8, sequence=16, head_dim=16)

# Many weights for few tokens: 64 for each of 4 ranks. A GPU computes, for each byte that its network moves meanwhile,
# a hundred times as much as a core does beside gloo; so few tokens here weigh weights as thousands weigh them there.
WIDE = Size(hidden=512, heads=8, ffn=1376, rows=4, sequence=64, head_dim=64)

# One long row.
LONG = Size(layers=4, rows=1, sequence=4096)


def decoder(size: Size) -> Decoder:
    """The whole model on one device, with the first weights of every side."""
    model = Decoder(size.model, "cpu")
    initialise(model, TrainSpec().seed)
    return model


def where(rows: int, sequence: int) -> Where:
    """Coordinates of whole rows; which rows does not matter without dropout."""
    return Where.of(torch.arange(rows), sequence)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's fastest AdamW with plait's settings: matrices decay, norms do not."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (OPTIM.beta1, OPTIM.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], OPTIM.lr, betas, OPTIM.eps, fused=True)
