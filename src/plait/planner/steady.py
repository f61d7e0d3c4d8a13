"""Long steps by short ones: from some micro-batches on, a further one adds to a step what every other one does.

A count of a rank's own step, and a plan of its bytes, run two short steps in place of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.schedule import GENERATORS, SENDS_IN_FLIGHT, Size
from plait.spec.layout import Layout
from plait.spec.pipeline import chunks_of
from plait.spec.run import RunSpec

ONE, LONG = 1, 8  # a step of one micro-batch; bytes of a token's or a label's number


def counted_lengths(run: RunSpec, layout: Layout, rank: int, micro_batches: int) -> tuple[int, ...]:
    """The micro-batches of the steps that are run in place of one of so many: two numbers, or the number itself.

    `few` is enough for a rank to have as many messages on their way as it ever has, with the same remainder as the long
    step where stages take turns by groups of pp micro-batches (and longer where pp does not divide, since the first
    groups are). Where a rank holds no more micro-batches from there on, the lengths are 1 and `few`: what is sent is
    affine from 1, and activations are those of `few` with a longer batch. Else they are `few` and one period more.
    """
    pp, chunks = layout.pp, chunks_of(run.schedule)
    period = pp if chunks > 1 else 1
    filled = SENDS_IN_FLIGHT * pp + 2
    few = filled + (micro_batches - filled) % period + micro_batches % period * period
    more = few + period
    if micro_batches <= more or run.schedule.file is not None:
        return (micro_batches,)
    live = GENERATORS[run.schedule.name].peak_live
    few_live, more_live = (live(Size(pp, n, chunks), layout.coordinates(rank).pp) for n in (few, more))
    return (few, more) if more_live > few_live else (ONE, few)


def extrapolated(lengths: Sequence[int], found: tuple[float, float], micro_batches: int) -> float:
    """What a step of so many micro-batches has of something, from what steps of these lengths have of it."""
    first, last = found
    times = (micro_batches - lengths[0]) / (lengths[-1] - lengths[0]) if len(lengths) > 1 else 0.0
    return first + (last - first) * times


def activations_extrapolated(
    run: RunSpec, layout: Layout, lengths: Sequence[int], found: tuple[int, int], micro_batches: int
) -> int:
    """The same of the peak of activations: where the short step has one micro-batch, a long one adds batch alone."""
    if lengths[0] > ONE or len(lengths) == 1:
        return round(extrapolated(lengths, found, micro_batches))
    each = numbers_per_token(run) * LONG * run.batch.micro_size * (run.batch.sequence // layout.cp)
    return found[-1] + each * (micro_batches - lengths[-1])


def numbers_per_token(run: RunSpec) -> int:
    """Of a batch on a rank: token and label; where every row has its own documents, place and document too."""
    return 4 if run.data.mask_documents else 2
