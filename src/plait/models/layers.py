"""The small parts of a block: linear maps, norms, the MLP, the embeddings. Attention has a file of its own.

Parameters are made empty, on any device: what they start as is decided in init.py alone. No size is assumed that
could be read from a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.dropout import Dropout, site_number
from plait.models.where import Where
from plait.spec.model import ModelSpec

Terms = dict[str, Tensor]  # named sums that leave a stage beside its activations


class Factory(TypedDict):
    """Where and in which dtype parameters are made."""

    device: torch.device | str
    dtype: torch.dtype


class Linear(nn.Module):
    """y = x W^T + b, with W (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, make: Factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, **make))
        self.bias = nn.Parameter(torch.empty(outputs, **make)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several linear maps of one input as one GEMM; their weights are stacked along dim 0 and results come apart."""

    def __init__(self, inputs: int, outs: tuple[int, ...], bias: bool, make: Factory) -> None:
        super().__init__(inputs, sum(outs), bias, make)
        self.outs = outs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return torch.split(super().forward(x), list(self.outs), dim=-1)


NORMS: dict[str, type[nn.RMSNorm] | type[nn.LayerNorm]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def norm(kind: str, size: int, eps: float, make: Factory) -> nn.Module:
    """The norm over the last dim; statistics in fp32 or wider."""
    return NORMS[kind](size, eps=eps, **make)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gelu(up: Tensor) -> Tensor:
    return F.gelu(up)


def _gelu_tanh(up: Tensor) -> Tensor:
    return F.gelu(up, approximate="tanh")


def _relu2(up: Tensor) -> Tensor:
    return F.relu(up).square()


# What stands between the two matrices of an MLP, and how many outputs of the first it takes.
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "swiglu": (_swiglu, 2),  # Shazeer 2020
    "gelu": (_gelu, 1),
    "gelu_tanh": (_gelu_tanh, 1),
    "relu": (F.relu, 1),
    "relu2": (_relu2, 1),  # So et al. 2021
}


class Activation(nn.Module):
    """The function between an MLP's two matrices, a row of ACTIVATIONS."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.function, self.inputs = ACTIVATIONS[kind]

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class MLP(nn.Module):
    """The dense feed-forward slot of a block: (x, where) -> (y, loss terms), of which it has none."""

    def __init__(self, spec: ModelSpec, make: Factory, ffn: int | None = None) -> None:
        super().__init__()
        ffn = ffn or spec.ffn
        self.activation = Activation(spec.mlp)
        self.up = FusedLinear(spec.hidden, (ffn,) * self.activation.inputs, spec.mlp_bias, make)
        self.down = Linear(ffn, spec.hidden, spec.mlp_bias, make)

    def forward(self, x: Tensor, where: Where) -> tuple[Tensor, Terms]:
        return self.down(self.activation(*self.up(x))), {}


class TokenEmbedding(nn.Module):
    """Token numbers (B, S) -> (B, S, d)."""

    def __init__(self, vocab: int, hidden: int, make: Factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, **make))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, longest: int, hidden: int, make: Factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(longest, hidden, **make))

    def forward(self, x: Tensor, where: Where) -> Tensor:
        return x + F.embedding(where.positions, self.weight)


class NoPositions(nn.Module):
    """Stands in for `PositionEmbedding` where positions are rotary."""

    def forward(self, x: Tensor, where: Where) -> Tensor:
        return x


class Embedding(nn.Module):
    """The way in: tokens, positions, dropout."""

    def __init__(self, spec: ModelSpec, make: Factory) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(spec.vocab, spec.hidden, make)
        learned = spec.positions == "learned"
        self.positions = PositionEmbedding(spec.max_sequence, spec.hidden, make) if learned else NoPositions()
        self.dropout = Dropout(spec.dropout, site_number(None, "embedding"))

    def forward(self, tokens: Tensor, where: Where) -> Tensor:
        x: Tensor = self.positions(self.tokens(tokens), where)
        x = self.dropout(x, where)
        return x
