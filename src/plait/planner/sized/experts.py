"""A mixture of experts in sizes: routing, tokens to their experts and back, and the experts' products.

As `models/moe.py`, `models/grouped.py` and `parallel/expert.py` do it, routing even.
"""

from __future__ import annotations

from plait.placement.cuts import piece
from plait.planner.sized import ops
from plait.planner.sized.layers import activation, mlp
from plait.planner.sized.stage import Outputs, Stage
from plait.planner.sized.tape import Grads, Leaf, Saved, Sized, Tape
from plait.planner.traffic import even_rows


def experts(s: Stage, x: Sized, path: str) -> Outputs:
    """Of x (B, T, d), or of split tokens -> alike, and the auxiliary losses."""
    t, model, layout = s.tape, s.seat.run.model, s.seat.layout
    moe = model.moe
    assert moe is not None
    tokens = x.elements // model.hidden
    whole = 1 if s.split else s.tp  # over how many ranks tokens that come are alike
    start, stop = piece(tokens, whole, s.seat.at.tp if whole > 1 else 0)
    mine = _own_rows(s, x, tokens, stop - start, whole)
    weights, terms = _route(s, mine, stop - start, path)
    chosen = (stop - start) * moe.top_k
    order = t.new(chosen, ops.LONG)
    here, come = even_rows(s.seat)
    sent, rows = sum(sum(counts) for counts in here), sum(come)
    out = _to_experts(t, mine, order, model.hidden)
    travels = layout.ep > 1
    out = _journey(t, out, rows * model.hidden, travels)
    spread = s.tp * layout.cp * layout.ep * layout.size("etp") > 1
    shared = mlp(s, x, f"{path}.shared") if moe.shared and spread else None  # while tokens travel
    out = _run(s, out, rows, path)
    out = _journey(t, out, sent * model.hidden, travels)
    y = _combine(t, out, order, weights, stop - start, model.hidden)
    del out
    y = _all_rows(s, y, tokens, stop - start, whole)
    if moe.shared and not spread:
        shared = mlp(s, x, f"{path}.shared")
    return (y if shared is None else ops.add(t, y, shared)), terms


# --- routing ----------------------------------------------------------------------------------------------------------


def _route(s: Stage, x: Sized, tokens: int, path: str) -> tuple[Sized, dict[str, Sized]]:
    """How much each token makes of each of its experts; and the auxiliary losses."""
    t, model, router = s.tape, s.seat.run.model, s.weights[f"{path}.router.weight"]
    moe = model.moe
    assert moe is not None
    wide = ops.cast(t, x, s.wide)
    logits = _router_linear(s, wide, router, tokens)
    scores = ops.softmax(t, logits)
    indices = _choose(s, scores, tokens)
    weights = _gathered(t, scores, indices, tokens * moe.top_k)
    if moe.normalise:
        weights = _shares(t, weights, tokens)
    kept = _within_capacity(s, scores, tokens)
    refused = t.new(kept.elements, ops.BOOL)
    weights = ops.elementwise(t, ops.scale(t, weights), (refused,))
    routed = t.new(tokens * moe.top_k, ops.LONG)
    weights = ops.cast(t, weights, s.width)
    terms = {}
    if moe.balance_coef:
        shares = _shares(t, scores, tokens)
        load = t.new(tokens * moe.count, s.wide)
        terms["balance"] = ops.total(t, ops.multiply(t, shares, load))
        del shares, load
    if moe.z_coef:
        terms["z"] = ops.total(t, ops.square(t, ops.log_sums(t, logits, tokens)))
    entropy = [t.new(tokens * moe.count, s.wide) for _ in range(2)]
    del entropy, routed
    return weights, terms


