"""Context parallelism: the tokens of a sequence on several ranks, and attention that sees all of them.

| what is split      | forward                        | backward                        | replaces       |
|--------------------|--------------------------------|---------------------------------|----------------|
| tokens, ring       | (ring - 1) shifts of K, of V   | the same, and as many of dK, dV | attention.core |
| tokens, gather     | all-gather of K, of V          | the same, and reduce-scatter of |                |
|                    |                                | dK, of dV                       |                |
| heads over Ulysses | all-to-all of q, k, v, out     | all-to-all of their gradients   |                |

cp = ring x ulysses: Ulysses inside (Jacobs et al. 2023) exchanges tokens for heads, after which a rank holds all tokens
of its ring rank for some heads; the ring (Liu et al. 2023), or a gather in its place, brings the keys of the others.
Masks and dropout follow from global token numbers, so order (contiguous or zigzag), windows and packed documents
change nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.models.attention import Core, dead_probabilities, seen
from plait.models.where import Where
from plait.parallel import collectives as comm
from plait.parallel import ring as blocks
from plait.parallel.collectives import Group
from plait.parallel.mesh import Mesh
from plait.placement.tiles import Tile, tiles
from plait.placement.tokens import Runs, ring_chunks, ring_runs, tokens_in
from plait.spec.run import RunSpec

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Context:
    """How the tokens of a row are spread: the two groups, the tokens of each ring rank, and how keys travel."""

    ring: Group
    ulysses: Group
    runs: tuple[Runs, ...]
    exchange: str  # a row of EXCHANGES

    @classmethod
    def of(cls, mesh: Mesh, run: RunSpec) -> Context:
        ring = mesh.group("ring")
        runs = ring_runs(run.batch.sequence, ring.size, ring_chunks(run))
        return cls(ring, mesh.group("ulysses"), runs, run.layout.context)


# --- tokens for heads ------------------------------------------------------------------------------------------------


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """(B, T, h, D) of all heads -> (B, n·T, h/n, D)."""
    pieces = x.unflatten(2, (group.size, -1)).movedim(2, 0)  # (n, B, T, h/n, D)
    return comm.exchange(pieces, group).movedim(0, 1).flatten(1, 2)


def _to_tokens(x: Tensor, group: Group) -> Tensor:
    """(B, n·T, h/n, D) -> (B, T, h, D)."""
    pieces = x.unflatten(1, (group.size, -1)).movedim(1, 0)  # (n, B, T, h/n, D)
    return comm.exchange(pieces, group).movedim(0, 2).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Tokens for heads, or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, heads: bool) -> Tensor:
        ctx.group, ctx.heads = group, heads
        return (_to_heads if heads else _to_tokens)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.heads else _to_heads)(grad, ctx.group), None, None


def exchange_heads(x: Tensor, group: Group, heads: bool) -> Tensor:
    """All heads of some tokens for some heads of all tokens (`heads`), or the other way."""
    return x if group.size == 1 else cast(Tensor, _Exchange.apply(x, group, heads))  # type: ignore[no-untyped-call]


def enough_heads(x: Tensor, query_heads: int, ranks: int) -> Tensor:
    """Key or value heads (B, T, kv, D) repeated as little as lets every rank have those of its query heads."""
    kv = x.shape[2]
    if kv % ranks == 0:
        return x
    times = ranks // kv if ranks % kv == 0 else query_heads // kv
    return x.repeat_interleave(times, dim=2)


# --- keys of other ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attend:
    """One attention of this rank's queries to the keys of every ring rank, tile by tile."""

    context: Context
    core: Core
    where: Where
    places: tuple[Tensor, ...]  # global numbers of each ring rank's tokens
    training: bool

    @property
    def rank(self) -> int:
        return self.context.ring.rank

    def scale(self, q: Tensor) -> float:
        return float(self.core.scale or q.shape[-1] ** -0.5)

    def tiles(self, source: int) -> list[Tile]:
        """What queries here see of the keys of ring rank `source`."""
        runs, documents = self.context.runs, self.where.row_documents
        return tiles(runs[self.rank], runs[source], self.core.window, documents is not None)

    def masks(self, tile: Tile, source: int, q: Tensor) -> blocks.Masks:
        """What a kernel must heed in a tile."""
        queries, keys = self.places[self.rank][tile.queries], self.places[source][tile.keys]
        visible = None
        if tile.kind == "masked":
            documents = self.where.row_documents
            both = None if documents is None else (documents[:, queries], documents[:, keys])
            visible = seen(queries, keys, self.core.window, both)
        return blocks.Masks(tile.kind == "causal", visible, self._keep(queries, keys, q), self.scale(q))

    def _keep(self, queries: Tensor, keys: Tensor, q: Tensor) -> blocks.Keep | None:
        p = self.core.dropout if self.training else 0.0
        if not p:
            return None
        heads = torch.arange(self.core.first_head, self.core.first_head + q.shape[1], device=q.device)

        def keep(rows: slice) -> Tensor:
            dead = dead_probabilities(self.where, (self.core.site, p), heads, queries[rows], keys)
            return torch.full_like(dead, 1 / (1 - p), dtype=torch.float64).masked_fill_(dead, 0.0).to(q.dtype)

        return keep


