"""Schedules that no generator names: any placement of stages, any order that their data allow. For tests only."""

from __future__ import annotations

import random

from plait.schedule import Action, Kind, Schedule


def drawn_schedule(seed: int, ranks: int, owner: tuple[int, ...], micro_batches: int, split: bool) -> Schedule:
    """At every tick each rank runs one of its actions whose inputs were made in earlier ticks, drawn at random."""
    random_ = random.Random(seed)
    shape = Schedule("drawn", micro_batches, owner, ((),) * ranks)
    kinds = (Kind.F, Kind.B, Kind.W) if split else (Kind.F, Kind.BW)
    left = {Action(kind, stage, m) for kind in kinds for stage in range(len(owner)) for m in range(micro_batches)}
    made: set[object] = set()
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        ready = [a for a in sorted(left) if _before(a) <= made and set(shape.inputs(a)) <= made]
        ran = {}
        for action in random_.sample(ready, len(ready)):
            ran.setdefault(owner[action.stage], action)
        for rank, action in ran.items():
            programs[rank].append(action)
            left.remove(action)
            made |= {action, *shape.outputs(action)}
    return Schedule("drawn", micro_batches, owner, tuple(map(tuple, programs)))


def _before(action: Action) -> set[object]:
    """The pass of the same stage and micro-batch that comes first."""
    earlier = {Kind.B: Kind.F, Kind.BW: Kind.F, Kind.W: Kind.B}
    return {action._replace(kind=earlier[action.kind])} if action.kind in earlier else set()
