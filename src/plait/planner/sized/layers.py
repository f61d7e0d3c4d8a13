"""The dense modules of a stage in sizes, as in `models/` and, where tensors are split, in `parallel/tensor.py`.

Every function reads like its module: what a frame of Python refers to lives as long here as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from plait.planner.sized import ops
from plait.planner.sized.masks import hashed
from plait.planner.sized.stage import Stage
from plait.planner.sized.tape import Grads, Leaf, Saved, Sized, Tape


def norm(s: Stage, x: Sized, path: str, kind: str, vectors: int) -> Sized:
    """Over the last dim of so many vectors."""
    weight, bias = s.weights[f"{path}.weight"], s.weights.get(f"{path}.bias")
    if kind == "layer":
        assert bias is not None
        return s.part("norm", lambda x: ops.layer_norm(s.tape, x, weight, bias, vectors), x)
    rms_norm = ops.fused_rms_norm if s.fused_norm else ops.rms_norm
    return s.part("norm", lambda x: rms_norm(s.tape, x, weight, vectors), x)


# --- linears ----------------------------------------------------------------------------------------------------------


def column(s: Stage, x: Sized, path: str, inputs: int) -> Sized:
    """A linear of so many inputs whose outputs are spread over tp; x is whole, or split tokens."""
    weight, bias = s.weights[f"{path}.weight"], s.weights.get(f"{path}.bias")
    if s.late is not None:
        return _late(s, x, weight, bias, inputs, spread=s.tp > 1)
    if s.tp == 1:
        return ops.linear(s.tape, x, weight, bias, inputs)
    return _column(s, x, weight, bias, inputs)


def alone(s: Stage, x: Sized, path: str, inputs: int) -> Sized:
    """A linear that every rank has whole, of the tokens that are here."""
    weight, bias = s.weights[f"{path}.weight"], s.weights.get(f"{path}.bias")
    if s.late is not None:
        return _late(s, x, weight, bias, inputs, spread=False)
    return ops.linear(s.tape, x, weight, bias, inputs)


def _column(s: Stage, x: Sized, weight: Leaf, bias: Leaf | None, inputs: int) -> Sized:
    t, split, over = s.tape, s.split, s.spread
    whole = over.gather(t, x) if split else x
    out = t.new(whole.elements // inputs * (weight.elements // inputs), x.width)
    del whole

    def backward(saved: Saved, grads: Grads) -> Grads:
        x, tokens = saved[0], saved[0].elements // inputs * (s.tp if split else 1)
        gathering = over.start_gather(t, x) if split else x
        partial = t.new(tokens * inputs, x.width)
        pending = over.scatter(t, partial) if split else over.sum(t, partial)
        whole = over.laid_out(t, gathering) if split else x
        by_weight = t.gradient(weight)
        by_bias = t.gradient(bias) if bias is not None else None
        del gathering, whole
        return pending, by_weight, by_bias

    t.record((x, weight, *_there(bias)), (out,), (x,), backward)
    return out


def row(s: Stage, x: Sized, path: str, inputs: int) -> Sized:
    """A linear whose inputs, so many here, are spread over tp; the bias is added to the sum."""
    weight, bias = s.weights[f"{path}.weight"], s.weights.get(f"{path}.bias")
    own = bias if s.tp == 1 else None
    if s.late is not None:
        partial = _late(s, x, weight, own, inputs, spread=False)
    else:
        partial = ops.linear(s.tape, x, weight, own, inputs)
    if s.tp == 1:
        return partial
    y = s.spread.scatter_partial(s.tape, partial) if s.split else s.spread.sum_partial(s.tape, partial)
    return y if bias is None else ops.add(s.tape, y, bias)


def _late(s: Stage, x: Sized, weight: Leaf, bias: Leaf | None, inputs: int, spread: bool) -> Sized:
    """A linear whose weight's gradient may wait for W."""
    t, late, over, split = s.tape, s.late, s.spread, s.split and spread
    assert late is not None
    whole = over.gather(t, x) if split else x
    out = t.new(whole.elements // inputs * (weight.elements // inputs), x.width)
    del whole

    def backward(saved: Saved, grads: Grads) -> Grads:
        x, grad = saved[0], grads[0]
        assert grad is not None
        by_x = t.new(x.elements * (s.tp if split else 1), x.width)
        pending = by_x
        if spread:
            pending = over.scatter(t, by_x) if split else over.sum(t, by_x)
        by_weight = None
        if late.kept is not None:
            late.kept.append((weight, x, grad, split))
        else:
            by_weight = product(s, weight, x, split)
        by_bias = t.gradient(bias) if bias is not None else None
        return pending, by_weight, by_bias

    t.record((x, weight, *_there(bias)), (out,), (x,), backward)
    return out


def product(s: Stage, weight: Leaf, x: Sized, split: bool) -> Sized:
    """A weight's gradient, its input gathered first where tokens are split."""
    whole = s.spread.gather(s.tape, x) if split else x
    found = s.tape.gradient(weight)
    del whole
    return found


def _there(bias: Leaf | None) -> tuple[Leaf, ...]:
    return () if bias is None else (bias,)


# --- the way in -------------------------------------------------------------------------------------------------------


def embedding(s: Stage) -> Sized:
    """Tokens, positions, dropout."""
    model, table = s.seat.run.model, s.weights["embedding.tokens.weight"]
    x = _found(s, table, s.seat.tokens) if s.tp == 1 else _vocabulary(s, table)
    if model.positions == "learned":
        rows = s.rows if s.seat.run.data.mask_documents else 1
        found = _found(s, s.weights["embedding.positions.weight"], rows * s.seat.between // s.rows)
        x = ops.add(s.tape, x, found)
        del found
    return dropout(s, x)


def _found(s: Stage, table: Leaf, tokens: int) -> Sized:
    """Rows of a table."""
    t = s.tape
    out = t.new(tokens * s.seat.run.model.hidden, table.width)
    t.record((table,), (out,), (), lambda _, grads: (t.gradient(table),))
    return out


def _vocabulary(s: Stage, table: Leaf) -> Sized:
    """Rows of a table of which other ranks have the rest."""
    t, tokens = s.tape, s.seat.tokens
    local, foreign = t.new(tokens, ops.LONG), t.new(tokens, ops.BOOL)
    here = t.new(tokens, ops.LONG)
    found = t.new(tokens * s.seat.run.model.hidden, table.width)
    t.record((table,), (found,), (here,), lambda _, grads: (t.gradient(table),))
    x = ops.elementwise(t, found, (foreign,))
    del here, found
    y = s.spread.scatter_partial(t, x) if s.split else s.spread.sum_partial(t, x)
    del local
    return y


def tables(s: Stage) -> tuple[Sized, ...]:
    """Cosines and sines of positions, of angles in float64."""
    t, run = s.tape, s.seat.run
    if run.model.positions != "rotary":
        return ()
    dim = run.model.head_dim if run.model.latent is None else run.model.latent.rotated
    places = s.seat.tokens // s.rows * (s.rows if run.data.mask_documents else 1)
    angles = t.new(places * (dim // 2), ops.DOUBLE)
    both, found = (ops.like(t, angles), ops.like(t, angles)), []
    for table in both:
        found.append(ops.cast(t, ops.like(t, table), s.wide))
    return tuple(found)


# --- between ----------------------------------------------------------------------------------------------------------


def dropout(s: Stage, x: Sized) -> Sized:
    """Some elements are zero, the others larger."""
    if not s.seat.run.model.dropout:
        return x
    return ops.scale(s.tape, ops.elementwise(s.tape, x, (hashed(s.tape, x.elements),)))


def mlp(s: Stage, x: Sized, path: str) -> Sized:
    """Two matrices with a function between them."""
    model, down = s.seat.run.model, s.weights[f"{path}.down.weight"]
    inner = activation(s, up_parts(s, column(s, x, f"{path}.up", model.hidden)))
    return row(s, inner, f"{path}.down", down.elements // model.hidden)


def up_parts(s: Stage, up: Sized) -> list[Sized]:
    """What the activation takes: gate and up, or up alone."""
    _, inputs = ACTIVATIONS[s.seat.run.model.mlp]
    return ops.split(s.tape, up, [up.elements // inputs] * inputs)


def activation(s: Stage, parts: list[Sized]) -> Sized:
    """What stands between the matrices."""
    function, _ = ACTIVATIONS[s.seat.run.model.mlp]
    return s.part("activation", partial(function, s.tape), *parts)


def _swiglu(t: Tape, gate: Sized, up: Sized) -> Sized:
    return ops.multiply(t, ops.elementwise(t, gate, keeps="input"), up)


def _gelu(t: Tape, up: Sized) -> Sized:
    return ops.elementwise(t, up, keeps="input")


def _relu(t: Tape, up: Sized) -> Sized:
    return ops.elementwise(t, up, keeps="result")


def _relu2(t: Tape, up: Sized) -> Sized:
    return ops.square(t, _relu(t, up))


# As in `models.layers`: what stands between the two matrices of an MLP, and how many outputs of the first it takes.
ACTIVATIONS: Mapping[str, tuple[Callable[..., Sized], int]] = {
    "swiglu": (_swiglu, 2), "gelu": (_gelu, 1), "gelu_tanh": (_gelu, 1), "relu": (_relu, 1), "relu2": (_relu2, 1),
}  # fmt: skip
