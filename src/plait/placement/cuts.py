"""How each role of tensor is cut, as a table, and the arithmetic of one cut. It knows no tensor by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Rectangle = tuple[tuple[int, int], ...]  # (start, stop) of each dim of the global tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """`dim` is cut over the ranks of group `over` (None: whole on each rank), and dim `second[0]` over `second[1]`.

    A gradient is partial over `domain` always, over the groups of `partial` too, and over those of `partial_split`
    where the tokens between blocks are split over tp (sequence parallelism).
    """

    dim: int | None = None
    over: str = "tp"
    partial: tuple[str, ...] = ()
    partial_split: tuple[str, ...] = ()
    second: tuple[int, str] | None = None
    domain: str = "dp_cp"


CUTS: Mapping[str, Cut] = {
    "embedding": Cut(dim=0),
    "positions": Cut(partial_split=("tp",)),
    "norm": Cut(partial_split=("tp",)),
    "q": Cut(dim=0),
    "kv": Cut(dim=0, over="kv", partial=("copies",)),  # each copy meets other query heads
    "qk_norm": Cut(partial=("tp",)),  # one scale for all heads, and each rank sees only its own
    "column": Cut(dim=0),
    "row": Cut(dim=1),
    "row_bias": Cut(partial_split=("tp",)),  # added once, after the partial sums meet
    "head": Cut(dim=0),
    "latent": Cut(partial_split=("tp",)),
    "router": Cut(partial=("tp",)),  # every tp rank routes tokens of its own
    "router_bias": Cut(),
    "router_load": Cut(),
    "expert_column": Cut(dim=0, over="ep", second=(1, "etp"), domain="edp"),
    "expert_row": Cut(dim=0, over="ep", second=(2, "etp"), domain="edp"),
}


def piece(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of piece `index` when `size` is cut into `parts`: the first size % parts pieces have one more."""
    whole, rest = divmod(size, parts)
    start = index * whole + min(index, rest)
    return start, start + whole + (index < rest)


def area(rectangle: Rectangle) -> int:
    """Number of elements in a rectangle."""
    count = 1
    for start, stop in rectangle:
        count *= stop - start
    return count