def _pass_around(held: Sequence[Tensor], group: Group) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """(rank that they come from, its tensors) of every rank, this one first; the next arrive while these are used."""
    for step in range(group.size):
        last = step == group.size - 1
        pending = [] if last else [comm.start_shift(x, group) for x in held]
        yield (group.rank - step) % group.size, held
        held = [comm.finish_shift(x, group) for x in pending]


def _gather(held: Sequence[Tensor], group: Group) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """The same from one all-gather of each tensor (B, T, kv, D)."""
    wholes = [comm.finish_all_gather(x, group) for x in [comm.start_all_gather(x, group) for x in held]]
    parts = [x.chunk(group.size, dim=1) for x in wholes]
    for step in range(group.size):
        source = (group.rank - step) % group.size
        yield source, [part[source] for part in parts]


class _RingHome:
    """Gradients of travelling keys follow them: each rank adds its share and passes the sum on; the last hop is home.

    A rank's share for its own keys stays, so that there are as many hops as of the keys.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.own: Sequence[Tensor] = ()
        self.travelling: list[Tensor] = []

    def add(self, source: int, grads: Sequence[Tensor]) -> None:
        if source == self.group.rank:
            self.own = grads
            return
        arrived = [comm.finish_shift(x, self.group) for x in self.travelling]
        sums = [a + b for a, b in zip(arrived, grads, strict=True)] if arrived else grads
        self.travelling = [comm.start_shift(x, self.group) for x in sums]

    def home(self) -> list[Tensor]:
        arrived = [comm.finish_shift(x, self.group) for x in self.travelling]
        return [a + b for a, b in zip(self.own, arrived, strict=True)]


class _ScatterHome:
    """The same by one reduce-scatter of each tensor (B, T, kv, D)."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.parts: dict[int, Sequence[Tensor]] = {}

    def add(self, source: int, grads: Sequence[Tensor]) -> None:
        self.parts[source] = grads

    def home(self) -> list[Tensor]:
        wholes = [torch.cat(part, dim=1) for part in zip(*(self.parts[i] for i in range(self.group.size)), strict=True)]
        self.parts.clear()
        pending = [comm.start_reduce_scatter(x, self.group) for x in wholes]
        return [comm.finish_reduce_scatter(x, self.group) for x in pending]


Travel = Callable[[Sequence[Tensor], Group], Iterator[tuple[int, Sequence[Tensor]]]]

# layout.context -> how keys and values come, and how their gradients go home.
EXCHANGES: dict[str, tuple[Travel, type[_RingHome] | type[_ScatterHome]]] = {
    "ring": (_pass_around, _RingHome),
    "gather": (_gather, _ScatterHome),
}


