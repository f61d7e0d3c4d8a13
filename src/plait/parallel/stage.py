"""One pipeline stage at work: the forward and backward of its micro-batches. It sends nothing and receives nothing.

What is split: nothing here. A stage is given activations, gives activations, and keeps what backward needs; named
loss terms stay here as sums, each with the denominator by which its gradient is divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plait.models.decoder import Decoder, add_terms
from plait.models.where import Where
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.late import Late, Product

Tensors = tuple[Tensor, ...]
# Shape and dtype of each tensor between two stages.
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


# Loss term -> the one whose count divides it; a term that is not here has a count of its own.
COUNT_OF: Mapping[str, str] = {"z_loss": "loss"}


class Micro(NamedTuple):
    """One micro-batch: tokens (B, T) and labels (B, T, below 0 where ignored), and where they stand."""

    tokens: Tensor
    labels: Tensor
    where: Where


class Denominators:
    """What divides the gradient of each loss term: counts of the whole global batch, summed while forward begins, and
    `fixed` ones, which need no counting.

    `scale` multiplies all gradients.
    """

    def __init__(
        self, counts: Mapping[str, Tensor], group: Group, scale: float = 1.0, fixed: Mapping[str, int] | None = None
    ) -> None:
        self._group, self.scale, self._fixed = group, scale, fixed or {}
        self._pending = {name: comm.start_all_reduce(count, group) for name, count in counts.items()}
        self._known: dict[str, Tensor] | None = None

    def wait(self) -> Mapping[str, Tensor]:
        """Term -> its denominator, at least 1."""
        if self._known is None:
            sums = {name: comm.finish_all_reduce(count, self._group) for name, count in self._pending.items()}
            like = next(iter(sums.values()))
            self._known = {name: total.clamp(min=1) for name, total in sums.items()}
            self._known |= {name: torch.full_like(like, count) for name, count in self._fixed.items()}
        return self._known


class Stage(Protocol):
    """What the executor drives. `inputs` are the tensors that the stage before sends; gradients have their shapes."""

    inputs: Signature
    outputs: Signature

    def forward(self, micro: int, received: Tensors) -> Tensors: ...

    def backward(self, micro: int, gradients: Tensors) -> Tensors: ...

    def backward_input(self, micro: int, gradients: Tensors) -> Tensors: ...

    def backward_weight(self, micro: int) -> None: ...


class DecoderStage:
    """Some consecutive blocks of a decoder, with the ends that belong to them. `late` takes B and W apart."""

    def __init__(
        self, index: int, module: Decoder, first: bool, last: bool, boundary: Signature = (), late: Late | None = None
    ) -> None:
        self.index, self.module, self.first, self.last, self._late = index, module, first, last, late
        self.inputs = () if first else boundary
        self.outputs = () if last else boundary
        self.totals: dict[str, Tensor] = {}
        self._micros: Sequence[Micro] = ()
        self._denominators: Denominators | None = None
        self._live: dict[int, tuple[Tensors, Tensors, Tensors]] = {}
        self._products: dict[int, list[Product]] = {}  # from B to W

    def begin(self, micros: Sequence[Micro], denominators: Denominators | None) -> None:
        """Take a step's micro-batches. Without denominators nothing is differentiated: an evaluation."""
        self._micros, self._denominators = micros, denominators
        self.totals = {}
        self._live.clear()
        self._products.clear()
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
        divide_by, scale = self._denominators.wait(), self._denominators.scale
        return (*outputs, *losses.values()), tuple(
            scale / divide_by[COUNT_OF.get(name, name)].to(value.dtype) for name, value in losses.items()
        )

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        received, roots, seeds = self._live.pop(micro)
        torch.autograd.backward(roots, [*gradients, *seeds])
        return tuple(x.grad for x in received if x.grad is not None)

    def backward_input(self, micro: int, gradients: Tensors) -> Tensors:
        """B: as `backward`, but the linears leave the gradients of their weights for W."""
        assert self._late is not None, "the stage was not made to take its backward apart"
        with self._late.keeping() as products:
            returned = self.backward(micro, gradients)
        self._products[micro] = products
        return returned

    def backward_weight(self, micro: int) -> None:
        """W: the gradients that B left."""
        assert self._late is not None, "the stage was not made to take its backward apart"
        with torch.no_grad():
            for product in self._products.pop(micro):
                self._late.deliver(product.weight, product.compute())
