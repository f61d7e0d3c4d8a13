"""The named schedules: one row each, with the closed forms of its bubble and its memory beside the generator.

A generator is a pure function from the pipeline's size to the compute actions of every rank. Communication is added
by `lower`, so a generator never mentions it. The closed forms hold for equal stages and free links; tests hold them
against the simulation of the very list that is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NamedTuple

from plait.schedule.actions import Action, Kind, Schedule
from plait.spec.errors import UsageError


class Size(NamedTuple):
    """A pipeline of `ranks`, each holding `chunks` stages, through which `micro_batches` go in one step."""

    ranks: int
    micro_batches: int
    chunks: int = 1


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch's passes through all stages of one rank; b and w are 0 in an evaluation."""

    f: float
    b: float
    w: float


@dataclass(frozen=True)
class Generator:
    """A row: the generator; seconds that each rank idles in a step; most micro-batches a rank holds from F to B.

    `idle(size, seconds)` is the same for every rank, `peak_live(size, rank)` counts stage inputs (one per chunk).
    """

    generate: Callable[[Size], Schedule]
    idle: Callable[[Size, PassSeconds], float]
    peak_live: Callable[[Size, int], int]
    chunked: bool = False  # whether a rank may hold more than one stage

    def bubble(self, size: Size, seconds: PassSeconds) -> float:
        """The bubble as a share of the step."""
        idle = self.idle(size, seconds)
        return idle / (idle + size.micro_batches * sum(seconds))

    def bubble_over_ideal(self, size: Size, seconds: PassSeconds) -> float:
        """The bubble relative to the ideal time, in which no rank ever waits."""
        return self.idle(size, seconds) / (size.micro_batches * sum(seconds))


def gpipe(size: Size) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, section 2.3).

    Backwards go in the order of the forwards, so gradients are summed in the same order as under 1F1B.
    """
    micros = range(size.micro_batches)
    program = [(kind, micro) for kind in (Kind.F, Kind.BW) for micro in micros]
    return _one_stage_per_rank("gpipe", size, [program] * size.ranks)


def one_f_one_b(size: Size) -> Schedule:
    """As many forwards as there are stages below, then one forward and one backward in turn (Narayanan et al. 2019).

    With one rank this is gradient accumulation: F0 BW0 F1 BW1 ...
    """
    return _one_stage_per_rank("1f1b", size, [_one_f_one_b_program(size, rank) for rank in range(size.ranks)])


def _one_f_one_b_program(size: Size, rank: int) -> list[tuple[Kind, int]]:
    warm_up = min(size.ranks - 1 - rank, size.micro_batches)
    program = [(Kind.F, micro) for micro in range(warm_up)]
    for micro in range(size.micro_batches):
        if micro + warm_up < size.micro_batches:
            program.append((Kind.F, micro + warm_up))
        program.append((Kind.BW, micro))
    return program


def forward(size: Size) -> Schedule:
    """Evaluation of one stage per rank. For any other placement, take `forward_of` the training schedule."""
    return forward_of(gpipe(size))


def forward_of(schedule: Schedule) -> Schedule:
    """The forwards of a compute-only schedule in their order: the same stages in the same places, without backward."""
    programs = tuple(
        tuple(part for action in program for part in action.parts if part.kind is Kind.F)
        for program in schedule.programs
    )
    return replace(schedule, name="forward", programs=programs, trains=False)


def _one_stage_per_rank(name: str, size: Size, programs: Iterable[Iterable[tuple[Kind, int]]]) -> Schedule:
    return Schedule(
        name=name,
        micro_batches=size.micro_batches,
        owner=tuple(range(size.ranks)),
        programs=tuple(
            tuple(Action(kind, stage, micro) for kind, micro in program) for stage, program in enumerate(programs)
        ),
    )


def _fill_and_drain(size: Size, seconds: PassSeconds) -> float:
    """A rank waits for the stages before it to fill and for those after it to drain: p-1 stages in all, both ways."""
    return (size.ranks - 1) * sum(seconds)


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(gpipe, _fill_and_drain, lambda size, rank: size.micro_batches),
    "1f1b": Generator(one_f_one_b, _fill_and_drain, lambda size, rank: min(size.ranks - rank, size.micro_batches)),
    "forward": Generator(forward, _fill_and_drain, lambda size, rank: 0),
}


def generate(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The compute actions of the named schedule, not yet lowered."""
    if name not in GENERATORS:
        near = get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(GENERATORS)
        raise UsageError(f"schedule.name: unknown schedule {name!r}", hint)
    for what, value in (("pp", ranks), ("micro-batches", micro_batches), ("schedule.chunks", chunks)):
        if value < 1:
            raise UsageError(f"{what} = {value}, needs at least 1")
    if chunks > 1 and not GENERATORS[name].chunked:
        raise UsageError(f"schedule.chunks = {chunks}, but {name} holds 1 stage per rank", "schedule.chunks = 1")
    return GENERATORS[name].generate(Size(ranks, micro_batches, chunks))
