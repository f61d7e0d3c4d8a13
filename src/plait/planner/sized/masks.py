"""Who sees whom, and who is dropped, in sizes: a byte for each element."""

from __future__ import annotations

from plait.planner.sized import ops
from plait.planner.sized.stage import Stage
from plait.planner.sized.tape import Sized, Tape


def visible(s: Stage, square: int) -> Sized:
    """Which of so many pairs of query and key see each other, in every row where rows hold documents."""
    t, run = s.tape, s.seat.run
    found = t.new(square, ops.BOOL)
    if run.model.window is not None:
        difference = t.new(square, ops.LONG)
        near = t.new(square, ops.BOOL)
        del difference
        found = t.new(square, ops.BOOL)
        del near
    if run.data.mask_documents:
        same = t.new(s.rows * square, ops.BOOL)
        found = t.new(s.rows * square, ops.BOOL)
        del same
    return found


def hashed(t: Tape, elements: int) -> Sized:
    """Which elements die, by a hash of eight bytes for each."""
    state = t.new(elements, ops.LONG)
    mixed = _mix(t, state)
    return t.new(mixed.elements, ops.BOOL)


def _mix(t: Tape, x: Sized) -> Sized:
    shifted = ops.like(t, x)
    mixed = ops.like(t, x)
    del shifted
    ops.like(t, mixed)
    return mixed
