"""What torch's CPU kernels make, keep and make again in backward, operation by operation, in sizes.

Every function takes the tape and inputs and returns outputs. A backward makes gradients in the order in which torch's
does, since one that is made before another is held beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.planner.sized.tape import Grads, Leaf, Saved, Sized, Tape

LONG, BOOL, DOUBLE = 8, 1, 8


def multiply(t: Tape, a: Sized, b: Sized) -> Sized:
    """a · b; the smaller one is broadcast, the narrower one widened."""
    out = t.new(max(a.elements, b.elements), max(a.width, b.width))
    needs = a.needs, b.needs
    width = out.width

    def backward(saved: Saved, grads: Grads) -> Grads:
        (grad,) = grads
        assert grad is not None
        by_b = t.new(grad.elements, width) if needs[1] else None
        by_a = t.new(grad.elements, width) if needs[0] else None
        return by_a, by_b

    t.record((a, b), (out,), [x for x, other in ((b, a), (a, b)) if other.needs], backward)
    return out


def scale(t: Tape, x: Sized) -> Sized:
    """x times a number."""
    return elementwise(t, x)


def elementwise(t: Tape, x: Sized, saved: Sequence[Sized] = (), keeps: str = "") -> Sized:
    """A function of each element of x. `keeps`: its "input" or its "result"."""
    out = t.new(x.elements, x.width)
    kept = {"": (), "input": (x,), "result": (out,)}[keeps]
    t.record((x,), (out,), (*kept, *saved), lambda _, grads: (like(t, grads[0]),))
    return out


def add(t: Tape, a: Sized, b: Sized) -> Sized:
    """a + b."""
    out = t.new(max(a.elements, b.elements), max(a.width, b.width))
    t.record((a, b), (out,), (), lambda _, grads: (grads[0], grads[0]))
    return out


def subtract(t: Tape, a: Sized, b: Sized) -> Sized:
    """a - b."""
    out = t.new(max(a.elements, b.elements), max(a.width, b.width))
    t.record((a, b), (out,), (), lambda _, grads: (grads[0], like(t, grads[0])))
    return out


def cast(t: Tape, x: Sized, width: int) -> Sized:
    """x in another dtype; the same where it has it."""
    if x.width == width:
        return x
    out, narrow = t.new(x.elements, width), x.width
    t.record((x,), (out,), (), lambda _, grads: (t.new(x_elements, narrow),))
    x_elements = x.elements
    return out


def like(t: Tape, x: Sized | None) -> Sized:
    assert x is not None
    return t.new(x.elements, x.width)


def split(t: Tape, x: Sized, sizes: Sequence[int]) -> list[Sized]:
    """Views of x; backward lays their gradients side by side."""
    parts = [Sized(x.memory, size, x.width) for size in sizes]
    elements, width = x.elements, x.width
    t.record((x,), parts, (), lambda _, grads: (t.new(elements, width),))
    return parts


def cat(t: Tape, parts: Sequence[Sized]) -> Sized:
    """Parts side by side; backward views."""
    out = t.new(sum(x.elements for x in parts), max(x.width for x in parts))
    sizes = [x.elements for x in parts]

    def backward(_: Saved, grads: Grads) -> Grads:
        (grad,) = grads
        assert grad is not None
        return [Sized(grad.memory, size, grad.width) for size in sizes]

    t.record(parts, (out,), (), backward)
    return out


def linear(t: Tape, x: Sized, weight: Leaf, bias: Leaf | None, inputs: int) -> Sized:
    """y = x Wᵀ + b of so many inputs. One kernel with a bias, whose backward is the input's first."""
    out = t.new(x.elements // inputs * (weight.elements // inputs), x.width)
    needs, elements, width = x.needs, x.elements, x.width

    def backward(_: Saved, grads: Grads) -> Grads:
        if bias is not None:
            by_x = t.new(elements, width) if needs else None
            return by_x, t.gradient(weight), grads[0]
        by_weight = t.gradient(weight)
        return t.new(elements, width) if needs else None, by_weight

    t.record((x, weight, *((bias,) if bias is not None else ())), (out,), (x,), backward)
    return out


def rms_norm(t: Tape, x: Sized, weight: Leaf, vectors: int) -> Sized:
    """In pieces, as a CPU has no kernel for it: x · rsqrt(mean x²) · w, in float32 or wider."""
    wide = max(x.width, 4)
    given = x.width
    x = cast(t, x, wide)
    squares = square(t, x)
    mean = _mean(t, squares, vectors)
    root = _power(t, mean, keeps="result")
    del squares, mean
    normal = multiply(t, x, root)
    out = multiply(t, normal, weight)
    return cast(t, out, given)


def fused_rms_norm(t: Tape, x: Sized, weight: Leaf, vectors: int) -> Sized:
    """One kernel, which keeps the root of each vector."""
    out, roots = like(t, x), t.new(vectors, max(x.width, 4))
    elements, width = x.elements, x.width
    t.record((x, weight), (out,), (x, roots), lambda _, grads: (t.new(elements, width), t.gradient(weight)))
    return out


def square(t: Tape, x: Sized) -> Sized:
    """x²."""
    return _power(t, x, keeps="input")


def _power(t: Tape, x: Sized, keeps: str) -> Sized:
    """A power of each element; its gradient is made in three steps. `keeps`: its "input" or its "result"."""
    out = t.new(x.elements, x.width)

    def backward(_: Saved, grads: Grads) -> Grads:
        power = like(t, grads[0])
        factor = like(t, power)
        return (like(t, factor),)

    t.record((x,), (out,), ({"input": x, "result": out}[keeps],), backward)
    return out


def _mean(t: Tape, x: Sized, vectors: int) -> Sized:
    out, elements = t.new(vectors, x.width), x.elements
    t.record((x,), (out,), (), lambda _, grads: (t.new(elements, out_width),))
    out_width = out.width
    return out


def layer_norm(t: Tape, x: Sized, weight: Leaf, bias: Leaf, vectors: int) -> Sized:
    """One kernel, which keeps mean and deviation of each vector."""
    out, statistics = t.new(x.elements, x.width), [t.new(vectors, x.width) for _ in range(2)]
    elements, width = x.elements, x.width

    def backward(_: Saved, grads: Grads) -> Grads:
        return t.new(elements, width), t.gradient(weight), t.gradient(bias)

    t.record((x, weight, bias), (out,), (x, *statistics), backward)
    return out


def attend(t: Tape, q: Sized, k: Sized, v: Sized, dim: int, mask: Sized | None = None) -> Sized:
    """Fused attention over heads of `dim` channels, those of values too.

    Keeps q, k, v, the mask that is added, its result, and a number for each query.
    """
    out, sums = like(t, q), t.new(q.elements // dim, max(q.width, 4))
    shapes = [(x.elements, x.width) for x in (q, k, v)]
    saved = (q, k, v, out, sums, *((mask,) if mask is not None else ()))
    t.record((q, k, v), (out,), saved, lambda _, grads: [t.new(*shape) for shape in shapes])
    return out


def like_mask(t: Tape, seen: Sized, width: int) -> Sized:
    """Who sees whom, as what is added to scores."""
    return t.new(seen.elements, width)


def softmax(t: Tape, x: Sized) -> Sized:
    """Over the last dim."""
    return elementwise(t, x, keeps="result")


def repeated(t: Tape, x: Sized, elements: int) -> Sized:
    """Every head a few times over, copied; its gradient is summed."""
    out, own = t.new(elements, x.width), x.elements
    t.record((x,), (out,), (), lambda _, grads: (_summed(t, grads, own),))
    return out


def expanded(t: Tape, x: Sized, elements: int) -> Sized:
    """The same memory as many times over; its gradient is summed."""
    out, own = Sized(x.memory, elements, x.width), x.elements
    t.record((x,), (out,), (), lambda _, grads: (_summed(t, grads, own),))
    return out


def _summed(t: Tape, grads: Grads, elements: int) -> Sized:
    (grad,) = grads
    assert grad is not None
    return t.new(elements, grad.width)


def copied(t: Tape, x: Sized) -> Sized:
    """Laid out in another order; its gradient passes through."""
    out = like(t, x)
    t.record((x,), (out,), (), lambda _, grads: grads)
    return out


def reordered(t: Tape, x: Sized) -> Sized:
    """Laid out in another order; so is its gradient."""
    return elementwise(t, x)


def relaid(t: Tape, x: Sized) -> Sized:
    """A view whose gradient has to be laid out in another order."""
    out = Sized(x.memory, x.elements, x.width)
    t.record((x,), (out,), (), lambda _, grads: (like(t, grads[0]),))
    return out


def batched(t: Tape, a: Sized, b: Sized, elements: int, laid_out: bool = False) -> Sized:
    """Products of matrices side by side; `laid_out`: the gradient has to be copied first."""
    out = t.new(elements, a.width)
    shapes = [(x.elements, x.width) for x in (a, b)]

    def backward(_: Saved, grads: Grads) -> Grads:
        contiguous = like(t, grads[0]) if laid_out else None
        by_b = t.new(*shapes[1])
        by_a = t.new(*shapes[0])
        del contiguous
        return by_a, by_b

    t.record((a, b), (out,), (a, b), backward)
    return out


def total(t: Tape, x: Sized) -> Sized:
    """The sum of all elements; its gradient is laid out again."""
    out, elements, width = t.new(1, x.width), x.elements, x.width
    t.record((x,), (out,), (), lambda _, grads: (t.new(elements, width),))
    return out


def log_sums(t: Tape, x: Sized, vectors: int) -> Sized:
    """log Σ exp of each vector: keeps x and its result; backward makes a difference, its exponential and a product."""
    largest = t.new(vectors, x.width)
    exponentials = like(t, x)
    del largest
    out = t.new(vectors, x.width)
    del exponentials

    def backward(saved: Saved, grads: Grads) -> Grads:
        difference = like(t, saved[0])
        exponential = like(t, difference)
        found = like(t, exponential)
        del difference
        return (found,)

    t.record((x,), (out,), (x, out), backward)
    return out
