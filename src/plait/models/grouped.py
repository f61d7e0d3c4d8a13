"""The products of tokens with the matrices of their experts, tokens sorted by expert; kernels as a table.

The loops run anywhere: an expert after the other, each with all that it needs at hand, backward included. `_grouped` is
torch's grouped GEMM, where the dtype and the device have it. All leave weight gradients of experts without a token at
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertWeights(NamedTuple):
    """gate and up (E, ffn, d), down (E, d, ffn); no gate where the MLP has none."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


def _spans(counts: Tensor, experts: int) -> list[tuple[int, int, int]]:
    """(expert, first, last + 1) of each run of rows; experts take turns, 0 1 … 0 1 …"""
    spans, start = [], 0
    for number, count in enumerate(counts.tolist()):
        if count:
            spans.append((number % experts, start, start + count))
        start += count
    return spans


class _Loop(torch.autograd.Function):
    """y_e = x_e W_eᵀ for the rows x_e of each expert; W (E, n, m), x (M, m) -> (M, n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.spans = _spans(counts, len(weight))
        ctx.save_for_backward(x, weight)
        y = x.new_empty(x.shape[0], weight.shape[1])
        for expert, start, stop in ctx.spans:
            torch.mm(x[start:stop], weight[expert].t(), out=y[start:stop])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grads = torch.empty_like(x), _WeightGradients(weight)
        for expert, start, stop in ctx.spans:
            torch.mm(grad[start:stop], weight[expert], out=grad_x[start:stop])
            grads.add(0, expert, grad[start:stop], x[start:stop])
        return grad_x, grads.finish()[0], None


def _loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return cast(Tensor, _Loop.apply(x, weight, counts))  # type: ignore[no-untyped-call]


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """torch's kernel wants one run of rows for each matrix, so rows that came in several runs have their matrices in
    turn."""
    runs = len(counts) // len(weight)
    return F.grouped_mm(x, weight.mT.repeat(runs, 1, 1), offs=counts.cumsum(0).to(torch.int32))


Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # x (M, m), W (E, n, m), counts (runs·E,) -> (M, n)

# Where torch's grouped GEMM is a kernel of its own, and not a loop: elsewhere ours costs less (docs/log.md).
PRODUCTS: Mapping[tuple[str, torch.dtype], Product] = {("cuda", torch.bfloat16): _grouped}


class _LoopSwiGLU(torch.autograd.Function):
    """The whole gated MLP (Shazeer 2020) of one expert after the other. What stands between its products is made anew
    in backward, while it fits the cache: only the results of the first two are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
        ctx.spans = _spans(counts, len(gate))
        y = x.new_empty(x.shape[0], down.shape[1])
        inner: list[Tensor] = []
        for expert, start, stop in ctx.spans:
            rows = x[start:stop]
            g, u = rows @ gate[expert].t(), rows @ up[expert].t()
            torch.mm(F.silu(g).mul_(u), down[expert].t(), out=y[start:stop])
            inner += [g, u]
        ctx.save_for_backward(x, gate, up, down, *inner)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, *inner = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grads = _WeightGradients(gate, up, down)
        for number, (expert, start, stop) in enumerate(ctx.spans):
            rows, out, g, u = x[start:stop], grad[start:stop], inner[2 * number], inner[2 * number + 1]
            swish = F.silu(g)
            grad_h = out @ down[expert]
            grad_g = torch.ops.aten.silu_backward(grad_h * u, g)
            grads.add(2, expert, out, swish * u)
            grad_u = grad_h.mul_(swish)
            torch.mm(grad_g, gate[expert], out=grad_x[start:stop])
            grad_x[start:stop].addmm_(grad_u, up[expert])
            grads.add(0, expert, grad_g, rows)
            grads.add(1, expert, grad_u, rows)
        return grad_x, *grads.finish(), None


class _WeightGradients:
    """Gradients of stacked matrices, an expert's share at a time."""

    def __init__(self, *weights: Tensor) -> None:
        self._grads = [torch.empty_like(weight) for weight in weights]
        self._met: list[set[int]] = [set() for _ in weights]

    def add(self, which: int, expert: int, outputs: Tensor, inputs: Tensor) -> None:
        """outputsᵀ inputs, for weights (n, m) of one expert."""
        if expert in self._met[which]:
            self._grads[which][expert].addmm_(outputs.t(), inputs)
        else:
            torch.mm(outputs.t(), inputs, out=self._grads[which][expert])
            self._met[which].add(expert)

    def finish(self) -> list[Tensor]:
        """All of them; zero where an expert had no row."""
        for grad, met in zip(self._grads, self._met, strict=True):
            for expert in set(range(len(grad))) - met:
                grad[expert].zero_()
        return self._grads


def grouped_mlp(x: Tensor, counts: Tensor, weights: ExpertWeights, activation: Callable[..., Tensor]) -> Tensor:
    """The MLP of each expert on its rows of x (M, d) -> (M, d): counts (runs·E,) of each expert's rows in each run of
    rows, one run where a rank sorted them all."""
    product = PRODUCTS.get((x.device.type, x.dtype), _loop)
    if product is _loop and weights.gate is not None:
        return cast(Tensor, _LoopSwiGLU.apply(x, *weights, counts))  # type: ignore[no-untyped-call]
    inner = [product(x, w, counts) for w in (weights.gate, weights.up) if w is not None]
    return product(activation(*inner), weights.down, counts)