def _router_linear(s: Stage, x: Sized, router: Leaf, tokens: int) -> Sized:
    t, wide, own = s.tape, s.wide, router.width
    weight = t.new(router.elements, wide) if own < wide else router
    elements, needs = x.elements, x.needs
    out = t.new(tokens * (router.elements * tokens // elements), wide)

    def backward(_: Saved, grads: Grads) -> Grads:
        by_weight = t.gradient(router, wide)
        return t.new(elements, wide) if needs else None, by_weight

    t.record((x, router), (out,), (x, weight), backward)
    return out


def _choose(s: Stage, scores: Sized, tokens: int) -> Sized:
    t, moe = s.tape, s.seat.run.model.moe
    assert moe is not None
    biased = ops.like(t, scores) if moe.bias else scores
    opened = ops.like(t, biased) if moe.groups > 1 else biased
    values = t.new(tokens * moe.top_k, scores.width)
    indices = t.new(tokens * moe.top_k, ops.LONG)
    del biased, opened, values
    return indices


def _gathered(t: Tape, scores: Sized, indices: Sized, elements: int) -> Sized:
    out, own, width = t.new(elements, scores.width), scores.elements, scores.width
    t.record((scores,), (out,), (indices,), lambda _, grads: (t.new(own, width),))
    return out


def _shares(t: Tape, x: Sized, tokens: int) -> Sized:
    """x / Σ x of each token."""
    total, out = t.new(tokens, x.width), t.new(x.elements, x.width)
    elements, width = x.elements, x.width

    def backward(_: Saved, grads: Grads) -> Grads:
        direct = t.new(elements, width)
        by_total = t.new(tokens, width)
        del by_total
        return (t.new(elements, width) if direct else None,)

    t.record((x,), (out,), (x, total), backward)
    return out


def _within_capacity(s: Stage, scores: Sized, tokens: int) -> Sized:
    t, moe = s.tape, s.seat.run.model.moe
    assert moe is not None
    if moe.capacity is not None:
        elements = s.rows * s.seat.run.batch.sequence * moe.count
        asked = [t.new(elements, scores.width) for _ in range(2)]
        order = [t.new(elements, ops.LONG) for _ in range(3)]
        del asked, order
    return t.new(tokens * moe.top_k, ops.BOOL)


# --- to the experts and back ------------------------------------------------------------------------------------------


def _to_experts(t: Tape, x: Sized, order: Sized, hidden: int) -> Sized:
    rows, tokens = order.elements, x.elements // hidden
    places = t.new(rows, ops.LONG)
    out, width = t.new(rows * hidden, x.width), x.width
    del places

    def backward(_: Saved, grads: Grads) -> Grads:
        sorted_back = t.new(rows * hidden, width)
        found = t.new(tokens * hidden, width)
        del sorted_back
        return (found,)

    t.record((x,), (out,), (order,), backward)
    return out


def _combine(t: Tape, out: Sized, order: Sized, weights: Sized, tokens: int, hidden: int) -> Sized:
    """Σ of weight · output of each token's experts."""
    zeros = t.new(order.elements * hidden, out.width)
    places, width, rows = ops.like(t, zeros), out.width, out.elements
    del zeros
    t.record((out,), (places,), (order, out), lambda _, grads: (t.new(rows, width),))
    return ops.batched(t, weights, places, tokens * hidden, laid_out=False)


def _journey(t: Tape, x: Sized, arrives: int, travels: bool) -> Sized:
    if not travels:
        return x
    out, left, width = t.new(arrives, x.width), x.elements, x.width
    t.record((x,), (out,), (), lambda _, grads: (t.new(left, width),))
    return out


def _own_rows(s: Stage, x: Sized, tokens: int, own: int, whole: int) -> Sized:
    if whole == 1:
        return x
    t, hidden, width = s.tape, s.seat.run.model.hidden, x.width
    out = t.new(own * hidden, width)
    t.record((x,), (out,), (), lambda _, grads: (_gathered_rows(s, tokens, own, width),))
    return out


def _all_rows(s: Stage, x: Sized, tokens: int, own: int, whole: int) -> Sized:
    if whole == 1:
        return x
    out = _gathered_rows(s, tokens, own, x.width)

    def backward(_: Saved, grads: Grads) -> Grads:
        (grad,) = grads
        assert grad is not None
        return (Sized(grad.memory, own * s.seat.run.model.hidden, grad.width),)

    s.tape.record((x,), (out,), (), backward)
    return out


def _gathered_rows(s: Stage, tokens: int, own: int, width: int) -> Sized:
    """Every rank's rows, the longest piece sent by all."""
    t, hidden = s.tape, s.seat.run.model.hidden
    longest = -(-tokens // s.tp)
    padded = t.new(longest * hidden, width)
    rows = t.new(longest * s.tp * hidden, width)
    del padded
    return rows if longest * s.tp == tokens else t.new(tokens * hidden, width)


# --- the experts ------------------------------------------------------------------------------------------------------


def _run(s: Stage, x: Sized, rows: int, path: str) -> Sized:
    """The experts here on the rows that came, those of all parts of a split expert together."""
    t, etp, hidden = s.tape, s.seat.layout.size("etp"), s.seat.run.model.hidden
    if etp == 1:
        return _products(s, x, rows, path)
    every = _together(t, x, rows * hidden, etp, reverse=False)
    out = _products(s, every, rows * etp, path)
    del every
    return _together(t, out, rows * hidden, etp, reverse=True)


def _together(t: Tape, x: Sized, own: int, ranks: int, reverse: bool) -> Sized:
    width = x.width
    out = _summed(t, own, ranks, width) if reverse else _repeated(t, own, ranks, width)
    other = _repeated if reverse else _summed
    t.record((x,), (out,), (), lambda _, grads: (other(t, own, ranks, width),))
    return out


def _repeated(t: Tape, own: int, ranks: int, width: int) -> Sized:
    copies = t.new(own * ranks, width)
    return ops.like(t, copies)


def _summed(t: Tape, own: int, ranks: int, width: int) -> Sized:
    parts = t.new(own * ranks, width)
    return t.new(parts.elements // ranks, width)


def _products(s: Stage, x: Sized, rows: int, path: str) -> Sized:
    moe, model = s.seat.run.model.moe, s.seat.run.model
    assert moe is not None
    gate, up, down = (s.weights.get(f"{path}.experts.{name}") for name in ("gate", "up", "down"))
    assert up is not None and down is not None
    each = moe.count // s.seat.layout.ep
    ffn = up.elements // (each * model.hidden)
    if gate is not None:
        return _swiglu(s.tape, x, (gate, up, down), rows, ffn, each)
    inner = [_loop(s.tape, x, up, rows * ffn)]
    return _loop(s.tape, activation(s, inner), down, rows * model.hidden)


def _swiglu(t: Tape, x: Sized, weights: tuple[Leaf, ...], rows: int, ffn: int, each: int) -> Sized:
    """One expert after the other, of which the results of the first two products are kept."""
    out, longest = ops.like(t, x), -(-rows // each) * ffn
    inner = []
    for expert in range(each):
        own = piece(rows, each, expert)
        size = (own[1] - own[0]) * ffn
        inner += [t.new(size, x.width) for _ in range(2)]
        t.new(size, x.width)
    elements, width = x.elements, x.width

    def backward(_: Saved, grads: Grads) -> Grads:
        by_x = t.new(elements, width)
        by_weights = [t.gradient(weight) for weight in weights]
        swish, by_h = t.new(longest, width), t.new(longest, width)
        product = t.new(longest, width)
        by_gate = t.new(longest, width)
        del product
        again = t.new(longest, width)
        del swish, by_h, by_gate, again
        return by_x, *by_weights

    t.record((x, *weights), (out,), (x, *inner), backward)
    return out


def _loop(t: Tape, x: Sized, weight: Leaf, elements: int) -> Sized:
    out, own, width = t.new(elements, x.width), x.elements, x.width

    def backward(_: Saved, grads: Grads) -> Grads:
        return t.new(own, width), t.gradient(weight)

    t.record((x, weight), (out,), (x,), backward)
    return out
