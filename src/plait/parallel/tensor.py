"""Tensor parallelism (Shoeybi et al. 2019), with the tokens between blocks whole or split (Korthikanti et al. 2022).

| what is split                  | forward                        | backward                       | replaces         |
|--------------------------------|--------------------------------|--------------------------------|------------------|
| heads, ffn by output (column)  | split tokens: all-gather       | all-reduce (reduce-scatter) of | attention.qkv,   |
|                                |                                | the input gradient, beside the | mlp.up,          |
|                                |                                | weight gradient's GEMM         | head.projection  |
| one key for all heads (latent) | split tokens: all-gather       | all-reduce (reduce-scatter)    | attention.spread |
| heads, ffn by input (row)      | all-reduce (reduce-scatter)    | split tokens: all-gather       | attention.out,   |
|                                |                                |                                | mlp.down         |
| rows of the token table        | all-reduce (reduce-scatter)    | split tokens: all-gather       | embedding.tokens |
| columns of the logits          | all-reduce of 3 numbers/token  | none                           | head.loss        |

Under split tokens a column's input is kept as the (B, T/tp, d) that it came as, and gathered once more in backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.layers import Linear, TokenEmbedding
from plait.models.where import Where
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.loss import VocabularyCrossEntropy
from plait.placement.cuts import Rectangle


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # (B, T, D) -> (B·T, D)


class _Column(torch.autograd.Function):
    """y = x Wᵀ + b with W's rows on different ranks; x is whole, or (B, T/tp, d) where `split`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, split: bool) -> Tensor:
        ctx.group, ctx.split, ctx.biased = group, split, bias is not None
        ctx.save_for_backward(x, weight)
        whole = comm.finish_all_gather(comm.start_all_gather(x, group), group) if split else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        group, split = ctx.group, ctx.split
        gathering = comm.start_all_gather(x, group) if split else x
        partial = grad @ weight
        pending = comm.start_reduce_scatter(partial, group) if split else comm.start_all_reduce(partial, group)
        whole = comm.finish_all_gather(gathering, group) if split else x
        grad_weight = _flat(grad).t() @ _flat(whole)
        grad_bias = _flat(grad).sum(0) if ctx.biased else None
        finish = comm.finish_reduce_scatter if split else comm.finish_all_reduce
        return finish(pending, group), grad_weight, grad_bias, None, None


class ColumnLinear(nn.Module):
    """A linear whose output features are spread over the group; `outs` as in FusedLinear, of this rank."""

    def __init__(self, like: Linear, outs: tuple[int, ...] | None, group: Group, split: bool) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.outs, self.group, self.split = outs, group, split

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        y: Tensor = _Column.apply(x, self.weight, self.bias, self.group, self.split)  # type: ignore[no-untyped-call]
        return y.split(self.outs, dim=-1) if self.outs else y


class RowLinear(nn.Module):
    """A linear whose input features are spread over the group; the bias is added once, to the sum."""

    def __init__(self, like: Linear, group: Group, split: bool) -> None:
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.group, self.split = group, split

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)  # (B, T, d); y is whole, or (B, T/tp, d) where tokens are split
        y = comm.scatter_partial(partial, self.group) if self.split else comm.sum_partial(partial, self.group)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """A token table whose rows from `start` on are here; tokens of other ranks look up zero."""

    def __init__(self, like: TokenEmbedding, start: int, group: Group, split: bool) -> None:
        super().__init__()
        self.weight = like.weight
        self.start, self.group, self.split = start, group, split

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - self.start
        foreign = (local < 0) | (local >= rows)
        x = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return comm.scatter_partial(x, self.group) if self.split else comm.sum_partial(x, self.group)


class SplitTokens(nn.Module):
    """A module between blocks that depends on where its tokens stand: it is told which part of the row it is given."""

    def __init__(self, inner: nn.Module, group: Group) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor, where: Where) -> Tensor:
        length = x.shape[1]  # T/tp
        y: Tensor = self.inner(x, where.narrow(self.group.rank * length, length))
        return y


@dataclass(frozen=True)
class Sharding:
    """What a style needs to know: the group, whether tokens between blocks are split, and this rank's rectangles.

    `rectangles` are those of the tensors stacked in a module parameter, by the parameter's path.
    """

    group: Group
    split: bool
    head_dim: int
    rectangles: Mapping[str, tuple[Rectangle, ...]]


def _column(module: Any, path: str, known: Sharding) -> nn.Module:
    rows = tuple(stop - start for (start, stop), _ in known.rectangles[f"{path}.weight"])
    return ColumnLinear(module, rows if hasattr(module, "outs") else None, known.group, known.split)


def _row(module: Any, path: str, known: Sharding) -> nn.Module:
    return RowLinear(module, known.group, known.split)


def _vocabulary(module: Any, path: str, known: Sharding) -> nn.Module:
    return VocabularyEmbedding(module, known.rectangles[f"{path}.weight"][0][0][0], known.group, known.split)


def _loss(module: Any, path: str, known: Sharding) -> nn.Module:
    return VocabularyCrossEntropy(module.z_loss, known.rectangles["head.projection.weight"][0][0], known.group)


def _heads(module: Any, path: str, known: Sharding) -> nn.Module:
    attention = path.removesuffix("core")
    fused = f"{attention}qkv.weight"
    rows = known.rectangles[fused if fused in known.rectangles else f"{attention}q.weight"][0][0]
    core = copy(module)
    core.first_head = rows[0] // known.head_dim
    assert isinstance(core, nn.Module)
    return core


class Spread(nn.Module):
    """What all heads share meets the heads of every rank: (B, T/tp, d) of split tokens, or whole -> (B, T, d)."""

    def __init__(self, group: Group, split: bool) -> None:
        super().__init__()
        self.group, self.split = group, split

    def forward(self, x: Tensor) -> Tensor:
        return comm.spread(x, self.group, self.split)


def _spread(module: nn.Module, path: str, known: Sharding) -> nn.Module:
    return Spread(known.group, known.split)


def _between(module: nn.Module, path: str, known: Sharding) -> nn.Module:
    return SplitTokens(module, known.group) if known.split else module


Style = Callable[[Any, str, Sharding], nn.Module]

# Path of a submodule, with * for a block's number -> what replaces it.
STYLES: Mapping[str, Style] = {
    "embedding.tokens": _vocabulary,
    "embedding.positions": _between,
    "embedding.dropout": _between,
    "blocks.*.attention.qkv": _column,
    "blocks.*.attention.q": _column,
    "blocks.*.attention.kv": _column,
    "blocks.*.attention.spread": _spread,
    "blocks.*.attention.core": _heads,
    "blocks.*.attention.out": _row,
    "blocks.*.dropout1": _between,
    "blocks.*.mlp.up": _column,
    "blocks.*.mlp.down": _row,
    "blocks.*.mlp.shared.up": _column,
    "blocks.*.mlp.shared.down": _row,
    "blocks.*.dropout2": _between,
    "head.projection": _column,
    "head.loss": _loss,
}


def split_tensors(stage: nn.Module, known: Sharding) -> None:
    """Replace the submodules of a stage by those that know their weights to be shards.

    In a group of one the model's own modules are those already, and cost less on a CPU (docs/log.md).
    """
    if known.group.size == 1:
        return
    for path, module in list(stage.named_modules()):
        style = STYLES.get(re.sub(r"\.\d+\.", ".*.", path))
        if style is not None:
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, style(module, path, known))
