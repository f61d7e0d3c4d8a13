"""Who is dropped, in sizes: a byte for each element, made of a hash of eight."""

from __future__ import annotations

from plait.planner.sized import ops
from plait.planner.sized.tape import Sized, Tape


def hashed(t: Tape, elements: int) -> Sized:
    """Which elements die."""
    state = t.new(elements, ops.LONG)
    mixed = _mix(t, state)
    return t.new(mixed.elements, ops.BOOL)


def _mix(t: Tape, x: Sized) -> Sized:
    shifted = ops.like(t, x)
    mixed = ops.like(t, x)
    del shifted
    ops.like(t, mixed)
    return mixed
