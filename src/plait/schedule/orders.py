"""The generators of the named schedules: pure functions from the pipeline's size to the compute actions of every rank.

Communication is added by `lower`, so a generator never mentions it. The closed forms of each stand in `generators.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from plait.schedule.actions import BW, Action, B, F, Kind, Schedule, W
from plait.schedule.greedy import Limits, Policy, list_schedule
from plait.schedule.simulate import Costs
from plait.spec.pipeline import SHAPES, owners


class Size(NamedTuple):
    """A pipeline of `ranks`, each holding `chunks` stages, through which `micro_batches` go in one step."""

    ranks: int
    micro_batches: int
    chunks: int = 1

    @property
    def in_flight(self) -> int:
        """Micro-batches, but no more than there are ranks."""
        return min(self.ranks, self.micro_batches)


def gpipe(size: Size) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, section 2.3).

    Backwards go in the order of the forwards, so gradients are summed in the same order as under 1F1B.
    """
    micros = range(size.micro_batches)
    return _schedule("gpipe", size, ([Action(k, r, m) for k in (F, BW) for m in micros] for r in range(size.ranks)))


def one_f_one_b(size: Size) -> Schedule:
    """As many forwards as there are stages below, then one forward and one backward in turn (Narayanan et al. 2019).

    With one rank this is gradient accumulation: F0 BW0 F1 BW1 ...
    """
    micros = range(size.micro_batches)
    forwards = ([Action(F, rank, micro) for micro in micros] for rank in range(size.ranks))
    backwards = ([Action(BW, rank, micro) for micro in micros] for rank in range(size.ranks))
    warm_ups = range(size.ranks - 1, -1, -1)
    return _schedule("1f1b", size, map(_alternate, forwards, backwards, warm_ups))


def interleaved(size: Size) -> Schedule:
    """1F1B over `chunks` stages per rank, micro-batches in groups (Narayanan et al. 2021, section 2.2).

    A group passes a rank's first stage, then its second, and so on. Their groups have as many micro-batches as there
    are ranks, which must divide the batch; here a group may be larger (the largest come first), since a pipeline that
    is full stays full: the bubble is the same for any number of micro-batches, and memory pays for what is left over.
    """
    groups = _groups(size)
    forwards, backwards = [], []
    for rank in range(size.ranks):
        stages = range(rank, size.ranks * size.chunks, size.ranks)
        forwards.append([Action(F, s, m) for group in groups for s in stages for m in group])
        backwards.append([Action(BW, s, m) for group in groups for s in reversed(stages) for m in group])
    return _schedule("interleaved", size, map(_alternate, forwards, backwards, interleaved_warm_ups(size)))


def interleaved_warm_ups(size: Size) -> list[int]:
    """The forwards that each rank runs before its first backward; the last rank still runs one more before its own."""
    per_hop = 2 if size.chunks > 1 else 1
    return [(size.chunks - 1) * len(_groups(size)[0]) + per_hop * below for below in range(size.ranks - 1, -1, -1)]


