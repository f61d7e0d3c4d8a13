"""Attention in sizes: projections, rotation, and the core, fused or with probabilities that are dropped."""

from __future__ import annotations

from plait.planner.sized import ops
from plait.planner.sized.context import exchange_heads, exchange_tokens, ring_attention, widened
from plait.planner.sized.layers import alone, column, norm, row
from plait.planner.sized.masks import hashed, visible
from plait.planner.sized.stage import Stage, Tables
from plait.planner.sized.tape import Sized


def attention(s: Stage, x: Sized, path: str, where: Tables) -> Sized:
    """Of the tokens here, whole over tp or split."""
    model = s.seat.run.model
    if model.latent is not None:
        return _latent(s, x, path, where)
    t, tokens, dim = s.tape, s.seat.tokens, model.head_dim
    heads, kv = model.heads // s.tp, model.kv_heads // s.seat.layout.kv
    sizes = [tokens * n * dim for n in (heads, kv, kv)]
    q, k, v = ops.split(t, column(s, x, f"{path}.qkv", model.hidden), sizes)
    if model.qk_norm:
        q, k = norm(s, q, f"{path}.q_norm", "rms", tokens * heads), norm(s, k, f"{path}.k_norm", "rms", tokens * kv)
    if where:
        q, k = rotate(s, q, where), rotate(s, k, where)
    return row(s, core(s, q, k, v, dim, dim), f"{path}.out", heads * dim)


