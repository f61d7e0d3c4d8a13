"""One pipeline stage at work: the forward and backward of its micro-batches. It sends nothing and receives nothing.

What is split: nothing here. A stage is given activations, gives activations, and keeps what backward needs; named
loss terms stay here as sums, each with the denominator by which its gradient is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plait.models.decoder import Decoder, add_terms
from plait.models.where import Where

Tensors = tuple[Tensor, ...]
Denominators = Callable[[], Mapping[str, Tensor]]  # term -> what divides its gradient, asked late
# Shape and dtype of each tensor between two stages.
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Micro(NamedTuple):
    """One micro-batch: tokens (B, T) and labels (B, T, below 0 where ignored), and where they stand."""

    tokens: Tensor
    labels: Tensor
    where: Where


class Stage(Protocol):
    """What the executor drives. `inputs` are the tensors that the stage before sends; gradients have their shapes."""

    inputs: Signature
    outputs: Signature

    def forward(self, micro: int, received: Tensors) -> Tensors: ...

    def backward(self, micro: int, gradients: Tensors) -> Tensors: ...


class DecoderStage:
    """Some consecutive blocks of a decoder, with the ends that belong to them."""

    def __init__(self, index: int, module: Decoder, first: bool, last: bool) -> None:
        self.index, self.module, self.first, self.last = index, module, first, last
        self.inputs: Signature = ()
        self.outputs: Signature = ()
        self.totals: dict[str, Tensor] = {}
        self._micros: Sequence[Micro] = ()
        self._denominators: Denominators | None = None
        self._live: dict[int, tuple[Tensors, Tensors, Tensors]] = {}

    def begin(self, micros: Sequence[Micro], denominators: Denominators | None, boundary: Signature) -> None:
        """Take a step's micro-batches; `boundary` is what travels between stages. Without denominators: evaluation."""
        self._micros, self._denominators = micros, denominators
        self.inputs = () if self.first else boundary
        self.outputs = () if self.last else boundary
        self.totals = {}
        self._live.clear()
        self.module.train(denominators is not None)

    def forward(self, micro: int, received: Tensors) -> Tensors:
        batch, training = self._micros[micro], self._denominators is not None
        received = tuple(x.requires_grad_(training) for x in received)
        with torch.set_grad_enabled(training):
            x, terms = self.module(batch.tokens if self.first else received[0], batch.where, batch.labels)
        self.totals = add_terms(self.totals, {name: value.detach() for name, value in terms.items()})
        outputs = () if self.last else (x,)
        if training:
            self._live[micro] = (received, *self._roots(outputs, terms))
        return tuple(x.detach() for x in outputs)

    def _roots(self, outputs: Tensors, terms: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """What backward starts from, and the gradients of the loss terms among it (1 / denominator)."""
        losses = {name: value for name, value in terms.items() if value.requires_grad}
        if not losses:
            return outputs, ()
        assert self._denominators is not None
        divide_by = self._denominators()
        return (*outputs, *losses.values()), tuple(1 / divide_by[name].to(v.dtype) for name, v in losses.items())

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        received, roots, seeds = self._live.pop(micro)
        torch.autograd.backward(roots, [*gradients, *seeds])
        return tuple(x.grad for x in received if x.grad is not None)
