"""The products of tokens with the matrices of their experts, tokens sorted by expert; kernels as a table.

`loop` runs anywhere: one GEMM per expert and matrix, written in place, backward included. `grouped` is torch's grouped
GEMM, where the dtype and the device have it. Both leave weight gradients of experts without a token at zero.
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
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        met: set[int] = set()
        for expert, start, stop in ctx.spans:
            torch.mm(grad[start:stop], weight[expert], out=grad_x[start:stop])
            share = grad[start:stop].t(), x[start:stop]
            if expert in met:
                grad_weight[expert].addmm_(*share)
            else:
                torch.mm(*share, out=grad_weight[expert])
                met.add(expert)
        for expert in set(range(len(weight))) - met:
            grad_weight[expert].zero_()
        return grad_x, grad_weight, None


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


def grouped_mlp(x: Tensor, counts: Tensor, weights: ExpertWeights, activation: Callable[..., Tensor]) -> Tensor:
    """The MLP of each expert on its rows of x (M, d) -> (M, d): counts (runs·E,) of each expert's rows in each run of
    rows, one run where a rank sorted them all."""
    product = PRODUCTS.get((x.device.type, x.dtype), _loop)
    inner = [product(x, w, counts) for w in (weights.gate, weights.up) if w is not None]
    return product(activation(*inner), weights.down, counts)
