"""Attention over tokens that are spread over context ranks, in sizes: heads for tokens, the ring of keys and values.

As `parallel/context.py` and `parallel/ring.py` do it: tile by tile, fused where torch's CPU kernel takes the tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.placement.tiles import Tile, tiles
from plait.placement.tokens import Runs, ring_chunks, ring_runs
from plait.planner.sized import ops
from plait.planner.sized.masks import hashed, visible
from plait.planner.sized.stage import Stage
from plait.planner.sized.tape import Grads, Saved, Sized, Tape

SCORES = 2**22  # elements of a matrix of scores that the plain kernel makes at once, as in parallel/ring.py


def widened(s: Stage, q: Sized, x: Sized, dim: int, own: int) -> Sized:
    """Heads of keys or values repeated as little as lets every Ulysses rank have those of its query heads."""
    tokens, ranks = s.seat.tokens, s.seat.layout.size("ulysses")
    heads, kv = q.elements // (tokens * dim), x.elements // (tokens * own)
    if kv % ranks == 0:
        return x
    times = ranks // kv if ranks % kv == 0 else heads // kv
    return ops.repeated(s.tape, x, x.elements * times)


def exchange_heads(s: Stage, x: Sized, dim: int) -> Sized:
    """All heads of some tokens for some heads of all tokens."""
    return _exchange(s, x, dim, heads=True)


def exchange_tokens(s: Stage, x: Sized, dim: int) -> Sized:
    """The other way."""
    return _exchange(s, x, dim, heads=False)


def _exchange(s: Stage, x: Sized, dim: int, heads: bool) -> Sized:
    t = s.tape
    if s.seat.layout.size("ulysses") == 1:
        return x
    out = _exchanged(s, x, dim, heads)
    t.record((x,), (out,), (), lambda _, grads: (_exchanged(s, _one(grads), dim, not heads),))
    return out


def _exchanged(s: Stage, x: Sized, dim: int, heads: bool) -> Sized:
    """Laid out by rank, sent, and laid out again, where that is another order."""
    t, ranks = s.tape, s.seat.layout.size("ulysses")
    here = x.elements // (s.seat.tokens * dim)  # heads of this rank, of all tokens
    sent = ops.like(t, x) if heads or s.rows > 1 else x
    arrived = ops.like(t, x)
    del sent
    moved = s.rows > 1 if heads else here > ranks
    return ops.like(t, arrived) if moved else arrived


def _one(grads: Grads) -> Sized:
    (grad,) = grads
    assert grad is not None
    return grad


@dataclass(frozen=True)
class _Ring:
    """Sizes of one attention on a ring rank: heads of queries and of keys, channels of both and of values."""

    s: Stage
    heads: int
    kv: int
    dim: int
    value: int

    @property
    def t(self) -> Tape:
        return self.s.tape

    @property
    def samples(self) -> int:
        return self.s.rows

    def rows_at_once(self, tile: Tile) -> list[int]:
        """Queries a few at a time, so that no matrix of scores is large: of each part how many."""
        queries, keys = _length(tile.queries), _length(tile.keys)
        at_once = max(1, SCORES // (self.samples * self.heads * keys))
        return [min(at_once, queries - start) for start in range(0, queries, at_once)]

    @cached_property
    def ranks(self) -> int:
        return self.s.seat.layout.size("ring")

    @cached_property
    def runs(self) -> tuple[Runs, ...]:
        run = self.s.seat.run
        return ring_runs(run.batch.sequence, self.ranks, ring_chunks(run))

    @cached_property
    def rank(self) -> int:
        return self.s.seat.at.cp // self.s.seat.layout.size("ulysses")

    @property
    def wide(self) -> int:
        return self.s.wide

    def tiles(self, source: int) -> list[Tile]:
        run = self.s.seat.run
        return tiles(self.runs[self.rank], self.runs[source], run.model.window, run.data.mask_documents)

    def travel(self, held: Sequence[Sized], strided: int) -> Iterator[tuple[int, Sequence[Sized]]]:
        """(source, keys and values) of every rank, the next on their way; `strided` of them are copied to be sent."""
        if self.s.seat.run.layout.context == "gather":
            wholes = self.gathered(held, strided)
            for step in range(self.ranks):
                yield (
                    (self.rank - step) % self.ranks,
                    [Sized(w.memory, w.elements // self.ranks, w.width) for w in wholes],
                )
            return
        for step in range(self.ranks):
            last, first = step == self.ranks - 1, step == 0
            pending = []
            for number, x in enumerate([] if last else held):
                sent = ops.like(self.t, x) if first and number >= len(held) - strided else x
                pending.append(ops.like(self.t, sent))
                del sent
            yield (self.rank - step) % self.ranks, held
            held = pending
            del pending

    def gathered(self, held: Sequence[Sized], strided: int) -> list[Sized]:
        arrived = []
        for number, x in enumerate(held):
            sent = ops.like(self.t, x) if number >= len(held) - strided else x
            arrived.append(self.t.new(x.elements * self.ranks, x.width))
            del sent
        return arrived if self.samples == 1 else [ops.like(self.t, x) for x in arrived]


def ring_attention(s: Stage, q: Sized, k: Sized, v: Sized, dim: int, value: int) -> Sized:
    """Keys and values of other ranks come, now and again in backward; gradients of theirs go home."""
    tokens = s.rows * s.seat.run.batch.sequence // s.seat.layout.size("ring")
    ring = _Ring(s, q.elements // (tokens * dim), k.elements // (tokens * dim), dim, value)
    t = s.tape
    queries = q.elements // dim
    out = t.new(queries * value, s.wide)
    lse = t.new(queries, s.wide)
    strided = 1 if s.seat.layout.size("ulysses") == 1 else 0
    for source, _ in ring.travel((k, v), strided):
        for tile in ring.tiles(source):
            queries = ring.samples * ring.heads * _length(tile.queries)
            part, sums = _tile_forward(ring, tile, q.width)
            both = t.new(queries, ring.wide)
            finite = t.new(queries, ring.wide)
            factors = [ops.like(t, both) for _ in range(2)]
            _add_up(ring, queries)
    del part, sums, both, finite, factors
    out = ops.cast(t, out, q.width)

    def backward(saved: Saved, grads: Grads) -> Grads:
        return _backward(ring, saved, _one(grads))

    t.record((q, k, v), (out,), (q, k, v, out, lse), backward)
    return out


def _add_up(ring: _Ring, queries: int) -> None:
    """What was there and what is new, each times its factor, and their sum."""
    old, new, both = (ring.t.new(queries * ring.value, ring.wide) for _ in range(3))
    del old, new, both


def _length(places: slice) -> int:
    return int(places.stop - places.start)


def _masks(ring: _Ring, tile: Tile) -> Sized | None:
    """Who sees whom in a tile, where that is not the tile's own order."""
    return visible(ring.s, _length(tile.queries) * _length(tile.keys)) if tile.kind == "masked" else None