class _Attention(torch.autograd.Function):
    """q (B, T, h, D), k (B, T, kv, D), v (B, T, kv, V) of this rank's tokens -> (B, T, h, V). Keeps those and one
    number per query and head; keys of others come again in backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        travel, _ = EXCHANGES[attend.context.exchange]
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.transpose(1, 2)  # (B, h, T, D)
        out = q.new_zeros(*queries.shape[:3], v.shape[-1], dtype=wide)
        lse = q.new_full(queries.shape[:3], -torch.inf, dtype=wide)
        for source, held in travel((k, v), attend.context.ring):
            keys, values = (x.transpose(1, 2) for x in held)
            for tile in attend.tiles(source):
                at = tile.queries
                inputs = queries[:, :, at], keys[:, :, tile.keys], values[:, :, tile.keys]
                part, part_lse = blocks.forward(*inputs, attend.masks(tile, source, queries))
                both = torch.logaddexp(lse[:, :, at], part_lse)
                finite = both.clamp(min=torch.finfo(wide).min)  # a query may have seen no key yet
                kept, added = ((x - finite).exp().unsqueeze(-1) for x in (lse[:, :, at], part_lse))
                out[:, :, at] = out[:, :, at] * kept + part * added
                lse[:, :, at] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attend = attend
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        saved = ctx.saved_tensors  # asked for once: what is recomputed would be computed again
        q, k, v, *_ = saved
        grad_q, home = _gradients(ctx.attend, saved, grad.transpose(1, 2))
        grad_keys, grad_values = home.home()
        return grad_q.transpose(1, 2).to(q.dtype), grad_keys.to(k.dtype), grad_values.to(v.dtype), None


def _gradients(attend: Attend, saved: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, _RingHome | _ScatterHome]:
    """That of the queries (B, h, T, D), and those of all keys and values, which have to be sent home."""
    q, k, v, out, lse = saved
    travel, home_kind = EXCHANGES[attend.context.exchange]
    home = home_kind(attend.context.ring)
    wide, queries = lse.dtype, q.transpose(1, 2)
    delta = (out.to(wide) * grad.to(wide)).sum(-1)
    grad_q = torch.zeros_like(q, dtype=wide).transpose(1, 2)
    for source, held in travel((k, v), attend.context.ring):
        keys, values = (x.transpose(1, 2) for x in held)
        grads = [torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in held]
        grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        for tile in attend.tiles(source):
            at = tile.queries
            inputs = grad[:, :, at], queries[:, :, at], keys[:, :, tile.keys], values[:, :, tile.keys]
            whole = out[:, :, at], lse[:, :, at], delta[:, :, at]
            by_q, by_k, by_v = blocks.backward(*inputs, whole, attend.masks(tile, source, queries))
            grad_q[:, :, at] += by_q
            grad_k[:, :, tile.keys] += by_k
            grad_v[:, :, tile.keys] += by_v
            del by_q, by_k, by_v  # or they would stand beside those of the next tile
        home.add(source, grads)
    return grad_q, home


class ContextCore(nn.Module):
    """The core of attention over tokens that are spread: q (B, T/cp, h, D), k and v (B, T/cp, kv, ·) -> like q."""

    def __init__(self, core: Core, heads: int, context: Context, device: torch.device) -> None:
        super().__init__()
        self.context, self.heads = context, heads
        self.core = copy(core)
        self.core.fused = core.fused or context.ring.size > 1  # `_Attention` keeps O(S) whatever it drops
        self.core.first_head = core.first_head + context.ulysses.rank * heads // context.ulysses.size
        self.places = tuple(torch.tensor(tokens_in(runs), device=device) for runs in context.runs)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Tensor:
        group = self.context.ulysses
        k, v = (enough_heads(x, q.shape[2], group.size) for x in (k, v))
        q, k, v = (exchange_heads(x, group, heads=True) for x in (q, k, v))
        if self.context.ring.size == 1:
            y = self.core(q, k, v, where._replace(indices=self.places[0], documents=where.row_documents))
        else:
            attend = Attend(self.context, self.core, where, self.places, self.training)
            y = _Attention.apply(q, k, v, attend)  # type: ignore[no-untyped-call]
        return exchange_heads(y, group, heads=False)


def split_context(stage: nn.Module, context: Context, heads: int, device: torch.device) -> None:
    """Replace the cores of a stage whose tokens are spread. `heads` are the query heads of a tp rank."""
    if context.ring.size * context.ulysses.size == 1:
        return
    for path, module in list(stage.named_modules()):
        if isinstance(module, Core):
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, ContextCore(module, heads, context, device))