def _groups(size: Size) -> list[range]:
    count = max(1, size.micro_batches // size.ranks)
    each, left_over = divmod(size.micro_batches, count)
    edges = [each * group + min(group, left_over) for group in range(count + 1)]
    return [range(*edge) for edge in pairwise(edges)]


def zb_h1(size: Size) -> Schedule:
    """1F1B with weight gradients apart, each as many micro-batches late as its stage is deep (Qi et al. 2023, ZB-H1).

    So every rank holds as many micro-batches as the first one does under 1F1B, and the weight gradients that are left
    fill the time in which 1F1B drains.
    """
    return _schedule("zb-h1", size, (_zb_h1_program(size, rank) for rank in range(size.ranks)))


def _zb_h1_program(size: Size, rank: int) -> Iterator[Action]:
    micros = range(size.micro_batches)
    for action in _alternate(
        [Action(F, rank, m) for m in micros], [Action(B, rank, m) for m in micros], size.ranks - 1 - rank
    ):
        yield action
        if action.kind is B and action.micro >= rank:
            yield Action(W, rank, action.micro - rank)
    yield from (Action(W, rank, m) for m in micros[max(0, size.micro_batches - rank) :])


def zb_v(size: Size) -> Schedule:
    """Two stages per rank in a V, so that the last stage hands its gradient over at once (Qi et al. 2023, ZB-V).

    A rank warms up with twice as many forwards of its first stage as there are ranks below, and one; then each stage
    in turn runs F, B and W. Made for at least 2p - 1 micro-batches; of fewer, those that are not there are left out.
    """
    made = size._replace(micro_batches=max(size.micro_batches, 2 * size.ranks - 1))
    programs = [_zb_v_program(made, rank) for rank in range(size.ranks)]
    return _first(_schedule("zb-v", made, programs), size.micro_batches)


def _zb_v_program(size: Size, rank: int) -> list[Action]:
    below, count = size.ranks - rank, size.micro_batches
    run = _Counter(rank, 2 * size.ranks - 1 - rank)
    program = [run(F, 0) for _ in range(2 * below - 1)]
    program += [run(F, chunk) for _ in range(rank) for chunk in (1, 0)]
    program += [run(kind, 1) for _ in range(below) for kind in (F, B, W)]
    turn = [(kind, chunk) for chunk in (0, 1) for kind in (F, B, W)]
    for _ in range(count - size.ranks):
        program += [run(kind, chunk) for kind, chunk in turn if kind is not F or run.done[F, chunk] < count]
    program += [run(B, chunk) for _ in range(rank) for chunk in (0, 1)]
    program += [run(kind, 0) for _ in range(count - run.done[B, 0]) for kind in (B, W)]
    return program + [run(W, chunk) for chunk in (1, 0) for _ in range(count - run.done[W, chunk])]


def v_half(size: Size) -> Schedule:
    """A V that holds half of 1F1B's activations (Qi et al. 2024, V-Half): list scheduling under that limit.

    Theirs repeats a building block; this one runs at each time what its policy prefers, with F, B and W equally long,
    while rank r's first stage may hold about as many micro-batches less as r is deep. It keeps their limit, (p+2)//2
    micro-batches, and their bubble, which the tests hold against the published figures.
    """
    ranks, limit = size.ranks, 2 * ((size.ranks + 2) // 2)
    caps = [max(1, limit - 1 - rank * limit // (2 * ranks)) for rank in range(ranks)] + [limit] * ranks
    stages = 2 * ranks
    limits = Limits((1,) * stages, (1,) * stages, (limit,) * ranks, tuple(caps))
    owner = owners(ranks, 2, folded=True)
    found = list_schedule(owner, size.micro_batches, Costs.equal(stages), limits, (Policy(),) * ranks)
    assert found is not None, "the caps leave room for the second stage, so every micro-batch can come through"
    return replace(found.schedule, name="v-half")


def dualpipe_v(size: Size) -> Schedule:
    """A V in whose middle each forward runs together with a backward (DeepSeek-AI 2025, DualPipeV; their README).

    DualPipe cut in half: the eight phases of its figure, with a rank's share of each by its depth. Made for at least
    2p micro-batches; of fewer, those that are not there are left out.
    """
    made = size._replace(micro_batches=max(size.micro_batches, 2 * size.ranks))
    programs = [list(_dualpipe_v_program(made, rank)) for rank in range(size.ranks)]
    return _first(_schedule("dualpipe-v", made, programs), size.micro_batches)


def _dualpipe_v_program(size: Size, rank: int) -> Iterator[Action]:
    below, depth = size.ranks - 1 - rank, rank + 1
    run, late = _Counter(rank, 2 * size.ranks - 1 - rank), deque[Action]()
    yield from (run(F, 0) for _ in range(2 * below))
    yield from (run(F, chunk) for _ in range(depth) for chunk in (0, 1))
    yield from (run(kind, 1) for _ in range(below) for kind in (B, W, F))
    for turn in range(size.micro_batches - 2 * size.ranks + depth):
        if turn == 0 and below == 0:  # the last rank's first backward waits for this very forward
            yield from (run(F, 0), run(BW, 1))
        else:
            yield Action.together(run(F, 0), run(BW, 1))
        yield Action.together(run(F, 1), run(BW, 0))
    for _ in range(below):
        yield from (run(BW, 1), Action.together(run(F, 1), run(BW, 0)))
    for turn in range(2 * depth):  # the later half leaves its weight gradients for the end
        chunk = 1 - turn % 2
        yield run(B if turn >= depth else BW, chunk)
        late += [Action(W, run.stages[chunk], run.done[B, chunk] - 1)] * (turn >= depth)
    for _ in range(below):
        yield late.popleft()
        yield run(B, 0)
        late.append(Action(W, rank, run.done[B, 0] - 1))
    yield from late


class _Counter:
    """The next pass of each kind on a rank's two stages, micro-batches in order."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.done = {(kind, chunk): 0 for kind in (F, B, W) for chunk in range(len(stages))}

    def __call__(self, kind: Kind, chunk: int) -> Action:
        """BW counts as a B; W follows the split B's alone, so it is only asked for where all before it were split."""
        at = (B if kind is BW else kind), chunk
        micro = self.done[at]
        self.done[at] += 1
        return Action(kind, self.stages[chunk], micro)


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn until the forwards end, then the other backwards."""
    program = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        program += (forward, backward)
    return program + list(backwards[max(0, len(forwards) - warm_up) :])


def _first(schedule: Schedule, micro_batches: int) -> Schedule:
    """The same schedule without the later micro-batches. What waited for others waits for nothing new."""
    programs = []
    for program in schedule.programs:
        kept = [tuple(part for part in action.parts if part.micro < micro_batches) for action in program]
        both = [parts and (parts[0] if len(parts) == 1 else Action.together(*parts)) for parts in kept]
        programs.append(tuple(action for action in both if action))
    return replace(schedule, micro_batches=micro_batches, programs=tuple(programs))


def _schedule(name: str, size: Size, programs: Iterable[Iterable[Action]]) -> Schedule:
    owner = owners(size.ranks, size.chunks, SHAPES[name].folded)
    return Schedule(name, size.micro_batches, owner, tuple(map(tuple, programs)))