def _fused(ring: _Ring) -> bool:
    return ring.dim == ring.value and not ring.s.seat.run.model.attention_dropout


def _added(t: Tape, seen: Sized | None, width: int) -> Sized | None:
    """The mask as what is added to scores."""
    if seen is None:
        return None
    added = t.new(seen.elements, width)
    t.new(seen.elements, ops.BOOL)
    return added


def _tile_forward(ring: _Ring, tile: Tile, width: int) -> tuple[Sized, Sized]:
    t, seen = ring.t, _masks(ring, tile)
    queries = ring.samples * ring.heads * _length(tile.queries)
    keys, masked = _length(tile.keys), seen is not None or tile.kind == "causal"
    if _fused(ring):
        added = _added(t, seen, width)
        out, sums = t.new(queries * ring.value, width), t.new(queries, ring.wide)
        del added
        return out, sums
    parts = [_plain_forward(ring, at_once, keys, masked, width) for at_once in ring.rows_at_once(tile)]
    out, sums = t.new(queries * ring.value, width), t.new(queries, ring.wide)
    del parts
    return out, sums


def _plain_forward(ring: _Ring, queries: int, keys: int, masked: bool, width: int) -> tuple[Sized, Sized]:
    """Some queries of a tile whose scores stand whole."""
    t = ring.t
    scores = _scores(ring, queries, keys, masked, width)
    sums = t.new(ring.samples * ring.heads * queries, ring.wide)
    shifted = ops.like(t, scores)
    weights = ops.like(t, scores)
    del shifted
    if ring.s.seat.run.model.attention_dropout:
        weights = _thinned(ring, weights, width)
    narrow = ops.cast(t, weights, width)
    values = t.new(ring.samples * ring.heads * keys * ring.value, width)
    out = t.new(ring.samples * ring.heads * queries * ring.value, width)
    del narrow, values
    return out, sums


