"""Collectives inside a block in sizes: what arrives is new, and what has to be laid out in another order is copied.

Over NCCL, and with rows: where a micro-batch is one row, pieces along the tokens lie as they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.sized import ops
from plait.planner.sized.tape import Grads, Saved, Sized, Tape


@dataclass(frozen=True)
class Parts:
    """A group of `ranks` over which the tokens of `rows` rows are split."""

    ranks: int
    rows: int

    def gather(self, t: Tape, x: Sized) -> Sized:
        """(rows, T/n, …) -> (rows, T, …)."""
        return self.laid_out(t, self.start_gather(t, x))

    def start_gather(self, t: Tape, x: Sized) -> Sized:
        return x if self.ranks == 1 else t.new(x.elements * self.ranks, x.width)

    def laid_out(self, t: Tape, arrived: Sized) -> Sized:
        return arrived if self.ranks == 1 or self.rows == 1 else ops.like(t, arrived)

    def scatter(self, t: Tape, x: Sized) -> Sized:
        """(rows, T, …) -> the sum of this rank's piece (rows, T/n, …)."""
        if self.ranks == 1:
            return x
        pieces = x if self.rows == 1 else ops.like(t, x)
        return t.new(pieces.elements // self.ranks, x.width)

    def sum(self, t: Tape, x: Sized) -> Sized:
        return x if self.ranks == 1 else ops.like(t, x)

    # --- with a backward of their own ---

    def sum_partial(self, t: Tape, x: Sized) -> Sized:
        if self.ranks == 1:
            return x
        out = self.sum(t, x)
        t.record((x,), (out,), (), lambda _, grads: grads)
        return out

    def scatter_partial(self, t: Tape, x: Sized) -> Sized:
        if self.ranks == 1:
            return x
        out = self.scatter(t, x)
        t.record((x,), (out,), (), lambda _, grads: (self.gather(t, _given(grads)),))
        return out

    def spread(self, t: Tape, x: Sized, split: bool) -> Sized:
        if self.ranks == 1:
            return x
        out = self.gather(t, x) if split else x.detach()

        def backward(_: Saved, grads: Grads) -> Grads:
            grad = _given(grads)
            return (self.scatter(t, grad) if split else self.sum(t, grad),)

        t.record((x,), (out,), (), backward)
        return out


def _given(grads: Grads) -> Sized:
    (grad,) = grads
    assert grad is not None
    return grad
