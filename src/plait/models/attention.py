"""Self-attention: projections, rotation, and the core that mixes tokens.

`Core` is the one part that sees other tokens, and the one that context parallelism replaces. It gets q, k, v and the
`Where` of the tokens, since masks are data. Head counts are read from tensors: a shard of the heads works unchanged.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.dropout import dropped, fold, site_number, site_state
from plait.models.layers import Factory, FusedLinear, Linear, norm
from plait.models.rotary import rotate
from plait.models.where import Where
from plait.spec.model import ModelSpec


class Attention(nn.Module):
    """x (B, S, d) -> (B, S, d)."""

    def __init__(self, spec: ModelSpec, layer: int, make: Factory) -> None:
        super().__init__()
        self.head_dim, self.rotates = spec.head_dim, spec.positions == "rotary"
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = FusedLinear(spec.hidden, (q, kv, kv), spec.qkv_bias, make)
        self.q_norm, self.k_norm = (
            norm("rms", spec.head_dim, spec.norm_eps, make) if spec.qk_norm else nn.Identity() for _ in "qk"
        )
        self.core = Core(spec.window, spec.attention_dropout, layer)
        self.out = Linear(q, spec.hidden, spec.out_bias, make)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.qkv(x))  # (B, S, heads, D), (B, S, kv, D) x 2
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            assert where.rotary is not None, "a block needs the tables that Decoder.rotary fills in"
            q, k = rotate(q, where.rotary), rotate(k, where.rotary)
        y: Tensor = self.out(self.core(q, k, v, where).flatten(-2))
        return y


class Core(nn.Module):
    """Causal attention, softmax(scale q k^T) v, within documents and window, with dropout on the probabilities.

    `scale` is 1/sqrt(D) unless given; `first_head` is the global number of the first query head held here. `fused` says
    whether one kernel does it all and keeps O(S) for backward: probabilities that are dropped are kept whole.
    """

    def __init__(
        self, window: int | None, dropout: float, layer: int, first_head: int = 0, scale: float | None = None
    ) -> None:
        super().__init__()
        self.window, self.dropout, self.scale, self.first_head = window, dropout, scale, first_head
        self.site = site_number(layer, "attention")
        self.fused = dropout == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        """q (B, S, h, D), k (B, S, kv, D) and v (B, S, kv, V) with kv dividing h -> (B, S, h, V)."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.dropout and self.training:
            y = self._with_dropout(q, k, v, where)
        else:
            plain = where.documents is None and (self.window is None or self.window >= q.shape[2])
            mask = None if plain else visible(where, self.window)
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain, scale=self.scale, enable_gqa=True)
        return y.transpose(1, 2).contiguous()  # as a kernel leaves it: the next matrix takes it without a copy

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scale = self.scale or 1 / math.sqrt(q.shape[-1])
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
        weights = scores.masked_fill(~visible(where, self.window), -math.inf).softmax(dim=-1).to(q.dtype)
        heads = torch.arange(self.first_head, self.first_head + q.shape[1], device=q.device)
        dead = dead_probabilities(where, (self.site, self.dropout), heads, where.indices, where.indices)
        return (weights.masked_fill(dead, 0.0) @ v) * (1 / (1 - self.dropout))


def dead_probabilities(where: Where, site: tuple[int, float], heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Which attention probabilities dropout kills: bool (B, h, Q, K), by global numbers of heads, queries and keys.

    `site` is the number of the layer's attention (`dropout.site_number`), and the probability.
    """
    state = fold(site_state(where.key, site[0]), where.samples)  # (B,)
    rows = fold(fold(state[:, None], heads)[..., None], queries)  # (B, h, Q)
    return dropped(rows, keys, site[1])


def visible(where: Where, window: int | None) -> Tensor:
    """Which key each query sees: bool (S, S), or (B, 1, S, S) where rows hold several documents."""
    documents = where.documents
    return seen(where.indices, where.indices, window, None if documents is None else (documents, documents))


def seen(queries: Tensor, keys: Tensor, window: int | None, documents: tuple[Tensor, Tensor] | None) -> Tensor:
    """Which key each query sees: bool (Q, K), or (B, 1, Q, K) with the documents (B, Q) and (B, K) of both."""
    query = queries[:, None]
    found = keys <= query
    if window is not None:
        found = found & (query - keys < window)
    if documents is not None:
        of_query, of_key = documents
        found = found & (of_query[:, None, :, None] == of_key[:, None, None, :])
    return found
