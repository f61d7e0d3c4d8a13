"""Long steps by short ones: from some micro-batches on, a further one adds to a step what every other one does.

A count of a rank's own step, and a plan of its bytes, run two short steps in place of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.schedule import GENERATORS, Size
from plait.spec.layout import Layout
from plait.spec.pipeline import chunks_of
from plait.spec.run import RunSpec

ONE, LONG = 1, 8  # a step of one micro-batch; bytes of a token's or a label's number


def counted_lengths(run: RunSpec, layout: Layout, rank: int, micro_batches: int) -> tuple[int, ...]:
    """The micro-batches of the steps that are run in place of one of so many: two numbers, or the number itself.

    Once 2·pp messages have left, a rank has as many on their way as it ever has (`SENDS_IN_FLIGHT`), and holds as many
    micro-batches: then the other step has one, since what is sent is affine from there. Or it holds one more of each
    further one, and two long steps say how much that is. Stages that take turns do so by groups of pp micro-batches, of
    which the first ones are longer where pp does not divide them all.
    """
    pp, chunks = layout.pp, chunks_of(run.schedule)
    period = pp if chunks > 1 else 1
    few = 2 * pp + 2 + (micro_batches - 2 * pp - 2) % period + micro_batches % period * period
    more = few + period
    if micro_batches <= more or run.schedule.file is not None:
        return (micro_batches,)
    live = GENERATORS[run.schedule.name].peak_live
    few_live, more_live = (live(Size(pp, n, chunks), layout.coordinates(rank).pp) for n in (few, more))
    return (few, more) if more_live > few_live else (ONE, few)


def along(lengths: Sequence[int], found: tuple[float, float], micro_batches: int) -> float:
    """What a step of so many micro-batches has of something, from what steps of these lengths have of it."""
    first, last = found
    times = (micro_batches - lengths[0]) / (lengths[-1] - lengths[0]) if len(lengths) > 1 else 0.0
    return first + (last - first) * times


def activations_along(
    run: RunSpec, layout: Layout, lengths: Sequence[int], found: tuple[int, int], micro_batches: int
) -> int:
    """The same of the peak of activations: where the short step has one micro-batch, a long one adds batch alone."""
    if lengths[0] > ONE or len(lengths) == 1:
        return round(along(lengths, found, micro_batches))
    rows = 4 if run.data.mask_documents else 2  # tokens and labels; where each has one, its place and its document
    each = rows * LONG * run.batch.micro_size * (run.batch.sequence // layout.cp)
    return found[-1] + each * (micro_batches - lengths[-1])
