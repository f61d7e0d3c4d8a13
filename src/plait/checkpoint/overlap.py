"""Rectangles against rectangles: what two have in common, and where that lies in memory. Numbers only."""

from __future__ import annotations

from collections.abc import Iterator

from plait.placement.cuts import Rectangle, area


def overlap(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """What two rectangles of one tensor have in common; None where that is nothing."""
    common = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices(part: Rectangle, within: Rectangle) -> tuple[slice, ...]:
    """The index of a part in a tensor that holds the rectangle `within`."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, within, strict=True))


def runs(part: Rectangle, within: Rectangle) -> Iterator[tuple[int, int]]:
    """(start, stop) of each stretch of elements, row-major in `within`, that together are `part`, in their order."""
    if part == within:
        yield 0, area(within)
        return
    (low, high), (first, _), inner = part[0], within[0], area(within[1:])
    if part[1:] == within[1:]:
        yield (low - first) * inner, (high - first) * inner
        return
    for row in range(low - first, high - first):
        for start, stop in runs(part[1:], within[1:]):
            yield row * inner + start, row * inner + stop