def rotate(s: Stage, x: Sized, where: Tables) -> Sized:
    """Pairs of channels turned by their angle."""
    t = s.tape
    cos, sin = where
    a, b = ops.split(t, x, [x.elements // 2] * 2)
    turned = ops.cat(
        t,
        (
            ops.subtract(t, ops.multiply(t, a, cos), ops.multiply(t, b, sin)),
            ops.add(t, ops.multiply(t, b, cos), ops.multiply(t, a, sin)),
        ),
    )
    return ops.cast(t, turned, x.width)


def core(s: Stage, q: Sized, k: Sized, v: Sized, dim: int, value: int) -> Sized:
    """Of queries and keys of `dim` channels and values of `value`; over cp by exchanging heads, keys, or both."""
    layout, run = s.seat.layout, s.seat.run
    ulysses, ring = layout.size("ulysses"), layout.size("ring")
    fused = not run.model.attention_dropout or ring > 1

    def compute(q: Sized, k: Sized, v: Sized) -> Sized:
        if ulysses * ring == 1:
            return _whole(s, q, k, v, dim, value)
        k, v = widened(s, q, k, dim, dim), widened(s, q, v, dim, value)
        q, k, v = exchange_heads(s, q, dim), exchange_heads(s, k, dim), exchange_heads(s, v, value)
        if ring == 1:
            y = _whole(s, q, k, v, dim, value)
        else:
            y = ring_attention(s, q, k, v, dim, value)
            apart = ulysses == 1 and q.elements > s.seat.tokens * dim  # heads: to lay them side by side is to copy
            y = ops.copied(s.tape, y) if apart else y
        return exchange_tokens(s, y, value)

    return compute(q, k, v) if fused else s.part("attention", compute, q, k, v)


def _whole(s: Stage, q: Sized, k: Sized, v: Sized, dim: int, value: int) -> Sized:
    """All tokens of the rows are here."""
    t, run = s.tape, s.seat.run
    length = run.batch.sequence
    several = s.rows > 1 and q.elements > s.rows * length * dim  # rows and heads: to merge them is to copy
    if run.model.attention_dropout:
        y = _with_dropout(s, q, k, v, (dim, value), several)
        return ops.copied(t, y) if q.elements > s.rows * length * dim else y
    window = run.model.window
    plain = not run.data.mask_documents and (window is None or window >= length)
    seen = None if plain else visible(s, length**2)
    if dim != value:
        y = _in_pieces(s, (q, k, v), seen, (length, dim, value), several)
        return ops.copied(t, y) if q.elements > s.rows * length * dim else y
    mask = None if seen is None else ops.like_mask(t, seen, q.width)
    return ops.attend(t, q, k, v, dim, mask)


def _in_pieces(
    s: Stage, given: tuple[Sized, Sized, Sized], seen: Sized | None, sizes: tuple[int, int, int], several: bool
) -> Sized:
    """What torch does where its kernel does not take the sizes of heads: scores and probabilities stand whole."""
    t, (length, dim, value), narrow = s.tape, sizes, given[0].width
    wide, k, v = (ops.cast(t, x, s.wide) for x in given)
    vectors = wide.elements // dim
    q = ops.scale(t, wide)
    below = seen or t.new(length**2, ops.BOOL)
    mask = t.new(below.elements, s.wide)
    del below
    grown = ops.scale(t, k)
    a, b = (ops.copied(t, q), ops.copied(t, grown)) if several else (q, grown)
    del grown
    weights = ops.softmax(t, _masked(s, ops.batched(t, a, b, vectors * length)))
    del a, b
    told = ops.cast(t, weights, narrow)
    values = ops.copied(t, v) if several else v
    y = ops.cast(t, ops.batched(t, weights, values, vectors * value, several), narrow)
    del mask, told, wide
    return y


def _masked(s: Stage, scores: Sized) -> Sized:
    out = ops.like(s.tape, scores)
    s.tape.record((scores,), (out,), (), lambda _, grads: grads)
    return out


def _with_dropout(s: Stage, q: Sized, k: Sized, v: Sized, dims: tuple[int, int], several: bool) -> Sized:
    """Probabilities are dropped, so they stand whole."""
    t, (dim, value), length = s.tape, dims, s.seat.run.batch.sequence
    vectors = q.elements // dim
    k, v = ops.repeated(t, k, vectors * dim), ops.repeated(t, ops.relaid(t, v), vectors * value)
    laid_out = ops.copied(t, q) if several else q
    scores = ops.scale(t, ops.cast(t, ops.batched(t, laid_out, k, vectors * length), s.wide))
    del laid_out
    weights = ops.cast(t, ops.softmax(t, _hidden(s, scores, length)), q.width)
    dead = hashed(t, vectors * length)
    return ops.scale(t, ops.batched(t, ops.elementwise(t, weights, (dead,)), v, vectors * value))


def _hidden(s: Stage, scores: Sized, length: int) -> Sized:
    """Scores of keys that are not seen are out."""
    unseen = s.tape.new(visible(s, length**2).elements, ops.BOOL)
    return ops.elementwise(s.tape, scores, (unseen,))


def _latent(s: Stage, x: Sized, path: str, where: Tables) -> Sized:
    """Keys and values of all heads grow from one small vector; one rotated key serves all heads."""
    t, model, tokens = s.tape, s.seat.run.model, s.seat.tokens
    latent = model.latent
    assert latent is not None
    kept, rotated, value = latent.kept, latent.rotated, latent.value
    heads = model.heads // s.tp
    q = x
    small, k_rotated = ops.split(
        t, alone(s, x, f"{path}.kv_down", model.hidden), [s.seat.between * n for n in (latent.kv_rank, rotated)]
    )
    if latent.q_rank is not None:
        q = alone(s, x, f"{path}.q_down", model.hidden)
        q = norm(s, q, f"{path}.q_latent_norm", "rms", s.seat.between)
    q = column(s, q, f"{path}.q", latent.q_rank or model.hidden)
    kv = column(s, norm(s, small, f"{path}.kv_latent_norm", "rms", s.seat.between), f"{path}.kv", latent.kv_rank)
    q_kept, q_rotated = ops.split(t, q, [tokens * heads * n for n in (kept, rotated)])
    k_kept, v = ops.split(t, kv, [tokens * heads * n for n in (kept, value)])
    q_rotated = rotate(s, _halves(s, q_rotated), where)
    k_rotated = rotate(s, _halves(s, s.spread.spread(t, k_rotated, s.split)), where)
    q = ops.cat(t, (q_kept, q_rotated))
    k = ops.cat(t, (k_kept, ops.expanded(t, k_rotated, tokens * heads * rotated)))
    return row(s, core(s, q, k, v, kept + rotated, value), f"{path}.out", heads * value)


def _halves(s: Stage, x: Sized) -> Sized:
    latent = s.seat.run.model.latent
    return ops.reordered(s.tape, x) if latent is not None and latent.interleaved else x
