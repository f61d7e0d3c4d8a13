"""Plain text tables, and the short forms of long lists. It knows nothing of runs, and needs no colour to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

SHOWN_RUNS = 4


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned lines, the head first. A column whose head begins with ">" stands to the right."""
    right = [title.startswith(">") for title in head]
    lines = [[title.lstrip(">") for title in head], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def elide(items: Sequence[str], most: int) -> list[str]:
    """At most `most` items: the first ones, "…", and the last."""
    if len(items) <= most:
        return list(items)
    return [*items[: most - 2], "…", items[-1]]


def numbers(values: Sequence[int]) -> str:
    """0 1 2 3 -> '0-3'; 0 4 8 12 -> '0-12 by 4'; 0 1 4 5 8 9 -> '0-1, 4-5, 8-9'; many runs are elided."""
    strides = {after - before for before, after in pairwise(values)}
    if len(values) > 2 and len(strides) == 1 and (stride := strides.pop()) > 1:
        return f"{values[0]}-{values[-1]} by {stride}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(elide([str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs], SHOWN_RUNS))
