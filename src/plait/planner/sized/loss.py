"""The way out in sizes: norm, projection, and the loss, over the vocabulary or parts of it, at once or in chunks."""

from __future__ import annotations

from dataclasses import replace

from plait.planner.sized import ops
from plait.planner.sized.layers import column, norm
from plait.planner.sized.stage import Outputs, Stage
from plait.planner.sized.tape import Grads, Leaf, Memory, Saved, Sized


def head(s: Stage, x: Sized) -> Outputs:
    """What enters the projection; the loss, and the z-loss where there is one."""
    model = s.seat.run.model
    x = norm(s, x, "head.norm", model.norm, s.seat.between)
    found = _chunked(s, x) if s.seat.run.recompute.loss_chunk else _loss(s, x)
    return x, dict(zip(("loss", "z_loss"), found, strict=False))


def _loss(s: Stage, x: Sized) -> list[Sized]:
    """Of all tokens of x at once."""
    model = s.seat.run.model
    tokens = x.elements // model.hidden * (s.tp if s.split else 1)
    whole = _plain if s.tp == 1 else _vocabulary
    return whole(s, column(s, x, "head.projection", model.hidden), tokens)


def _plain(s: Stage, logits: Sized, tokens: int) -> list[Sized]:
    t = s.tape
    logits = ops.cast(t, logits, s.wide)
    found = [_picked(s, ops.elementwise(t, logits, keeps="result"))]
    if s.seat.run.model.z_loss:
        found.append(ops.total(t, ops.square(t, ops.log_sums(t, logits, tokens))))
    return found


def _picked(s: Stage, logs: Sized) -> Sized:
    """The sum of what each token lost."""
    t, out = s.tape, s.tape.new(1, s.wide)
    elements, width = logs.elements, logs.width
    t.record((logs,), (out,), (logs,), lambda _, grads: (t.new(elements, width),))
    return out


def _vocabulary(s: Stage, logits: Sized, tokens: int) -> list[Sized]:
    t, wide = s.tape, s.wide
    given = logits
    logits = ops.cast(t, given, wide)
    highest = t.new(tokens, wide)
    highest = s.spread.sum(t, highest)
    shifted = ops.like(t, logits)
    valid, here, local = t.new(tokens, ops.BOOL), t.new(tokens, ops.BOOL), t.new(tokens, ops.LONG)
    losses, log_sums = t.new(tokens, wide), t.new(tokens, wide)

    def backward(saved: Saved, grads: Grads) -> Grads:
        probabilities = saved[0]
        by_logits = ops.like(t, probabilities)
        return (by_logits,)

    t.record((given,), (losses, log_sums), (shifted, local, here, valid), backward)
    total = t.new(1, wide)
    count = losses.elements
    t.record((losses,), (total,), (), lambda _, grads: (t.new(count, wide),))
    return [total, ops.total(t, ops.square(t, log_sums))] if s.seat.run.model.z_loss else [total]


def _chunked(s: Stage, x: Sized) -> list[Sized]:
    """A few tokens at a time, differentiated at once: what waits for backward are gradients of x and the weights."""
    t, hidden, chunk = s.tape, s.seat.run.model.hidden, s.seat.run.recompute.loss_chunk
    weight = s.weights["head.projection.weight"]
    size, left = max(1, chunk // (s.tp if s.split else 1)), x.elements // hidden
    by_x: list[Sized] = []
    by_weight: Sized | None = None
    found: list[Sized] = []
    while left:
        own = min(size, left)
        left -= own
        tied_here = s.seat.run.model.tied and s.seat.stages.last == 0  # then it is added to the embedding's first
        stays = by_weight is None and not tied_here and weight.width == s.wide and weight.gradients.keeps(weight.place)
        taken = _Taken(stays)
        part = Leaf(x.memory, own * hidden, x.width, taken, "x")
        alone = replace(
            s, weights={"head.projection.weight": Leaf(Memory(0, None), weight.elements, weight.width, taken, "weight")}
        )
        found = _loss(alone, part)
        t.backward(found, [t.new(1, s.wide) for _ in found])
        by_x.append(taken.found.pop("x"))
        more = ops.cast(t, taken.found.pop("weight"), s.wide)
        by_weight = more if by_weight is None else by_weight
        del more, taken, part, alone
    whole = [t.new(x.elements, x.width), by_weight]
    by_x.clear()
    return _known(s, x, weight, whole, len(found))


class _Taken:
    """Gradients that somebody asked for. `stays`: that of the weight will be the step's."""

    def __init__(self, stays: bool) -> None:
        self.stays = stays
        self.found: dict[str, Sized] = {}

    def keeps(self, place: str) -> bool:
        return self.stays and place == "weight"

    def add(self, place: str, gradient: Sized) -> None:
        self.found[place] = gradient


def _known(s: Stage, x: Sized, weight: Leaf, gradients: list[Sized | None], terms: int) -> list[Sized]:
    """Sums whose gradients are known: backward scales them in place."""
    t = s.tape
    sums = [t.new(1, s.wide) for _ in range(terms)]
    width, elements = x.width, x.elements

    def backward(_: Saved, grads: Grads) -> Grads:
        by_x, by_weight = gradients
        gradients.clear()
        assert by_x is not None and by_weight is not None
        if width < s.wide:
            by_x = t.new(elements, s.wide)
            by_x = t.new(elements, width)
            by_weight = t.gradient(weight)
        return by_x, by_weight

    t.record((x, weight), sums, (), backward)
    return sums
