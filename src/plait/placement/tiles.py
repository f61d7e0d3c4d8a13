"""Which blocks of a ring of context ranks have to be worked for: rectangles of queries and keys, as few as there are.

No torch: training runs the list, and the planner sizes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from plait.placement.tokens import Runs


class Tile(NamedTuple):
    """Some queries (a slice of this rank's tokens) against some keys (a slice of the block's).

    `kind`: "full", every query sees every key; "causal", the same tokens; "masked", look.
    """

    queries: slice
    keys: slice
    kind: str


def tiles(queries: Runs, keys: Runs, window: int | None, documents: bool) -> list[Tile]:
    """What a rank's queries can see of a block's keys, in as few tiles as there are rectangles."""
    if queries == keys and window is None:
        everything = slice(0, sum(stop - start for start, stop in queries))
        found = [Tile(everything, everything, "causal")]
    else:
        found = _merged([
            Tile(q_slice, k_slice, kind)
            for k, k_slice in _sliced(keys)
            for q, q_slice in _sliced(queries)
            if (kind := _kind(q, k, window)) is not None
        ])  # fmt: skip
    return [tile._replace(kind="masked") for tile in found] if documents else found


def _sliced(runs: Runs) -> Iterator[tuple[tuple[int, int], slice]]:
    """Each run with its place among this rank's tokens."""
    offset = 0
    for start, stop in runs:
        yield (start, stop), slice(offset, offset + stop - start)
        offset += stop - start


def _kind(q: tuple[int, int], k: tuple[int, int], window: int | None) -> str | None:
    """How run q sees run k; None where it sees nothing of it."""
    reach = math.inf if window is None else window
    if k[0] >= q[1] or q[0] - (k[1] - 1) >= reach:
        return None
    if k[1] - 1 <= q[0] and q[1] - 1 - k[0] < reach:
        return "full"
    return "causal" if q == k and q[1] - q[0] <= reach else "masked"


def _merged(found: list[Tile]) -> list[Tile]:
    """Full tiles that lie side by side as one: first along the queries, then along the keys."""
    for along, across in (("queries", "keys"), ("keys", "queries")):
        merged: list[Tile] = []
        for tile in sorted(found, key=lambda t: (getattr(t, across).start, getattr(t, along).start)):
            last = merged[-1] if merged else None
            beside = (
                last is not None
                and last.kind == tile.kind == "full"
                and getattr(last, across) == getattr(tile, across)
                and getattr(last, along).stop == getattr(tile, along).start
            )
            if last is not None and beside:
                span = slice(getattr(last, along).start, getattr(tile, along).stop)
                merged[-1] = Tile(**{**last._asdict(), along: span})
            else:
                merged.append(tile)
        found = merged
    return found
