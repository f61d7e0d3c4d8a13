"""The decoder-only transformer: embedding, blocks, head. One device, one forward pass, no other knowledge.

Whatever an axis replaces is a named submodule. A pipeline stage is the same `Decoder` with fewer blocks, and with
`PassThrough` for the ends it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from plait.models.attention import Attention
from plait.models.dropout import Dropout, site_number
from plait.models.latent import LatentAttention
from plait.models.layers import MLP, Embedding, Factory, Linear, Terms, norm
from plait.models.loss import CrossEntropy
from plait.models.moe import MoE
from plait.models.rotary import NoRotary, Rotary
from plait.models.where import Where
from plait.spec.model import ModelSpec


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, layer: int, make: Factory) -> None:
        super().__init__()
        self.attention_norm = norm(spec.norm, spec.hidden, spec.norm_eps, make)
        self.attention = (LatentAttention if spec.latent else Attention)(spec, layer, make)
        self.dropout1 = Dropout(spec.dropout, site_number(layer, "residual1"))
        self.mlp_norm = norm(spec.norm, spec.hidden, spec.norm_eps, make)
        self.mlp = MoE(spec, layer, make) if spec.has_experts(layer) else MLP(spec, make)
        self.dropout2 = Dropout(spec.dropout, site_number(layer, "residual2"))

    def forward(self, x: Tensor, where: Where) -> tuple[Tensor, Terms]:
        x = x + self.dropout1(self.attention(self.attention_norm(x), where), where)
        y, terms = self.mlp(self.mlp_norm(x), where)
        return x + self.dropout2(y, where), terms


class Head(nn.Module):
    """The way out: norm, projection onto the vocabulary, loss."""

    def __init__(self, spec: ModelSpec, make: Factory) -> None:
        super().__init__()
        self.norm = norm(spec.norm, spec.hidden, spec.norm_eps, make)
        self.projection = Linear(spec.hidden, spec.vocab, False, make)
        self.loss: nn.Module = CrossEntropy(spec.z_loss)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Terms]:
        x = self.norm(x)
        return x, self.loss(x, self.projection, labels)


class PassThrough(nn.Module):
    """Stands in for an end of the decoder that another pipeline stage holds; `of` is "embedding" or "head"."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor, _: object) -> Tensor | tuple[Tensor, Terms]:
        return x if self.of == "embedding" else (x, {})


class Decoder(nn.Module):
    """A stage: the whole network, or some consecutive blocks of it with the ends that belong to them.

    Parameters are left empty. The keys of `blocks` are global layer numbers.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        make = Factory(device=device, dtype=dtype)
        self.spec = spec
        self.embedding: nn.Module = Embedding(spec, make)
        self.rotary = Rotary(spec) if spec.positions == "rotary" else NoRotary()
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer, make) for layer in range(spec.layers)})
        self.head: nn.Module = Head(spec, make)
        self._tie()

    def forward(self, x: Tensor, where: Where, labels: Tensor | None = None) -> tuple[Tensor, Terms]:
        """Tokens (B, S), or activations (B, S, d) of the stage before -> activations, and named sums.

        The last stage's sums hold those of its loss: "loss" (over tokens) and "count" (of valid labels) always.
        """
        x, terms = self.body(x, where)
        x, last = self.head(x, labels)
        return x, add_terms(terms, last)

    def logits(self, tokens: Tensor, where: Where) -> Tensor:
        """Tokens (B, S) -> (B, S, V). The whole model only."""
        x, _ = self.body(tokens, where)
        assert isinstance(self.head, Head), "only the stage with the head has logits"
        logits: Tensor = self.head.projection(self.head.norm(x))
        return logits

    def body(self, x: Tensor, where: Where) -> tuple[Tensor, Terms]:
        """All but the head."""
        x = self.embedding(x, where)
        where = self.rotary(where, x.dtype)
        terms: Terms = {}
        for block in self.blocks.values():
            x, extra = block(x, where)
            terms = add_terms(terms, extra)
        return x, terms

    def _tie(self) -> None:
        if self.spec.tied and isinstance(self.embedding, Embedding) and isinstance(self.head, Head):
            self.head.projection.weight = self.embedding.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()  # moving between devices makes new parameters, which must be one again
        return self


def add_terms(terms: Terms, extra: Terms) -> Terms:
    """Sum by name."""
    return terms | {name: terms[name] + value if name in terms else value for name, value in extra.items()}


def logical_tensors(spec: ModelSpec, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of what module parameters hold, by the global names of `spec.parameters()`.

    `held` maps parameter names of a Decoder or stage to tensors of their shapes: weights, gradients, moments alike.
    """
    views: dict[str, Tensor] = {}
    for home, tensors in spec.homes().items():
        tensor = held.get(home, held.get(tensors[0].also or home))
        if tensor is not None:
            parts = torch.split(tensor, [t.shape[0] for t in tensors])
            views |= {t.name: part for t, part in zip(tensors, parts, strict=True)}
    return views