def _scores(ring: _Ring, queries: int, keys: int, masked: bool, width: int) -> Sized:
    t = ring.t
    laid_out = t.new(ring.samples * ring.heads * queries * ring.dim, width)
    grown = t.new(ring.samples * ring.heads * keys * ring.dim, width)
    scores = t.new(ring.samples * ring.heads * queries * keys, width)
    del laid_out, grown
    scores = ops.scale(t, ops.cast(t, scores, ring.wide))
    return ops.like(t, scores) if masked else scores


def _thinned(ring: _Ring, weights: Sized, width: int) -> Sized:
    """Probabilities times what keeps some of them."""
    t = ring.t
    dead = hashed(t, weights.elements)
    keep = t.new(dead.elements, ops.DOUBLE)
    del dead
    keep = ops.cast(t, keep, width)
    return ops.like(t, weights)


def _backward(ring: _Ring, saved: Saved, grad: Sized) -> Grads:
    t, wide = ring.t, ring.wide
    q, k, v, out, lse = saved
    product = t.new(out.elements, wide)
    delta = t.new(lse.elements, wide)
    del product
    grad_q = t.new(q.elements, wide)
    gather = ring.s.seat.run.layout.context == "gather"
    own: list[Sized] = []
    travelling: list[Sized] = []
    parts: list[list[Sized]] = []
    strided = 1 if ring.s.seat.layout.size("ulysses") == 1 else 0
    for source, held in ring.travel((k, v), strided):
        grads = [t.new(x.elements, wide) for x in held]
        for tile in ring.tiles(source):
            _tile_backward(ring, tile, q.width)
        if gather:
            parts.append(grads)
        elif source == ring.rank:
            own = grads
        else:
            sums = [ops.like(t, x) for x in grads] if travelling else grads
            travelling = [ops.like(t, x) for x in sums]
            del sums
        del grads
    held = []
    if gather:
        wholes = [t.new(x.elements * ring.ranks, wide) for x in parts[0]]
        parts.clear()
        pending = [ops.like(t, x) if ring.samples > 1 else x for x in wholes]
        home = [t.new(x.elements // ring.ranks, wide) for x in pending]
    else:
        home = [ops.like(t, x) for x in travelling]
    del travelling, own, delta
    return ops.cast(t, grad_q, q.width), ops.cast(t, home[0], k.width), ops.cast(t, home[1], v.width)


def _tile_backward(ring: _Ring, tile: Tile, width: int) -> None:
    t, seen = ring.t, _masks(ring, tile)
    queries, keys = _length(tile.queries), _length(tile.keys)
    sizes = (
        ring.samples * ring.heads * queries * ring.dim, ring.samples * ring.kv * keys * ring.dim,
        ring.samples * ring.kv * keys * ring.value,
    )  # fmt: skip
    if _fused(ring):
        added = _added(t, seen, width)
        found = [t.new(n, width) for n in sizes]
        del added, found
        return
    masked = seen is not None or tile.kind == "causal"
    parts = [_plain_backward(ring, at_once, keys, masked, width) for at_once in ring.rows_at_once(tile)]
    summed = [t.new(n, width) for n in sizes]
    del parts, summed


def _plain_backward(ring: _Ring, queries: int, keys: int, masked: bool, width: int) -> list[Sized]:
    """Gradients from some queries of a tile, by them and by all its keys and values."""
    t, samples = ring.t, ring.samples
    scores = _scores(ring, queries, keys, masked, width)
    shifted = ops.like(t, scores)
    weights = ops.like(t, scores)
    del scores, shifted
    values = t.new(samples * ring.heads * keys * ring.value, width)
    by_weights = t.new(weights.elements, width)
    del values
    by_weights = ops.cast(t, by_weights, ring.wide)
    used = weights
    if ring.s.seat.run.model.attention_dropout:
        used = _thinned(ring, weights, width)
        by_weights = ops.like(t, weights)
    difference = ops.like(t, weights)
    by_scores = ops.like(t, weights)
    del difference
    by_scores = ops.cast(t, ops.like(t, by_scores), width)
    whole = [t.new(samples * ring.heads * keys * n, width) for n in (ring.dim, ring.value)]
    found = [t.new(samples * ring.kv * keys * n, width) for n in (ring.dim, ring.value)]
    del whole, used, by_weights, by_scores
    return [t.new(samples * ring.heads * queries * ring.dim, width), *found]
