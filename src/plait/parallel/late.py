"""Weight gradients of linears, apart from their backward: B computes the input's gradient, W the weight's, later.

| what is split           | forward | backward                                  | replaces                  |
|-------------------------|---------|-------------------------------------------|---------------------------|
| the backward of linears | nothing | B keeps a linear's input and its output's | Linear, FusedLinear,      |
|                         | new     | gradient, W multiplies them (and gathers  | ColumnLinear, RowLinear   |
|                         |         | split tokens first)                       |                           |

Gradients of embeddings, norms, biases, experts and routers are no such products, or small: they are done in B. Source:
Qi et al. 2023, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.layers import FusedLinear, Linear
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.tensor import ColumnLinear, RowLinear


class Product(NamedTuple):
    """A weight gradient that is not computed yet: gradᵀ x, where x is gathered over a group first if there is one."""

    weight: nn.Parameter
    x: Tensor  # (B, T, inputs), or (B, T/tp, inputs)
    grad: Tensor  # (B, T, outputs)
    gather: Group | None

    def compute(self) -> Tensor:
        """The gradient in the shape of the weight."""
        x = self.x
        if self.gather is not None:
            x = comm.finish_all_gather(comm.start_all_gather(x, self.gather), self.gather)
        return self.grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Late:
    """What the linears of a rank leave for later, while somebody asks them to. `deliver` takes each gradient."""

    def __init__(self, deliver: Callable[[nn.Parameter, Tensor], None]) -> None:
        self.deliver = deliver
        self._kept: list[Product] | None = None

    @contextmanager
    def keeping(self) -> Iterator[list[Product]]:
        """Every backward of a linear in here leaves its weight's gradient in the list."""
        kept: list[Product] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    def keeps(self, product: Product) -> bool:
        """Whether the product was kept for later; if not, it is wanted now."""
        if self._kept is None:
            return False
        self._kept.append(product)
        return True


class _LateProduct(torch.autograd.Function):
    """y = x Wᵀ + b. With a group, W's rows are on different ranks; x is whole, or (B, T/tp, d) where `split`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, late: Late, group: Group | None, split: bool
    ) -> Tensor:
        ctx.late, ctx.parameter, ctx.group, ctx.split, ctx.biased = late, weight, group, split, bias is not None
        ctx.save_for_backward(x, weight)
        if group is not None and split:
            x = comm.finish_all_gather(comm.start_all_gather(x, group), group)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, split = ctx.group, ctx.split
        grad_x = grad @ weight
        if group is not None:
            pending = comm.start_reduce_scatter(grad_x, group) if split else comm.start_all_reduce(grad_x, group)
        # Detached: x knows its graph, at whose beginning stands what the stage received, with its gradient.
        product = Product(ctx.parameter, x.detach(), grad, group if split else None)
        grad_weight = None if ctx.late.keeps(product) else product.compute()
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        if group is not None:
            grad_x = (comm.finish_reduce_scatter if split else comm.finish_all_reduce)(pending, group)
        return grad_x, grad_weight, grad_bias, None, None, None


class LateLinear(nn.Module):
    """In place of a linear whose outputs this rank has all, or its own rows of; `outs` as in FusedLinear."""

    def __init__(self, like: Linear | ColumnLinear, late: Late) -> None:
        super().__init__()
        self.weight, self.bias, self.late = like.weight, like.bias, late
        self.outs = tuple(like.outs or ()) if isinstance(like, FusedLinear | ColumnLinear) else ()
        self.group = like.group if isinstance(like, ColumnLinear) else None
        self.split = isinstance(like, ColumnLinear) and like.split

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        y: Tensor = _LateProduct.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.late, self.group, self.split
        )
        return y.split(self.outs, dim=-1) if self.outs else y


class LateRowLinear(nn.Module):
    """In place of a linear whose inputs are spread over the group; the bias is added once, to the sum."""

    def __init__(self, like: RowLinear, late: Late) -> None:
        super().__init__()
        self.weight, self.bias, self.late = like.weight, like.bias, late
        self.group, self.split = like.group, like.split

    def forward(self, x: Tensor) -> Tensor:
        partial: Tensor = _LateProduct.apply(x, self.weight, None, self.late, None, False)  # type: ignore[no-untyped-call]
        y = comm.scatter_partial(partial, self.group) if self.split else comm.sum_partial(partial, self.group)
        return y if self.bias is None else y + self.bias


LATE: dict[type[nn.Module], Callable[[Any, Late], nn.Module]] = {
    Linear: LateLinear,
    FusedLinear: LateLinear,
    ColumnLinear: LateLinear,
    RowLinear: LateRowLinear,
}


def split_backward(stage: nn.Module, late: Late) -> None:
    """Replace the linears of a stage by those that can leave their weight's gradient for later."""
    for path, module in list(stage.named_modules()):
        if type(module) in LATE:
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, LATE[type(module)](module, late))
