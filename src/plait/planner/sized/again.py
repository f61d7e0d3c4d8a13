"""Recompute in sizes, as in `parallel/recompute.py`: saved tensors are numbers, found again by one more forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from plait.planner.sized.tape import Memory, Sized, Tape

OUTPUT = -1


class _Complete(Exception):
    """All that was saved is there."""


class _Forward:
    """One forward of which only inputs are kept. As hooks, it packs saved tensors as numbers."""

    def __init__(self, tape: Tape, compute: Callable[..., Any], inputs: Sequence[Sized]) -> None:
        self.tape, self.compute = tape, compute
        self.inputs = [(x.detach(), x.needs) for x in inputs]
        self.saves = self.output_uses = 0
        self.found: dict[int, Sized] = {}

    def pack(self, x: Sized) -> int:
        self.saves += 1
        return self.saves - 1

    def unpack(self, slot: int) -> Sized:
        if slot not in self.found:
            self._again()
        if slot == OUTPUT and self.output_uses > 1:
            self.output_uses -= 1
            return self.found[slot]
        return self.found.pop(slot)

    def _again(self) -> None:
        kept = _Kept(self.saves, stops=not self.output_uses)
        inputs = []
        for x, needs in self.inputs:
            x.needs = needs
            inputs.append(x)
        try:
            with self.tape.hooks(kept):
                out = self.compute(*inputs)
            if self.output_uses:
                self.found[OUTPUT] = out.detach()
        except _Complete as complete:
            complete.__traceback__ = None
        self.found |= enumerate(kept.saved)


class _Kept:
    """Hooks that collect what is saved, until it is as much as before."""

    def __init__(self, expected: int, stops: bool) -> None:
        self.expected, self.stops = expected, stops
        self.saved: list[Sized] = []

    def pack(self, x: Sized) -> None:
        self.saved.append(x.detach())
        if self.stops and len(self.saved) == self.expected:
            raise _Complete

    def unpack(self, packed: Any) -> Sized:
        raise AssertionError("nothing is differentiated through what was computed again")


class Recomputed:
    """A whole block computed again."""

    def __init__(self, tape: Tape, compute: Callable[..., Any]) -> None:
        self.tape, self.compute = tape, compute

    def __call__(self, *inputs: Sized) -> Any:
        forward = _Forward(self.tape, self.compute, inputs)
        with self.tape.hooks(forward):
            return self.compute(*inputs)


class Results:
    """Results of a block's recomputed parts by memory, while the block runs. As hooks, it asks the part for its own."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[weakref.ref[Memory], _Forward]] = {}

    def add(self, y: Sized, forward: _Forward) -> None:
        self.of[id(y.memory)] = weakref.ref(y.memory), forward

    def pack(self, x: Sized) -> tuple[_Forward | None, Sized]:
        memory, forward = self.of.get(id(x.memory), (None, None))
        if memory is None or forward is None or memory() is not x.memory:
            return None, x.detach()
        forward.output_uses += 1
        return forward, Sized(Memory(0, None), x.elements, x.width)

    def unpack(self, packed: tuple[_Forward | None, Sized]) -> Sized:
        forward, x = packed
        if forward is None:
            return x
        return Sized(forward.unpack(OUTPUT).memory, x.elements, x.width)


def part(tape: Tape, results: Results, compute: Callable[..., Sized], *inputs: Sized) -> Sized:
    """A part of a block: neither what it saves nor, outside, its result is kept."""
    forward = _Forward(tape, compute, inputs)
    with tape.hooks(forward):
        y = compute(*inputs)
    results.add(y, forward)
    return y
