"""The named schedules: one row each, with the closed forms of its bubble and its memory beside the generator.

The closed forms hold for equal stages and free links, and where a row says so only for some sizes and seconds; tests
hold them against the simulation of the very list that is generated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NamedTuple

from plait.schedule.actions import F, Schedule
from plait.schedule.bulk import uncollected
from plait.schedule.orders import (
    Size,
    dualpipe_v,
    gpipe,
    interleaved,
    interleaved_warm_ups,
    one_f_one_b,
    v_half,
    zb_h1,
    zb_v,
)
from plait.spec.errors import UsageError
from plait.spec.pipeline import SHAPES


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch's passes through all stages of one rank; b and w are 0 in an evaluation."""

    f: float
    b: float
    w: float


@dataclass(frozen=True)
class Generator:
    """A row: the generator; seconds that each rank idles in a step; most stage inputs a rank holds from F to W.

    `idle(size, seconds)` is the same for every rank and true where `holds`; `peak_live(size, rank)` counts one for
    each of a rank's stages. `peak_late(size, rank)` is an upper bound on those that wait between B and W, 0 where
    backward is never split.
    """

    generate: Callable[[Size], Schedule]
    idle: Callable[[Size, PassSeconds], float]
    peak_live: Callable[[Size, int], int]
    holds: Callable[[Size, PassSeconds], bool] = lambda size, seconds: True
    peak_late: Callable[[Size, int], int] = lambda size, rank: 0

    def bubble(self, size: Size, seconds: PassSeconds) -> float:
        """The bubble as a share of the step."""
        idle = self.idle(size, seconds)
        return idle / (idle + size.micro_batches * sum(seconds))

    def bubble_over_ideal(self, size: Size, seconds: PassSeconds) -> float:
        """The bubble relative to the ideal time, in which no rank ever waits."""
        return self.idle(size, seconds) / (size.micro_batches * sum(seconds))


def forward_of(schedule: Schedule) -> Schedule:
    """The forwards of a compute-only schedule in their order: the same stages in the same places, without backward."""
    programs = tuple(
        tuple(part for action in program for part in action.parts if part.kind is F) for program in schedule.programs
    )
    return replace(schedule, name="forward", programs=programs, trains=False)


def _fill_and_drain(size: Size, seconds: PassSeconds) -> float:
    """A rank waits for the stages before it to fill and for those after it to drain: p-1 stages in all, both ways."""
    return (size.ranks - 1) * sum(seconds)


def _interleaved_idle(size: Size, seconds: PassSeconds) -> float:
    """(p-1) / v of a micro-batch's time (Narayanan et al. 2021, section 2.2); fewer than p cannot fill the ranks."""
    missing = size.ranks - size.in_flight
    return (missing * size.chunks + size.in_flight - 1) * sum(seconds) / size.chunks


def _zb_h1_idle(size: Size, seconds: PassSeconds) -> float:
    """(p-1)(F + B - W) where W is the shortest of the three (Qi et al. 2023, section 2.3) and m ≥ p; else no less."""
    return (size.ranks - 1) * (seconds.f + seconds.b) - (size.in_flight - 1) * min(seconds)


def _zb_v_idle(size: Size, seconds: PassSeconds) -> float:
    """Nothing but the fill: the last rank begins p-1 forwards late, and then no rank waits (Qi et al. 2023, ZB-V)."""
    return (size.ranks - 1) * seconds.f / 2


def _v_half_idle(size: Size, seconds: PassSeconds) -> float:
    """Of this generator, in forwards of one stage; less than the published p / (2m) of the ideal time, 3p of them."""
    return max(size.ranks - 1, 6 * -(-size.ranks // 2) - 7) * seconds.f / 2


def _dualpipe_v_idle(size: Size, seconds: PassSeconds) -> float:
    """(PP/2 - 1)(F&B + B - 3W) with 2p = PP, B the whole backward, F&B no shorter than both (DualPipe's README)."""
    f, b, w = (time / 2 for time in seconds)
    return (size.ranks - 1) * ((f + b + w) + (b + w) - 3 * w)


def _alike(size: Size, seconds: PassSeconds) -> bool:
    """Enough micro-batches, and F, B and W equally long."""
    return size.micro_batches >= 2 * size.ranks and seconds.f == seconds.b == seconds.w


def _v_peak(most_more: int) -> Callable[[Size, int], int]:
    """2p stage inputs or so: at most both of each micro-batch, or what warm-up brings while the batch lasts."""

    def peak(size: Size, rank: int) -> int:
        m = size.micro_batches
        return min(2 * m, m + rank + 1, 2 * size.ranks + most_more)

    return peak


GENERATORS: dict[str, Generator] = {
    "gpipe": Generator(gpipe, _fill_and_drain, lambda size, rank: size.micro_batches),
    "1f1b": Generator(one_f_one_b, _fill_and_drain, lambda size, rank: min(size.ranks - rank, size.micro_batches)),
    "interleaved": Generator(
        interleaved,
        _interleaved_idle,
        lambda size, rank: min(size.chunks * size.micro_batches, interleaved_warm_ups(size)[rank] + 1),
    ),
    "zb-h1": Generator(
        zb_h1,
        _zb_h1_idle,
        lambda size, rank: size.in_flight,
        peak_late=lambda size, rank: min(rank + 1, size.in_flight),
    ),
    "zb-v": Generator(
        zb_v, _zb_v_idle, _v_peak(0), _alike, peak_late=lambda size, rank: min(2 * size.micro_batches, 2 * rank + 1)
    ),
    "v-half": Generator(
        v_half,
        _v_half_idle,
        lambda size, rank: min(2 * size.micro_batches, 2 * ((size.ranks + 2) // 2)),
        _alike,
        # Six at most once all ranks are filled, in this generator's lists of up to 16 ranks; before, all that is live.
        peak_late=lambda size, rank: min(
            2 * size.micro_batches, 6 if size.micro_batches >= size.ranks else size.ranks + 2
        ),
    ),
    "dualpipe-v": Generator(
        dualpipe_v,
        _dualpipe_v_idle,
        _v_peak(1),
        lambda size, seconds: size.micro_batches >= 2 * size.ranks and seconds.f == seconds.b >= seconds.w,
        peak_late=lambda size, rank: min(2 * size.micro_batches, rank + 1),
    ),
}


@uncollected()
def generate(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The compute actions of the named schedule, not yet lowered; without `chunks`, as many stages as it needs."""
    if name not in GENERATORS:
        near = get_close_matches(name, GENERATORS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(GENERATORS)
        raise UsageError(f"schedule.name: unknown schedule {name!r}", hint)
    shape = SHAPES[name]
    chunks = shape.chunks if chunks is None else chunks
    for what, value in (("pp", ranks), ("micro-batches", micro_batches), ("schedule.chunks", chunks)):
        if value < 1:
            raise UsageError(f"{what} = {value}, needs at least 1")
    if chunks != shape.chunks and not shape.chosen:
        holds = f"{name} holds {shape.chunks} stage{'s' * (shape.chunks > 1)} per rank"
        raise UsageError(f"schedule.chunks = {chunks}, but {holds}", f"schedule.chunks = {shape.chunks}")
    return GENERATORS[name].generate(Size(ranks, micro_batches, chunks))
